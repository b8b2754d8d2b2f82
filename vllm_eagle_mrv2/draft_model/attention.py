"""Runs the attention of draft decodes in one Triton kernel that needs neither a schedule nor a plan.

For one token per request, FlashAttention 3 launches a kernel that makes a schedule, one for attention and one that
combines the splits.  FlashInfer's own kernels follow a plan made by the CPU, which waits for the sequence lengths.
`SingleTokenAttention` reads each request's length on the device, applies RoPE to the query and the key, and writes the
token's key and value to the cache; vLLM launches separate kernels for RoPE and the cache.

The kernel also serves draft prefills of which one row a request is read (see `rows_read`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vllm_eagle_mrv2.classes import class_path
from vllm_eagle_mrv2.draft_model import compile_ahead
from vllm_eagle_mrv2.draft_model.rows_read import RowsRead
from vllm_eagle_mrv2.kernels.single_token_attention import SingleTokenAttention

_ATTENTION = "vllm.model_executor.models.llama.LlamaAttention"
"""The module that passes the output of RoPE to its attention layer only."""
_LAYER = "vllm.model_executor.layers.attention.attention.Attention"
"""The attention layer that leaves its metadata to the backend; its subclasses change it (chunks, sinks)."""
_BACKENDS = "vllm.v1.attention.backends"
_FLASH_ATTENTION = f"{_BACKENDS}.flash_attn.FlashAttentionImpl"
_FLASHINFER = f"{_BACKENDS}.flashinfer.FlashInferImpl"
_MISSING = object()


@dataclass(frozen=True)
class DecodeMetadata:
    """Attention metadata for one token per request, made without a builder; field names follow FlashAttention's."""

    num_actual_tokens: int  # n
    seq_lens: torch.Tensor  # [n] int32, the token included
    block_table: torch.Tensor  # [n, m] int32
    max_query_len: int = 1
    causal: bool = True


class Rope(torch.nn.Module):
    """Replaces a module's RoPE, which the attention layer applies instead.

    Args:
        stock: vLLM's RoPE module.
        positions: [T] int64, the positions of every pass of the draft.
    """

    def __init__(self, stock: Any, positions: torch.Tensor) -> None:
        super().__init__()
        self.stock = stock
        self._positions = positions

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries and keys unchanged."""
        return query, key

    def turn(self, *heads: torch.Tensor) -> None:
        """Apply RoPE to queries and keys [n, heads, D], or one of them, in place; tokens need not be contiguous."""
        rows = [each.view(len(each), each.shape[1] * each.shape[2]) for each in heads]
        self.stock.forward_cuda(self._positions[: len(rows[0])], *rows)

    def angles(self, num_tokens: int) -> dict[str, torch.Tensor]:
        """Return the RoPE arguments of `SingleTokenAttention`."""
        return {"positions": self._positions[:num_tokens], "cos_sin": self.stock.cos_sin_cache}


def install(
    draft: torch.nn.Module,
    target: torch.nn.Module,
    block_size: int = 16,
    positions: torch.Tensor | None = None,
    max_model_len: int = 0,
    read: RowsRead | None = None,
) -> bool:
    """Make a draft's plain FlashAttention and FlashInfer layers use `SingleTokenAttention` for one token per request.

    FlashInfer layers use it only with `DecodeMetadata`, because the metadata of FlashInfer's builder lacks lengths and
    block tables.

    Args:
        draft: the loaded draft model.
        target: the target model; layers shared with it stay unchanged.
        block_size: tokens per block of the KV cache, for compiling the kernel ahead.
        positions: [T] int64; the first rows hold the token positions of every pass of the draft.  None leaves RoPE
            unchanged.
        max_model_len: all positions are below it.  The kernel reads RoPE's table without a bounds check, so a module
            with a shorter table keeps its RoPE.
        read: the rows that are read of a pass; None means all of every pass.

    Returns:
        whether these are all attention layers of the draft; then `DecodeMetadata` is all that draft decodes need.
    """
    shared = {id(module) for module in target.modules()}
    layers = [module for module in draft.modules() if id(module) not in shared and hasattr(module, "impl")]
    kernels: dict[tuple[int, ...], SingleTokenAttention] = {}
    plain = [layer for layer in layers if class_path(type(layer)) == _LAYER and _is_plain(layer.impl)]
    ropes = {} if positions is None else _take_ropes(draft, plain, positions, max_model_len)
    for layer in plain:
        _attend_by_ours(layer.impl, kernels, ropes.get(id(layer)), read)
    weight = next(draft.parameters(), None)
    all_are = len(plain) == len(layers) > 0
    if weight is not None:
        kinds = {(_shape(layer.impl), id(layer) in ropes) for layer in plain}
        for shape, rotates in kinds:
            launches = functools.partial(
                compile_ahead.attention,
                *shape,
                block_size,
                weight.dtype,
                weight.device,
                writes=all_are,
                rotates=rotates,
                read_rows=rotates and len(layers) == 1,
            )
            compile_ahead.submit(weight.device, launches)
    return all_are


def _take_ropes(
    draft: torch.nn.Module, layers: list[Any], positions: torch.Tensor, max_model_len: int
) -> dict[int, Rope]:
    """Leave RoPE to the given attention layers where possible; returns the replacements by ``id`` of the layer."""
    known = {id(layer) for layer in layers}
    taken: dict[int, Rope] = {}
    for module in list(draft.modules()):
        layer: Any = getattr(module, "attn", None)
        rope: Any = getattr(module, "rotary_emb", None)
        if (
            id(layer) in known
            and class_path(type(module)) == _ATTENTION
            and _is_plain_rope(rope, layer.impl)
            and len(rope.cos_sin_cache) >= max_model_len
        ):
            module.rotary_emb = taken[id(layer)] = Rope(rope, positions)
    return taken


def _is_plain_rope(rope: Any, impl: Any) -> bool:
    """Whether a module's RoPE rotates whole heads by a table, in NeoX order, whatever the table contains."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    return (
        isinstance(rope, RotaryEmbedding)
        and type(rope).forward_cuda is RotaryEmbedding.forward_cuda
        and rope.is_neox_style
        and rope.rotary_dim == rope.head_size == impl.head_size
        and not getattr(rope, "use_flashinfer", False)
        and rope.cos_sin_cache.is_contiguous()
        and getattr(impl, "kv_sharing_target_layer_name", None) is None
    )


