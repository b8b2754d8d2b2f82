"""Draft decode in graphs with a backend whose target has none: FlashInfer on Hopper."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from packaging.version import Version
from release_under_test import release
from support import Acceptance, engine, greedy, held_out_prompts, runner_of, speculator_of

from .test_graphs import SIZES, TOKENS, counted_builds, counted_replays

pytest.importorskip("flashinfer")
FLASHINFER: dict[str, Any] = {"attention_config": {"backend": "FLASHINFER"}}
# On 0.20.2, with an eager target, ours had 2.314 and stock 2.337, with draft graphs and without; why is not known.
TOLERANCE = 0.04 if release < Version("0.22") else 0.02
PROMPTS = held_out_prompts(5)


# Without compilation there is nothing piecewise, and the target runs eagerly.
COMPILATION: dict[str, dict[str, Any]] = {
    "PIECEWISE": SIZES | {"cudagraph_mode": "FULL_AND_PIECEWISE"},
    "NONE": SIZES | {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
}


@functools.cache
def stock(target: str) -> tuple[list[list[list[int]]], float]:
    """Tokens of batches of 1, 3 and 5, and the acceptance length; compiled code rounds in other places."""
    with engine("eagle", **FLASHINFER, compilation_config=COMPILATION[target]) as llm:
        tokens = [greedy(llm, PROMPTS[:n], TOKENS) for n in (1, 3, 5)]
        acceptance = Acceptance(llm)
        greedy(llm, PROMPTS, TOKENS)
        return tokens, acceptance.length


def test_batches_of_the_largest_graph() -> None:
    """Builders prepare for the sizes that are captured: below 0.26 the target's would end at 6, two requests of K+1."""
    sizes = {"cudagraph_capture_sizes": [1, 2, 4, 8]}
    prompts = held_out_prompts(8)
    with engine("eagle", k=2, **FLASHINFER, compilation_config=sizes) as llm:
        acceptance = Acceptance(llm)
        expected = greedy(llm, prompts, TOKENS)
        length = acceptance.length
    with engine("eagle_mrv2", k=2, **FLASHINFER, compilation_config=sizes) as llm:
        acceptance = Acceptance(llm)
        with counted_replays(speculator_of(llm)) as replays:
            assert greedy(llm, prompts, TOKENS) == expected
        assert replays["decode of 8"] > 10
        assert acceptance.length >= length - 0.02


@pytest.mark.parametrize("disable", [[], ["draft_graphs_by_support"], ["single_token_attention"]])
@pytest.mark.parametrize("target", ["PIECEWISE", "NONE"])
def test_draft_decode_has_graphs(target: str, disable: list[str]) -> None:
    tokens, length = stock(target)
    compilation = COMPILATION[target]
    with engine("eagle_mrv2", options={"disable": disable}, **FLASHINFER, compilation_config=compilation) as llm:
        speculator = speculator_of(llm)
        if runner_of(llm).cudagraph_manager.cudagraph_mode.has_full_cudagraphs():
            pytest.skip("FlashInfer has full graphs for a verification on this GPU")
        assert runner_of(llm).cudagraph_manager.cudagraph_mode.name == target
        with counted_replays(speculator) as replays, counted_builds(llm) as builds:
            assert [greedy(llm, PROMPTS[:n], TOKENS) for n in (1, 3, 5)] == tokens
        graphs = disable != ["draft_graphs_by_support"]
        assert (replays["decode"] > 10) is graphs
        # Three requests in the graph of four, five in that of eight.
        assert not graphs or {f"decode of {n}" for n in (1, 4, 8)} <= replays.keys()
        # By our kernel there is nothing to plan, and all draft decodes are one graph.
        planned = disable == ["single_token_attention"]
        assert (builds["draft decode"] > 10) is planned
        assert planned or not graphs or replays["decode"] <= builds["target"]
        acceptance = Acceptance(llm)
        greedy(llm, PROMPTS, TOKENS)
        assert acceptance.length >= length - TOLERANCE
