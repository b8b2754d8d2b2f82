"""``lookup_drafts`` on a GPU: texts in the device's memory, looked up in the graphs of the draft phase."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lookups import check
from packaging.version import Version
from release_under_test import PROBABILISTIC, release
from support import engine, greedy, held_out_prompts, runner_of, speculator_of

from .test_graphs import SIZES, counted_replays
from .test_sleep import after_sleeps

K = 5
TOKENS = 90
ON = {"lookup_drafts": True}
PROMPTS = held_out_prompts(5)


@pytest.mark.parametrize("family", ["eagle", "eagle3"])
def test_drafts_go_on_as_the_text_did_before(family: str) -> None:
    arguments: dict[str, Any] = {"family": family, "k": K, "compilation_config": SIZES}
    with engine("eagle_mrv2", **arguments) as llm:
        wanted = greedy(llm, PROMPTS, TOKENS)
    with engine("eagle_mrv2", options=ON, **arguments) as llm:
        assert runner_of(llm).req_states.all_token_ids.gpu.is_cuda
        with counted_replays(speculator_of(llm)) as counts:
            check(llm, PROMPTS, wanted)
        assert counts["both"] > 10


@pytest.mark.own_process
@pytest.mark.skipif(release < Version("0.22"), reason="after a sleep vLLM 0.20 itself finds no block tables")
def test_texts_are_looked_up_after_a_sleep() -> None:
    with engine("eagle_mrv2", k=K, options=ON, compilation_config=SIZES, enable_sleep_mode=True) as llm:
        wanted = greedy(llm, PROMPTS, TOKENS)
        for _ in after_sleeps(llm):
            check(llm, PROMPTS, wanted)


def test_what_is_found_is_certain_in_a_graph() -> None:
    """The stored logits of a request's last drafts name one token wherever it was found."""
    with engine("eagle_mrv2", k=K, options=ON, speculative=PROBABILISTIC, compilation_config=SIZES) as llm:
        speculator = speculator_of(llm)
        loop, propose, found = speculator.drafter.loop, speculator.drafter.loop.propose, 0

        def proposing(batch: Any) -> Any:
            nonlocal found
            drafts = propose(batch)
            for row, request in enumerate(batch.idx_mapping.tolist()):
                names = loop.lookup.found[row] >= 0
                stored = speculator.draft_logits[request]
                assert torch.equal(torch.isfinite(stored).sum(-1) == 1, names)
                if names.any():
                    assert stored[names].argmax(-1).tolist() == drafts[row][names].tolist()
                    found += 1
            return drafts

        loop.propose = proposing
        greedy(llm, PROMPTS, TOKENS, temperature=0.1, seed=3)
    assert found > 10