def _is_plain(impl: Any) -> bool:
    """Whether a layer is decoder attention over a 16-bit KV cache, without further features (ALiBi, sinks, ...)."""
    field = functools.partial(getattr, impl)
    return (
        class_path(type(impl)) in (_FLASH_ATTENTION, _FLASHINFER)
        and field("head_size", 0) in (16, 32, 64, 128, 256)
        and field("alibi_slopes", _MISSING) is None
        and field("sliding_window", _MISSING) == (-1, -1)
        and not field("logits_soft_cap", _MISSING)
        and field("sinks", _MISSING) is None
        and field("attn_type", "decoder") == "decoder"  # FlashInfer supports no other
        and field("kv_cache_dtype", _MISSING) in ("auto", "bfloat16", "float16")
        and field("dcp_world_size", 1) <= 1
        and not field("batch_invariant_enabled", False)
    )


def _shape(impl: Any) -> tuple[int, int, int]:
    return impl.num_heads, impl.num_kv_heads, impl.head_size


def _attend_by_ours(
    impl: Any, kernels: dict[tuple[int, ...], SingleTokenAttention], rope: Rope | None, read: RowsRead | None
) -> None:
    stock_forward = impl.forward
    shape = _shape(impl)
    update = _CacheUpdate(impl, rope)

    def kernel_for(device: torch.device) -> SingleTokenAttention:
        if shape not in kernels:
            kernels[shape] = SingleTokenAttention(*shape, device)
        return kernels[shape]

    def attend(
        query: torch.Tensor, kv_cache: torch.Tensor, attn_metadata: Any, output: torch.Tensor, **how: Any
    ) -> Any:
        key_cache, value_cache = _caches(kv_cache, impl)
        return kernel_for(query.device)(
            query,
            key_cache,
            value_cache,
            attn_metadata.block_table,
            attn_metadata.seq_lens,
            impl.scale,
            output,
            **how,
            **({} if rope is None else rope.angles(len(query))),
        )

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
        plain = not any(each is not None for each in (*args, *kwargs.values()))
        rows = None if read is None else read.now()
        if rows is not None and not len(rows) and update.written:
            update.taken()
            return output
        if attn_metadata is None:
            # The profile run.  Memory allocated during weight loading would be freed with the weights when vLLM sleeps.
            kernel_for(query.device)
        elif plain and _is_for_us(attn_metadata, query):
            num_reqs = attn_metadata.num_actual_tokens
            where, _ = update.taken()
            attend(
                query[:num_reqs],
                kv_cache,
                attn_metadata,
                output[:num_reqs],
                key=None if where is None else key[:num_reqs],
                value=None if where is None else value[:num_reqs],
                slots=where,
            )
            return output
        elif rope is not None:
            _, keys_are_turned = update.taken()
            if plain and rows is not None and keys_are_turned and _has_requests(attn_metadata, len(rows), query):
                return attend(query, kv_cache, attn_metadata, output, index=rows)
            rope.turn(query, *([] if keys_are_turned else [key]))
        return stock_forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)

    impl.forward = forward


