"""Two data-parallel ranks with batches of different sizes, in processes of their own."""

from __future__ import annotations

import pytest
from support import engine, greedy, has_cuda, held_out_prompts
from two_ranks import IN_STEP, Share, greedy_on_replicas

PROMPTS = held_out_prompts(5)
MANY, FEW = Share(PROMPTS[:4], 24), Share(PROMPTS[4:], 7)


@pytest.mark.skipif(has_cuda(), reason="a replica wants a GPU of its own: tests/gpu/test_two_gpus.py")
@pytest.mark.parametrize("shares", [(MANY, FEW), (FEW, Share([], 1))], ids=["uneven", "idle"])
def test_ranks_end_and_say_the_same(shares: tuple[Share, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has nothing left, or nothing at all, does not hold up the other."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # or each rank asks for a NUMA node
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with engine(None) as llm:
        expected = [greedy(llm, share.prompts, share.max_tokens) if share.prompts else [] for share in shares]
    tokens, accepted = greedy_on_replicas("eagle_mrv2", shares, **IN_STEP)
    assert tokens == expected
    assert accepted > 1.2
