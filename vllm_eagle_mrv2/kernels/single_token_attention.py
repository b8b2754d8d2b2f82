"""Attention of one query token per request over a paged KV cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_eagle_mrv2.kernels.device import multiprocessors, stages
from vllm_eagle_mrv2.kernels.launching import launch

_LEAST_SPLIT = 256  # tokens, a multiple of every tile; a second program for less costs more than it saves
_PROGRAMS = 2  # per multiprocessor
_LEAST_ROWS = 16  # minimum of a matrix instruction
_LANES = 32  # number of request lengths read at a time
_IN_FLIGHT = 2  # tiles of keys and values in shared memory: one is read while the other is multiplied
_WARPS = 4


def _tile(width: int) -> int:
    """Return how many tokens are read at a time; measured on an H200 for heads of 64 and 128."""
    return 64 if width <= 128 else 32


@triton.jit
def _lengths(seq_lens_ptr, first, num_reqs, LANES: tl.constexpr):
    """Load the lengths of the next requests; lanes after the last request get length 0."""
    request = first + tl.arange(0, LANES)
    return tl.load(seq_lens_ptr + request, mask=request < num_reqs, other=0)


@triton.jit
def _limit(
    seq_lens_ptr, num_reqs, SPREAD: tl.constexpr, LEAST_SPLIT: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr
):
    """Return about how many tokens a split gets: an even share of the batch, but at least `LEAST_SPLIT`."""
    if num_reqs == 1:
        total = tl.load(seq_lens_ptr)
    else:
        lengths = tl.zeros([LANES], tl.int32)
        for first in range(0, num_reqs, LANES):
            lengths += _lengths(seq_lens_ptr, first, num_reqs, LANES)
        total = tl.sum(lengths)
    return tl.cdiv(tl.maximum(tl.cdiv(total, SPREAD), LEAST_SPLIT), TILE) * TILE


@triton.jit
def _share(length, limit, TILE: tl.constexpr):
    """Return the tokens in each split of a request: about equal shares, none added for less than half a limit."""
    length = tl.maximum(length, 1)
    splits = tl.maximum((length + limit // 2) // limit, 1)
    return tl.cdiv(tl.cdiv(length, splits), TILE) * TILE


@triton.jit
def _further(length, limit, TILE: tl.constexpr):
    """Return how many splits a request has in addition to its first."""
    length = tl.maximum(length, 1)
    return tl.cdiv(length, _share(length, limit, TILE)) - 1


@triton.jit
def _further_before(seq_lens_ptr, request, limit, TILE: tl.constexpr, LANES: tl.constexpr):
    """Return how many splits the requests before this one have in addition to their first."""
    count = tl.zeros([LANES], tl.int32)
    for first in range(0, request, LANES):
        count += _further(_lengths(seq_lens_ptr, first, request, LANES), limit, TILE)
    return tl.sum(count)


@triton.jit
def _request_of(further, seq_lens_ptr, num_reqs, limit, TILE: tl.constexpr, LANES: tl.constexpr):
    """Return the request of a further split, by the split's number; `num_reqs` if none of several has it."""
    request, seen = 0, 0
    if num_reqs > 1:
        for first in range(0, num_reqs, LANES):
            counts = _further(_lengths(seq_lens_ptr, first, num_reqs, LANES), limit, TILE)
            request += tl.sum((seen + tl.cumsum(counts) <= further).to(tl.int32))
            seen += tl.sum(counts)
    return tl.minimum(request, num_reqs)


