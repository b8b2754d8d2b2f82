"""The product of a single row against plain torch, and the op that chooses it."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from vllm_eagle_mrv2.draft_model import linear
from vllm_eagle_mrv2.draft_model.rows_read import RowsRead
from vllm_eagle_mrv2.kernels.fp8 import quantized
from vllm_eagle_mrv2.kernels.row_product import (
    gated_row_product,
    gated_row_product_reference,
    row_product,
    row_product_reference,
)

pytestmark = pytest.mark.any_release

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDING = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}


def inputs(
    outputs: int, width: int, dtype: torch.dtype, stride: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A row, weights whose rows lie ``stride`` apart, and a bias."""
    generator = torch.Generator().manual_seed(outputs * width)
    store = torch.randn(outputs, stride or width, generator=generator)
    store[:, width:] = torch.nan
    row, bias = torch.randn(width, generator=generator), torch.randn(outputs, generator=generator)
    return row.to(DEVICE, dtype), store.to(DEVICE, dtype)[:, :width], bias.to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(
    ("outputs", "width"),
    [(1, 1), (2, 64), (3, 100), (5, 2048), (64, 2049), (17, 4096), (6, 5000), (7, 8192), (9, 14336), (2, 28672)],
)
def test_is_the_product_with_every_output(outputs: int, width: int, dtype: torch.dtype) -> None:
    row, weight, bias = inputs(outputs, width, dtype)
    for given in (None, bias):
        expected = row_product_reference(row, weight, given)
        size = float(expected.float().abs().max())
        torch.testing.assert_close(row_product(row, weight, given), expected, rtol=0, atol=ROUNDING[dtype] * size)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("outputs", "width"), [(1, 1), (3, 100), (5, 2048), (17, 4096), (7, 8192), (9, 14336)])
def test_gates_and_their_factors_in_one_product(outputs: int, width: int, dtype: torch.dtype) -> None:
    row, weight, _ = inputs(2 * outputs, width, dtype)
    expected = gated_row_product_reference(row, weight)
    size = max(float(expected.float().abs().max()), float((weight.float() @ row.float()).abs().max()))
    torch.testing.assert_close(gated_row_product(row, weight), expected, rtol=0, atol=2 * ROUNDING[dtype] * size)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("index", [0, 2, 3])
def test_one_of_several_rows(index: int, dtype: torch.dtype) -> None:
    row, weight, bias = inputs(6, 100, dtype)
    rows = torch.full((4, 104), torch.nan, dtype=dtype, device=DEVICE)[:, :100]
    rows[index] = row
    at = torch.tensor([index], device=DEVICE)
    for product, alone in (
        (row_product(rows, weight, bias, at), row_product(row, weight, bias)),
        (gated_row_product(rows, weight, at), gated_row_product(row, weight)),
    ):
        assert product.shape == (4, len(alone))
        torch.testing.assert_close(product[index], alone, rtol=0, atol=0)


def test_no_other_row_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    row, weight, _ = inputs(6, 100, torch.float32)
    rows, index = row.repeat(3, 1), torch.tensor([1], device=DEVICE)
    new_empty = torch.Tensor.new_empty

    def filled(self: torch.Tensor, *shape: int, **kwargs: Any) -> torch.Tensor:
        return new_empty(self, *shape, **kwargs).fill_(-7 if len(shape) == 2 else 0)

    monkeypatch.setattr(torch.Tensor, "new_empty", filled)
    for product in (row_product, gated_row_product):
        out = product(rows, weight, index=index)
        assert (out == -7).all(dim=1).tolist() == [True, False, True]


def test_rows_of_weights_that_lie_apart() -> None:
    row, weight, bias = inputs(8, 300, torch.float32, stride=320)
    assert weight.stride(0) == 320
    torch.testing.assert_close(row_product(row, weight, bias), row_product_reference(row, weight, bias))
    torch.testing.assert_close(gated_row_product(row, weight), gated_row_product_reference(row, weight))


