"""Greedy drafts through the draft's own vocabulary."""

from __future__ import annotations

from typing import Any

import pytest
from release_under_test import supplied
from support import Acceptance, engine, greedy, held_out_prompts, speculator_of

K = 3


@pytest.mark.skipif(not supplied("two_stage_argmax"), reason="this release samples every draft, in blocks")
@pytest.mark.parametrize("family", ["eagle", "eagle3"])
def test_drafts_are_those_of_torchs_argmax(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, acceptances, argmaxes = [], [], []
    for disable in ([], ["two_stage_argmax"]):
        with engine("eagle_mrv2", family=family, k=K, options={"disable": disable}) as llm:
            speculator, acceptance = speculator_of(llm), Acceptance(llm)
            calls = 0
            stock = speculator.sample_draft

            def counted(*args: object, stock: Any = stock, **kwargs: object) -> object:
                nonlocal calls
                calls += 1
                return stock(*args, **kwargs)

            monkeypatch.setattr(speculator, "sample_draft", counted)
            tokens.append(greedy(llm, held_out_prompts(5), 24))
            acceptances.append(acceptance.by_position)
            argmaxes.append(calls)
    assert tokens[0] == tokens[1]
    assert acceptances[0] == acceptances[1]
    assert acceptances[0][0] > 0.2
    assert argmaxes[0] == 0
    assert argmaxes[1] > 0


def test_a_draft_vocabulary_is_not_scattered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The EAGLE-3 head's argmax runs over its own rows."""
    with engine("eagle_mrv2", family="eagle3", k=K) as llm:
        model = speculator_of(llm).model
        head = speculator_of(llm).drafter.adapter.head
        assert head is not None
        assert head.offsets is not None
        assert len(head.offsets) < model.config.vocab_size

        def scattered(*args: object) -> None:
            raise AssertionError("a full row was made")

        monkeypatch.setattr(type(model), "compute_logits", scattered)
        greedy(llm, held_out_prompts(2), 8)
