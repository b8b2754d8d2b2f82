"""FP8 weights: how they are rounded, and the products with them, against plain torch."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from vllm_eagle_mrv2.kernels import few_rows_product, fp8, row_product
from vllm_eagle_mrv2.kernels.greedy import best_tokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float16]


def given(rows: int, outputs: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, FP8 weights and their scales; the last row of the weights is zero."""
    generator = torch.Generator().manual_seed(rows * outputs + width)
    weight = torch.randn(outputs, width, generator=generator) * torch.rand(outputs, 1, generator=generator)
    weight[-1] = 0
    x = torch.randn(rows, width, generator=generator)
    values, scale = fp8.quantized(weight.to(dtype))
    return x.to(DEVICE, dtype), values.to(DEVICE), scale.to(DEVICE)


def exact(x: torch.Tensor, values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x.float() @ fp8.dequantized(values, scale, torch.float32).T


@pytest.fixture(params=["fp8", "bytes"])
def read_as(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What kernels read: FP8 numbers, and their bits where a GPU has no instructions for them."""
    if request.param == "bytes":
        modules: list[ModuleType] = [row_product, few_rows_product]
        for module in modules:
            monkeypatch.setattr(module, "as_read", lambda values: values.view(torch.uint8))


def test_each_row_has_its_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "_ROWS", 3)
    weight = torch.tensor([[1.0, -2.0], [0.0, 0.0], [3e-4, 1e-4], [896.0, 448.0]], dtype=torch.bfloat16)
    values, scales = fp8.quantized(weight)
    assert (values.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert values.float().abs().amax(dim=1).tolist() == [448.0, 0.0, 448.0, 448.0]
    torch.testing.assert_close(fp8.dequantized(values, scales, torch.bfloat16), weight, rtol=2**-4, atol=0)
    again = fp8.quantized(fp8.dequantized(values, scales, torch.float32))
    assert torch.equal(again[0].float(), values.float())


@pytest.mark.usefixtures("read_as")
def test_every_number_is_widened_exactly() -> None:
    """All 254 numbers of e4m3, the least of them too, in a product with one."""
    bits = torch.tensor([number for number in range(256) if number & 0x7F != 0x7F], dtype=torch.uint8)
    values, scale = bits.view(torch.float8_e4m3fn)[:, None].to(DEVICE), torch.ones(len(bits), device=DEVICE)
    one = torch.ones(1, dtype=torch.float32, device=DEVICE)
    assert torch.equal(row_product.row_product(one, values, scale=scale), values.float()[:, 0])
    rows = torch.ones(2, 1, dtype=torch.float16, device=DEVICE)
    assert torch.equal(few_rows_product.few_rows_product(rows, values, scale)[1], values.to(torch.float16)[:, 0])


@pytest.mark.parametrize("shape", [(5, 96), (70, 200), (9, 3000), (8200, 64), (3, 9000), (3, 17000)])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
@pytest.mark.usefixtures("read_as")
def test_one_row(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, values, scale = given(3, *shape, dtype)
    bias = torch.arange(shape[0], device=DEVICE).to(dtype)
    expected = row_product.row_product_reference(x[1], values, bias, scale)
    near: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-3} if dtype == torch.float32 else {"rtol": 0.01, "atol": 0.02}
    torch.testing.assert_close(row_product.row_product(x[1], values, bias, scale=scale), expected, **near)
    index = torch.tensor([1], device=DEVICE)
    of_index = row_product.row_product(x, values, bias, index, scale)[1]
    torch.testing.assert_close(of_index, expected, **near)


@pytest.mark.parametrize("shape", [(6, 96), (70, 3000), (8, 9000)])
@pytest.mark.usefixtures("read_as")
def test_one_gated_row(shape: tuple[int, int]) -> None:
    x, values, scale = given(2, *shape, torch.bfloat16)
    expected = row_product.gated_row_product_reference(x[1], values, scale)
    torch.testing.assert_close(row_product.gated_row_product(x[1], values, scale=scale), expected, rtol=0.02, atol=0.02)
    index = torch.tensor([1], device=DEVICE)
    of_index = row_product.gated_row_product(x, values, index, scale)[1]
    torch.testing.assert_close(of_index, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("rows", [2, 16, 17, 32])
@pytest.mark.parametrize("shape", [(70, 200), (33, 1000)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("read_as")
def test_few_rows(rows: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, values, scale = given(rows, *shape, dtype)
    product = few_rows_product.few_rows_product(x, values, scale)
    torch.testing.assert_close(product.float(), exact(x, values, scale), rtol=0.01, atol=0.02)


def test_rows_that_float16_cannot_hold() -> None:
    x, values, scale = given(2, 5, 96, torch.bfloat16)
    x[0, 0] = 3e38
    assert bool(few_rows_product.few_rows_product(x, values, scale).isfinite().all())


def test_wide_weights_have_a_tile_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows_product, "_WIDE", 70)
    x, values, scale = given(17, 70, 200, torch.float16)
    torch.testing.assert_close(
        few_rows_product.few_rows_product(x, values, scale).float(), exact(x, values, scale), rtol=0.01, atol=0.02
    )
    keys = few_rows_product.few_rows_keys(x, values, scale)
    assert keys.shape == (17, 1)


def test_keys_and_drafts_by_temperature() -> None:
    x, values, scale = given(3, 70, 200, torch.float16)
    logits = few_rows_product.few_rows_product(x, values, scale)
    assert torch.equal(best_tokens(few_rows_product.few_rows_keys(x, values, scale)), logits.argmax(dim=-1))
    of_rows: Any = torch.tensor([0, 1, -1], device=DEVICE)
    temperature = torch.tensor([0.0, 0.7], device=DEVICE)
    found, best = few_rows_product.few_rows_by_temperature(x, values, of_rows, temperature, scale)
    assert torch.equal(found[1], logits[1])
    assert int(best[0, 1, best[0, 0].argmax()]) == int(logits[0].argmax())
