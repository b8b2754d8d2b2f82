"""Lets draft decodes attend with one kernel of ours where FlashAttention takes three.

FlashAttention 3 runs a kernel that makes a schedule, one that attends and one that puts its splits together, for one
token a request as for many.  Ours reads each request's length itself.  The cache is written by vLLM, as before.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from vllm_eagle_mrv2.kernels.single_token_attention import SingleTokenAttention

_FLASH_ATTENTION = "vllm.v1.attention.backends.flash_attn.FlashAttentionImpl"


def install(draft: torch.nn.Module, target: torch.nn.Module, max_num_reqs: int) -> bool:
    """Have a draft's plain FlashAttention layers attend so where a batch has one token a request.

    Args:
        draft: loaded.
        target: the target model, whose layers stay as they are.
        max_num_reqs: the most requests of a batch.

    Returns:
        whether these are all attention layers of the draft, so that nothing looks at FlashAttention's schedule.
    """
    shared = {id(module) for module in target.modules()}
    layers = [module for module in draft.modules() if id(module) not in shared and hasattr(module, "impl")]
    kernels: dict[tuple[int, ...], SingleTokenAttention] = {}
    plain = [layer for layer in layers if _is_plain(layer)]
    for layer in plain:
        _attend_by_ours(layer.impl, kernels, max_num_reqs)
    return len(plain) == len(layers) > 0


def _is_plain(layer: Any) -> bool:
    """Whether a layer is attention of a decoder over a cache in 16 bit, with no more to it."""
    impl = getattr(layer, "impl", None)
    width = getattr(impl, "head_size", 0)
    return (
        impl is not None
        and f"{type(impl).__module__}.{type(impl).__qualname__}" == _FLASH_ATTENTION
        and width in (16, 32, 64, 128, 256)
        and impl.alibi_slopes is None
        and impl.sliding_window == (-1, -1)
        and not impl.logits_soft_cap
        and impl.sinks is None
        and impl.attn_type == "decoder"
        and impl.kv_cache_dtype in ("auto", "bfloat16", "float16")
        and getattr(impl, "dcp_world_size", 1) <= 1
        and not getattr(impl, "batch_invariant_enabled", False)
    )


def _attend_by_ours(impl: Any, kernels: dict[tuple[int, ...], SingleTokenAttention], max_num_reqs: int) -> None:
    stock_forward = impl.forward
    shape = (impl.num_heads, impl.num_kv_heads, impl.head_size)

    def forward(
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if attn_metadata is None:
            # The profile run.  What is made while weights are loaded goes with them when vLLM sleeps.
            if shape not in kernels:
                kernels[shape] = SingleTokenAttention(max_num_reqs, *shape, query.device)
        elif _is_for_us(attn_metadata, query) and not any(each is not None for each in (*args, *kwargs.values())):
            num_reqs = attn_metadata.num_actual_tokens
            key_cache, value_cache = _caches(kv_cache, impl.head_size)
            kernels[shape](
                query[:num_reqs],
                key_cache,
                value_cache,
                attn_metadata.block_table,
                attn_metadata.seq_lens,
                impl.scale,
                output[:num_reqs],
            )
            return output
        return stock_forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)

    impl.forward = forward


def _is_for_us(attn_metadata: Any, query: torch.Tensor) -> bool:
    return (
        attn_metadata.max_query_len == 1
        and not getattr(attn_metadata, "use_cascade", False)  # none from 0.32 on
        and attn_metadata.causal is True
        and len(attn_metadata.seq_lens) == attn_metadata.num_actual_tokens
        and query.dtype in (torch.bfloat16, torch.float16)
    )


def _caches(kv_cache: torch.Tensor, width: int) -> tuple[torch.Tensor, ...]:
    """Keys and values [blocks, block size, kv_heads, D], in whichever form a release keeps them."""
    views: tuple[torch.Tensor, ...]
    if kv_cache.dim() == 4:  # from 0.29 on, [blocks, kv_heads, block size, 2 * D]
        views = kv_cache.transpose(1, 2).split(width, dim=-1)
    else:  # [2, blocks, ...], or the other way round
        views = kv_cache.unbind(0 if _two_come_first() else 1)
    return views


@functools.cache
def _two_come_first() -> bool:
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

    shape: tuple[int, ...] = FlashAttentionBackend.get_kv_cache_shape(8, 16, 4, 64)
    return shape[0] == 2
