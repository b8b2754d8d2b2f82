"""Top-k and top-p of the requests, applied to draft logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_eagle_mrv2.kernels.launching import launch
from vllm_eagle_mrv2.kernels.sample_with_logits import block_of

BINS = 512
"""Histogram bins of 1/32 nat, down to 16 nats below the best logit; the last bin holds everything lower."""
_BINS_PER_NAT = tl.constexpr(32.0)
_UNIT = tl.constexpr(4294967296.0)  # mass is counted in units of 2**-32: integers add up the same in any order


@triton.jit
def _filters(idx_mapping_ptr, temperature_ptr, top_k_ptr, top_p_ptr, row, vocab_size):
    """Load temperature, k and p of a row; the temperature is 0 if there is nothing to filter."""
    state = tl.load(idx_mapping_ptr + row).to(tl.int64)
    live = state >= 0
    temperature = tl.load(temperature_ptr + state, mask=live, other=0.0)
    k = tl.load(top_k_ptr + state, mask=live, other=0)
    p = tl.load(top_p_ptr + state, mask=live, other=1.0)
    filtered = live & ((k < vocab_size) | (p < 1.0))
    return tl.where(filtered, temperature, 0.0), k, p


@triton.jit
def _block(logits_ptr, logits_stride, row, block, vocab_size, BLOCK: tl.constexpr):
    """Load a block of a row's logits; also returns their addresses and which are inside the vocabulary."""
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocab_size
    places = logits_ptr + row * logits_stride + tokens
    return tl.load(places, mask=inside, other=float("-inf")).to(tl.float32), places, inside


@triton.jit
def _best(best_ptr, row, num_blocks, BLOCKS: tl.constexpr):
    """Return the best logit of a row from those of its blocks."""
    each = tl.arange(0, BLOCKS)
    return tl.max(tl.load(best_ptr + row * num_blocks + each, mask=each < num_blocks, other=float("-inf")), axis=0)


@triton.jit
def _bins(logits, best, temperature, BINS: tl.constexpr):
    """Return how many bins each logit is below the best one; -inf and NaN fall into the last bin."""
    distance = (best - logits) / temperature * _BINS_PER_NAT
    return tl.where(distance < BINS - 1, distance, BINS - 1.0).to(tl.int32)


