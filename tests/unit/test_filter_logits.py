"""Top-k and top-p of draft logits against plain torch: nothing too little is kept, and little too much."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from vllm_eagle_mrv2.kernels.filter_logits import filter_logits, filter_logits_reference

pytestmark = pytest.mark.any_release

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MAX_REQS = 8
NAT = 1 / 32  # the width of a bin
INFINITY = float("inf")


def states(k: int, p: float, heat: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Temperature, top-k and top-p: requests with filters at odd states, none at even ones but 0, which is greedy."""
    odd = torch.arange(MAX_REQS, device=DEVICE) % 2 == 1
    temperature = torch.full((MAX_REQS,), heat, device=DEVICE)
    temperature[0] = 0.0
    top_k = torch.where(odd, k, 1 << 30).to(torch.int32)
    top_k[0] = 1
    return temperature, top_k, torch.where(odd, p, 1.0)


@pytest.mark.parametrize("vocab", [9, 4096, 10_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heat", [0.3, 1.0, 2.5])
@pytest.mark.parametrize(("k", "p"), [(1, 1.0), (5, 1.0), (1 << 30, 0.9), (1 << 30, 0.1), (50, 0.7), (5, 0.999)])
def test_what_is_kept(vocab: int, dtype: torch.dtype, heat: float, k: int, p: float) -> None:
    torch.manual_seed(vocab)
    logits = (3 * torch.randn(5, vocab, device=DEVICE)).to(dtype)
    mapping = torch.tensor([3, 0, 2, -1, 1], dtype=torch.int32, device=DEVICE)
    given = (mapping, *states(k, p, heat))
    wanted = filter_logits_reference(logits, *given)
    actual = logits.clone()
    filter_logits(actual, *given)
    kept = ~torch.isinf(actual)
    assert torch.equal(actual[kept], logits[kept])
    assert bool((kept | ~wanted).all()), "something that belongs in was left out"
    for row in (0, 4):
        # Bins are kept whole, and what a bin has too much for top-k shifts the limit of top-p.
        lowest, best = logits[row].float()[wanted[row]].min(), logits[row].float().max()
        limit = lowest - 2.01 * NAT * heat if best - lowest < (16 - 2 * NAT) * heat else -INFINITY
        assert bool((logits[row].float()[kept[row]] >= limit).all())
    assert bool(kept[1:4].all()), "greedy rows, rows without filters and padding are left alone"


def test_little_is_left_of_a_long_tail() -> None:
    logits = torch.full((1, 8192), -4.0, device=DEVICE)
    logits[0, [5, 7000]] = torch.tensor([9.0, 8.0], device=DEVICE)
    filter_logits(logits, torch.tensor([1], device=DEVICE), *states(1 << 30, 0.9, 1.0))
    assert torch.nonzero(~torch.isinf(logits[0])).flatten().tolist() == [5, 7000]


def test_far_logits_and_infinities() -> None:
    """What is further from the best than the histogram reaches is one bin, kept only where the limit falls into it."""
    logits = torch.full((2, 100), -1000.0, device=DEVICE)
    logits[:, 3], logits[:, 50] = 0.0, -INFINITY
    few, many = logits[:1].clone(), logits[1:].clone()
    filter_logits(few, torch.tensor([1], device=DEVICE), *states(1, 1.0, 1.0))
    assert torch.nonzero(~torch.isinf(few[0])).flatten().tolist() == [3]
    filter_logits(many, torch.tensor([1], device=DEVICE), *states(7, 1.0, 1.0))
    assert torch.equal(many, logits[1:])


def test_a_second_batch_finds_no_counts_of_the_first() -> None:
    mapping = torch.tensor([1], device=DEVICE)
    for _ in range(2):
        logits = torch.arange(64.0, device=DEVICE)[None].clone()
        filter_logits(logits, mapping, *states(4, 1.0, 1.0))
        assert torch.nonzero(~torch.isinf(logits[0])).flatten().tolist() == [60, 61, 62, 63]
