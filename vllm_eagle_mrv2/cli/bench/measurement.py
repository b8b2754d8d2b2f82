"""The measurement of two live engines with a batch of requests."""

from __future__ import annotations

from collections.abc import Callable

from vllm_eagle_mrv2.cli.bench.types import Batch, Round, Row
from vllm_eagle_mrv2.cli.common.engines import Engines

WORKER = "vllm_eagle_mrv2.cli.bench.worker"
"""The module that the process of an engine runs."""
WARM_UP_TOKENS = 32


def measure(
    pair: Engines, batch: int, rounds: int, max_tokens: int, on_round: Callable[[int], None] = lambda done: None
) -> Row:
    """Measure a batch size with two engines in turn, after two rounds that do not count.

    Raises:
        CommandError: an engine failed.
    """
    for process in 2 * list(pair.processes.values()):
        process.ask(Batch(size=batch, max_tokens=min(max_tokens, WARM_UP_TOKENS)))
    jobs = rounds * [Batch(size=batch, max_tokens=max_tokens)]
    against, ours = ([Round.model_validate(one) for one in taken] for taken in pair.in_turn(jobs, on_round))
    first, last = pair.names
    return Row(k=pair.k, batch=batch, names=(first, last), against=against, eagle_mrv2=ours)
