"""The product of one row with a weight matrix, at the speed at which the weights can be read."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_eagle_mrv2.kernels.launching import launch, pdl, wait_for_kernel_ahead


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
def _weights(pointers, start, inside, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The columns from ``start`` on of a program's rows, zeros behind the last."""
    column = start + tl.arange(0, BLOCK)
    read = inside[:, None] & (column < WIDTH)[None, :]
    # Each weight is needed once: evicted first, it leaves the cache to what the next kernels share.
    return tl.load(pointers + column[None, :], mask=read, other=0.0, eviction_policy="evict_first")


@triton.jit
def _row_product_kernel(
    row_ptr,
    weight_ptr,
    weight_stride,
    bias_ptr,
    out_ptr,
    num_outputs,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = output < num_outputs
    weights = weight_ptr + output[:, None].to(tl.int64) * weight_stride
    factors = weight_ptr + (num_outputs + output)[:, None].to(tl.int64) * weight_stride  # behind the gates
    # Weights are nobody's to write, and reading the first of them need not wait for the row.
    weight = _weights(weights, 0, inside, WIDTH, BLOCK)
    factor = weight
    if GATED:
        factor = _weights(factors, 0, inside, WIDTH, BLOCK)
    wait_for_kernel_ahead(PDL)
    products = tl.zeros([OUTPUTS, BLOCK], tl.float32)
    ups = tl.zeros([OUTPUTS, BLOCK], tl.float32)
    for start in tl.static_range(0, WIDTH, BLOCK):
        if start > 0:
            weight = _weights(weights, start, inside, WIDTH, BLOCK)
            if GATED:
                factor = _weights(factors, start, inside, WIDTH, BLOCK)
        column = start + tl.arange(0, BLOCK)
        row = tl.load(row_ptr + column, mask=column < WIDTH, other=0.0)
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


def row_product(row: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``torch.nn.functional.linear`` of a single row, summed in float32.

    A matrix library splits such a product as if there were many rows, and reads at a half to nine tenths of the
    memory's speed; here each program reads one or two whole rows of the weights, and many programs are under way at
    once.

    Args:
        row: [K], contiguous.
        weight: [N, K] of the same dtype, rows contiguous.
        bias: [N], or None.

    Returns:
        [N] of the dtype of ``row``.
    """
    out = torch.empty(len(weight), dtype=row.dtype, device=row.device)
    _launch(row, weight, bias, out, *_tile(weight.shape[1]), gated=False)
    return out


def gated_row_product(row: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of a single row, where its product with the weights is ``gate`` and then ``up``.

    A program that has a gate's row reads the row of its factor too, and nothing is left for a kernel behind it.

    Args:
        row: [K], contiguous.
        weight: [2 * N, K], as of `row_product`.

    Returns:
        [N] of the dtype of ``row``.
    """
    out = torch.empty(len(weight) // 2, dtype=row.dtype, device=row.device)
    outputs, block, warps = _tile(weight.shape[1])
    _launch(row, weight, None, out, max(outputs // 2, 1), block, warps, gated=True)
    return out


def _launch(
    row: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    outputs: int,
    block: int,
    warps: int,
    *,
    gated: bool,
) -> None:
    launch(_row_product_kernel, (triton.cdiv(len(out), outputs),))(
        row,
        weight,
        weight.stride(0),
        bias,
        out,
        len(out),
        WIDTH=weight.shape[1],
        BIAS=bias is not None,
        GATED=gated,
        OUTPUTS=outputs,
        BLOCK=block,
        num_warps=warps,
        **pdl(),
    )


def row_product_reference(row: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`row_product` in plain torch."""
    total = weight.float() @ row.float()
    return (total if bias is None else total + bias.float()).to(row.dtype)


def gated_row_product_reference(row: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`gated_row_product` in plain torch."""
    gate, up = row_product_reference(row, weight).float().chunk(2)
    return (torch.nn.functional.silu(gate) * up).to(row.dtype)
