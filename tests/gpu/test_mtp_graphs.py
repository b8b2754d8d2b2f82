"""Captured graphs of an MTP draft: that they run, and draft what stock drafts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from mtp_model import mtp_engine, our_mtp_speculator
from support import Acceptance, greedy, held_out_prompts, speculator_of

from .test_graphs import SIZES, STOCK_SIZES, TOKENS, counted_replays

# Random weights leave little between the best two tokens, less than bfloat16 tells apart.
HALF = {"dtype": "float16"}


@pytest.mark.parametrize(("k", "least"), [(1, 1.4), (3, 1.8)])
def test_replayed_mtp_graphs_draft_what_stock_drafts(
    k: int, least: float, mtp_target: Path, record_property: Callable[[str, object], None]
) -> None:
    prompts = held_out_prompts(8)
    speculative = {"model": str(mtp_target), "num_speculative_tokens": k}
    with mtp_engine(mtp_target, {"method": "mtp", **speculative}, **HALF, compilation_config=STOCK_SIZES) as llm:
        assert type(speculator_of(llm)).__module__.startswith("vllm.")
        expected = [greedy(llm, prompts[:n], TOKENS) for n in (1, 3, 8)]
        acceptance = Acceptance(llm)
        greedy(llm, prompts, TOKENS)
        stock = acceptance.length
    with mtp_engine(mtp_target, {"method": "eagle_mrv2", **speculative}, **HALF, compilation_config=SIZES) as llm:
        with counted_replays(our_mtp_speculator(llm)) as replays:
            actual = [greedy(llm, prompts[:n], TOKENS) for n in (1, 3, 8)]
        assert actual == expected
        assert replays["prefill"] > 10
        # A replay for each draft decode, or one for all of them where the release captures them together.
        assert replays["decode"] >= min(k - 1, 1) * replays["prefill"]
        # Three requests run in the graph of four: padded rows.
        assert replays["prefill of 4"] > 0
        assert k == 1 or replays["decode of 4"] > 0
        acceptance = Acceptance(llm)
        greedy(llm, prompts, TOKENS)
        for name, value in (("family", "mtp"), ("k", k), ("stock", stock), ("eagle_mrv2", acceptance.length)):
            record_property(name, value)
        assert acceptance.length >= stock - 0.02
        assert least < acceptance.length < k + 0.95
