"""Argmax over the draft vocabulary in two stages, the first spread over the whole GPU.

The second stage is fused into the kernel that uses the token; see `drafted_token`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_eagle_mrv2.kernels.launching import launch

_BLOCK = 2048


LEAST = tl.constexpr(-0x7FFFFFFFFFFFFFFF)
"""Less than every score order and every key."""
NO_TOKEN = tl.constexpr(0x7FFFFFFF)
"""Greater than every token."""


@triton.jit
def order_of(score):
    """Map float32 scores to int32 with the same order; NaN is the greatest."""
    # The bits of a negative float are inverted, except the sign.  Zeros are equal: -0.0 + 0.0 is 0.0.
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(score != score, 0x7FFFFFFF, order)


@triton.jit
def key_of(order, token):
    """Pack score orders (of `order_of`) and tokens into int64 keys that compare by score, then by token.

    Among equal scores the first token has the greatest key, as in torch.  NaN is greater than every score.
    """
    return (order.to(tl.int64) << 32) | (0xFFFFFFFF - token)


@triton.jit
def order_of_double(score):
    """Map float64 scores, none of them NaN, to int64 with the same order."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int64, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFFFFFFFFFF, bits)


@triton.jit
def tokens_of(rows, inside, offsets_ptr, MAPPED: tl.constexpr):
    """Return the target's tokens, int32, for rows of the head; `NO_TOKEN` for rows that are not inside."""
    if MAPPED:
        rows += tl.load(offsets_ptr + rows, mask=inside, other=0).to(tl.int32)
    return tl.where(inside, rows, NO_TOKEN)


@triton.jit
def first_of_best(scores, tokens):
    """Return the best score, none of them NaN, and the first token that has it."""
    best = tl.max(scores, axis=0)
    return best, tl.min(tl.where(scores == best, tokens, NO_TOKEN), axis=0)


@triton.jit
def _block_keys_kernel(
    logits_ptr,
    logits_stride,
    offsets_ptr,
    keys_ptr,
    first_row,
    num_columns,
    num_blocks,
    MAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_columns
    logits = tl.load(logits_ptr + row * logits_stride + columns, mask=inside, other=float("-inf")).to(tl.float32)
    tokens = tokens_of(first_row + columns, inside, offsets_ptr, MAPPED)
    # The reduction within a block is in 32 bits, because each int64 operation takes two instructions.
    orders = tl.where(inside, order_of(logits), -0x7FFFFFFF)
    best, token = first_of_best(orders, tokens)
    tl.store(keys_ptr + row * num_blocks + block, key_of(best, token.to(tl.int64)))


@triton.jit
def drafted_token(drafted_ptr, row, KEYS: tl.constexpr, LANES: tl.constexpr, PAIRS: tl.constexpr):
    """Return the draft token of a row, from drafts in a form of `how_drafted`."""
    if KEYS == 0:
        token = tl.load(drafted_ptr + row)
    else:
        each = tl.arange(0, LANES)
        if PAIRS:
            orders_ptr = drafted_ptr + row * 2 * KEYS
            orders = tl.load(orders_ptr + each, mask=each < KEYS, other=LEAST)
            tokens = tl.load(orders_ptr + KEYS + each, mask=each < KEYS, other=0)
            _, token = first_of_best(orders, tokens)
        else:
            keys = tl.load(drafted_ptr + row * KEYS + each, mask=each < KEYS, other=LEAST)
            token = 0xFFFFFFFF - (tl.max(keys, axis=0) & 0xFFFFFFFF)
    return token


def how_drafted(drafted: torch.Tensor) -> dict[str, int | bool]:
    """Return the constants of `drafted_token` for drafts in one of three forms.

    Args:
        drafted: contiguous int64, for n rows: tokens [n]; keys of `key_of` [n, m]; or score orders of
            `order_of_double` and their tokens [n, 2, m].  The greatest key or order gives the token.
    """
    keys = drafted.shape[-1] if drafted.dim() > 1 else 0
    return {"KEYS": keys, "LANES": triton.next_power_of_2(keys) if keys else 1, "PAIRS": drafted.dim() == 3}


def argmax_keys(
    logits: torch.Tensor, offsets: torch.Tensor | None = None, *, first_row: int = 0, num_columns: int | None = None
) -> torch.Tensor:
    """Return the best key of every block of columns; the greatest key of a row gives its argmax.

    A key holds the order of the logit in its upper half and the complement of the token in its lower half.  Keys of
    several vocabulary shards can be reduced together; the result is exact, ties included.

    Args:
        logits: [n, W], bfloat16, float16 or float32.
        offsets: int64, the target's token minus the row, for each row of the whole head; None where a row is the token.
        first_row: row of the whole head that the first column of a shard stands for.
        num_columns: number of columns that count, the rest is padding; all by default.

    Returns:
        [n, blocks] int64.
    """
    num_rows, width = logits.shape
    num_blocks = triton.cdiv(width, _BLOCK)
    keys = torch.empty(num_rows, num_blocks, dtype=torch.int64, device=logits.device)
    launch(_block_keys_kernel, (num_rows, num_blocks))(
        logits,
        logits.stride(0),
        offsets,
        keys,
        first_row,
        width if num_columns is None else num_columns,
        num_blocks,
        MAPPED=offsets is not None,
        BLOCK=_BLOCK,
    )
    return keys


def best_tokens(drafted: torch.Tensor) -> torch.Tensor:
    """`drafted_token` of every row in plain torch: [n] int64."""
    if drafted.dim() == 1:
        return drafted
    if drafted.dim() == 2:
        return 0xFFFFFFFF - (drafted.amax(dim=-1) & 0xFFFFFFFF)
    orders, tokens = drafted.unbind(1)
    best = orders == orders.amax(dim=-1, keepdim=True)
    return torch.where(best, tokens, 0x7FFFFFFF).amin(dim=-1)


def argmax_reference(logits: torch.Tensor, offsets: torch.Tensor | None = None) -> torch.Tensor:
    """``best_tokens(argmax_keys(...))`` in plain torch: the argmax of the row over the target's vocabulary."""
    if offsets is None:
        return logits.argmax(dim=-1)
    target_ids = torch.arange(len(offsets), device=offsets.device) + offsets
    row = logits.new_full((logits.shape[0], int(target_ids.max()) + 1), float("-inf"))
    row[:, target_ids] = logits
    return row.argmax(dim=-1)
