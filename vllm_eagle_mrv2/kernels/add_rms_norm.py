"""A residual added and both normed, in a kernel that the products around it overlap with."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_eagle_mrv2.kernels.launching import launch, pdl, wait_for_kernel_ahead

MAX_WIDTH = 16384
_OF_A_WARP = 256  # elements, of which each thread reads 16 bytes


@triton.jit
def _add_rms_norm_kernel(
    x_ptr,
    x_stride,
    residual_ptr,
    residual_stride,
    weight_ptr,
    normed_ptr,
    sum_ptr,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0, eviction_policy="evict_last")
    wait_for_kernel_ahead(PDL)
    row = tl.program_id(0).to(tl.int64)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
    normed = normed.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)
    tl.store(normed_ptr + row * WIDTH + column, normed.to(normed_ptr.dtype.element_ty), mask=inside)
    tl.store(sum_ptr + row * WIDTH + column, x.to(sum_ptr.dtype.element_ty), mask=inside)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The RMS norm (arXiv:1910.07467) of ``x + residual``, and that sum; rounded where vLLM's ``RMSNorm`` rounds.

    Compiled by Inductor it takes as long, but lets no kernel begin before it has ended, and the product behind it could
    read weights.

    Args:
        x: [n, H], a row contiguous.
        residual: likewise, of the same dtype.
        weight: [H], H of at most `MAX_WIDTH`.
        eps: added to the mean of the squares.

    Returns:
        both [n, H] of the dtype of ``x``.
    """
    num_rows, width = x.shape
    normed, total = x.new_empty(num_rows, width), x.new_empty(num_rows, width)
    block = triton.next_power_of_2(width)
    launch(_add_rms_norm_kernel, (num_rows,))(
        x,
        x.stride(0),
        residual,
        residual.stride(0),
        weight,
        normed,
        total,
        eps,
        WIDTH=width,
        BLOCK=block,
        num_warps=min(max(block // _OF_A_WARP, 1), 32),
        **pdl(),
    )
    return normed, total


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_rms_norm` in plain torch."""
    total = x.float() + residual.float()
    normed = total * torch.rsqrt(total.square().mean(dim=-1, keepdim=True) + eps)
    return (normed.to(weight.dtype) * weight).to(x.dtype), total.to(x.dtype)
