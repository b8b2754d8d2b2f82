"""Graphs of the draft after the engine slept: what they hold the addresses of is where it was."""

from __future__ import annotations

import pytest
from packaging.version import Version
from releases import release
from support import Acceptance, engine, greedy, held_out_prompts, recorded_slots, speculator_of
from test_graphs import SIZES, TOKENS, counted_replays


@pytest.mark.skipif(release < Version("0.22"), reason="after a sleep vLLM 0.20 itself finds no block tables")
def test_the_same_drafts_after_a_sleep() -> None:
    prompts = held_out_prompts(5)
    # vLLM allows for one engine a process that can sleep.
    with engine("eagle_mrv2", compilation_config=SIZES, enable_sleep_mode=True) as llm:
        acceptance = Acceptance(llm)
        before = greedy(llm, prompts, TOKENS)
        length = acceptance.length
        llm.sleep(level=1)
        llm.wake_up()
        acceptance = Acceptance(llm)
        speculator = speculator_of(llm)
        with counted_replays(speculator) as replays, recorded_slots(speculator) as right:
            assert greedy(llm, prompts, TOKENS) == before
        assert replays["decode"] > 10
        assert right
        assert all(right)
        assert acceptance.length == pytest.approx(length, abs=0.02)
