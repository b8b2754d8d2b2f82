"""Which batches FlashAttention's metadata builders split; the builders themselves need a GPU (tests/gpu)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.config.compilation")

from vllm.config.compilation import CUDAGraphMode

from vllm_eagle_mrv2.config.method import Settings, mark
from vllm_eagle_mrv2.config.options import Options
from vllm_eagle_mrv2.patches.attention_splits import split_decodes_alone

CAPTURED, VLLM_LARGEST, K = 2048, 512, 3


class Builder:
    """Splits as FlashAttention's does."""

    def __init__(self) -> None:
        self.max_cudagraph_size = CAPTURED

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> bool:
        return bool(common_attn_metadata.num_actual_tokens <= self.max_cudagraph_size)


def runner(*, mode: CUDAGraphMode = CUDAGraphMode.FULL_AND_PIECEWISE, vllm_largest: int = VLLM_LARGEST) -> Any:
    def groups() -> list[list[Any]]:
        others = SimpleNamespace(metadata_builders=[object()])
        return [[SimpleNamespace(metadata_builders=[Builder(), Builder()])], [others]]

    speculator = SimpleNamespace(attn_groups=groups(), num_speculative_steps=K)
    mark(speculator, Settings("eagle", Options(), vllm_largest=vllm_largest))
    return SimpleNamespace(
        attn_groups=groups(), speculator=speculator, cudagraph_manager=SimpleNamespace(cudagraph_mode=mode)
    )


def split(runner: Any, tokens: int, max_query_len: int) -> set[bool]:
    """Whether the builders of the target and of the draft split a batch."""
    batch = SimpleNamespace(num_actual_tokens=tokens, max_query_len=max_query_len)
    return {
        builder.build(common_prefix_len=0, common_attn_metadata=batch, fast_build=True)
        for groups in (runner.attn_groups, runner.speculator.attn_groups)
        for builder in groups[0][0].metadata_builders
    }


@pytest.mark.parametrize(
    ("tokens", "max_query_len", "expected"),
    [
        (VLLM_LARGEST, 100, True),
        (VLLM_LARGEST + 1, 100, False),
        (VLLM_LARGEST + 1, K + 2, False),
        (VLLM_LARGEST + 1, K + 1, True),
        (CAPTURED, 1, True),
        (CAPTURED + 1, K + 1, False),
    ],
)
def test_larger_batches_are_split_if_they_are_decodes(tokens: int, max_query_len: int, expected: bool) -> None:
    bounded = runner()
    split_decodes_alone(bounded)
    assert split(bounded, CAPTURED, K + 1) == {True}, "a batch says nothing about the next"
    assert split(bounded, tokens, max_query_len) == {expected}


def test_batches_with_prefills_in_full_graphs_are_split() -> None:
    full = runner(mode=CUDAGraphMode.FULL)
    split_decodes_alone(full)
    assert split(full, CAPTURED, 100) == {True}


def test_sizes_that_the_user_gives_split_as_in_vllm() -> None:
    given = runner(vllm_largest=0)
    split_decodes_alone(given)
    assert split(given, CAPTURED, 100) == {True}
