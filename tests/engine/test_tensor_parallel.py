"""Two tensor-parallel ranks, in processes of their own: the same text and drafts, and what is exchanged for them."""

from __future__ import annotations

from typing import Any

import pytest
from release_under_test import supplied
from support import chosen_draft_lengths, engine, greedy, has_cuda, held_out_prompts, random_draft_lengths
from two_ranks import RANKS, VOCAB, drafts_on_two_ranks

PROMPTS = held_out_prompts(3)
TOKENS = 16


@pytest.fixture(autouse=True)
def _two_ranks_on_few_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each rank asks for a NUMA node to bind its threads to.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def drafts_of(family: str, options: dict[str, Any]) -> tuple[list[list[int]], list[float], list[set[Any]]]:
    return drafts_on_two_ranks(family, options, PROMPTS, TOKENS)


@pytest.mark.skipif(has_cuda(), reason="two GPUs round otherwise than one: tests/gpu/test_two_gpus.py")
@pytest.mark.skipif(not supplied("local_argmax"), reason="this release samples every draft")
def test_ranks_exchange_their_best_tokens() -> None:
    with engine(None) as llm:
        expected = greedy(llm, PROMPTS, TOKENS)
    tokens, acceptance, exchanged = drafts_of("eagle", {})
    assert tokens == expected
    assert acceptance[0] > 0.2
    assert exchanged == [{(2, "torch.float32")}] * 2, "a key of 64 bits for a block of the shard"
    off = drafts_of("eagle", {"disable": ["local_argmax"]})
    assert off == (tokens, acceptance, [{(VOCAB // 2, "torch.float32")}] * 2)
    tokens, acceptance, exchanged = drafts_of("eagle3", {})
    assert tokens == expected
    assert acceptance[0] > 0.2
    assert exchanged == [{(2, "torch.float32")}] * 2


@pytest.mark.skipif(has_cuda(), reason="two GPUs round otherwise than one: tests/gpu/test_two_gpus.py")
def test_ranks_draft_as_many_tokens_as_the_scheduler_says() -> None:
    with engine(None) as llm:
        expected = greedy(llm, PROMPTS, TOKENS)
    with (
        engine("eagle_mrv2", k=3, options={"draft_length": "auto"}, **RANKS) as llm,
        chosen_draft_lengths(random_draft_lengths(3)) as taken,
    ):
        assert greedy(llm, PROMPTS, TOKENS) == expected
        assert set(taken) == {0, 1, 2, 3}
