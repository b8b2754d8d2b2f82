"""``draft_length: auto``: the number of draft tokens is chosen at run time, and the output does not depend on it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from support import (
    Acceptance,
    chosen_draft_lengths,
    engine,
    greedy,
    held_out_prompts,
    random_draft_lengths,
    recorded_log,
)

from .test_dynamic_draft_length import (  # noqa: F401
    asynchronous_on_a_cpu,
    plain,
    recorded_drafts,
    recorded_verifications,
    schedule,
)

K = 3
TOKENS = 16
PROMPTS = held_out_prompts(4)
AUTO = {"draft_length": "auto"}
ORDERS = pytest.mark.parametrize("async_scheduling", [True, False], ids=["asynchronous", "synchronous"])


@ORDERS
def test_output_does_not_depend_on_it(async_scheduling: bool, plain: list[list[int]]) -> None:  # noqa: F811
    with (
        engine("eagle_mrv2", k=K, options=AUTO, async_scheduling=async_scheduling) as llm,
        chosen_draft_lengths(random_draft_lengths(K)) as taken,
        recorded_drafts(llm) as drafts,
        recorded_verifications(llm) as verified,
    ):
        assert greedy(llm, PROMPTS, TOKENS) == plain
        # What was chosen is drafted, and no more is verified than was drafted.
        assert [length for _, length, _ in drafts][: len(taken)] == taken[: len(drafts)]
        assert set(taken) == set(range(K + 1))
        assert len({number for _, number in verified}) > 2
        assert all(passes == max(length, 1) for _, length, passes in drafts)


def test_drafts_are_as_good_after_iterations_without(plain: list[list[int]]) -> None:  # noqa: F811
    """An iteration that drafts nothing keeps the draft's keys and values."""
    lengths = {}
    for name, options, numbers in (
        ("constant", {}, itertools.repeat(1)),
        ("chosen", AUTO, itertools.cycle([1, 0, 0])),
    ):
        with engine("eagle_mrv2", k=1, options=options) as llm, chosen_draft_lengths(numbers):
            acceptance = Acceptance(llm)
            assert greedy(llm, PROMPTS, TOKENS) == plain
            lengths[name] = acceptance.by_position[0]
    assert lengths["chosen"] == pytest.approx(lengths["constant"], abs=0.12)


def test_many_requests_come_and_go() -> None:
    """Preemption, cached prefixes, and requests of several lengths."""
    prompts = held_out_prompts(12)
    arguments: dict[str, Any] = {"enable_prefix_caching": True, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    with engine(None, **arguments) as llm:
        wanted = greedy(llm, prompts, 24)
    arguments["num_gpu_blocks_override"] = 20
    with (
        engine("eagle_mrv2", k=K, options=AUTO, **arguments) as llm,
        chosen_draft_lengths(random_draft_lengths(K, seed=1)),
    ):
        for _ in range(2):
            assert greedy(llm, prompts, 24) == wanted


def test_other_numbers_are_tried() -> None:
    with engine("eagle_mrv2", k=K, options=AUTO) as llm, recorded_drafts(llm) as drafts:
        texts = [greedy(llm, PROMPTS[:1], 150) for _ in range(2)]
        assert texts[0] == texts[1]
        assert len({length for _, length, _ in drafts}) > 1


def test_a_schedule_of_the_users_own_rules(plain: list[list[int]]) -> None:  # noqa: F811
    with recorded_log() as log, engine("eagle_mrv2", k=K, options=AUTO, speculative=schedule(2, 2)) as llm:
        assert greedy(llm, PROMPTS, TOKENS) == plain
    assert any("does not choose the number of draft tokens, as num_speculative_tokens_per" in line for line in log)
