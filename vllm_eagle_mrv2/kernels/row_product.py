"""The product of one row with a weight matrix, at the speed at which the weights can be read."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_eagle_mrv2.kernels.launching import launch


def _tile(width: int) -> tuple[int, int, int]:
    """Outputs of a program, columns that it reads at a time, and its warps: on an H200 the best over 17 shapes.

    Measured behind another kernel, with weights of 8 to 525 MB out of the cache.
    """
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
    out_ptr,
    num_outputs,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
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
    factors = weight_ptr + (num_outputs + output)[:, None].to(tl.int64) * weight_stride  # behind the gates
    products = tl.zeros([OUTPUTS, BLOCK], tl.float32)
    ups = tl.zeros([OUTPUTS, BLOCK], tl.float32)
    for start in tl.static_range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        held = column < WIDTH
        read = inside[:, None] & held[None, :]
        # Each weight is needed once: evicted first, it leaves the cache to what the next kernels share.
        weight = tl.load(weights + column[None, :], mask=read, other=0.0, eviction_policy="evict_first")
        if GATED:
            factor = tl.load(factors + column[None, :], mask=read, other=0.0, eviction_policy="evict_first")
        row = tl.load(row_ptr + column, mask=held, other=0.0)
        products += weight.to(tl.float32) * row[None, :].to(tl.float32)
        if GATED:
            ups += factor.to(tl.float32) * row[None, :].to(tl.float32)
    total = tl.sum(products, axis=1)
    if BIAS:
        total += tl.load(bias_ptr + output, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        gate = total.to(out_ptr.dtype.element_ty).to(tl.float32)  # both rounded as they would be stored
        total = gate / (1.0 + tl.exp(-gate)) * tl.sum(ups, axis=1).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + output, total.to(out_ptr.dtype.element_ty), mask=inside)


def row_product(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, index: torch.Tensor | None = None
) -> torch.Tensor:
    """``torch.nn.functional.linear`` of a single row, summed in float32.

    A matrix library splits such a product as if there were many rows, and reads at a half to nine tenths of the
    memory's speed; here each program reads one or two whole rows of the weights, and many programs are under way at
    once.

    Args:
        rows: [K], contiguous; with ``index`` [n, K], each row contiguous.
        weight: [N, K] of the same dtype, rows contiguous.
        bias: [N], or None.
        index: [1] int64, the one of several rows that counts; None for a lone row.

    Returns:
        [N] of the dtype of ``rows``; with ``index`` [n, N], of which nothing but the row that counts is written.
    """
    return _launch(rows, weight, bias, index, len(weight), *_tile(weight.shape[1]), gated=False)


def gated_row_product(rows: torch.Tensor, weight: torch.Tensor, index: torch.Tensor | None = None) -> torch.Tensor:
    """``silu(gate) * up`` of a single row, where its product with the weights is ``gate`` and then ``up``.

    A program that has a gate's row reads the row of its factor too, and nothing is left for a kernel behind it.

    Args:
        rows: as of `row_product`.
        weight: [2 * N, K], likewise.
        index: likewise.

    Returns:
        [N] or [n, N], likewise.
    """
    outputs, block, warps = _tile(weight.shape[1])
    return _launch(rows, weight, None, index, len(weight) // 2, max(outputs // 2, 1), block, warps, gated=True)


def _launch(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    index: torch.Tensor | None,
    num_outputs: int,
    outputs: int,
    block: int,
    warps: int,
    *,
    gated: bool,
) -> torch.Tensor:
    out = rows.new_empty(*rows.shape[:-1], num_outputs)
    launch(_row_product_kernel, (triton.cdiv(num_outputs, outputs),))(
        rows,
        0 if index is None else rows.stride(0),
        index,
        weight,
        weight.stride(0),
        bias,
        out,
        num_outputs,
        WIDTH=weight.shape[1],
        BIAS=bias is not None,
        GATED=gated,
        INDEXED=index is not None,
        OUTPUTS=outputs,
        BLOCK=block,
        num_warps=warps,
    )
    return out


def row_product_reference(row: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`row_product` in plain torch."""
    total = weight.float() @ row.float()
    return (total if bias is None else total + bias.float()).to(row.dtype)


def gated_row_product_reference(row: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`gated_row_product` in plain torch."""
    gate, up = row_product_reference(row, weight).float().chunk(2)
    return (torch.nn.functional.silu(gate) * up).to(row.dtype)
