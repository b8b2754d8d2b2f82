"""Probabilistic drafting on the releases with an inexact stock sampler, below vLLM 0.29."""

from __future__ import annotations

from typing import Any

import torch

from vllm_eagle_mrv2.batch.buffers import DraftBuffers
from vllm_eagle_mrv2.kernels.sample_with_logits import sample_with_logits


def sample_and_store(
    stock: Any, buffers: DraftBuffers, logits: torch.Tensor, offsets: torch.Tensor | None, *, after_temperature: bool
) -> torch.Tensor:
    """Draft from logits, and store them in the row of each request.

    The stock sampler uses the same random numbers for drafts and for the target's tokens, and again for what it drafts
    later for the same position, which biases sampled output.
    Below 0.25 it also writes the logits of padded rows into the rows of live requests.

    Args:
        stock: vLLM's speculator, with stored logits.
        buffers: the draft's.
        logits: [n, C], of the head's own rows.
        offsets: [C] int64, the target's token minus the row; None where a row is the token.
        after_temperature: the release's rejection sampler expects stored logits to be divided by the temperature.

    Returns:
        drafts for n rows, in a form of `how_drafted`.
    """
    num_reqs = len(logits)
    return sample_with_logits(
        logits,
        buffers.idx_mapping[:num_reqs],
        buffers.temperature,
        buffers.seeds,
        buffers.sample_positions[:num_reqs],
        stock.current_draft_step,
        stock.draft_logits,
        salted=True,
        after_temperature=after_temperature,
        fp64=stock.use_fp64_gumbel,
        offsets=offsets,
    )
