"""``draft_length: auto``: the number of draft tokens is chosen at run time, and the output does not depend on it."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
import torch
from support import (
    Acceptance,
    chosen_draft_lengths,
    engine,
    engine_arguments,
    greedy,
    has_cuda,
    held_out_prompts,
    random_draft_lengths,
    recorded_log,
)

from vllm_eagle_mrv2.draft_length.chooser import group_of
from vllm_eagle_mrv2.draft_length.notes import GraphTime
from vllm_eagle_mrv2.drafting.graphs import DraftGraphs
from vllm_eagle_mrv2.patches.draft_length import chooser_of
from vllm_eagle_mrv2.telemetry import counters

from .test_behaviours import check_follows_the_target, sampled_and_ranks
from .test_dynamic_draft_length import (  # noqa: F401
    asynchronous_on_a_cpu,
    recorded_drafts,
    recorded_verifications,
    schedule,
)
from .test_top_k_top_p import FILTERS, stock_filters_by_torch  # noqa: F401

K = 3
TOKENS = 16
PROMPTS = held_out_prompts(4)
AUTO = {"draft_length": "auto"}
ORDERS = pytest.mark.parametrize("async_scheduling", [True, False], ids=["asynchronous", "synchronous"])


@pytest.mark.smoke
@ORDERS
def test_output_does_not_depend_on_it(async_scheduling: bool, plain: list[list[int]]) -> None:
    with (
        engine("eagle_mrv2", k=K, options=AUTO, async_scheduling=async_scheduling) as llm,
        chosen_draft_lengths(random_draft_lengths(K)) as taken,
        recorded_drafts(llm) as drafts,
        recorded_verifications(llm) as verified,
    ):
        assert greedy(llm, PROMPTS, TOKENS) == plain
        # What was chosen is drafted, and what is verified varies as well.
        assert [length for _, length, _ in drafts][: len(taken)] == taken[: len(drafts)]
        assert set(taken) == set(range(K + 1))
        assert len({number for _, number in verified}) > 2
        assert all(passes == max(length, 1) for _, length, passes in drafts)


def test_drafts_are_as_good_after_iterations_without(plain: list[list[int]]) -> None:
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


ABORTS: tuple[dict[int, set[int]], ...] = ({3: {1}, 5: {3, 6}, 11: {4}}, {5: set(range(8))})
"""Requests to abort before a step: some that run and one that waits, then all at once."""


@ORDERS
def test_aborted_requests(async_scheduling: bool, plain: list[list[int]]) -> None:
    """The others go on, and new ones take the rows and blocks."""
    arguments: dict[str, Any] = {"async_scheduling": async_scheduling, "max_num_seqs": 4}
    with (
        engine("eagle_mrv2", k=K, options=AUTO, **arguments) as llm,
        chosen_draft_lengths(random_draft_lengths(K)) as taken,
    ):
        for aborted in ABORTS:
            left = set(range(8)).difference(*aborted.values())
            assert greedy_but(llm, PROMPTS * 2, aborted) == {number: plain[number % 4] for number in left}
            assert set(taken) == set(range(K + 1))
        assert greedy(llm, PROMPTS, TOKENS) == plain


def greedy_but(llm: Any, prompts: list[str], aborted: dict[int, set[int]]) -> dict[int, list[int]]:
    """Greedy token ids of the prompts by number, but for those that are aborted before a step."""
    from vllm import SamplingParams

    core = llm.llm_engine
    for number, prompt in enumerate(prompts):
        core.add_request(str(number), prompt, SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True))
    finished: dict[int, list[int]] = {}
    for step in itertools.count():
        core.abort_request([str(number) for number in aborted.get(step, ())])
        if not core.has_unfinished_requests():
            return finished
        for output in core.step():
            if output.finished:
                finished[int(output.request_id.split("-")[0])] = list(output.outputs[0].token_ids)
    raise AssertionError


SENTENCE = r"[A-Z][a-z]{2,7}( [a-z]{2,7}){8,12}\."
KINDS = ["a list of integers", "a list of strings", "a tuple of integers and of strings"]
TYPES: dict[str, Any] = {
    "name": {"type": "string", "maxLength": 12},
    "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 3, "maxItems": 5},
}
OBJECT = {"type": "object", "properties": TYPES, "required": list(TYPES), "additionalProperties": False}


def structured(llm: Any) -> list[str]:
    """Greedy texts: an object, a sentence, a kind, and one in which everything is allowed, for two prompts each."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    grammars = ({"json": OBJECT}, {"regex": SENTENCE}, {"choice": KINDS}, None)
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=80,
            structured_outputs=None if allowed is None else StructuredOutputsParams(**allowed),
        )
        for allowed in grammars
    ]
    with pytest.MonkeyPatch.context() as patch:
        if not has_cuda():  # where 0.27 pins memory all the same
            tensor = torch.tensor
            patch.setattr(torch, "tensor", lambda *args, pin_memory=False, **kwargs: tensor(*args, **kwargs))
        outputs = llm.generate(held_out_prompts(8), params * 2, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


@pytest.fixture(scope="module")
def valid() -> list[str]:
    """Structured output without speculation."""
    with engine(None) as llm:
        texts = structured(llm)
    for text, sentence, kind in (texts[:3], texts[4:7]):
        assert set(json.loads(text)) == set(TYPES)
        assert re.fullmatch(SENTENCE, sentence)
        assert kind in KINDS
    return texts


@ORDERS
def test_structured_output(async_scheduling: bool, valid: list[str]) -> None:
    """As many drafts are masked as are verified."""
    with (
        engine("eagle_mrv2", k=K, options=AUTO, async_scheduling=async_scheduling) as llm,
        chosen_draft_lengths(random_draft_lengths(K)) as taken,
    ):
        acceptance = Acceptance(llm)
        assert structured(llm) == valid
        assert acceptance.length > 1.3
        assert set(taken) == set(range(K + 1))


SAMPLED: dict[str, dict[str, Any]] = {
    "greedy drafts": {"speculative_config": engine_arguments("eagle_mrv2", k=K)["speculative_config"]},
    "probabilistic drafts": {},
    "top-k and top-p": FILTERS | {"async_scheduling": True},
}


@pytest.mark.parametrize("case", SAMPLED)
def test_sampled_output_follows_the_target(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of a step are far from those of the next, which a rejection sampler must not take for them."""
    from vllm.model_executor.models.llama_eagle import EagleLlamaForCausalLM as Head

    compute_logits, heats = Head.compute_logits, itertools.cycle([0.5, 2.5])
    monkeypatch.setattr(Head, "compute_logits", lambda *given: compute_logits(*given) * next(heats))
    with chosen_draft_lengths(random_draft_lengths(K)) as taken:
        places = sampled_and_ranks(AUTO, prompts=32, **SAMPLED[case])
    assert set(taken) == set(range(K + 1))
    check_follows_the_target(places)


def test_other_numbers_are_tried() -> None:
    """Whatever an earlier engine of this process was to hold, and counted."""
    counters.share_folder()
    cells = counters.DraftCounter.of_rank(0).cells
    cells[counters.HELD], cells[counters.EAGER] = 1 + K, 10**9
    with engine("eagle_mrv2", k=K, options=AUTO) as llm, recorded_drafts(llm) as drafts:
        texts = [greedy(llm, PROMPTS[:1], 150) for _ in range(2)]
        assert texts[0] == texts[1]
        assert len({length for _, length, _ in drafts}) > 1
        assert cells[counters.EAGER] < 10**9


@pytest.mark.smoke
def test_what_graphs_take_reaches_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftGraphs, "times", lambda self: [GraphTime(1, length, 0.01) for length in range(K + 1)])
    with engine("eagle_mrv2", k=K, options=AUTO) as llm:
        chooser = chooser_of(llm.llm_engine.engine_core.engine_core.scheduler)
        assert chooser is not None
        assert set(chooser._times) == {group_of(1)}
        assert len(greedy(llm, PROMPTS[:1], TOKENS)[0]) == TOKENS


def test_a_schedule_of_the_users_own_rules(plain: list[list[int]]) -> None:
    with recorded_log() as log, engine("eagle_mrv2", k=K, options=AUTO, speculative=schedule(2, 2)) as llm:
        assert greedy(llm, PROMPTS, TOKENS) == plain
    assert any("does not choose the number of draft tokens, as num_speculative_tokens_per" in line for line in log)
