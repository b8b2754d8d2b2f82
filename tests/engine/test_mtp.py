"""MTP: a model that is its own draft, in float32; its MTP layer is used again for every draft token after the first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mtp_model import mtp_engine, our_mtp_speculator
from support import Acceptance, greedy, held_out_prompts, speculator_of

from vllm_eagle_mrv2.config.heads import detect_family

PROMPTS = held_out_prompts(4)
TOKENS = 16


@pytest.fixture(scope="module")
def plain(mtp_target: Path) -> list[list[int]]:
    """Greedy continuations of `PROMPTS` without speculation."""
    with mtp_engine(mtp_target, None) as llm:
        return greedy(llm, PROMPTS, TOKENS)


def speculative(method: str, k: int, model: Path | None) -> dict[str, Any]:
    return {"method": method, "num_speculative_tokens": k, **({} if model is None else {"model": str(model)})}


def test_the_family_is_read_from_the_checkpoint(mtp_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert detect_family(None, str(mtp_target)) == "mtp"
    assert detect_family(str(mtp_target), str(mtp_target)) == "mtp"
    monkeypatch.chdir(mtp_target.parent)
    assert detect_family(f"./{mtp_target.name}/", str(mtp_target)) == "mtp"
    # The MTP layer of another copy of the model, of one that is quantized otherwise for instance.
    assert detect_family(str(mtp_target), "another/target") == "mtp"


@pytest.mark.parametrize(("k", "least"), [(1, 1.5), (3, 1.8)])
def test_what_stock_drafts(k: int, least: float, mtp_target: Path, plain: list[list[int]]) -> None:
    measured = {}
    for method in ("mtp", "eagle_mrv2"):
        with mtp_engine(mtp_target, speculative(method, k, mtp_target)) as llm:
            if method == "eagle_mrv2":
                our_mtp_speculator(llm)
            else:
                assert type(speculator_of(llm)).__module__.startswith("vllm.")
            acceptance = Acceptance(llm)
            assert greedy(llm, PROMPTS, TOKENS) == plain
            measured[method] = (acceptance.length, acceptance.by_position)
    (stock, _), (ours, by_position) = measured["mtp"], measured["eagle_mrv2"]
    assert len(by_position) == k
    assert ours >= stock - 0.02
    # Drafts are accepted at every position, and rejected too.
    assert least < ours < k + 0.95
    assert all(0.1 < share < 0.95 for share in by_position)


def test_without_a_draft_model_and_with_chunked_prefills(mtp_target: Path, plain: list[list[int]]) -> None:
    # Prompts are longer than a step's token budget: prefills in chunks, beside requests that decode.
    limits = {"max_num_batched_tokens": 24, "max_num_seqs": 3}
    with mtp_engine(mtp_target, speculative("eagle_mrv2", 3, None), **limits) as llm:
        our_mtp_speculator(llm)
        acceptance = Acceptance(llm)
        assert greedy(llm, PROMPTS, TOKENS) == plain
        assert acceptance.length > 1.8


def test_the_family_can_be_forced(mtp_target: Path, plain: list[list[int]]) -> None:
    with mtp_engine(mtp_target, speculative("eagle_mrv2:mtp", 2, mtp_target)) as llm:
        our_mtp_speculator(llm)
        acceptance = Acceptance(llm)
        assert greedy(llm, PROMPTS[:3], TOKENS) == plain[:3]
        assert acceptance.length > 1.5
