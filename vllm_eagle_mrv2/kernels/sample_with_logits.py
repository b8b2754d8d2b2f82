"""Probabilistic draft sampling that stores the logits for the rejection sampler."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_eagle_mrv2.kernels.greedy import NO_TOKEN, first_of_best, key_of, order_of, order_of_double, tokens_of
from vllm_eagle_mrv2.kernels.launching import launch

FEW_ROWS = 8
"""Up to this many rows leave multiprocessors idle, and get smaller blocks."""
_PART = 512
_CLEARED = 4096
# Added to the position of salted draws; far beyond any position, so no other draw has the same random numbers.
_SALT = tl.constexpr(1 << 30)
_TINY = tl.constexpr(2.0**-126)


def block_of(num_rows: int) -> int:
    """Return how many columns of a row a program takes."""
    return 1024 if num_rows <= FEW_ROWS else 2048


@triton.jit
def _noise(seed, position, keys, SALTED: tl.constexpr, FP64: tl.constexpr):
    """Return Gumbel noise for the tokens ``keys``: -log(E) with E exponential."""
    if SALTED:
        position += _SALT
    stream = tl.randint(seed, position)
    if FP64:
        low, high, _, _ = tl.randint4x(stream, keys)
        low = low.to(tl.uint32, bitcast=True).to(tl.uint64)
        high = high.to(tl.uint32, bitcast=True).to(tl.uint64)
        uniform = ((high << 32) | low).to(tl.float64) * 5.421010862427522e-20  # 2**-64
        exponential = -tl.log(tl.maximum(uniform, 2.2250738585072014e-308))
    else:
        # The largest noise decides, and comes from the smallest E: -log(1 - u) near u = 0, where fp32 is fine-grained.
        uniform = tl.maximum(tl.rand(stream, keys), _TINY)
        series = uniform * (1.0 + uniform * (0.5 + uniform * 0.33333334))
        exponential = tl.where(uniform < 1e-3, series, -tl.log(1.0 - uniform))
    return -tl.log(exponential)


@triton.jit
def _clear_kernel(
    idx_mapping_ptr,
    temperature_ptr,
    draft_step_ptr,
    draft_logits_ptr,
    draft_logits_stride_req,
    draft_logits_stride_step,
    vocab_size,
    BLOCK: tl.constexpr,
):
    state = tl.load(idx_mapping_ptr + tl.program_id(0)).to(tl.int64)
    if tl.load(temperature_ptr + state, mask=state >= 0, other=0.0) == 0.0:
        return
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = draft_logits_ptr + state * draft_logits_stride_req + tl.load(draft_step_ptr) * draft_logits_stride_step
    tl.store(kept + tokens, tl.full([BLOCK], float("-inf"), tl.float32), mask=tokens < vocab_size)


@triton.jit
def _sample_blocks_kernel(
    logits_ptr,
    logits_stride,
    idx_mapping_ptr,
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    draft_step_ptr,
    offsets_ptr,
    draft_logits_ptr,
    draft_logits_stride_req,
    draft_logits_stride_step,
    best_ptr,
    best_width,
    num_columns,
    MAPPED: tl.constexpr,
    KEEP: tl.constexpr,
    AFTER_TEMPERATURE: tl.constexpr,
    SALTED: tl.constexpr,
    FP64: tl.constexpr,
    GREEDY: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    logits_ptr += row * logits_stride
    if GREEDY:
        # Loaded before it is known whether the row is greedy: for greedy rows the kernel is bound by latency.
        columns = block * BLOCK + tl.arange(0, BLOCK)
        inside = columns < num_columns
        row_logits = tl.load(logits_ptr + columns, mask=inside, other=float("-inf")).to(tl.float32)
    state = tl.load(idx_mapping_ptr + row).to(tl.int64)
    live = state >= 0
    temperature = tl.load(temperature_ptr + state, mask=live, other=0.0)
    if not GREEDY:  # noqa: SIM102 - known to the compiler
        if temperature == 0.0:
            return
    best = tl.full((), float("-inf"), tl.float64 if FP64 else tl.float32)
    token = NO_TOKEN
    # With NaN any lane may win, even one beyond the vocabulary, so NaN becomes -inf.
    if temperature != 0.0:
        # One part at a time: random numbers take many registers, and the other branch would have to wait for them too.
        step = tl.load(draft_step_ptr)
        seed = tl.load(seeds_ptr + state)
        if SALTED:
            seed ^= step << 32  # a position that is drafted again, at an earlier step, gets other random numbers
        position = tl.load(positions_ptr + row) + 1
        for start in range(0, BLOCK, PART):
            part = block * BLOCK + start + tl.arange(0, PART)
            held = part < num_columns
            tokens = tokens_of(part, held, offsets_ptr, MAPPED)
            raw = tl.load(logits_ptr + part, mask=held, other=float("-inf")).to(tl.float32)
            scaled = raw / temperature
            if KEEP:
                kept = draft_logits_ptr + state * draft_logits_stride_req + step * draft_logits_stride_step + tokens
                tl.store(kept, scaled if AFTER_TEMPERATURE else raw, mask=held)
            score, first = tl.full((), float("-inf"), best.dtype), tl.min(tokens, axis=0)
            # Noise takes longest, and top-k and top-p leave few tokens to draw it for.
            if tl.max((scaled > float("-inf")).to(tl.int32), axis=0) != 0:
                scores = scaled.to(tl.float64) if FP64 else scaled
                scores = tl.where(held, scores + _noise(seed, position, tokens, SALTED, FP64), float("-inf"))
                score, first = first_of_best(tl.where(scores == scores, scores, float("-inf")), tokens)
            token = tl.where(score > best, first, tl.where(score == best, tl.minimum(token, first), token))
            best = tl.maximum(score, best)
    elif GREEDY:
        # No logits are stored for greedy or padded rows: vLLM compares greedy drafts with the target's argmax.
        # The comparison needs no float64, because nothing is finer than the logits.
        tokens = tokens_of(columns, inside, offsets_ptr, MAPPED)
        largest, token = first_of_best(tl.where(row_logits == row_logits, row_logits, float("-inf")), tokens)
        best = largest.to(tl.float64) if FP64 else largest
    if FP64:
        orders_ptr = best_ptr + row * 2 * best_width
        tl.store(orders_ptr + block, order_of_double(best))
        tl.store(orders_ptr + best_width + block, token.to(tl.int64))
    else:
        tl.store(best_ptr + row * best_width + block, key_of(order_of(best), token.to(tl.int64)))


def sample_with_logits(
    logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    draft_step: torch.Tensor,
    draft_logits: torch.Tensor | None,
    *,
    salted: bool,
    after_temperature: bool,
    fp64: bool,
    offsets: torch.Tensor | None = None,
    best: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sample a draft token for every row with the Gumbel-max trick, and store the logits of rows that are not greedy.

    The random numbers are a function of (seed, position, token).  A rejected draft is replaced by a draw from the
    target's residual distribution, which vLLM keys in the same way.  For the output to follow the target's
    distribution, the two must not share random numbers; ``salted`` keeps them apart.  Nor may two drafts for a position
    share them, where drafts decide how many of those before them are accepted (block verification): ``salted`` ones
    also depend on the draft step, as in vLLM 0.33.

    Args:
        logits: [n, V], any floating dtype; with ``offsets`` [n, C], over the draft's own vocabulary.
        idx_mapping: [n] request state of each row; a row of -1 is padding.
        temperature: [R] float32; 0 takes the argmax.
        seeds: [R] int64.
        positions: [n] int64, the position before that of the drafted token.
        draft_step: [] int64, on the device.
        draft_logits: [R, K, V], written at [state, draft_step] where the temperature is not 0; None stores nothing.
            Tokens without a column get -inf.
        salted: use other random numbers than the target does, and others at each draft step.
        after_temperature: store logits divided by the temperature.
        fp64: compute noise and compare in float64.
        offsets: [C] int64, the target's token minus the column; None where a column is the token.
        best: result of `few_rows_by_temperature`, which contains the greedy rows; written; only with ``fp64``.

    Returns:
        the best of each block of tokens in a form of `how_drafted`: keys [n, m], or with ``fp64`` score orders and
        tokens [n, 2, m].  The kernel that uses the token takes the best of them.
    """
    assert best is None or fp64
    num_rows, num_columns = logits.shape
    if offsets is not None and draft_logits is not None:
        vocab_size = draft_logits.shape[-1]
        launch(_clear_kernel, (num_rows, triton.cdiv(vocab_size, _CLEARED)))(
            idx_mapping,
            temperature,
            draft_step,
            draft_logits,
            draft_logits.stride(0),
            draft_logits.stride(1),
            vocab_size,
            BLOCK=_CLEARED,
        )
    block = block_of(num_rows)
    num_blocks = triton.cdiv(num_columns, block)
    greedy = best is None
    if best is None:
        best = logits.new_empty((num_rows, 2, num_blocks) if fp64 else (num_rows, num_blocks), dtype=torch.int64)
    launch(_sample_blocks_kernel, (num_rows, num_blocks))(
        logits,
        logits.stride(0),
        idx_mapping,
        temperature,
        seeds,
        positions,
        draft_step,
        offsets,
        draft_logits,
        0 if draft_logits is None else draft_logits.stride(0),
        0 if draft_logits is None else draft_logits.stride(1),
        best,
        best.shape[-1],
        num_columns,
        MAPPED=offsets is not None,
        KEEP=draft_logits is not None,
        AFTER_TEMPERATURE=after_temperature,
        SALTED=salted,
        FP64=fp64,
        GREEDY=greedy,
        BLOCK=block,
        PART=_PART,
    )
    return best


