"""Argmax over the draft vocabulary, spread over the whole chip."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 2048


@triton.jit
def _block_keys_kernel(
    logits_ptr,
    logits_stride,
    target_ids_ptr,
    keys_ptr,
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
    tokens = columns.to(tl.int64)
    if MAPPED:
        tokens = tl.load(target_ids_ptr + columns, mask=inside, other=0)
    # Integers in the order of the floats: a negative float has its other bits turned.  Zeros are equal, NaN is largest.
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(logits != logits, 0x7FFFFFFF, order).to(tl.int64)
    # Among equals the first token wins, as in torch.
    keys = (order << 32) | (0xFFFFFFFF - tokens)
    keys = tl.where(inside, keys, -0x7FFFFFFFFFFFFFFF)
    tl.store(keys_ptr + row * num_blocks + block, tl.max(keys, axis=0))


@triton.jit
def _best_token_kernel(keys_ptr, tokens_ptr, num_keys, KEYS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, KEYS)
    keys = tl.load(keys_ptr + row * num_keys + each, mask=each < num_keys, other=-0x7FFFFFFFFFFFFFFF)
    tl.store(tokens_ptr + row, 0xFFFFFFFF - (tl.max(keys, axis=0) & 0xFFFFFFFF))


def argmax_keys(logits: torch.Tensor, target_ids: torch.Tensor | None = None) -> torch.Tensor:
    """The best of every block of columns, as integers whose maximum names the argmax.

    A key holds the logit in its upper half and the token, counted from the end, in its lower half.  Keys of several
    shards of a vocabulary can be reduced together.

    Args:
        logits: [n, C], bfloat16, float16 or float32.
        target_ids: [C] int64, the target's token of each column; None where a column is the token.

    Returns:
        [n, blocks] int64.
    """
    num_rows, num_columns = logits.shape
    num_blocks = triton.cdiv(num_columns, _BLOCK)
    keys = torch.empty(num_rows, num_blocks, dtype=torch.int64, device=logits.device)
    _block_keys_kernel[(num_rows, num_blocks)](
        logits,
        logits.stride(0),
        target_ids,
        keys,
        num_columns,
        num_blocks,
        MAPPED=target_ids is not None,
        BLOCK=_BLOCK,
    )
    return keys


def best_tokens(keys: torch.Tensor) -> torch.Tensor:
    """The tokens that `argmax_keys` names.

    Args:
        keys: [n, m] int64, contiguous.

    Returns:
        [n] int64.
    """
    num_rows, num_keys = keys.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=keys.device)
    _best_token_kernel[(num_rows,)](keys, tokens, num_keys, KEYS=triton.next_power_of_2(num_keys))
    return tokens


def argmax_reference(logits: torch.Tensor, target_ids: torch.Tensor | None = None) -> torch.Tensor:
    """``best_tokens(argmax_keys(...))`` in plain torch: the argmax of the row over the target's vocabulary."""
    if target_ids is None:
        return logits.argmax(dim=-1)
    row = logits.new_full((logits.shape[0], int(target_ids.max()) + 1), float("-inf"))
    row[:, target_ids] = logits
    return row.argmax(dim=-1)
