"""The sizes of batches that have CUDA graphs.

vLLM chooses sizes of up to 512 tokens, enough for decodes.  Larger batches, those with prefills for the most part, are
then launched kernel by kernel, and the GPU waits for the host.  An engine with ``eagle_mrv2`` captures these, too,
unless the user says which sizes are captured.

A target with latent attention (MLA) keeps vLLM's sizes: on Hopper, FlashAttention stores up to 32 partial results for
each token of a FULL graph, 64 KiB a head, which would be 16 GiB for 2,048 tokens with 128 heads on a GPU.
"""

from __future__ import annotations

from typing import Any

_MOST, _APART = 2048, 16  # a batch of more tokens keeps the GPU busy by itself


def largest(vllm_config: Any) -> int:
    """Tokens of the largest batch to capture beyond vLLM's own choice; 0 if vLLM's choice stays."""
    if vllm_config.model_config.use_mla:
        return 0
    return int(min(_MOST, vllm_config.scheduler_config.max_num_batched_tokens)) // _APART * _APART


def beyond(captured: int, vllm_config: Any) -> range:
    """Sizes to capture beyond the largest of vLLM's own choice; all in tokens."""
    return range(captured // _APART * _APART + _APART, largest(vllm_config) + 1, _APART)
