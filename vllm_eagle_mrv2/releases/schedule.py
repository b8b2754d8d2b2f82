"""Dynamic number of draft tokens on the releases where the scheduler varies it and the speculator does not.

From 0.25 on ``num_speculative_tokens_per_batch_size`` decides how many drafts of a request are verified.  vLLM's own
speculator follows it from 0.32 on (#51510); before that it drafts all K.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


def lengths_by_batch_size(speculative_config: Any, max_num_reqs: int) -> list[int] | None:
    """Return the number of draft tokens by number of requests, as the scheduler looks it up; None if constant."""
    schedule = getattr(speculative_config, "num_speculative_tokens_per_batch_size", None)
    if not schedule:
        return None
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    lengths: list[int] = build_dynamic_sd_schedule_lookup(
        schedule,
        vllm_max_batch_size=max_num_reqs,
        vllm_num_speculative_tokens=speculative_config.num_speculative_tokens,
    )
    return lengths


@contextlib.contextmanager
def hidden_schedule(speculative_config: Any) -> Iterator[None]:
    """Hide the schedule from a graph manager with one token per request.

    Below 0.32 a manager assumes that its query length is the target's, K + 1, and derives the schedule's other query
    lengths from it.  From a query length of 1 it derives 0, and divides by zero, or a negative number.
    """
    schedule = getattr(speculative_config, "num_speculative_tokens_per_batch_size", None)
    if not schedule:
        yield
        return
    speculative_config.num_speculative_tokens_per_batch_size = None
    try:
        yield
    finally:
        speculative_config.num_speculative_tokens_per_batch_size = schedule