def sample_with_target_noise(
    logits: torch.Tensor,
    offsets: torch.Tensor | None,
    idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    draft_step: torch.Tensor,
    best: torch.Tensor | None = None,
) -> torch.Tensor:
    """`sample_with_logits` for vLLM 0.20, which stores no logits: drafts use the target's own random numbers.

    Strict rejection accepts a draft that equals the token sampled by the target, so a draft is best drawn with the
    noise that the target will use.  This adds no bias: the output is the target's sample either way.
    """
    return sample_with_logits(
        logits,
        idx_mapping,
        temperature,
        seeds,
        positions,
        draft_step,
        None,
        salted=False,
        after_temperature=True,
        fp64=True,
        offsets=offsets,
        best=best,
    )


def sample_with_logits_reference(
    logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    draft_step: torch.Tensor,
    draft_logits: torch.Tensor | None,
    *,
    after_temperature: bool,
) -> torch.Tensor:
    """Store what `sample_with_logits` stores, in plain torch; returns the probabilities [n, V] to sample from."""
    probabilities = torch.zeros(logits.shape, dtype=torch.float64)
    for row, state in enumerate(idx_mapping.tolist()):
        raw = logits[row].float()
        heat = float(temperature[state]) if state >= 0 else 0.0
        scaled = raw / heat if heat else raw
        if draft_logits is not None and heat:
            draft_logits[state, int(draft_step)] = scaled if after_temperature else raw
        if heat:
            probabilities[row] = scaled.double().softmax(-1)
        else:
            probabilities[row, int(raw.argmax())] = 1.0
    return probabilities
