"""The adapter of vLLM 0.28."""

from __future__ import annotations

import torch

from vllm_eagle_mrv2.draft_model.sampling import sample_and_store
from vllm_eagle_mrv2.releases import v0_28
from vllm_eagle_mrv2.releases.autoregressive import AutoRegressiveAdapter


class Adapter(AutoRegressiveAdapter):
    """vLLM 0.28."""

    release = v0_28.RELEASE
    sample_offset = 0
    dp_sync_argument = None

    def sample(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return sample_and_store(self.stock, self.buffers, *self.logits_to_store(hidden_states), after_temperature=False)
