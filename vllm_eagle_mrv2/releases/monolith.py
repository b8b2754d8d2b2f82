"""What vLLM 0.20 and 0.22 share: one `EagleSpeculator` class for all families, without base classes.

`CompletedEagleSpeculator` adds the attributes and methods that the speculators of later releases have, so the rest of
the adapter is shared with those releases.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

from vllm_eagle_mrv2.patches.model_runner import TakesTargetInputs
from vllm_eagle_mrv2.releases import per_step
from vllm_eagle_mrv2.releases.per_step import PerStepAdapter


class PrefillEagleCudaGraphManager(per_step.PrefillEagleCudaGraphManager):
    """Graphs of the draft prefill, in the target's memory pool."""

    use_breakable_cg = False  # does not exist in these releases


class DecodeEagleCudaGraphManager(per_step.DecodeEagleCudaGraphManager):
    """Graphs of one draft decode step, in the target's memory pool."""

    use_breakable_cg = False


class CompletedEagleSpeculator(EagleSpeculator):
    """The stock speculator with the attributes and methods of later releases."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.draft_max_seq_len = self.max_model_len

    def _run_model(self, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        hidden: tuple[torch.Tensor, torch.Tensor] = self.run_model(*args)
        return hidden

    def sample_draft(
        self,
        hidden_states: torch.Tensor,
        positions: torch.Tensor,
        idx_mapping: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        draft_step: torch.Tensor,
        draft_logits: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return greedy draft tokens [n] int64; where logits are stored, `OwnSampling` samples instead."""
        greedy: torch.Tensor = self.model.compute_logits(hidden_states).argmax(dim=-1)
        return greedy


class MonolithAdapter(TakesTargetInputs, PerStepAdapter):
    """Adapter of vLLM 0.20 and 0.22."""

    prefill_manager_class = PrefillEagleCudaGraphManager
    decode_manager_class = DecodeEagleCudaGraphManager

    def before_forward(self, num_tokens: int) -> None:
        """Do nothing: these releases have no expert load balancing for drafts."""