@triton.jit
def _block_best_kernel(
    logits_ptr,
    logits_stride,
    idx_mapping_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    best_ptr,
    histogram_ptr,
    vocab_size,
    num_blocks,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    temperature, _, _ = _filters(idx_mapping_ptr, temperature_ptr, top_k_ptr, top_p_ptr, row, vocab_size)
    if temperature == 0.0:
        return
    if block == 0:
        tl.store(histogram_ptr + row * 2 * BINS + tl.arange(0, 2 * BINS), tl.zeros([2 * BINS], tl.int64))
    logits, _, _ = _block(logits_ptr, logits_stride, row, block, vocab_size, BLOCK)
    tl.store(best_ptr + row * num_blocks + block, tl.max(logits, axis=0))


@triton.jit
def _histogram_kernel(
    logits_ptr,
    logits_stride,
    idx_mapping_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    best_ptr,
    histogram_ptr,
    vocab_size,
    num_blocks,
    BINS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    temperature, k, p = _filters(idx_mapping_ptr, temperature_ptr, top_k_ptr, top_p_ptr, row, vocab_size)
    if temperature == 0.0:
        return
    best = _best(best_ptr, row, num_blocks, BLOCKS)
    logits, _, inside = _block(logits_ptr, logits_stride, row, block, vocab_size, BLOCK)
    bins = _bins(logits, best, temperature, BINS)
    mass = (tl.exp((logits - best) / temperature) * _UNIT).to(tl.int64)
    counts = histogram_ptr + row * 2 * BINS
    near = inside & (bins < BINS - 1)
    far = inside & (bins == BINS - 1)
    # Most tokens are far from the best: a single addition counts all of them in a block.
    # Relaxed: only the next kernel reads the counts, so no order is needed, and each fence would stall a warp.
    if k < vocab_size:
        tl.atomic_add(counts + bins, tl.full([BLOCK], 1, tl.int64), mask=near, sem="relaxed")
        tl.atomic_add(counts + BINS - 1, tl.sum(far.to(tl.int64), axis=0), sem="relaxed")
    if p < 1.0:
        tl.atomic_add(counts + BINS + bins, mass, mask=near, sem="relaxed")
        tl.atomic_add(counts + 2 * BINS - 1, tl.sum(tl.where(far, mass, 0), axis=0), sem="relaxed")


@triton.jit
def _mask_kernel(
    logits_ptr,
    logits_stride,
    idx_mapping_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    best_ptr,
    histogram_ptr,
    vocab_size,
    num_blocks,
    BINS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    temperature, k, p = _filters(idx_mapping_ptr, temperature_ptr, top_k_ptr, top_p_ptr, row, vocab_size)
    if temperature == 0.0:
        return
    best = _best(best_ptr, row, num_blocks, BLOCKS)
    bins = tl.arange(0, BINS)
    last = BINS - 1
    in_last = k.to(tl.int64)
    if k < vocab_size:
        # Number of bins that lie entirely before the k-th token; the next bin is kept too, as a whole.
        counts = tl.cumsum(tl.load(histogram_ptr + row * 2 * BINS + bins), axis=0)
        last = tl.minimum(tl.sum((counts < k).to(tl.int32), axis=0), BINS - 1)
        in_last -= tl.max(tl.where(bins < last, counts, 0), axis=0)
    if p < 1.0:
        # Bound of the mass of the best k tokens: the bins before the last, and its tokens at the bin's upper edge.
        mass = tl.cumsum(tl.load(histogram_ptr + row * 2 * BINS + BINS + bins), axis=0)
        whole = tl.sum(tl.where(bins == last, mass, 0), axis=0).to(tl.float32)
        most = in_last.to(tl.float32) * tl.exp(-last / _BINS_PER_NAT) * _UNIT
        kept = tl.minimum(whole, tl.max(tl.where(bins < last, mass, 0), axis=0).to(tl.float32) + most)
        last = tl.minimum(last, tl.sum((mass.to(tl.float32) < p * kept).to(tl.int32), axis=0))
    logits, places, inside = _block(logits_ptr, logits_stride, row, block, vocab_size, BLOCK)
    out = inside & (_bins(logits, best, temperature, BINS) > last)
    tl.store(places, tl.full([BLOCK], float("-inf"), tl.float32), mask=out)


def filter_logits(
    logits: torch.Tensor, idx_mapping: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> None:
    """Set the draft logits that a request's top-k and top-p exclude to -inf, in place.

    The target never accepts a token that its own top-k and top-p exclude, so a draft from the excluded tail is wasted
    (#56724).  Any draft distribution keeps the output exact, as long as the rejection sampler is given the same one.
    The cut may therefore be approximate, and nothing is sorted: logits are counted in a histogram, and the bin where a
    limit falls is kept whole.  No token within the limits is removed, and at most a sixteenth of a nat too much is
    kept, down to 16 nats below the best logit.  Counts and mass are integers, so all tensor-parallel ranks cut at the
    same place.

    Rows of greedy requests, padded rows and rows without either filter stay unchanged.

    Args:
        logits: [n, V], any floating dtype, written in place.
        idx_mapping: [n] request state of each row, -1 for padding.
        temperature: [R] float32.
        top_k: [R] int32; V or more means no limit.
        top_p: [R] float32; 1 means no limit.
    """
    num_rows, vocab_size = logits.shape
    block = block_of(num_rows)
    num_blocks = triton.cdiv(vocab_size, block)
    best = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=logits.device)
    histogram = torch.empty(num_rows, 2, BINS, dtype=torch.int64, device=logits.device)
    blocks = triton.next_power_of_2(num_blocks)
    grid = (num_rows, num_blocks)
    given = (logits, logits.stride(0), idx_mapping, temperature, top_k, top_p, best, histogram, vocab_size, num_blocks)
    launch(_block_best_kernel, grid)(*given, BINS=BINS, BLOCK=block)
    launch(_histogram_kernel, grid)(*given, BINS=BINS, BLOCKS=blocks, BLOCK=block, num_warps=8)
    launch(_mask_kernel, grid)(*given, BINS=BINS, BLOCKS=blocks, BLOCK=block)


def filter_logits_reference(
    logits: torch.Tensor, idx_mapping: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """Return [n, V] bool, in plain torch: the tokens that top-k and then top-p keep, without extra ties or bins."""
    keep = torch.ones_like(logits, dtype=torch.bool)
    for row, state in enumerate(idx_mapping.tolist()):
        if state < 0 or float(temperature[state]) == 0.0:
            continue
        scaled = logits[row].double() / float(temperature[state])
        order = scaled.argsort(descending=True, stable=True)
        kept = order[: int(top_k[state])]
        probabilities = scaled[kept].softmax(-1)
        kept = kept[probabilities.cumsum(-1) - probabilities < float(top_p[state])]
        keep[row] = False
        keep[row, kept] = True
    return keep
