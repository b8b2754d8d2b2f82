"""Probabilistic drafting on the releases whose own sampler is not enough."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from vllm_eagle_mrv2.kernels.sample_with_logits import sample_with_logits


class OwnSampling:
    """Mixed into the adapters below vLLM 0.29.

    Their sampler shares the draft's random numbers with those of the target's tokens (a bias in sampled output), and
    below 0.25 it writes the logits of padded rows into the rows of live requests.  Greedy drafting stays the
    release's own.
    """

    logits_after_temperature: ClassVar[bool] = True
    """What the release's rejection sampler expects to be stored."""

    model: Any
    draft_logits: torch.Tensor | None
    temperature: torch.Tensor
    seeds: torch.Tensor
    current_draft_step: torch.Tensor
    use_fp64_gumbel: bool

    def sample(self, hidden_states: torch.Tensor, positions: torch.Tensor, idx_mapping: torch.Tensor) -> torch.Tensor:
        """Draft tokens [n] int64 from hidden states [n, H]; ``positions`` [n] are those of the last known tokens."""
        if self.draft_logits is None:
            greedy: torch.Tensor = super().sample(hidden_states, positions, idx_mapping)  # type: ignore[misc]
            return greedy
        return sample_with_logits(
            self.model.compute_logits(hidden_states),
            idx_mapping,
            self.temperature,
            self.seeds,
            positions,
            self.current_draft_step,
            self.draft_logits,
            salted=True,
            after_temperature=self.logits_after_temperature,
            fp64=self.use_fp64_gumbel,
        )