class _CacheUpdate:
    """Replaces a layer's KV cache update; in draft decodes the attention kernel writes the keys and values.

    Passes with `DecodeMetadata` run eagerly or are captured whole, so the cache update and attention are always both
    inside a graph or both outside.
    """

    def __init__(self, impl: Any, rope: Rope | None) -> None:
        self._slots: torch.Tensor | None = None
        self._turned = False
        self.written = False
        """Whether vLLM's update has written the keys and values of this pass."""
        self._rope = rope
        if hasattr(impl, "do_kv_cache_update"):
            self._stock: Callable[..., None] = impl.do_kv_cache_update
            impl.do_kv_cache_update = self

    def __call__(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        if key.dtype == kv_cache.dtype and isinstance(_metadata_of(layer), DecodeMetadata):
            self._slots = slot_mapping
            return
        if self._rope is not None:
            self._rope.turn(key)
            self._turned = True
        self._stock(layer, key, value, kv_cache, slot_mapping)
        self.written = True

    def taken(self) -> tuple[torch.Tensor | None, bool]:
        """Return the slots for attention to write, or None, and whether RoPE was applied to the keys; resets all."""
        found = self._slots, self._turned
        self._slots, self._turned, self.written = None, False, False
        return found


def _metadata_of(layer: Any) -> Any:
    """Return the attention metadata of a layer in the current forward pass."""
    from vllm.forward_context import get_forward_context

    by_layer = get_forward_context().attn_metadata
    return by_layer.get(layer.layer_name) if isinstance(by_layer, dict) else None


def _is_for_us(attn_metadata: Any, query: torch.Tensor) -> bool:
    return (
        getattr(attn_metadata, "max_query_len", 0) == 1  # missing in FlashInfer's metadata
        and _is_plain_batch(attn_metadata, query)
        and len(attn_metadata.seq_lens) == attn_metadata.num_actual_tokens
    )


def _has_requests(attn_metadata: Any, number: int, query: torch.Tensor) -> bool:
    """Whether a batch has so many requests; False with FlashInfer's metadata, which lacks the fields."""
    return len(getattr(attn_metadata, "seq_lens", ())) == len(
        getattr(attn_metadata, "block_table", ())
    ) == number and _is_plain_batch(attn_metadata, query)


def _is_plain_batch(attn_metadata: Any, query: torch.Tensor) -> bool:
    return (
        not getattr(attn_metadata, "use_cascade", False)  # absent from 0.32 on
        and attn_metadata.causal is True
        and query.dtype in (torch.bfloat16, torch.float16)
    )


def _caches(kv_cache: torch.Tensor, impl: Any) -> tuple[torch.Tensor, ...]:
    """Return the key and value caches as [blocks, block size, kv_heads, D], whatever the release's layout."""
    views: tuple[torch.Tensor, ...]
    if kv_cache.dim() == 4:  # [blocks, kv_heads, block size, 2 * D]
        views = kv_cache.transpose(1, 2).split(impl.head_size, dim=-1)
    else:  # [2, blocks, ...] or [blocks, 2, ...]
        views = kv_cache.unbind(0 if class_path(type(impl)) == _FLASH_ATTENTION and _two_come_first() else 1)
    return views


@functools.cache
def _two_come_first() -> bool:
    """Whether FlashAttention's cache is [2, blocks, ...]; FlashInfer's is always [blocks, 2, ...]."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

    shape: tuple[int, ...] = FlashAttentionBackend.get_kv_cache_shape(8, 16, 4, 64)
    return shape[0] == 2
