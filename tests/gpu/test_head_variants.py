"""Heads whose configuration is fitted to the target, with graphs and compiled models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from head_variants import write_head, write_head_of_last_state, write_head_of_layers
from packaging.version import Version
from release_under_test import release
from support import PAIR, Acceptance, engine, greedy, held_out_prompts, runner_of, speculator_of

from vllm_eagle_mrv2.draft_model.attention import Rope
from vllm_eagle_mrv2.errors import EagleMRV2Error

from .test_graphs import SIZES, TOKENS

PROMPTS = held_out_prompts(4)
FEW = 24
"""Positions of a head: fewer than a prompt and its `TOKENS` have."""


@contextmanager
def drafting(head: Path, family: str) -> Iterator[tuple[Any, list[list[int]], Acceptance]]:
    """An engine with a head, what its target wrote, and how drafts were accepted meanwhile."""
    with engine("eagle_mrv2", family=family, speculative={"model": str(head)}, compilation_config=SIZES) as llm:
        acceptance = Acceptance(llm)
        yield llm, greedy(llm, PROMPTS, TOKENS), acceptance


def own(family: str) -> tuple[list[list[int]], float]:
    """What the target writes with the demo pair's own head, and the mean accepted length."""
    with drafting(PAIR / family, family) as (_, texts, acceptance):
        return texts, acceptance.length


@pytest.mark.parametrize("family", ["eagle", "eagle3"])
def test_a_head_of_fewer_positions_than_its_target(family: str, tmp_path: Path) -> None:
    expected, length = own(family)
    head = write_head(tmp_path / "head", family, {"max_position_embeddings": FEW})
    with drafting(head, family) as (llm, texts, acceptance):
        assert texts == expected
        assert acceptance.length == pytest.approx(length, abs=0.05)
        tables = [
            len(rope.stock.cos_sin_cache) for rope in speculator_of(llm).model.modules() if isinstance(rope, Rope)
        ]
        assert tables == [runner_of(llm).max_model_len]


@pytest.mark.parametrize("nested", [False, True])
def test_a_head_of_four_layers(nested: bool, tmp_path: Path) -> None:
    head = write_head_of_layers(tmp_path / "head", (1, 2, 3, 4), nested=nested)
    if release < Version("0.22"):
        with pytest.raises(EagleMRV2Error, match="combines 4 layers"), drafting(head, "eagle3"):
            pass
        return
    expected, length = own("eagle3")
    with drafting(head, "eagle3") as (_, texts, acceptance):
        assert texts == expected
        assert acceptance.length == pytest.approx(length, abs=0.1)


def test_a_head_of_the_last_state_alone(tmp_path: Path) -> None:
    expected, _ = own("eagle3")
    with drafting(write_head_of_last_state(tmp_path / "head", expected), "eagle3") as (llm, texts, acceptance):
        # Other drafts are verified in other batches, where a near tie of 16-bit logits may fall otherwise.
        assert sum(text == other for text, other in zip(texts, expected, strict=True)) >= len(PROMPTS) - 1
        assert acceptance.by_position[0] > 0.2
        assert not runner_of(llm).cudagraph_manager.aux_hidden_states
