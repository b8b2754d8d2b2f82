"""A residual added and both normed, against plain torch, and as part of vLLM's norms."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from vllm_eagle_mrv2.kernels.add_rms_norm import add_rms_norm, add_rms_norm_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-5
ROUNDING = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}


def inputs(rows: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, their residuals and the norm's weights."""
    generator = torch.Generator().manual_seed(rows * width)
    x, residual = torch.randn(2, rows, width, generator=generator).to(DEVICE, dtype)
    return x, 3 * residual, torch.randn(width, generator=generator).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (1, 2048), (3, 100), (2, 4096), (33, 2049), (1, 16384), (0, 64)])
def test_is_the_norm_of_the_sum_and_the_sum(rows: int, width: int, dtype: torch.dtype) -> None:
    given = inputs(rows, width, dtype)
    kept = [each.clone() for each in given]
    for result, expected in zip(add_rms_norm(*given, EPS), add_rms_norm_reference(*given, EPS), strict=True):
        torch.testing.assert_close(result, expected, rtol=2 * ROUNDING[dtype], atol=ROUNDING[dtype])
    for each, before in zip(given, kept, strict=True):
        torch.testing.assert_close(each, before, rtol=0, atol=0)  # nothing is written in place


def test_rows_that_lie_apart() -> None:
    x, residual, weight = inputs(4, 96, torch.float32)
    apart = (x[:, :64], residual[:, 32:], weight[:64])
    for result, expected in zip(add_rms_norm(*apart, EPS), add_rms_norm_reference(*apart, EPS), strict=True):
        torch.testing.assert_close(result, expected)


def test_a_row_of_zeros_is_no_division_by_zero() -> None:
    zeros = torch.zeros(1, 64, device=DEVICE)
    normed, total = add_rms_norm(zeros, zeros, zeros[0] + 1, EPS)
    assert not normed.any()
    assert not total.any()
