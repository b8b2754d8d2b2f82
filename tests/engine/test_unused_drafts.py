"""Drafts that nobody can use are not made (#48244); the others are, and the text stays the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support import Acceptance, engine, greedy, held_out_prompts, runner_of, speculator_of

from vllm_eagle_mrv2.config.behaviours import Behaviour
from vllm_eagle_mrv2.errors import EagleMRV2Error
from vllm_eagle_mrv2.releases import installed_release, installed_version

K = 3
TOKENS = 12
CHUNK = 16  # tokens of a step
PROMPTS = [f"{first} {second}" for first, second in zip(held_out_prompts(4), held_out_prompts(8)[4:], strict=True)]
OFF = {"disable": [Behaviour.SKIP_UNUSED_DRAFTS.value]}
SUPPLIER = installed_release().supplier(Behaviour.SKIP_UNUSED_DRAFTS, installed_version())


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    with engine(None) as llm:
        assert all(len(llm.get_tokenizer().encode(prompt)) > 2 * CHUNK for prompt in PROMPTS)
        return greedy(llm, PROMPTS, TOKENS)


@contextmanager
def recorded_phases(llm: Any) -> Iterator[list[tuple[list[bool], int, int]]]:
    """Of every draft phase: whether each request can use drafts, how often the head ran, and the forward passes."""
    phases: list[tuple[list[bool], int, int]] = []
    drafter, runner = speculator_of(llm).drafter, runner_of(llm)
    calls = {"sample": 0, "run_draft_model": 0}
    useful: list[bool] = []

    def counted(name: str, original: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return original(*args, **kwargs)

        return call

    def execute_model(output: Any, *args: Any, original: Any = runner.execute_model, **kwargs: Any) -> Any:
        requests = llm.llm_engine.engine_core.engine_core.scheduler.requests
        scheduled = [requests[name] for name in output.num_scheduled_tokens]
        useful[:] = [not request.is_prefill_chunk and request.max_tokens > 1 for request in scheduled]
        return original(output, *args, **kwargs)

    def propose(batch: Any, original: Any = drafter.loop.propose) -> Any:
        calls.update(sample=0, run_draft_model=0)
        drafted = original(batch)
        phases.append((list(useful), calls["sample"], calls["run_draft_model"]))
        return drafted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "execute_model", execute_model)
        patch.setattr(drafter.loop, "propose", propose)
        patch.setattr(drafter.loop, "sample", counted("sample", drafter.loop.sample))
        patch.setattr(drafter.adapter, "run_draft_model", counted("run_draft_model", drafter.adapter.run_draft_model))
        yield phases


def check(phases: list[tuple[list[bool], int, int]]) -> None:
    """The draft's keys and values are written by every phase; where a request can use drafts, all K are made."""
    for useful, heads, passes in phases:
        assert (heads, passes) == ((K, K) if any(useful) else (0, 1)), useful


@pytest.mark.parametrize("async_scheduling", [True, False], ids=["asynchronous", "synchronous"])
@pytest.mark.parametrize("family", ["eagle", "eagle3"])
def test_chunks_and_lone_tokens(family: str, async_scheduling: bool, plain: list[list[int]]) -> None:
    limits: dict[str, Any] = {"max_num_batched_tokens": CHUNK, "max_num_seqs": 3, "async_scheduling": async_scheduling}
    with engine("eagle_mrv2", family=family, k=K, **limits) as llm:
        with recorded_phases(llm) as phases:
            acceptance = Acceptance(llm)
            assert greedy(llm, PROMPTS, TOKENS) == plain
            length = acceptance.length
            alone = sum(not any(useful) for useful, _, _ in phases)
            assert alone > 1  # chunks of the first prompt, with nothing beside them
            assert any(any(useful) and not all(useful) for useful, _, _ in phases)  # a chunk beside decodes
            check(phases)
        with recorded_phases(llm) as phases:
            assert greedy(llm, PROMPTS, 1) == [tokens[:1] for tokens in plain]
            assert phases
            assert not any(any(useful) for useful, _, _ in phases)
            check(phases)
        # What was left out spoils nothing that comes later.
        acceptance = Acceptance(llm)
        assert greedy(llm, PROMPTS, TOKENS) == plain
        assert acceptance.length == pytest.approx(length)


def test_drafts_are_as_good_as_those_after_drafted_chunks(plain: list[list[int]]) -> None:
    if SUPPLIER == "stock":
        with pytest.raises(EagleMRV2Error, match="cannot be disabled"), engine("eagle_mrv2", options=OFF):
            pass
        return
    lengths = []
    for options in ({}, OFF):
        with engine("eagle_mrv2", k=K, options=options, max_num_batched_tokens=CHUNK, max_num_seqs=3) as llm:
            acceptance = Acceptance(llm)
            with recorded_phases(llm) as phases:
                assert greedy(llm, PROMPTS, TOKENS) == plain
            lengths.append(acceptance.length)
            assert {heads for _, heads, _ in phases} == ({0, K} if options is not OFF else {K})
    assert lengths[0] == pytest.approx(lengths[1])
