"""The draft's graphs after the engine slept: what they hold the addresses of is where and what it was."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from release_under_test import release
from support import PAIR, Acceptance, engine, greedy, held_out_prompts, recorded_slots, runner_of, speculator_of

from .test_graphs import SIZES, TOKENS, counted_replays


def head_with_a_table_of_its_own(folder: Path) -> Path:
    """The EAGLE head, whose table of RoPE vLLM does not share with the target as it has another length."""
    head = folder / "head"
    shutil.copytree(PAIR / "eagle", head)
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 512}))
    return head


def after_sleeps(llm: Any) -> Iterator[int]:
    """The levels of sleep, each after a sleep of that level; the weights are those from before."""
    models = (runner_of(llm).model, speculator_of(llm).model)
    weights = [(weight, weight.clone()) for model in models for weight in model.parameters()]
    for level in (1, 2):
        llm.sleep(level=level)
        llm.wake_up()
        if level == 2:  # weights are dropped, and come back from a trainer, in place
            with torch.inference_mode():
                for weight, trained in weights:
                    weight.copy_(trained)
        yield level


@pytest.mark.own_process
@pytest.mark.skipif(release < Version("0.22"), reason="after a sleep vLLM 0.20 itself finds no block tables")
def test_the_same_drafts_after_a_sleep(tmp_path: Path) -> None:
    prompts = held_out_prompts(5)
    speculative = {"model": str(head_with_a_table_of_its_own(tmp_path))}
    with engine("eagle_mrv2", speculative=speculative, compilation_config=SIZES, enable_sleep_mode=True) as llm:
        acceptance = Acceptance(llm)
        before = greedy(llm, prompts, TOKENS)
        length = acceptance.length
        speculator = speculator_of(llm)
        buffers = {name: buffer.clone() for name, buffer in speculator.model.named_buffers()}
        for _ in after_sleeps(llm):
            for name, buffer in speculator.model.named_buffers():
                assert torch.equal(buffer, buffers[name]), name
            acceptance = Acceptance(llm)
            with counted_replays(speculator) as replays, recorded_slots(speculator) as right:
                assert greedy(llm, prompts, TOKENS) == before
            assert replays["decode"] > 10
            assert right
            assert all(right)
            assert acceptance.length == pytest.approx(length, abs=0.02)
