"""Product of a few rows with a wide weight matrix, for example a draft's head; the weights may be FP8."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_eagle_mrv2.kernels.device import stages
from vllm_eagle_mrv2.kernels.fp8 import as_read, widened
from vllm_eagle_mrv2.kernels.greedy import LEAST, NO_TOKEN, key_of, order_of
from vllm_eagle_mrv2.kernels.launching import launch

# On an H200, 3 to 5 % faster than PyTorch for 32,000 and 128,256 outputs, slower at 64 rows, equal below 30,000.
MAX_ROWS = 32
MIN_OUTPUTS = 32_000
_TILE = (64, 128, 4, 4)
"""Outputs of a program, columns read at a time, how many times that in flight, and warps."""
_WIDE, _SHORT = 16_384, 2048  # outputs, and columns, of FP8 weights
_TILE_FP8, _TILE_FP8_WIDE = (32, 256, 4, 4), (128, 128, 3, 4)
LEAST_ROWS = 16  # minimum of a matrix instruction


# Batch sizes vary: specialized variants would be compiled during serving.
@triton.jit(do_not_specialize=["num_rows"])
def _few_rows_kernel(
    rows_ptr,
    rows_stride,
    weight_ptr,
    weight_stride,
    scale_ptr,
    out_ptr,
    out_stride,
    best_ptr,
    idx_mapping_ptr,
    temperature_ptr,
    num_rows,
    num_outputs,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    SCALED: tl.constexpr,
    KEYS: tl.constexpr,
    BY_TEMPERATURE: tl.constexpr,
):
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside, live = (output < num_outputs)[:, None], (row < num_rows)[:, None]
    if BY_TEMPERATURE:
        # Used only after the loop, so the loop does not wait for this load.
        state = tl.load(idx_mapping_ptr + row, mask=row < num_rows, other=-1)
    weights = weight_ptr + output[:, None].to(tl.int64) * weight_stride + column[None, :]
    inputs = rows_ptr + row[:, None] * rows_stride + column[None, :]
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for start in tl.range(0, WIDTH, BLOCK, num_stages=STAGES):
        held = (start + column < WIDTH)[None, :]
        weight = tl.load(weights + start, mask=inside & held, other=0.0, eviction_policy="evict_first")
        values = tl.load(inputs + start, mask=live & held, other=0.0)
        if SCALED:
            # Every e4m3 number is a float16 number, and GPUs convert it in one instruction.
            weight = widened(weight, tl.float16)
            values = tl.clamp(values.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
        total = tl.dot(weight, values.trans(), total)
    if SCALED:
        total *= tl.load(scale_ptr + output, mask=output < num_outputs, other=0.0)[:, None]
    stored = row < num_rows
    if BY_TEMPERATURE:
        stored &= tl.load(temperature_ptr + state.to(tl.int64), mask=state >= 0, other=0.0) != 0.0
    if KEYS or BY_TEMPERATURE:
        logits = total.to(rows_ptr.dtype.element_ty).to(tl.float32)  # rounded as they would be stored
        if BY_TEMPERATURE:
            logits = tl.where(logits == logits, logits, float("-inf"))  # NaN counts as -inf, as in the sampler
        orders = tl.where(inside, order_of(logits), -0x7FFFFFFF)
        best = tl.max(orders, axis=0)
        token = tl.min(tl.where(inside & (orders == best[None, :]), output[:, None], NO_TOKEN), axis=0)
        block, num_blocks = tl.program_id(0), tl.num_programs(0)
        if KEYS:
            keys = key_of(best, token.to(tl.int64))
            tl.store(best_ptr + row * num_blocks + block, keys, mask=row < num_rows)
        else:
            pair = best_ptr + row * 2 * num_blocks + block
            tl.store(pair, tl.where(stored, LEAST, best.to(tl.int64)), mask=row < num_rows)
            tl.store(pair + num_blocks, token.to(tl.int64), mask=row < num_rows)
    if not KEYS:
        out = out_ptr + row[None, :] * out_stride + output[:, None]
        tl.store(out, total.to(out_ptr.dtype.element_ty), mask=inside & stored[None, :])


def takes(num_rows: int, weight: torch.Tensor) -> bool:
    """Whether `few_rows_product` supports this number of rows and these weights [N, K]."""
    return 1 < num_rows <= MAX_ROWS and weight.shape[0] >= MIN_OUTPUTS and weight.dtype != torch.float32


def leads_with_fp8(weight: torch.Tensor) -> bool:
    """Whether `few_rows_product` is as fast with FP8 weights [N, K] as vLLM's product of FP8 matrices, on an H200.

    That one rounds the rows in another kernel first, and splits its work better on narrow and long weights.
    """
    return weight.shape[0] >= _WIDE or weight.shape[1] <= _SHORT


def variants(weight: torch.Tensor) -> list[int]:
    """Return the numbers of rows that are compiled as separate kernels."""
    return [rows for rows in (LEAST_ROWS, MAX_ROWS) if takes(rows, weight)]


def few_rows_product(rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """``torch.nn.functional.linear`` of up to 32 rows, summed in float32.

    Each program multiplies all rows with the weights of some outputs, so every weight is read once, by one program.

    Args:
        rows: [n, K] of bfloat16 or float16, each contiguous.
        weight: [N, K] of the same dtype, rows contiguous; with ``scale`` float8_e4m3fn.
        scale: [N] float32, the scales of `fp8.quantized`; None for weights that are not FP8.

    Returns:
        [n, N] of the same dtype.
    """
    out = torch.empty(len(rows), len(weight), dtype=rows.dtype, device=rows.device)
    _launch(rows, weight, out, None, scale=scale)
    return out


def few_rows_keys(rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """``argmax_keys(few_rows_product(rows, weight))`` without storing the logits.

    Args:
        rows: as for `few_rows_product`.
        weight: as for `few_rows_product`; its rows are the tokens.
        scale: as for `few_rows_product`.

    Returns:
        [n, blocks] int64, the best key of each block of tokens.
    """
    keys = torch.empty(len(rows), _blocks(weight, scale), dtype=torch.int64, device=rows.device)
    _launch(rows, weight, None, keys, scale=scale)
    return keys


def few_rows_by_temperature(
    rows: torch.Tensor,
    weight: torch.Tensor,
    idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`few_rows_product` that stores only the best tokens of greedy rows.

    Args:
        rows: as for `few_rows_product`.
        weight: as for `few_rows_product`; its rows are the tokens.
        idx_mapping: [n] int32 or int64, request state of each row; a row of -1 is padding, which counts as greedy.
        temperature: [R] float32, by request state; 0 is greedy.
        scale: as for `few_rows_product`.

    Returns:
        logits [n, N] of the same dtype, undefined in greedy rows; and [n, 2, blocks] int64 in the last form of
        `how_drafted`.  There the other rows hold the least value, which `sample_with_logits` replaces by their samples.
    """
    out = torch.empty(len(rows), len(weight), dtype=rows.dtype, device=rows.device)
    best = torch.empty(len(rows), 2, _blocks(weight, scale), dtype=torch.int64, device=rows.device)
    _launch(rows, weight, out, best, idx_mapping, temperature, scale)
    return out, best


