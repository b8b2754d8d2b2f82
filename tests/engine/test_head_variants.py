"""Heads whose configuration is fitted to the target, on real engines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from head_variants import write_head, write_head_of_last_state, write_head_of_layers
from support import Acceptance, engine, greedy, held_out_prompts, recorded_drafts, runner_of, speculator_of

PROMPTS = held_out_prompts(4)[2:]  # of 21 and 31 tokens
TOKENS = 24
FEW = 24
"""Positions of a head: fewer than a prompt and its `TOKENS` have."""

Texts = list[list[int]]


@contextmanager
def drafting(head: Path | None, expected: Texts) -> Iterator[tuple[Any, list[list[int]], Acceptance]]:
    """An engine with an EAGLE-3 head, the demo pair's own where none is given, that has written what is expected; what
    was drafted, and how it was accepted.
    """
    with engine("eagle_mrv2", family="eagle3", speculative={} if head is None else {"model": str(head)}) as llm:
        drafts, acceptance = recorded_drafts(speculator_of(llm)), Acceptance(llm)
        assert greedy(llm, PROMPTS, TOKENS) == expected
        yield llm, drafts, acceptance


@pytest.fixture(scope="module")
def own_drafts(plain: Texts) -> list[list[int]]:
    """What the demo pair's EAGLE-3 head drafts."""
    with drafting(None, plain) as (_, drafts, acceptance):
        assert acceptance.length > 1.8
        return drafts


def test_a_head_of_fewer_positions_than_its_target(
    plain: Texts, own_drafts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on releases that do not raise them: below 0.27, and below 0.33 for MTP."""
    stocks = "vllm.config.speculative.SpeculativeConfig._maybe_override_draft_max_position_embeddings"
    monkeypatch.setattr(stocks, lambda *args: None, raising=False)
    head = write_head(tmp_path / "head", "eagle3", {"max_position_embeddings": FEW})
    with drafting(head, plain) as (_, drafts, _):
        assert drafts == own_drafts


@pytest.mark.parametrize(("layers", "nested"), [((0, 1, 2, 3, 4), False), ((1, 2, 3, 4), True)])
def test_a_head_of_other_than_three_layers(
    layers: tuple[int, ...], nested: bool, plain: Texts, own_drafts: list[list[int]], tmp_path: Path
) -> None:
    with drafting(write_head_of_layers(tmp_path / "head", layers, nested=nested), plain) as (_, drafts, _):
        assert drafts == own_drafts


def test_a_head_of_the_last_state_alone(plain: Texts, tmp_path: Path) -> None:
    with drafting(write_head_of_last_state(tmp_path / "head", plain), plain) as (llm, _, acceptance):
        assert acceptance.by_position[0] > 0.2
        assert not runner_of(llm).use_aux_hidden_state_outputs
