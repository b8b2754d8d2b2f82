"""FP8 weights: e4m3 values with one float32 scale for each output."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_eagle_mrv2.kernels.device import converts_fp8

GREATEST = 448.0
"""The greatest e4m3 value."""
_ROWS = 1024  # rows that `quantized` converts at a time, which bounds its memory


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round weights [N, K] to e4m3, each row by its own scale, so that its greatest value becomes the greatest e4m3.

    Returns:
        values [N, K] float8_e4m3fn, and scales [N] float32; a weight is about its value times the scale of its row.
    """
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    for rows, value, scale in zip(weight.split(_ROWS), values.split(_ROWS), scales.split(_ROWS), strict=True):
        exact = rows.float()
        scale.copy_(exact.abs().amax(dim=1).clamp_(min=torch.finfo(torch.float32).tiny) / GREATEST)
        value.copy_(exact / scale[:, None])
    return values, scales


def dequantized(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weights [N, K] of a dtype that `quantized` values and scales stand for."""
    return (values.float() * scales[:, None]).to(dtype)


def as_read(values: torch.Tensor) -> torch.Tensor:
    """The values as a kernel reads them: as bytes where the GPU has no instructions for e4m3."""
    return values if converts_fp8(values.device) else values.view(torch.uint8)


@triton.jit
def widened(weight, dtype: tl.constexpr):
    """Convert weights to float16 or float32; bytes are the bits of e4m3 numbers.

    Followed by zeros, these are the bits of a float16 number that is smaller by 2 to the 8th.
    """
    if weight.dtype == tl.uint8:
        bits = weight.to(tl.uint16)
        smaller = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        wide = (smaller * 256.0).to(dtype)
    else:
        wide = weight.to(dtype)
    return wide
