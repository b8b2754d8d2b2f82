"""The draft's head: from hidden states to greedy draft tokens, over the draft's own vocabulary."""

from __future__ import annotations

import functools
from typing import Any

import torch

from vllm_eagle_mrv2.draft_vocab import TrimmedHead
from vllm_eagle_mrv2.kernels.greedy import argmax_keys, best_tokens

_MODELS = "vllm.model_executor.models"
# Classes whose ``compute_logits`` scatters the logits of a reduced vocabulary, and does nothing else.
_SCATTERING = frozenset({f"{_MODELS}.llama_eagle3", f"{_MODELS}.qwen3_eagle3", f"{_MODELS}.deepseek_eagle3"})


class DraftHead:
    """The head of a loaded draft model.

    An EAGLE-3 head has a vocabulary of its own (32,000 rows, say), and its model scatters the logits into a row of the
    target's vocabulary, filled with -inf.  The argmax needs neither: it runs over the head's rows, and the winner is
    looked up.

    Args:
        model: the draft, with its weights loaded.
        trimmed: what stands in for a head with the target's vocabulary, where the user asked for it.
    """

    def __init__(self, model: Any, trimmed: TrimmedHead | None = None) -> None:
        self._model = model
        self._trimmed = trimmed

    @functools.cached_property
    def target_ids(self) -> torch.Tensor | None:
        """[C] int64, the target's token of each row of the head; None where a row is the token."""
        if self._trimmed is not None:
            return self._trimmed.target_ids
        # Made at first use: what is made while weights are loaded goes with them when vLLM sleeps.
        offsets = getattr(self._model, "draft_id_to_target_id", None)
        if offsets is None or type(self._model).compute_logits.__module__ not in _SCATTERING:
            return None
        return torch.arange(len(offsets), device=offsets.device) + offsets.data

    def greedy(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Draft tokens [n] int64, the argmax for each of the hidden states [n, H]; the first of equals, as in torch."""
        return best_tokens(argmax_keys(self._logits(hidden_states), self.target_ids))

    def _logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[n, C], of all tensor-parallel ranks."""
        model = self._model
        logits: torch.Tensor
        if self._trimmed is not None:
            logits = self._trimmed.logits(hidden_states)
        elif self.target_ids is None:
            logits = model.compute_logits(hidden_states)
        else:
            logits = model.logits_processor(model.lm_head, hidden_states)
        return logits
