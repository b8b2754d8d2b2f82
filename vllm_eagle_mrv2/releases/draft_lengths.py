"""Dynamic numbers of draft tokens on the releases whose scheduler varies them and whose speculator does not.

From 0.25 on ``num_speculative_tokens_per_batch_size`` decides how many drafts of a request are verified; vLLM's own
speculator follows from 0.32 on (#51510) and drafts all K before that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from vllm_eagle_mrv2.patches.draft_tokens import mark_drafted


def lengths_by_batch_size(speculative_config: Any, max_num_reqs: int) -> list[int] | None:
    """The number of draft tokens by number of requests, as the scheduler looks it up; None where it is constant."""
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
    """Keep the schedule from a graph manager of one token a request.

    Below 0.32 a manager takes its query length for the target's, K + 1, and derives the others of the schedule from
    it: from 1 it gets 0, a division by zero, or less.
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
    """Mixed into the adapters whose release leaves the number of draft tokens to us."""

    speculative_config: Any
    dp_size: int
    max_num_reqs: int

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)  # type: ignore[call-arg]
        self._draft_lengths: list[int] | None = None
        # Ranks that draft different numbers would wait for each other in the draft's collectives.
        if self.dp_size == 1:
            self._draft_lengths = lengths_by_batch_size(self.speculative_config, self.max_num_reqs)

    def _propose(self, input_batch: Any, *batch: Any, num_draft_tokens: int | None = None, **how: Any) -> torch.Tensor:
        if self._draft_lengths is not None and not how.get("dummy_run"):
            # The scheduler takes the same entry of the same table for the next step.
            num_draft_tokens = self._draft_lengths[input_batch.num_reqs]
            mark_drafted(input_batch, num_draft_tokens)
        drafts: torch.Tensor = super()._propose(  # type: ignore[misc]
            input_batch, *batch, num_draft_tokens=num_draft_tokens, **how
        )
        return drafts
