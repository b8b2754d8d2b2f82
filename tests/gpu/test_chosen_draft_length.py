"""``draft_length: auto`` on a GPU: each number of draft tokens has graphs of its own."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import triton
from release_under_test import PROBABILISTIC
from support import (
    Acceptance,
    chosen_draft_lengths,
    engine,
    greedy,
    held_out_prompts,
    random_draft_lengths,
    runner_of,
    speculator_of,
)

from vllm_eagle_mrv2.draft_length.notes import graph_times_of
from vllm_eagle_mrv2.kernels import single_token_attention

from .test_graphs import counted_replays

K = 5
LENGTHS = (0, 1, 2, 3, 5)
TOKENS = 48
PROMPTS = held_out_prompts(7)
AUTO: dict[str, Any] = {"draft_length": "auto"}


@pytest.fixture(scope="module")
def constant() -> tuple[list[list[int]], list[float]]:
    """What the number of draft tokens as given makes: the texts, and the share accepted at each position."""
    with engine("eagle_mrv2", k=K) as llm:
        acceptance = Acceptance(llm)
        return greedy(llm, PROMPTS, TOKENS), acceptance.by_position


def test_every_number_has_its_graphs(constant: tuple[list[list[int]], list[float]]) -> None:
    with engine("eagle_mrv2", k=K, options=AUTO) as llm:
        speculator, target = speculator_of(llm), runner_of(llm).cudagraph_manager
        for length in LENGTHS:
            replayed: Counter[int | None] = Counter()

            def replay(descriptor: Any, original: Any = target.run_fullgraph, into: Any = replayed) -> Any:
                into[descriptor.uniform_token_count] += 1
                return original(descriptor)

            target.run_fullgraph = replay
            try:
                with chosen_draft_lengths(itertools.repeat(length)), counted_replays(speculator) as counts:
                    acceptance = Acceptance(llm)
                    texts = greedy(llm, PROMPTS[:1], TOKENS)
            finally:
                del target.run_fullgraph
            assert texts == constant[0][:1]
            iterations = TOKENS / acceptance.length if length else TOKENS
            # But for the last few, which verify what still fits, and the first.
            assert replayed[1 + length] > iterations - 4
            assert counts["both"] > iterations - 4


def test_graphs_are_timed(constant: tuple[list[list[int]], list[float]]) -> None:
    """Before the first request, and once more; the output stays the same."""
    with engine("eagle_mrv2", k=K, options=AUTO) as llm:
        again = speculator_of(llm).drafter.graphs.times()
        noted = graph_times_of(llm.llm_engine.vllm_config)
        assert [one[:2] for one in noted] == [one[:2] for one in again]
        assert {one.length for one in again} == set(LENGTHS)
        assert {one.requests for one in again} == {1, 4, 8}, "the engine has 8 requests at most"
        for one in again:
            assert 0 < one.seconds < 0.1
        of_one = {one.length: one.seconds for one in again if one.requests == 1}
        assert of_one[0] < of_one[5] < 3 * of_one[0]
        assert greedy(llm, PROMPTS, TOKENS) == constant[0]


def test_the_number_may_change_all_the_time(constant: tuple[list[list[int]], list[float]]) -> None:
    texts, by_position = constant
    for speculative in ({}, PROBABILISTIC):
        with engine("eagle_mrv2", k=K, options=AUTO, speculative=speculative) as llm:
            with chosen_draft_lengths(random_draft_lengths(K)):
                acceptance = Acceptance(llm)
                assert greedy(llm, PROMPTS, TOKENS) == texts
            assert acceptance.by_position[0] == pytest.approx(by_position[0], abs=0.06)
            assert len(greedy(llm, PROMPTS, TOKENS)) == len(PROMPTS)


@pytest.mark.parametrize("count", [1, 7])
def test_no_kernel_is_compiled_when_the_number_changes(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compilation takes as long as a hundred iterations."""
    compiled: list[str] = []

    def noted(*args: Any, fn: Any, **kwargs: Any) -> None:
        if fn.module.startswith("vllm_eagle_mrv2"):
            compiled.append(fn.name)

    single_token_attention._single_token_attention_kernel.device_caches.clear()  # of the engines before
    with engine("eagle_mrv2", k=K, options=AUTO) as llm:
        with chosen_draft_lengths(itertools.repeat(K)):
            greedy(llm, PROMPTS[:count], TOKENS)
        monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", noted)
        with chosen_draft_lengths(itertools.cycle([0, K, 1])):
            greedy(llm, PROMPTS[:count], TOKENS)
    assert not compiled
