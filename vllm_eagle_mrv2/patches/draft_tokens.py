"""Reports only the drafted columns to the scheduler when fewer tokens were drafted than the tensor has columns.

Without asynchronous scheduling the scheduler verifies every draft token that is reported to it.  Columns left over from
an earlier batch would be verified against logits that they were not sampled from, which biases sampled output.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_eagle_mrv2.draft_length.notes import drafted
from vllm_eagle_mrv2.patches.wrap import Function


def drafted_columns_only(original: Function) -> Function:
    """Wrap ``DraftTokensHandler.set_draft_tokens``: a marked batch passes on its drafted columns only."""

    def set_draft_tokens(self: Any, input_batch: Any, draft_tokens: torch.Tensor) -> None:
        original(self, input_batch, draft_tokens[:, : drafted(input_batch)])

    return set_draft_tokens
