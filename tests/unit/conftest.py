"""What several unit tests use."""

from __future__ import annotations

import os
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import wrapt

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


@wrapt.when_imported("vllm.transformers_utils.repo_utils")
def retry_at_once(module: ModuleType) -> None:
    """vLLM waits two seconds before it looks for a missing file again."""
    module.time = SimpleNamespace(sleep=lambda seconds: None)  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def environment_kept() -> Iterator[None]:
    """Variables that vLLM sets by itself, for some architectures say, end with the test."""
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A measuring command must not get as far as its engines."""
    from vllm_eagle_mrv2.cli.common.engines import Setup

    def refuse(self: Setup, k: int) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr(Setup, "engines", refuse)


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
    from vllm_eagle_mrv2.kernels.row_product import row_product

    product, seen = row_product, []

    def counted(row: torch.Tensor, weight: torch.Tensor, *others: Any, **how: Any) -> torch.Tensor:
        seen.append(weight)
        return product(row, weight, *others, **how)

    monkeypatch.setattr(linear, "row_product", counted)
    return seen
