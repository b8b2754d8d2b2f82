"""Product of one row with a weight matrix, at memory bandwidth; the weights may be FP8."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_eagle_mrv2.kernels.fp8 import as_read, dequantized, widened
from vllm_eagle_mrv2.kernels.launching import launch


def _tile(num_outputs: int, width: int, *, scaled: bool) -> tuple[int, int, int]:
    """Return outputs per program, columns read at a time, and warps; the best on an H200 over 17 shapes.

    Measured right after another kernel, with weights of 8 to 525 MB that were not in the cache; FP8 over 13 shapes.
    """
    if scaled:
        if width > 8192:
            return 1, 1024, 4
        if width > 4096:
            return 4, 1024, 4
        return (4, 2048, 4) if num_outputs > 8192 else (2, triton.next_power_of_2(width), 4)
    if width <= 2048:
        return 1, triton.next_power_of_2(width), 4
    if width <= 4096:
        return 2, 2048, 8
    if width <= 8192:
        return 1, 2048, 8
    return (2, 2048, 4) if width <= 16384 else (2, 1024, 4)


@triton.jit
def _row_product_kernel(
    row_ptr,
    row_stride,
    index_ptr,
    weight_ptr,
    weight_stride,
    bias_ptr,
    scale_ptr,
    out_ptr,
    num_outputs,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    GATED: tl.constexpr,
    INDEXED: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if INDEXED:
        index = tl.load(index_ptr)
        row_ptr += index * row_stride
        out_ptr += index * num_outputs
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = output < num_outputs
    weights = weight_ptr + output[:, None].to(tl.int64) * weight_stride
    factors = weight_ptr + (num_outputs + output)[:, None].to(tl.int64) * weight_stride  # stored after the gates
    products = tl.zeros([OUTPUTS, BLOCK], tl.float32)
    ups = tl.zeros([OUTPUTS, BLOCK], tl.float32)
    for start in tl.static_range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        held = column < WIDTH
        read = inside[:, None] & held[None, :]
        # Each weight is read once; evict_first leaves the cache to data that the next kernels share.
        weight = tl.load(weights + column[None, :], mask=read, other=0.0, eviction_policy="evict_first")
        if GATED:
            factor = tl.load(factors + column[None, :], mask=read, other=0.0, eviction_policy="evict_first")
        row = tl.load(row_ptr + column, mask=held, other=0.0)
        products += widened(weight, tl.float32) * row[None, :].to(tl.float32)
        if GATED:
            ups += widened(factor, tl.float32) * row[None, :].to(tl.float32)
    total = tl.sum(products, axis=1)
    if SCALED:
        total *= tl.load(scale_ptr + output, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias_ptr + output, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        gate = total.to(out_ptr.dtype.element_ty).to(tl.float32)  # both rounded as they would be stored
        up = tl.sum(ups, axis=1)
        if SCALED:
            up *= tl.load(scale_ptr + num_outputs + output, mask=inside, other=0.0)
        total = gate / (1.0 + tl.exp(-gate)) * up.to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + output, total.to(out_ptr.dtype.element_ty), mask=inside)


def row_product(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    index: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """``torch.nn.functional.linear`` of a single row, summed in float32.

    A matrix library splits this product as if there were many rows, and reaches a half to nine tenths of the memory
    bandwidth.  Here each program reads one or two whole rows of the weights, and many programs run at once.

    Args:
        rows: [K], contiguous; with ``index`` [n, K], each row contiguous.
        weight: [N, K] of the same dtype, rows contiguous; with ``scale`` float8_e4m3fn.
        bias: [N], or None.
        index: [1] int64, the only row to multiply; None for a single row.
        scale: [N] float32, the scales of `fp8.quantized`; None for weights that are not FP8.

    Returns:
        [N] of the dtype of ``rows``; with ``index`` [n, N], where only that row is written.
    """
    tile = _tile(*weight.shape, scaled=scale is not None)
    return _launch(rows, weight, bias, index, scale, len(weight), *tile, gated=False)


def gated_row_product(
    rows: torch.Tensor, weight: torch.Tensor, index: torch.Tensor | None = None, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """``silu(gate) * up`` of a single row, where its product with the weights is ``gate`` followed by ``up``.

    A program that reads a gate's weights also reads those of its factor, so no activation kernel follows.

    Args:
        rows: as for `row_product`.
        weight: [2 * N, K], otherwise as for `row_product`.
        index: as for `row_product`.
        scale: [2 * N], otherwise as for `row_product`.

    Returns:
        [N] or [n, N], as for `row_product`.
    """
    outputs, block, warps = _tile(*weight.shape, scaled=scale is not None)
    return _launch(rows, weight, None, index, scale, len(weight) // 2, max(outputs // 2, 1), block, warps, gated=True)


def _launch(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    index: torch.Tensor | None,
    scale: torch.Tensor | None,
    num_outputs: int,
    outputs: int,
    block: int,
    warps: int,
    *,
    gated: bool,
) -> torch.Tensor:
    out = rows.new_empty(*rows.shape[:-1], num_outputs)
    weight = weight if scale is None else as_read(weight)
    launch(_row_product_kernel, (triton.cdiv(num_outputs, outputs),))(
        rows,
        0 if index is None else rows.stride(0),
        index,
        weight,
        weight.stride(0),
        bias,
        scale,
        out,
        num_outputs,
        WIDTH=weight.shape[1],
        BIAS=bias is not None,
        SCALED=scale is not None,
        GATED=gated,
        INDEXED=index is not None,
        OUTPUTS=outputs,
        BLOCK=block,
        num_warps=warps,
    )
    return out


def row_product_reference(
    row: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """`row_product` in plain torch."""
    total = (weight if scale is None else dequantized(weight, scale, torch.float32)).float() @ row.float()
    return (total if bias is None else total + bias.float()).to(row.dtype)


def gated_row_product_reference(
    row: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """`gated_row_product` in plain torch."""
    gate, up = row_product_reference(row, weight, scale=scale).float().chunk(2)
    return (torch.nn.functional.silu(gate) * up).to(row.dtype)