@pytest.mark.skipif(DEVICE == "cpu", reason="takes minutes in the interpreter")
@pytest.mark.parametrize(("outputs", "width"), [(128_256, 2048), (16_384, 2048), (2048, 8192), (32_000, 4096)])
def test_the_shapes_of_a_draft(outputs: int, width: int) -> None:
    row, weight, _ = inputs(outputs, width, torch.bfloat16)
    torch.testing.assert_close(row_product(row, weight), row_product_reference(row, weight), rtol=0.02, atol=0.02)


def test_weights_beyond_two_to_the_31_elements() -> None:
    if DEVICE == "cpu" or torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB of GPU memory")
    row = torch.ones(16384, dtype=torch.bfloat16, device=DEVICE)
    weight = torch.zeros(2**17 + 2, 16384, dtype=torch.bfloat16, device=DEVICE)
    weight[-1] = 1
    assert row_product(row, weight)[[-2, -1]].tolist() == [0, 16384]


@pytest.mark.parametrize(("shape", "calls"), [((1,), 1), ((1, 1), 1), ((3,), 0), ((2, 1), 0), ((0,), 0)])
def test_the_rows_at_hand_decide(shape: tuple[int, ...], calls: int, ours: list[torch.Tensor]) -> None:
    _, weight, bias = inputs(6, 40, torch.float32)
    x = torch.randn(*shape, 40, device=DEVICE)
    result = torch.ops.vllm_eagle_mrv2.linear(x, weight, bias)
    torch.testing.assert_close(result, F.linear(x, weight, bias))
    assert len(ours) == calls


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("picked", [[2], [4, 1]], ids=str)
def test_rows_that_are_read(picked: list[int], compiled: bool, scaled: bool) -> None:
    """Only within `RowsRead.only`, and only of the layers that know of it."""
    pytest.importorskip("vllm._custom_ops")  # brings silu_and_mul
    _, weight, bias = inputs(64, 40, torch.float32)
    weight, scale = quantized(weight) if scaled else (weight, None)
    x = torch.randn(5, 40, device=DEVICE)
    x[0] = torch.nan
    read = RowsRead(torch.tensor([*picked, 99], device=DEVICE))

    def three(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ops, rows = torch.ops.vllm_eagle_mrv2, (read.index, read.count)
        after = ops.linear(x, weight, bias, scale, *rows), ops.gated_linear(x, weight, scale, *rows)
        return *after, ops.linear(x, weight, bias, scale)

    call = torch.compile(three, fullgraph=True, dynamic=True) if compiled else three
    every = torch.stack([row_product_reference(row, weight, bias, scale) for row in x])
    gates = torch.stack([gated_row_product_reference(row, weight, scale) for row in x])
    for within in (False, True, False):
        with read.only(len(picked)) if within else contextlib.nullcontext():
            products, gated, before = call(x)
        rows = picked if within else slice(None)
        assert products.shape == every.shape
        assert gated.shape == gates.shape
        torch.testing.assert_close(products[rows], every[rows], equal_nan=True)
        torch.testing.assert_close(gated[rows], gates[rows], rtol=1e-4, atol=1e-4, equal_nan=True)
        torch.testing.assert_close(before, every, equal_nan=True)


def test_only_the_rows_that_are_read_are_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def counted(x: torch.Tensor, *of: Any) -> torch.Tensor:
        seen.append(len(x))
        return F.linear(x, *of)

    monkeypatch.setattr(linear, "F", SimpleNamespace(linear=counted))
    _, weight, bias = inputs(6, 40, torch.float32)
    read = RowsRead(torch.tensor([4, 1], device=DEVICE))
    with read.only(2):
        torch.ops.vllm_eagle_mrv2.linear(torch.randn(5, 40, device=DEVICE), weight, bias, None, read.index, read.count)
    assert seen == [2]


def test_a_compiled_model_decides_at_every_call(ours: list[torch.Tensor]) -> None:
    _, weight, _ = inputs(6, 40, torch.float32)
    compiled = torch.compile(
        lambda x: torch.ops.vllm_eagle_mrv2.linear(x + 1, weight, None) * 2, fullgraph=True, dynamic=True
    )
    for rows in (3, 1, 5, 1):
        x = torch.randn(rows, 40, device=DEVICE)
        torch.testing.assert_close(compiled(x), F.linear(x + 1, weight) * 2)
    assert len(ours) == 2
