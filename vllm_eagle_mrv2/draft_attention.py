"""Lets draft decodes attend with one kernel of ours, which needs neither a schedule nor a plan.

For one token a request FlashAttention 3 runs a kernel that makes a schedule, one that attends and one that puts its
splits together; FlashInfer's own kernels run by a plan that the host makes, for which it waits for the lengths.  Ours
reads each request's length itself, and writes the token's key and value into the cache, for which vLLM runs a kernel
before.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from vllm_eagle_mrv2 import compile_ahead
from vllm_eagle_mrv2.kernels.single_token_attention import SingleTokenAttention

_BACKENDS = "vllm.v1.attention.backends"
_FLASH_ATTENTION = f"{_BACKENDS}.flash_attn.FlashAttentionImpl"
_FLASHINFER = f"{_BACKENDS}.flashinfer.FlashInferImpl"
_MISSING = object()


@dataclass(frozen=True)
class DecodeMetadata:
    """Attention metadata of one token a request that no builder made; its names are FlashAttention's."""

    num_actual_tokens: int  # n
    seq_lens: torch.Tensor  # [n] int32, the token included
    block_table: torch.Tensor  # [n, m] int32
    max_query_len: int = 1
    causal: bool = True


def install(draft: torch.nn.Module, target: torch.nn.Module, block_size: int = 16) -> bool:
    """Have a draft's plain FlashAttention and FlashInfer layers attend so where a batch has one token a request.

    FlashInfer's do so for `DecodeMetadata` alone: its builder's says nothing of lengths and blocks.

    Args:
        draft: loaded.
        target: the target model, whose layers stay as they are.
        block_size: tokens in a block of the cache, for which the kernel is compiled ahead.

    Returns:
        whether these are all attention layers of the draft, so that `DecodeMetadata` is all that draft decodes need.
    """
    shared = {id(module) for module in target.modules()}
    layers = [module for module in draft.modules() if id(module) not in shared and hasattr(module, "impl")]
    kernels: dict[tuple[int, ...], SingleTokenAttention] = {}
    plain = [layer for layer in layers if _is_plain(layer.impl)]
    for layer in plain:
        _attend_by_ours(layer.impl, kernels)
    weight = next(draft.parameters(), None)
    all_are = len(plain) == len(layers) > 0
    if weight is not None:
        for shape in {_shape(layer.impl) for layer in plain}:
            launches = functools.partial(
                compile_ahead.attention, *shape, block_size, weight.dtype, weight.device, writes=all_are
            )
            compile_ahead.submit(weight.device, launches)
    return all_are


def _is_plain(impl: Any) -> bool:
    """Whether a layer's implementation is attention of a decoder over a cache in 16 bit, with no more to it."""
    field = functools.partial(getattr, impl)
    return (
        _name(impl) in (_FLASH_ATTENTION, _FLASHINFER)
        and field("head_size", 0) in (16, 32, 64, 128, 256)
        and field("alibi_slopes", _MISSING) is None
        and field("sliding_window", _MISSING) == (-1, -1)
        and not field("logits_soft_cap", _MISSING)
        and field("sinks", _MISSING) is None
        and field("attn_type", "decoder") == "decoder"  # FlashInfer has no others
        and field("kv_cache_dtype", _MISSING) in ("auto", "bfloat16", "float16")
        and field("dcp_world_size", 1) <= 1
        and not field("batch_invariant_enabled", False)
    )


def _name(impl: Any) -> str:
    return f"{type(impl).__module__}.{type(impl).__qualname__}"


def _shape(impl: Any) -> tuple[int, int, int]:
    return impl.num_heads, impl.num_kv_heads, impl.head_size


def _attend_by_ours(impl: Any, kernels: dict[tuple[int, ...], SingleTokenAttention]) -> None:
    stock_forward = impl.forward
    shape = _shape(impl)
    slots = _leave_writing(impl)

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
                kernels[shape] = SingleTokenAttention(*shape, query.device)
        elif _is_for_us(attn_metadata, query) and not any(each is not None for each in (*args, *kwargs.values())):
            num_reqs = attn_metadata.num_actual_tokens
            key_cache, value_cache = _caches(kv_cache, impl)
            where = slots.pop() if slots else None
            kernels[shape](
                query[:num_reqs],
                key_cache,
                value_cache,
                attn_metadata.block_table,
                attn_metadata.seq_lens,
                impl.scale,
                output[:num_reqs],
                key=None if where is None else key[:num_reqs],
                value=None if where is None else value[:num_reqs],
                slots=where,
            )
            return output
        return stock_forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)

    impl.forward = forward


def _leave_writing(impl: Any) -> list[torch.Tensor]:
    """Keep vLLM from writing a draft decode's keys and values, as attention will; the slots where, until it has.

    Passes by `DecodeMetadata` run eagerly or are captured whole: none has its writes in a graph, and attention not.
    """
    slots: list[torch.Tensor] = []
    stock_update = getattr(impl, "do_kv_cache_update", None)
    if stock_update is None:
        return slots

    def update(
        layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        if key.dtype == kv_cache.dtype and isinstance(_metadata_of(layer), DecodeMetadata):
            slots[:] = [slot_mapping]
        else:
            stock_update(layer, key, value, kv_cache, slot_mapping)

    impl.do_kv_cache_update = update
    return slots


def _metadata_of(layer: Any) -> Any:
    """What a layer will be given to attend by."""
    from vllm.forward_context import get_forward_context

    by_layer = get_forward_context().attn_metadata
    return by_layer.get(layer.layer_name) if isinstance(by_layer, dict) else None


def _is_for_us(attn_metadata: Any, query: torch.Tensor) -> bool:
    return (
        getattr(attn_metadata, "max_query_len", 0) == 1  # FlashInfer's tells lengths and blocks to the device alone
        and not getattr(attn_metadata, "use_cascade", False)  # none from 0.32 on
        and attn_metadata.causal is True
        and len(attn_metadata.seq_lens) == attn_metadata.num_actual_tokens
        and query.dtype in (torch.bfloat16, torch.float16)
    )


def _caches(kv_cache: torch.Tensor, impl: Any) -> tuple[torch.Tensor, ...]:
    """Keys and values [blocks, block size, kv_heads, D], in whichever form a release keeps them."""
    views: tuple[torch.Tensor, ...]
    if kv_cache.dim() == 4:  # [blocks, kv_heads, block size, 2 * D]
        views = kv_cache.transpose(1, 2).split(impl.head_size, dim=-1)
    else:  # [2, blocks, ...], or the other way round
        views = kv_cache.unbind(0 if _name(impl) == _FLASH_ATTENTION and _two_come_first() else 1)
    return views


@functools.cache
def _two_come_first() -> bool:
    """Of FlashAttention's caches; FlashInfer's have the blocks first."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

    shape: tuple[int, ...] = FlashAttentionBackend.get_kv_cache_shape(8, 16, 4, 64)
    return shape[0] == 2
