"""Drafts from a part of the vocabulary: the same text, other drafts; exact where they are sampled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_model import mtp_engine, our_mtp_speculator, write_mtp_model
from release_under_test import PROBABILISTIC
from support import Acceptance, engine, greedy, held_out_prompts, recorded_log, speculator_of

from .test_behaviours import sampled

VOCAB = 2048
# Low ids are frequent in a BPE vocabulary.  Every sixteenth is left out, so that a row of the head is not its token.
RANKING = [token for token in range(VOCAB) if token % 16 != 15]
PROMPTS = held_out_prompts(4)
TOKENS = 16


@pytest.fixture(scope="module")
def ranking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranking") / "ranking.json"
    path.write_text(json.dumps({"vocab_size": VOCAB, "tokens": RANKING}))
    return path


def trimmed_to(size: int, ranking: Path) -> dict[str, Any]:
    return {"draft_vocab": {"size": size, "ranking": str(ranking)}}


@contextmanager
def recorded_drafts(speculator: Any) -> Iterator[set[int]]:
    """Every token that is drafted meanwhile."""
    drafted: set[int] = set()

    def propose(batch: Any, original: Any = speculator.drafter.loop.propose) -> torch.Tensor:
        tokens: torch.Tensor = original(batch)
        drafted.update(tokens[:, : batch.num_draft_tokens].flatten().tolist())
        return tokens

    speculator.drafter.loop.propose = propose
    yield drafted
    del speculator.drafter.loop.propose


def run(llm: Any) -> tuple[list[list[int]], set[int], list[float]]:
    """Greedy tokens, what was drafted for them, and how much of it was accepted at each position."""
    acceptance = Acceptance(llm)
    with recorded_drafts(speculator_of(llm)) as drafted:
        tokens = greedy(llm, PROMPTS, TOKENS)
    return tokens, drafted, acceptance.by_position


def test_the_same_text_from_fewer_tokens(ranking: Path) -> None:
    with engine("eagle_mrv2") as llm:
        assert speculator_of(llm).drafter.trimmed is None
        whole, drafted, whole_acceptance = run(llm)
        assert not drafted <= set(RANKING)
    acceptances = {}
    for size in (len(RANKING), 900):
        with engine("eagle_mrv2", options=trimmed_to(size, ranking)) as llm:
            tokens, drafted, acceptances[size] = run(llm)
            assert drafted <= set(RANKING[:size])
            assert len(drafted) > 40
            assert tokens == whole
    # Without a sixteenth of the tokens nearly as good, with less than half of them worse and still of use.
    assert 0.85 * sum(whole_acceptance) < sum(acceptances[len(RANKING)]) <= sum(whole_acceptance)
    assert 0.5 * sum(whole_acceptance) < sum(acceptances[900]) < sum(acceptances[len(RANKING)])
    # The release's own sampler reads rows of the whole vocabulary, to the same effect.
    with engine("eagle_mrv2", options={**trimmed_to(900, ranking), "disable": ["two_stage_argmax"]}) as llm:
        assert run(llm) == (whole, drafted, acceptances[900])


def test_mtp(ranking: Path, tmp_path: Path) -> None:
    model = write_mtp_model(tmp_path / "target")
    with mtp_engine(model, None) as llm:
        plain = greedy(llm, PROMPTS, TOKENS)
    asked = {"method": "eagle_mrv2", "num_speculative_tokens": 3}
    options = trimmed_to(1500, ranking)
    with mtp_engine(model, asked, additional_config={"eagle_mrv2": options}) as llm:
        our_mtp_speculator(llm)
        tokens, drafted, acceptance = run(llm)
        assert drafted <= set(RANKING[:1500])
        assert tokens == plain
        assert acceptance[0] > 0.2


def test_weights_that_are_loaded_again(ranking: Path) -> None:
    with engine("eagle_mrv2", options=trimmed_to(900, ranking)) as llm:
        tokens, drafted, acceptance = run(llm)
        kept = speculator_of(llm).drafter.trimmed.kept
        with torch.inference_mode():
            kept.weight.zero_()
            kept.quant_method.process_weights_after_loading(kept)
        assert run(llm)[1] == {0}
        llm.collective_rpc("reload_weights")
        assert run(llm) == (tokens, drafted, acceptance)


def test_sampled_drafts(ranking: Path) -> None:
    options = trimmed_to(900, ranking)
    with recorded_log() as log, engine("eagle_mrv2", speculative=PROBABILISTIC, options=options) as llm:
        assert any(f"draft vocabulary 900 of {VOCAB}," in line for line in log)
        speculator = speculator_of(llm)
        speculator.draft_logits.fill_(123.0)
        greedy(llm, PROMPTS[:3], 8, temperature=0.8, seed=3)
        written = speculator.draft_logits[(speculator.draft_logits != 123.0).any(dim=-1)]
        assert len(written) == 3 * 3
        kept = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, torch.tensor(RANKING[:900]), True)
        assert bool(written[:, kept].isfinite().all())
        assert bool((written[:, ~kept] == -torch.inf).all())


def test_tokens_that_are_never_drafted_are_sampled(ranking: Path) -> None:
    """As often as the target says: were their draft probability not zero, they would come too seldom."""
    tokens, probabilities = sampled(trimmed_to(900, ranking), prompts=12)
    left_out = torch.ones(VOCAB, dtype=torch.bool).index_fill_(0, torch.tensor(RANKING[:900]), False)
    expected = probabilities[:, left_out].sum(-1)
    deviation = (left_out[tokens].sum() - expected.sum()) / (expected * (1 - expected)).sum().sqrt()
    assert float(expected.sum()) > 30
    assert abs(float(deviation)) < 3.3  # one in a thousand
