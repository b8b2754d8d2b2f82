"""Probabilistic drafting on the releases with an inexact stock sampler."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from vllm_eagle_mrv2.kernels.sample_with_logits import sample_with_logits


class OwnSampling:
    """Replaces the stock sampler; mixed into the adapters below vLLM 0.29.

    The stock sampler uses the same random numbers for drafts and for the target's tokens, which biases sampled output.
    Below 0.25 it also writes the logits of padded rows into the rows of live requests.  Greedy drafting is left to the
    release.
    """

    logits_after_temperature: ClassVar[bool] = True
    """Whether the release's rejection sampler expects stored logits to be divided by the temperature."""

    model: Any
    draft_logits: torch.Tensor | None
    temperature: torch.Tensor
    seeds: torch.Tensor
    current_draft_step: torch.Tensor
    use_fp64_gumbel: bool

    def sample(self, hidden_states: torch.Tensor, positions: torch.Tensor, idx_mapping: torch.Tensor) -> torch.Tensor:
        """Draft from hidden states [n, H], in a form of `how_drafted`.

        ``positions`` [n] are those of the last known tokens."""
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
