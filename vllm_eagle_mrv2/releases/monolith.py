"""What vLLM 0.20 and 0.22 share: one `EagleSpeculator` class for all families, without base classes."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

from vllm_eagle_mrv2.config.families import Family
from vllm_eagle_mrv2.releases.graph_managers import graph_managers
from vllm_eagle_mrv2.releases.per_step import PerStepAdapter


class MonolithAdapter(PerStepAdapter):
    """Adapter of vLLM 0.20 and 0.22, which have no breakable graphs."""

    managers = graph_managers(use_breakable_cg=False)
    takes_target_inputs = True
    run_model_name = "run_model"

    @staticmethod
    def stock_class(family: Family) -> Any:
        return EagleSpeculator

    def before_forward(self, num_tokens: int) -> None:
        """Do nothing: these releases have no expert load balancing for drafts."""

    def _sample_without_head(self, hidden_states: torch.Tensor, draft_logits: torch.Tensor | None) -> torch.Tensor:
        """Draft greedily: these releases have no sampler to call."""
        greedy: torch.Tensor = self.stock.model.compute_logits(hidden_states).argmax(dim=-1)
        return greedy