@triton.jit
def _rotated(values, partners, cos, sin, column, WIDTH: tl.constexpr):
    """Apply RoPE to values; ``partners`` are the values half a head away (NeoX order)."""
    turned = values.to(tl.float32) * cos + tl.where(column < WIDTH // 2, -sin, sin) * partners.to(tl.float32)
    return turned.to(values.dtype)


# Batch sizes vary: specialized variants would be compiled during serving.
@triton.jit(do_not_specialize=["table_stride", "num_reqs"])
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
    num_reqs,
    partial_ptr,
    arrived_ptr,
    scale,
    key_ptr,
    key_stride,
    value_ptr,
    value_stride,
    slots_ptr,
    positions_ptr,
    cos_sin_ptr,
    index_ptr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SPREAD: tl.constexpr,
    LEAST_SPLIT: tl.constexpr,
    LANES: tl.constexpr,
    STAGES: tl.constexpr,
    WRITES: tl.constexpr,
    ROTATES: tl.constexpr,
    INDEXED: tl.constexpr,
):
    head = tl.program_id(0)
    # A first split for each request, then SPREAD - 1 further splits for requests that are long enough.
    request = tl.program_id(1)
    further = request - num_reqs
    limit = LEAST_SPLIT
    if further >= 0:
        limit = _limit(seq_lens_ptr, num_reqs, SPREAD, LEAST_SPLIT, TILE, LANES)
        request = _request_of(further, seq_lens_ptr, num_reqs, limit, TILE, LANES)
    if request == num_reqs:
        return
    length = tl.load(seq_lens_ptr + request)
    token = tl.load(index_ptr + request) if INDEXED else request.to(tl.int64)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    mine = row < GROUP
    out = out_ptr + token * out_stride + (head * GROUP + row[:, None]) * WIDTH + column[None, :]
    if length == 0:
        if not INDEXED:
            # Padding is not read, but a layer that mixes rows must not see stale values.
            tl.store(out, tl.zeros([ROWS, WIDTH], out_ptr.dtype.element_ty), mask=mine[:, None])
        return
    before = 0
    if 2 * length >= 3 * LEAST_SPLIT:
        if further < 0:
            limit = _limit(seq_lens_ptr, num_reqs, SPREAD, LEAST_SPLIT, TILE, LANES)
        before = _further_before(seq_lens_ptr, request, limit, TILE, LANES)
    split = tl.maximum(further - before + 1, 0)
    share = _share(length, limit, TILE)
    splits = tl.cdiv(length, share)
    if split >= splits:
        return  # no request has this split; a single request skips the search above
    queries = query_ptr + token * query_stride + (head * GROUP + row[:, None]) * WIDTH
    query = tl.load(queries + column[None, :], mask=mine[:, None], other=0.0)
    if ROTATES:
        partner = (column + WIDTH // 2) % WIDTH
        angles = cos_sin_ptr + tl.load(positions_ptr + token) * WIDTH + column % (WIDTH // 2)
        cos, sin = tl.load(angles).to(tl.float32), tl.load(angles + WIDTH // 2).to(tl.float32)
        partners = tl.load(queries + partner[None, :], mask=mine[:, None], other=0.0)
        query = _rotated(query, partners, cos[None, :], sin[None, :], column[None, :], WIDTH)
    table = table_ptr + request.to(tl.int64) * table_stride
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS, WIDTH], tl.float32)
    if INDEXED:
        length = tl.load(positions_ptr + token).to(tl.int32) + 1  # a later split may be left without tokens
    end = tl.minimum((split + 1) * share, length)
    if WRITES:
        # The token's own key and value are added after the loop: cache reads are not ordered after their write, and
        # the loop's reads need not wait for them.
        end = tl.minimum(end, length - 1)
        last = split == splits - 1
        slot = tl.load(slots_ptr + request, mask=last, other=-1)  # -1 in the rows of a dummy run
        keys_own = key_ptr + token * key_stride + head * WIDTH
        key = tl.load(keys_own + column)
        if ROTATES:
            key = _rotated(key, tl.load(keys_own + partner), cos, sin, column, WIDTH)
        value = tl.load(value_ptr + token * value_stride + head * WIDTH + column)
    # A tile's blocks are looked up while the tile before it is multiplied.  If keys and values waited for a load of the
    # same iteration, Triton would hold half as many of their tiles.
    earlier = split * share + tl.arange(0, TILE)
    block = tl.load(table + earlier // BLOCK_SIZE, mask=earlier < end, other=0)
    for start in tl.range(split * share, end, TILE, num_stages=STAGES):
        earlier = start + tl.arange(0, TILE)
        live = earlier < end
        place = block.to(tl.int64) * cache_stride_block
        place += (earlier % BLOCK_SIZE) * cache_stride_slot + head * cache_stride_head
        later = earlier + TILE
        block = tl.load(table + later // BLOCK_SIZE, mask=later < end, other=0)
        keys = tl.load(key_cache_ptr + place[:, None] + column[None, :], mask=live[:, None], other=0.0)
        values = tl.load(value_cache_ptr + place[:, None] + column[None, :], mask=live[:, None], other=0.0)
        scores = tl.where(live[None, :], tl.dot(query, keys.trans()) * scale, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        faded = tl.exp(highest - higher)
        weights = tl.exp(scores - higher[:, None])
        total = total * faded + tl.sum(weights, axis=1)
        summed = tl.dot(weights.to(values.dtype), values, summed * faded[:, None])
        highest = higher
    if WRITES:
        home = slot // BLOCK_SIZE * cache_stride_block + slot % BLOCK_SIZE * cache_stride_slot
        home += head * cache_stride_head + column
        tl.store(key_cache_ptr + home, key, mask=slot >= 0)
        tl.store(value_cache_ptr + home, value, mask=slot >= 0)
        score = tl.sum(query.to(tl.float32) * key[None, :].to(tl.float32), axis=1) * scale
        score = tl.where(last, score, float("-inf"))
        higher = tl.maximum(highest, score)
        faded, weight = tl.exp(highest - higher), tl.exp(score - higher)
        total = total * faded + weight
        summed = summed * faded[:, None] + weight[:, None] * value[None, :].to(tl.float32)
        highest = higher
    if splits == 1:
        tl.store(out, (summed / total[:, None]).to(out_ptr.dtype.element_ty), mask=mine[:, None])
        return
    # The last program to arrive combines the splits: further splits are stored in order, first splits after all those.
    parts = partial_ptr + head * (ROWS * (WIDTH + 2)) + row * (WIDTH + 2)
    stride = tl.num_programs(0) * (ROWS * (WIDTH + 2))
    part = parts + tl.where(split == 0, SPREAD + before, before + split - 1) * stride
    tl.store(part[:, None] + column[None, :], summed)
    tl.store(part + WIDTH, highest)
    tl.store(part + WIDTH + 1, total)
    tl.debug_barrier()
    arrived = arrived_ptr + before * tl.num_programs(0) + head
    if tl.atomic_add(arrived, 1, sem="acq_rel") != splits - 1:
        return
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS, WIDTH], tl.float32)
    for other in range(0, splits):
        part = parts + tl.where(other == 0, SPREAD + before, before + other - 1) * stride
        theirs = tl.load(part + WIDTH, cache_modifier=".cg")
        higher = tl.maximum(highest, theirs)
        faded, kept = tl.exp(highest - higher), tl.exp(theirs - higher)
        total = total * faded + tl.load(part + WIDTH + 1, cache_modifier=".cg") * kept
        numbers = tl.load(part[:, None] + column[None, :], cache_modifier=".cg")
        summed = summed * faded[:, None] + numbers * kept[:, None]
        highest = higher
    tl.store(out, (summed / total[:, None]).to(out_ptr.dtype.element_ty), mask=mine[:, None])
    tl.store(arrived, 0)


class SingleTokenAttention:
    """Attention kernel with the scratch memory in which splits are combined.

    Requests are split by their lengths on the device, so programs are assigned to where the batch's tokens are.
    FlashAttention launches one kernel before attention to schedule the splits and one after it to combine them.  Here
    the last of a request's splits combines the results.

    Args:
        num_heads: query heads.
        num_kv_heads: key and value heads.
        width: size of a head, a power of two of at least 16.
        device: device of all tensors.
        scratch: device of the scratch memory, if another (meta, for kernels that are only compiled; see
            `compiles_alone`).
    """

    def __init__(
        self, num_heads: int, num_kv_heads: int, width: int, device: torch.device, scratch: torch.device | None = None
    ) -> None:
        self.num_kv_heads, self.width = num_kv_heads, width
        self.group = num_heads // num_kv_heads
        self.rows = max(_LEAST_ROWS, triton.next_power_of_2(self.group))
        self._tile = _tile(width)
        # Of n stages Triton holds n - 1 in shared memory.  Keys and values have 16 bit.
        self._stages = 1 + stages(_IN_FLIGHT, 2 * self._tile * width * 2, device)
        # The number of further splits, and of requests that have any, is below this.
        self._spread = max(1, _PROGRAMS * multiprocessors(device) // num_kv_heads)
        scratch = scratch or device
        self._partial = torch.empty(2 * self._spread * num_kv_heads * self.rows * (width + 2), device=scratch)
        self._arrived = torch.zeros(self._spread * num_kv_heads, dtype=torch.int32, device=scratch)

    def __call__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
        out: torch.Tensor,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        slots: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        cos_sin: torch.Tensor | None = None,
        index: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute attention; the token's own key and value are in the cache or are written to it.

        Args:
            query: [n, heads, D]; tokens need not be contiguous.
            key_cache: [blocks, block size, kv_heads, D] of the same dtype, D contiguous.
            value_cache: as ``key_cache``, with the same strides.
            block_table: [n, m] int32.
            seq_lens: [n] int32, the token included; 0 is padding, which gets zeros (with ``index`` nothing).
            scale: factor of the products of queries and keys.
            out: [n, heads, D], written.
            key: [n, kv_heads, D] of the cache's dtype, the tokens' own, each contiguous; None if the cache has them.
            value: as ``key``.
            slots: [n] int64, the cache slots to write; -1 is not written.
            positions: as many int64 as queries, given if RoPE must still be applied to these and to ``key``.
            cos_sin: [max_model_len, D] contiguous, for each position D/2 cosines and then D/2 sines, as in vLLM's
                ``RotaryEmbedding`` in NeoX order; given with positions.
            index: [n] int64, given with positions and without a key: the requests have other tokens in ``query``, and
                only these attend, one of each request, to the tokens up to their positions, of which there are at most
                ``seq_lens``.  Only their outputs are written.
        """
        num_reqs = len(query if index is None else index)
        launch(_single_token_attention_kernel, (self.num_kv_heads, num_reqs + self._spread - 1))(
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
            num_reqs,
            self._partial,
            self._arrived,
            scale,
            key,
            0 if key is None else key.stride(0),
            value,
            0 if value is None else value.stride(0),
            slots,
            positions,
            cos_sin,
            index,
            GROUP=self.group,
            ROWS=self.rows,
            WIDTH=self.width,
            BLOCK_SIZE=key_cache.shape[1],
            TILE=self._tile,
            SPREAD=self._spread,
            LEAST_SPLIT=_LEAST_SPLIT,
            LANES=_LANES,
            STAGES=self._stages,
            WRITES=key is not None,
            ROTATES=positions is not None,
            INDEXED=index is not None,
            num_warps=_WARPS,
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


def rotated_reference(heads: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Apply RoPE to queries or keys [n, heads, D], in plain torch."""
    cos, sin = cos_sin[positions].float().chunk(2, dim=-1)
    first, second = heads.float().chunk(2, dim=-1)
    turned = (first * cos[:, None] - second * sin[:, None], second * cos[:, None] + first * sin[:, None])
    return torch.cat(turned, dim=-1).to(heads.dtype)
