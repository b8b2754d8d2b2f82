"""What several unit tests use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """vLLM's layers can be made."""
    from .test_head import tensor_parallel

    with tensor_parallel():
        yield


@pytest.fixture
def one_rank_as_on_a_gpu(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """And their products become ours."""
    from support import multiply_as_on_a_gpu

    multiply_as_on_a_gpu(monkeypatch)


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The weights that the op multiplied single rows with through our kernel."""
    from vllm_eagle_mrv2.draft_model import linear

    product, seen = linear.row_product, []

    def counted(row: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        seen.append(weight)
        return product(row, weight, bias)

    monkeypatch.setattr(linear, "row_product", counted)
    return seen
