"""The short form of ci/matrix.sh: one engine a family, and on it what another release could break first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mtp_model import mtp_engine, write_mtp_model
from support import (
    Acceptance,
    engine,
    greedy,
    has_cuda,
    held_out_prompts,
    recorded_log,
    recorded_max_seq_lens,
    recorded_slots,
    speculator_of,
)

from vllm_eagle_mrv2.config.families import FAMILIES
from vllm_eagle_mrv2.releases import installed_release

pytestmark = pytest.mark.smoke

K = 3
TOKENS = 12
PROMPTS = held_out_prompts(4)


@dataclass
class Drafting:
    """An engine of ours, what it logged at its start, and what the target alone answers to `PROMPTS`."""

    family: str
    llm: Any
    log: list[str]
    expected: list[list[int]]


class Targets:
    """The two target models, and their greedy answers to `PROMPTS`; each runs once."""

    def __init__(self, folder: Path) -> None:
        self._mimo = write_mtp_model(folder / "target")
        self._answers: dict[bool, list[list[int]]] = {}

    def engine(self, family: str, method: str | None) -> AbstractContextManager[Any]:
        """An engine on the family's target."""
        probabilistic = {"draft_sample_method": "probabilistic"}
        if family != "mtp":
            return engine(method, family=family, k=K, speculative=probabilistic)
        ours = {"method": method, "num_speculative_tokens": K, **probabilistic}
        return mtp_engine(self._mimo, None if method is None else ours)

    def answers(self, family: str) -> list[list[int]]:
        """Without speculation."""
        own = family == "mtp"
        if own not in self._answers:
            with self.engine(family, None) as llm:
                self._answers[own] = greedy(llm, PROMPTS, TOKENS)
        return self._answers[own]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Targets:
    return Targets(tmp_path_factory.mktemp("mimo"))


@pytest.fixture(scope="module", params=FAMILIES)
def drafting(request: pytest.FixtureRequest, targets: Targets) -> Iterator[Drafting]:
    family: str = request.param
    if family not in installed_release().families:
        pytest.skip(f"the adapter of this release has no {family}")
    expected = targets.answers(family)
    with recorded_log() as log, targets.engine(family, "eagle_mrv2") as llm:
        yield Drafting(family, llm, log, expected)


def test_the_start_is_announced_once(drafting: Drafting) -> None:
    (line,) = (line for line in drafting.log if "drafts on vLLM" in line)
    assert f"adapter {installed_release().name}, family {drafting.family}, K={K}," in line
    active = line.partition("active beyond this release: ")[2].split(", ")
    assert "draft_top_k_top_p" in active
    assert not {"local_argmax", "two_stage_argmax"}.intersection(active), "one rank, and drafts are sampled"
    if not has_cuda():
        assert not {"one_draft_graph", "row_products", "single_token_attention"}.intersection(active)
        assert drafting.log == [line]


def test_greedy_text_slots_and_acceptance(drafting: Drafting) -> None:
    acceptance = Acceptance(drafting.llm)
    with recorded_slots(speculator_of(drafting.llm)) as right:
        assert greedy(drafting.llm, PROMPTS, TOKENS) == drafting.expected
    # Of the decodes of every draft phase too, whose keys and values are the first thing that stale metadata spoils.
    assert right
    assert all(right)
    assert len(acceptance.by_position) == K
    assert acceptance.by_position[0] > 0.3
    assert acceptance.length > 1.4


def test_sampling_stores_the_logits_of_every_step(drafting: Drafting) -> None:
    speculator, unwritten = speculator_of(drafting.llm), 123.0
    speculator.draft_logits.fill_(unwritten)
    sampled = greedy(drafting.llm, PROMPTS[:3], 8, temperature=0.8, seed=3)
    assert [len(tokens) for tokens in sampled] == [8] * 3
    written = (speculator.draft_logits != unwritten).any(dim=-1)
    assert int(written[:, 0].sum()) == 3
    assert bool((written == written[:, :1]).all())


def test_max_seq_len_of_the_draft_is_the_batchs(drafting: Drafting) -> None:
    seen = recorded_max_seq_lens(speculator_of(drafting.llm))
    greedy(drafting.llm, PROMPTS[:1], 8)
    prompt = len(drafting.llm.get_tokenizer().encode(PROMPTS[0]))
    assert prompt + K < max(seen) <= prompt + 8 + 2 * (K + 1)
