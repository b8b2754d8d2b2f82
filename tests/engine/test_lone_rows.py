"""A draft whose lone rows go through our products, on a CPU whose layers multiply as on an NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import engine, greedy, has_cuda, held_out_prompts, multiply_as_on_a_gpu, recorded_drafts, speculator_of

from vllm_eagle_mrv2.draft_model import linear
from vllm_eagle_mrv2.drafting import loop

pytestmark = pytest.mark.skipif(has_cuda(), reason="tests/gpu has them on the GPU")


@pytest.fixture(autouse=True)
def plain_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM multiplies by ``F.linear`` with the weights as they were loaded."""
    from vllm.model_executor.layers import utils

    def leave_weights(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    multiply_as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", leave_weights)


def counted(product: Callable[..., torch.Tensor], seen: list[str]) -> Callable[..., torch.Tensor]:
    def counting(rows: torch.Tensor, *of: Any, **how: Any) -> torch.Tensor:
        seen.append(product.__name__ + (" of several rows" if rows.dim() == 2 and len(rows) > 1 else ""))
        return product(rows, *of, **how)

    return counting


def test_drafts_of_lone_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with and without; the draft's activation is part of a product."""
    seen: list[str] = []
    for name in ("row_product", "gated_row_product"):
        monkeypatch.setattr(linear, name, counted(getattr(linear, name), seen))
    drafts: dict[bool, list[list[int]]] = {}
    for ours in (False, True):
        disable = [] if ours else ["row_products"]
        with engine("eagle_mrv2", k=2, options={"disable": disable}) as llm:
            drafts[ours] = recorded_drafts(speculator_of(llm))
            greedy(llm, held_out_prompts(1), 2)
        assert (seen.count("gated_row_product") > 0) is ours
    assert drafts[True] == drafts[False]
    # Beside its gates a draft decode has five products.
    assert seen.count("row_product") >= 5 * seen.count("gated_row_product")
    # Of a draft prefill three layers look at the last token alone.
    assert seen.count("row_product of several rows") == 2 * seen.count("gated_row_product of several rows") > 0


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_drafts_of_several_requests_prefills(eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same whether or not layers after the attention leave out the rows that are not read."""
    drafts: dict[bool, list[list[int]]] = {}
    seen: list[int] = []

    def spread(product: torch.Tensor, rows: torch.Tensor, num_rows: int) -> torch.Tensor:
        seen.append(len(rows))
        return torch.full((num_rows, product.shape[1]), torch.nan, dtype=product.dtype).index_copy_(0, rows, product)

    monkeypatch.setattr(linear, "_spread", spread)
    for picks in (False, True):
        monkeypatch.setattr(loop, "_WORTH_PICKING", 0 if picks else 2**62)
        with engine("eagle_mrv2", k=2, enforce_eager=eager) as llm:
            drafts[picks] = recorded_drafts(speculator_of(llm))
            seen.clear()
            greedy(llm, held_out_prompts(4), 8)
            assert (4 in seen) is picks
    assert drafts[True] == drafts[False]
