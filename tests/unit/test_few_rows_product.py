"""The product of a few rows with a wide matrix against plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from vllm_eagle_mrv2.draft_model import linear
from vllm_eagle_mrv2.kernels import few_rows_product as few_rows
from vllm_eagle_mrv2.kernels.greedy import LEAST, best_tokens
from vllm_eagle_mrv2.kernels.sample_with_logits import sample_with_target_noise

pytestmark = pytest.mark.any_release

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter multiplies bfloat16 matrices as if they were integers.
DTYPES = [torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")


def inputs(rows: int, outputs: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and weights; NaN lies behind each row of both, which nobody may read."""
    generator = torch.Generator().manual_seed(rows * outputs * width)
    x, weight = (torch.full((n, width + 8), torch.nan) for n in (rows, outputs))
    x[:, :width] = torch.randn(rows, width, generator=generator)
    weight[:, :width] = torch.randn(outputs, width, generator=generator) / width**0.5
    return x.to(DEVICE, dtype)[:, :width], weight.to(DEVICE, dtype)[:, :width]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [2, 3, 16, 17, 32])
@pytest.mark.parametrize(("outputs", "width"), [(1, 16), (64, 128), (65, 100), (130, 384), (7, 2048)])
def test_is_the_product_with_every_output(rows: int, outputs: int, width: int, dtype: torch.dtype) -> None:
    x, weight = inputs(rows, outputs, width, dtype)
    expected = F.linear(x.float(), weight.float()).to(dtype)
    torch.testing.assert_close(few_rows.few_rows_product(x, weight), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("special", ["", "ties", "nan", "all nan", "-inf"])
@pytest.mark.parametrize("rows", [2, 16, 17, 32])
@pytest.mark.parametrize(("outputs", "width"), [(1, 16), (64, 128), (65, 100), (200, 384)])
def test_keys_name_the_argmax_of_the_logits(rows: int, outputs: int, width: int, special: str) -> None:
    x, weight = inputs(rows, outputs, width, DTYPES[-1])
    if special == "ties":
        weight[:] = weight[0].clone()
        weight[outputs // 2 :] *= 2
    elif special == "nan":
        weight[outputs // 3] = torch.nan
    elif special == "all nan":
        x[1] = torch.nan
    elif special == "-inf":
        x[0], weight[:] = 1, -torch.inf
    logits = few_rows.few_rows_product(x, weight)
    keys = few_rows.few_rows_keys(x, weight)
    assert keys.shape == (rows, -(-outputs // 64))
    assert best_tokens(keys).tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("mapping", [[0, 2], [1, 3], [3, 0, -1, 5], [*range(8)] * 4], ids=len)
@pytest.mark.parametrize(("outputs", "width"), [(65, 100), (1100, 32)])
def test_by_temperature(mapping: list[int], outputs: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are warm at odd states and greedy at even ones; both draft what they would of all logits."""
    rows = len(mapping)
    x, weight = inputs(rows, outputs, width, DTYPES[-1])
    weight[outputs // 2] = weight[outputs // 3]
    if rows > 3:
        weight[outputs // 4] = torch.nan
    product = few_rows.few_rows_product(x, weight)
    of_rows = torch.tensor(mapping, dtype=torch.int32, device=DEVICE)
    temperature = torch.tensor([0.0, 0.7] * 4, device=DEVICE)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *shape, **how: torch.full(shape, 55, **how))
        logits, best = few_rows.few_rows_by_temperature(x, weight, of_rows, temperature)
    warm = [state % 2 == 1 and state >= 0 for state in mapping]
    torch.testing.assert_close(logits[warm], product[warm], rtol=0, atol=0, equal_nan=True)
    assert (logits[[not each for each in warm]] == 55).all()
    assert ((best[:, 0] == LEAST.value).all(-1)).tolist() == warm
    states = torch.arange(8, device=DEVICE)
    others = (of_rows, temperature, states, torch.arange(rows, device=DEVICE), states[1])
    expected = best_tokens(sample_with_target_noise(product, None, *others)).tolist()
    assert best_tokens(sample_with_target_noise(logits, None, *others, best)).tolist() == expected
    greedy = product.nan_to_num(-torch.inf).argmax(-1).tolist()
    assert [token for token, is_warm in zip(expected, warm, strict=True) if not is_warm] == [
        token for token, is_warm in zip(greedy, warm, strict=True) if not is_warm
    ]


@pytest.mark.skipif(DEVICE == "cpu", reason="takes minutes in the interpreter")
@pytest.mark.parametrize("rows", [2, 8, 32])
def test_a_head(rows: int) -> None:
    x, weight = inputs(rows, 128_256, 2048, torch.bfloat16)
    expected = F.linear(x.float(), weight.float()).to(torch.bfloat16)
    logits = few_rows.few_rows_product(x, weight)
    torch.testing.assert_close(logits, expected, rtol=0.02, atol=0.02)
    assert torch.equal(best_tokens(few_rows.few_rows_keys(x, weight)), logits.argmax(-1))


@pytest.mark.parametrize(
    ("rows", "outputs", "dtype", "ours"),
    [
        (2, few_rows.MIN_OUTPUTS, torch.bfloat16, True),
        (32, few_rows.MIN_OUTPUTS, torch.float16, True),
        (1, few_rows.MIN_OUTPUTS, torch.bfloat16, False),
        (33, few_rows.MIN_OUTPUTS, torch.bfloat16, False),
        (2, few_rows.MIN_OUTPUTS - 1, torch.bfloat16, False),
        (2, few_rows.MIN_OUTPUTS, torch.float32, False),
    ],
)
def test_what_it_is_for(
    rows: int, outputs: int, dtype: torch.dtype, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[int] = []

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        called.append(len(x))
        return F.linear(x, weight)

    monkeypatch.setattr(few_rows, "few_rows_product", product)
    monkeypatch.setattr(linear, "row_product", lambda row, weight, bias, scale: F.linear(row, weight, bias))
    x, weight = torch.ones(rows, 4, dtype=dtype, device=DEVICE), torch.ones(outputs, 4, dtype=dtype, device=DEVICE)
    assert torch.ops.vllm_eagle_mrv2.linear(x, weight, None).shape == (rows, outputs)
    assert called == [rows] * ours
    torch.ops.vllm_eagle_mrv2.linear(x, weight, weight[:, 0].contiguous())  # with a bias, never
    assert called == [rows] * ours
