"""Rows picked by their numbers, against plain torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from vllm_eagle_mrv2.kernels.take_rows import take_rows, take_rows_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("count", "width"), [(1, 8), (3, 1024), (5, 1025), (33, 4096), (0, 64)])
def test_are_those_rows(count: int, width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(width)
    apart = torch.randn(7, width + 8, generator=generator).to(DEVICE, dtype)[:, :width]
    index = torch.randint(7, (count,), generator=generator).to(DEVICE)
    for rows in (apart, apart.contiguous()):
        taken = take_rows(rows, index)
        torch.testing.assert_close(taken, take_rows_reference(rows, index), rtol=0, atol=0)
        assert taken.is_contiguous()
