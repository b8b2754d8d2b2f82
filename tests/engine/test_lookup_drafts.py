"""``lookup_drafts``: drafts from a request's own text, and the output does not depend on them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lookups import check
from support import chosen_draft_lengths, engine, held_out_prompts, random_draft_lengths

from vllm_eagle_mrv2.drafting import loop

from .test_behaviours import check_follows_the_target, sampled_and_ranks

K = 5
TOKENS = 90
ON = {"lookup_drafts": True}
PROMPTS = held_out_prompts(5)


@pytest.mark.parametrize("family", [pytest.param("eagle", marks=pytest.mark.smoke), "eagle3"])
def test_drafts_go_on_as_the_text_did_before(family: str, plain: list[list[int]]) -> None:
    with engine("eagle_mrv2", family=family, k=K, options=ON) as llm:
        check(llm, PROMPTS, plain)


def test_requests_come_and_go(plain: list[list[int]]) -> None:
    """Preemption, chunks of prompts, and prompts whose beginning is cached and never computed."""
    few = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "num_gpu_blocks_override": 30}
    with engine("eagle_mrv2", k=K, options=ON, enable_prefix_caching=True, **few) as llm:
        check(llm, PROMPTS, plain)
        check(llm, PROMPTS, plain)


def test_with_a_chosen_number(plain: list[list[int]]) -> None:
    options = ON | {"draft_length": "auto"}
    with engine("eagle_mrv2", k=K, options=options) as llm, chosen_draft_lengths(random_draft_lengths(K)):
        check(llm, PROMPTS, plain)


def test_sampled_output_follows_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where drafts are drawn at random, and what was found is any token of the text."""
    draw = torch.Generator().manual_seed(0)

    def find(buffers: Any, texts: Any, num_rows: int) -> None:
        for row, request in enumerate(buffers.idx_mapping[:num_rows].tolist()):
            places = torch.randint(max(int(texts.lengths[request]), 1), texts.found.shape[1:], generator=draw)
            texts.found[row] = texts.tokens[request, places]
            if places[0] % 2:
                buffers.draft_tokens[row, 0] = buffers.input_ids[row] = texts.found[row, 0]
            else:
                texts.found[row, 0] = -1  # the first draft stays the head's

    monkeypatch.setattr(loop, "look_up_drafts", find)
    check_follows_the_target(sampled_and_ranks(ON, prompts=32))


def test_a_single_draft(plain: list[list[int]]) -> None:
    with engine("eagle_mrv2", k=1, options=ON) as llm:
        check(llm, PROMPTS, plain)
