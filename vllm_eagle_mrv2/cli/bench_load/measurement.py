"""The measurement of live engines under load."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from time import monotonic

from vllm_eagle_mrv2.cli.bench_load.types import LoadRow
from vllm_eagle_mrv2.cli.common.engines import Engines
from vllm_eagle_mrv2.cli.common.load.balance import balanced, prompts_per_token, usual_seconds
from vllm_eagle_mrv2.cli.common.load.traffic import SETTLES_S, Traffic
from vllm_eagle_mrv2.cli.common.load.types import Level, LoadRound


def measure(
    engines: Engines,
    level: Level,
    traffic: Traffic,
    rounds: int,
    on_round: Callable[[int], None] = lambda done: None,
) -> LoadRow:
    """Measure live engines at a level of load, in turn, after one round that does not count.

    Where the number of draft tokens is chosen at run time, each engine first has more such rounds, to settle.

    Raises:
        CommandError: an engine failed.
    """
    engines.in_turn([traffic.load(level, seed=0)])
    first, *loads = (traffic.load(level, seed, fills=False) for seed in range(rounds + 1))
    settled = monotonic() + SETTLES_S * len(engines.processes)
    while engines.chooses_length and monotonic() < settled:
        engines.in_turn([first])
    taken = engines.in_turn(loads, on_round)
    measured = [[LoadRound.model_validate(one) for one in answers] for answers in taken]
    if level.concurrency is not None:
        called_for = prompts_per_token(list(itertools.chain.from_iterable(measured)))
        measured = [balanced(rounds, called_for, usual_seconds(rounds)) for rounds in measured]
    return LoadRow(k=engines.k, level=level, names=engines.names, rounds=measured)
