"""Attention of one token a request over a paged KV cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_eagle_mrv2.kernels.shared_memory import stages

_LEAST_SPLIT = 256  # tokens; a second program for less costs more than it saves
_PROGRAMS = 264  # two for each multiprocessor of an H200
_LEAST_ROWS = 16  # of a matrix instruction


def _tile(width: int) -> tuple[int, int, int]:
    """Tokens read at a time, stages and warps: measured on an H200 for heads of 64 and of 128."""
    if width <= 64:
        return 256, 2, 8
    return (128, 3, 4) if width <= 128 else (64, 2, 4)


# Batch sizes vary: a variant per value would be compiled in the middle of serving.
@triton.jit(do_not_specialize=["table_stride"])
def _single_token_attention_kernel(
    query_ptr,
    query_stride,
    out_ptr,
    out_stride,
    key_cache_ptr,
    value_cache_ptr,
    cache_stride_block,
    cache_stride_slot,
    cache_stride_head,
    table_ptr,
    table_stride,
    seq_lens_ptr,
    partial_ptr,
    arrived_ptr,
    scale,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    LEAST_SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    mine = row < GROUP
    out = out_ptr + request * out_stride + (head * GROUP + row[:, None]) * WIDTH + column[None, :]
    length = tl.load(seq_lens_ptr + request)
    if length == 0:
        # Padding: nobody reads it, but a layer that mixes rows must not meet what lies there.
        tl.store(out, tl.zeros([ROWS, WIDTH], out_ptr.dtype.element_ty), mask=mine[:, None] & (split == 0))
        return
    # As many splits as the request's own length is worth, whatever the graph was captured for.
    most = tl.num_programs(2)
    splits = tl.minimum(tl.cdiv(length, LEAST_SPLIT), most)
    share = tl.cdiv(tl.cdiv(length, splits), TILE) * TILE
    splits = tl.cdiv(length, share)
    if split >= splits:
        return
    query = tl.load(
        query_ptr + request * query_stride + (head * GROUP + row[:, None]) * WIDTH + column[None, :],
        mask=mine[:, None],
        other=0.0,
    )
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS, WIDTH], tl.float32)
    end = tl.minimum((split + 1) * share, length)
    for start in tl.range(split * share, end, TILE, num_stages=STAGES):
        token = start + tl.arange(0, TILE)
        live = token < end
        block = tl.load(table_ptr + request * table_stride + token // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
        place = block * cache_stride_block + (token % BLOCK_SIZE) * cache_stride_slot + head * cache_stride_head
        keys = tl.load(key_cache_ptr + place[:, None] + column[None, :], mask=live[:, None], other=0.0)
        values = tl.load(value_cache_ptr + place[:, None] + column[None, :], mask=live[:, None], other=0.0)
        scores = tl.where(live[None, :], tl.dot(query, keys.trans()) * scale, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        faded = tl.exp(highest - higher)
        weights = tl.exp(scores - higher[:, None])
        total = total * faded + tl.sum(weights, axis=1)
        summed = tl.dot(weights.to(values.dtype), values, summed * faded[:, None])
        highest = higher
    if splits == 1:
        tl.store(out, (summed / total[:, None]).to(out_ptr.dtype.element_ty), mask=mine[:, None])
        return
    # The last to arrive puts the splits together.
    group = request * tl.num_programs(1) + head
    parts = partial_ptr + group * most * (ROWS * (WIDTH + 2))
    part = parts + split * (ROWS * (WIDTH + 2)) + row * (WIDTH + 2)
    tl.store(part[:, None] + column[None, :], summed)
    tl.store(part + WIDTH, highest)
    tl.store(part + WIDTH + 1, total)
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr + group, 1, sem="acq_rel") != splits - 1:
        return
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS, WIDTH], tl.float32)
    for other in range(splits):
        part = parts + other * (ROWS * (WIDTH + 2)) + row * (WIDTH + 2)
        theirs = tl.load(part + WIDTH, cache_modifier=".cg")
        higher = tl.maximum(highest, theirs)
        faded, kept = tl.exp(highest - higher), tl.exp(theirs - higher)
        total = total * faded + tl.load(part + WIDTH + 1, cache_modifier=".cg") * kept
        numbers = tl.load(part[:, None] + column[None, :], cache_modifier=".cg")
        summed = summed * faded[:, None] + numbers * kept[:, None]
        highest = higher
    tl.store(out, (summed / total[:, None]).to(out_ptr.dtype.element_ty), mask=mine[:, None])
    tl.store(arrived_ptr + group, 0)


class SingleTokenAttention:
    """Attention with the scratch memory that its splits meet in.

    Splits follow the length of each request on the device (what FlashAttention's schedule does with a kernel before and
    one behind it), and the last of them puts the results together.

    Args:
        max_num_reqs: R.
        num_heads: of the queries.
        num_kv_heads: of keys and values.
        width: of a head, a power of two of at least 16.
        device: of everything.
    """

    def __init__(self, max_num_reqs: int, num_heads: int, num_kv_heads: int, width: int, device: torch.device) -> None:
        self.num_kv_heads, self.width = num_kv_heads, width
        self.group = num_heads // num_kv_heads
        self.rows = max(_LEAST_ROWS, triton.next_power_of_2(self.group))
        self._tile, wanted, self._warps = _tile(width)
        self._stages = stages(wanted, 2 * self._tile * width * 2, device)  # keys and values in 16 bit
        # More requests have fewer splits each, and with one there is nothing to put together.
        most = max(n * s if (s := self._splits(n)) > 1 else 0 for n in range(1, max_num_reqs + 1))
        self._partial = torch.empty(most * num_kv_heads * self.rows * (width + 2), device=device)
        self._arrived = torch.zeros(max_num_reqs * num_kv_heads, dtype=torch.int32, device=device)

    def _splits(self, num_reqs: int) -> int:
        return max(1, _PROGRAMS // (num_reqs * self.num_kv_heads))

    def __call__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Attend; the token's own key and value are in the cache.

        Args:
            query: [n, heads, D], tokens may lie apart.
            key_cache: [blocks, block size, kv_heads, D] of the same dtype, D contiguous.
            value_cache: likewise, with the same strides.
            block_table: [n, m] int32.
            seq_lens: [n] int32, the token included; 0 is padding, which gets zeros.
            scale: of the products of queries and keys.
            out: [n, heads, D], written.
        """
        num_reqs = query.shape[0]
        _single_token_attention_kernel[(num_reqs, self.num_kv_heads, self._splits(num_reqs))](
            query,
            query.stride(0),
            out,
            out.stride(0),
            key_cache,
            value_cache,
            *key_cache.stride()[:3],
            block_table,
            block_table.stride(0),
            seq_lens,
            self._partial,
            self._arrived,
            scale,
            GROUP=self.group,
            ROWS=self.rows,
            WIDTH=self.width,
            BLOCK_SIZE=key_cache.shape[1],
            TILE=self._tile,
            LEAST_SPLIT=_LEAST_SPLIT,
            STAGES=self._stages,
            num_warps=self._warps,
        )
        return out


def single_token_attention_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """`SingleTokenAttention` in plain torch, [n, heads, D] float32."""
    out = torch.zeros(query.shape, device=query.device)
    group = query.shape[1] // key_cache.shape[2]
    for request, length in enumerate(seq_lens.tolist()):
        if length:
            keys, values = (
                cache[block_table[request].long()].flatten(0, 1)[:length].float().repeat_interleave(group, 1)
                for cache in (key_cache, value_cache)
            )
            scores = torch.einsum("hd,thd->ht", query[request].float(), keys) * scale
            out[request] = torch.einsum("ht,thd->hd", scores.softmax(-1), values)
    return out