def _tile(weight: torch.Tensor, scale: torch.Tensor | None) -> tuple[int, int, int, int]:
    if scale is None:
        return _TILE
    return _TILE_FP8_WIDE if len(weight) >= _WIDE else _TILE_FP8


def _blocks(weight: torch.Tensor, scale: torch.Tensor | None) -> int:
    return int(triton.cdiv(len(weight), _tile(weight, scale)[0]))


def _launch(
    rows: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor | None,
    best: torch.Tensor | None,
    idx_mapping: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> None:
    num_rows, width = rows.shape
    padded = max(LEAST_ROWS, triton.next_power_of_2(num_rows))
    outputs, block, in_flight, warps = _tile(weight, scale)
    size = (outputs * weight.element_size() + padded * rows.element_size()) * block
    weight = weight if scale is None else as_read(weight)
    launch(_few_rows_kernel, (_blocks(weight, scale),))(
        rows,
        rows.stride(0),
        weight,
        weight.stride(0),
        scale,
        out,
        0 if out is None else out.stride(0),
        best,
        idx_mapping,
        temperature,
        num_rows,
        weight.shape[0],
        WIDTH=width,
        ROWS=padded,
        OUTPUTS=outputs,
        BLOCK=block,
        STAGES=stages(in_flight, size, weight.device),
        SCALED=scale is not None,
        KEYS=out is None,
        BY_TEMPERATURE=temperature is not None,
        num_warps=warps,
    )
