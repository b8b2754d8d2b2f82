"""The sizes of batches that have CUDA graphs.

vLLM chooses sizes of up to 512 tokens, enough for decodes.  Larger batches, those with prefills for the most part, are
then launched kernel by kernel, and the GPU waits for the host.  An engine with ``eagle_mrv2`` captures these, too,
unless the user says which sizes are captured.

A target with latent attention (MLA) keeps vLLM's sizes: on Hopper, FlashAttention stores up to 32 partial results for
each token of a FULL graph, 64 KiB a head, which would be 16 GiB for 2,048 tokens with 128 heads on a GPU.

The sizes are 16 apart and just below its multiples.  On an H200, with cuBLAS of CUDA 13.0, the products of an 8B
target's batches of 513 to 2,048 tokens take 1.9 % longer on average if these are padded to multiples of 16, and no
longer if they are padded to one less; vLLM 0.20 to 0.24 round sizes up to multiples of K + 1.
"""

from __future__ import annotations

from typing import Any

_MOST = 2048  # a batch of more tokens keeps the GPU busy by itself
_APART, _REMAINDER = 16, 15  # for multiples of 16 rows cuBLAS chooses slower products


def largest(vllm_config: Any) -> int:
    """Tokens of the largest batch to capture beyond vLLM's own choice; 0 if vLLM's choice stays."""
    if vllm_config.model_config.use_mla:
        return 0
    most = int(min(_MOST, vllm_config.scheduler_config.max_num_batched_tokens))
    return most // _APART * _APART if _shares_tokens(vllm_config) else most


def beyond(captured: int, vllm_config: Any) -> list[int]:
    """Sizes to capture beyond the largest of vLLM's own choice; all in tokens."""
    most = largest(vllm_config)
    remainder = _APART if _shares_tokens(vllm_config) else _REMAINDER
    sizes = range(captured // _APART * _APART + remainder, most, _APART)
    return [size for size in (*sizes, most) if size > captured]


def _shares_tokens(vllm_config: Any) -> bool:
    """Whether tensor-parallel ranks share out each batch's tokens evenly (sequence parallelism, up to 0.31)."""
    return bool(getattr(vllm_config.compilation_config.pass_config, "enable_sp", False))
