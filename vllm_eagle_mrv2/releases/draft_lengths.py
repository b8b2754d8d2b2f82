"""Dynamic number of draft tokens on the releases where the scheduler varies it and the speculator does not.

From 0.25 on ``num_speculative_tokens_per_batch_size`` decides how many drafts of a request are verified.  vLLM's own
speculator follows it from 0.32 on (#51510); before that it drafts all K.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from vllm_eagle_mrv2.patches.draft_tokens import mark_drafted


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


class FollowsSchedule:
    """Follows the scheduler's number of draft tokens; mixed into the adapters of releases that do not."""

    speculative_config: Any
    dp_size: int
    max_num_reqs: int

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)  # type: ignore[call-arg]
        self._draft_lengths: list[int] | None = None
        # Ranks with different numbers of draft tokens would wait for each other in the draft's collectives.
        if self.dp_size == 1:
            self._draft_lengths = lengths_by_batch_size(self.speculative_config, self.max_num_reqs)

    def _propose(self, input_batch: Any, *batch: Any, num_draft_tokens: int | None = None, **how: Any) -> torch.Tensor:
        if self._draft_lengths is not None and not how.get("dummy_run"):
            # The scheduler reads the same entry of the same table for the next step.
            num_draft_tokens = self._draft_lengths[input_batch.num_reqs]
            mark_drafted(input_batch, num_draft_tokens)
        drafts: torch.Tensor = super()._propose(  # type: ignore[misc]
            input_batch, *batch, num_draft_tokens=num_draft_tokens, **how
        )
        return drafts
