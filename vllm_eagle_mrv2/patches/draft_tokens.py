"""The drafts that the scheduler is told of, where fewer were drafted than there are columns.

Without asynchronous scheduling the scheduler takes as many drafts as it is told of.  Columns that an earlier batch left
would be verified against logits that they were not sampled from, and sampled output would be biased.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_eagle_mrv2.patches.wrap import Function

_DRAFTED = "eagle_mrv2_drafted"


def mark_drafted(input_batch: Any, num_draft_tokens: int) -> None:
    """Note on a batch how many tokens were drafted for each of its requests."""
    setattr(input_batch, _DRAFTED, num_draft_tokens)


def drafted_columns_only(original: Function) -> Function:
    """``DraftTokensHandler.set_draft_tokens`` that hands on the drafted columns, where a batch is marked."""

    def set_draft_tokens(self: Any, input_batch: Any, draft_tokens: torch.Tensor) -> None:
        original(self, input_batch, draft_tokens[:, : getattr(input_batch, _DRAFTED, None)])

    return set_draft_tokens
