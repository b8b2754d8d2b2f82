"""Greedy draft sampling against torch's argmax, ties and NaN included."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from vllm_eagle_mrv2.kernels.greedy import argmax_keys, argmax_reference, best_tokens

pytestmark = pytest.mark.any_release

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def argmax(logits: torch.Tensor, offsets: torch.Tensor | None = None) -> torch.Tensor:
    return best_tokens(argmax_keys(logits, offsets))


def offsets_to(target_ids: torch.Tensor) -> torch.Tensor:
    return target_ids - torch.arange(len(target_ids), device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1), (1, 5), (1, 2048), (3, 2049), (8, 4096), (2, 32_000), (1, 128_256)]
)
def test_is_torchs_argmax(rows: int, columns: int, dtype: torch.dtype) -> None:
    """bfloat16 rows of this length are full of ties."""
    logits = torch.randn(rows, columns, device=DEVICE).to(dtype)
    assert argmax(logits).tolist() == argmax_reference(logits).tolist()


def test_the_first_of_equals() -> None:
    logits = torch.zeros(2, 5000, device=DEVICE)
    logits[1, [4999, 2100, 40]] = 1.0
    assert argmax(logits).tolist() == [0, 40]


def test_zeros_of_both_signs_are_equal() -> None:
    logits = torch.full((2, 3000), -1.0, device=DEVICE)
    logits[0, [7, 2500]] = torch.tensor([-0.0, 0.0], device=DEVICE)
    logits[1, [7, 2500]] = torch.tensor([0.0, -0.0], device=DEVICE)
    assert argmax(logits).tolist() == [7, 7]


def test_infinities_and_nan() -> None:
    infinity, nan = float("inf"), float("nan")
    logits = torch.randn(5, 2100, device=DEVICE)
    logits[0, 2099] = infinity
    logits[1] = -infinity
    logits[1, 3] = -1e30
    logits[2, [5, 2050]] = torch.tensor([infinity, nan], device=DEVICE)
    logits[3, [2050, 9]] = nan
    logits[4] = -infinity
    assert argmax(logits).tolist() == argmax_reference(logits).tolist() == [2099, 3, 2050, 9, 0]


def test_rows_of_a_wider_tensor() -> None:
    wide = torch.randn(4, 6000, device=DEVICE)
    logits = wide[:, :3000]
    assert argmax(logits).tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("rows", [1, 4])
def test_the_draft_vocabulary_maps_to_the_targets(rows: int, ordered: bool) -> None:
    """Ties are broken by the target's token, in whatever order the draft has them."""
    target_ids = torch.randperm(20_000, device=DEVICE)[:5000]
    if ordered:
        target_ids = target_ids.sort().values
    logits = torch.randn(rows, 5000, device=DEVICE).to(torch.bfloat16)
    offsets = offsets_to(target_ids)
    assert argmax(logits, offsets).tolist() == argmax_reference(logits, offsets).tolist()


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("width", [4544, 2048])
def test_keys_of_shards_reduce_together(mapped: bool, width: int) -> None:
    """What tensor-parallel ranks exchange: a key for each block instead of the logits; the last shard is padded."""
    columns = 2 * width - 88
    head = torch.randn(3, columns, device=DEVICE).to(torch.bfloat16)
    padded = torch.full((3, 2 * width), 99.0, dtype=torch.bfloat16, device=DEVICE)
    padded[:, :columns] = head
    offsets = offsets_to(torch.randperm(20_000, device=DEVICE)[:columns]) if mapped else None
    shards = [
        argmax_keys(
            padded[:, first : first + width],
            offsets,
            first_row=first,
            num_columns=min(columns - first, width),
        )
        for first in (0, width)
    ]
    keys = torch.cat(shards, dim=-1)
    assert best_tokens(keys).tolist() == argmax_reference(head, offsets).tolist()


def test_a_shard_of_padding_alone() -> None:
    logits = torch.randn(2, 300, device=DEVICE)
    keys = torch.cat([argmax_keys(logits), argmax_keys(logits + 9, first_row=300, num_columns=0)], dim=-1)
    assert best_tokens(keys).tolist() == logits.argmax(-1).tolist()


def test_tokens_of_scores_in_double_precision() -> None:
    """What differs beyond float32, what is equal, infinite, negative; the padding of lanes never wins."""
    scores = torch.tensor(
        [[1.0, 1.0 + 2**-40, 1.0, 1.0 + 2**-41, 0.5], [-1.0, -torch.inf, -1.0 - 2**-40, -1.0, -2.0], [-torch.inf] * 5],
        dtype=torch.float64,
    )
    bits = torch.where(scores == 0, 0.0, scores).view(torch.int64)
    orders = torch.where(bits < 0, bits ^ 0x7FFFFFFFFFFFFFFF, bits)
    tokens = torch.tensor([[50, 40, 30, 20, 10]] * 3)
    assert best_tokens(torch.stack((orders, tokens), dim=1)).tolist() == [40, 20, 10]
