"""``num_speculative_tokens_per_batch_size``: what is drafted is what the scheduler will have verified (#51510)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from packaging.version import Version
from support import Acceptance, engine, greedy, held_out_prompts, runner_of, speculator_of

from vllm_eagle_mrv2.config.behaviours import Behaviour
from vllm_eagle_mrv2.releases import installed_release, installed_version

K = 3
TOKENS = 16
FEW, MANY = 2, 4  # requests of a batch
PROMPTS = held_out_prompts(MANY)
SCHEDULES = {"fewer": (K, 1), "none": (K, 0), "more": (1, K)}  # of few requests, of many

SUPPLIER = installed_release().supplier(Behaviour.DYNAMIC_DRAFT_LENGTH, installed_version())
pytestmark = pytest.mark.skipif(SUPPLIER == "-", reason="this vLLM has no schedule of draft tokens")


def schedule(of_few: int, of_many: int) -> dict[str, Any]:
    return {"num_speculative_tokens_per_batch_size": [(1, FEW, of_few), (FEW + 1, 8, of_many)]}


@pytest.fixture(autouse=True)
def asynchronous_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM switches asynchronous scheduling off on CPUs; it runs there all the same."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        asked = vllm_config.scheduler_config.async_scheduling
        original(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = asked

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(check_and_update_config))


@contextmanager
def recorded_drafts(llm: Any) -> Iterator[list[tuple[int, int, int]]]:
    """Of every draft phase: its requests, the tokens to draft for each, and the forward passes that it took."""
    drafts: list[tuple[int, int, int]] = []
    drafter = speculator_of(llm).drafter
    passes = 0

    def run(*args: Any, original: Any = drafter.adapter.run_draft_model, **kwargs: Any) -> Any:
        nonlocal passes
        passes += 1
        return original(*args, **kwargs)

    def propose(batch: Any, original: Any = drafter.loop.propose) -> Any:
        nonlocal passes
        passes = 0
        drafted = original(batch)
        assert drafted.shape == (batch.num_reqs, K)
        drafts.append((batch.num_reqs, batch.num_draft_tokens, passes))
        return drafted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter.adapter, "run_draft_model", run)
        patch.setattr(drafter.loop, "propose", propose)
        yield drafts


@contextmanager
def recorded_verifications(llm: Any) -> Iterator[list[tuple[int, int]]]:
    """Of every request of every step: the requests of the step, and its drafts that are verified."""
    verified: list[tuple[int, int]] = []
    runner = runner_of(llm)

    def execute_model(output: Any, *args: Any, original: Any = runner.execute_model, **kwargs: Any) -> Any:
        scheduled = output.num_scheduled_tokens
        verified.extend((len(scheduled), len(output.scheduled_spec_decode_tokens.get(req, ()))) for req in scheduled)
        return original(output, *args, **kwargs)

    runner.execute_model = execute_model
    try:
        yield verified
    finally:
        del runner.execute_model


@pytest.mark.parametrize("async_scheduling", [True, False], ids=["asynchronous", "synchronous"])
@pytest.mark.parametrize("case", SCHEDULES)
def test_the_batch_size_decides(case: str, async_scheduling: bool, plain: list[list[int]]) -> None:
    of_few, of_many = SCHEDULES[case]
    with engine("eagle_mrv2", k=K, speculative=schedule(of_few, of_many), async_scheduling=async_scheduling) as llm:
        for prompts in (PROMPTS, PROMPTS[:FEW], PROMPTS[:1]):
            wanted = of_many if len(prompts) > FEW else of_few
            with recorded_drafts(llm) as drafts, recorded_verifications(llm) as verified:
                assert greedy(llm, prompts, TOKENS) == plain[: len(prompts)]
            # Requests of different lengths end one after the other, and the batch shrinks.
            assert {(num_reqs > FEW, drafted) for num_reqs, drafted, _ in drafts} <= {
                (False, of_few),
                (True, of_many),
            }
            assert (len(prompts), wanted, max(wanted, 1)) in drafts
            # One draft prefill, which keeps the draft's keys and values, and a decode for each further token.
            assert all(passes == max(drafted, 1) for _, drafted, passes in drafts)
            # What is verified was drafted: as many as of the batch before, or fewer near the end.
            full = [number for num_reqs, number in verified if num_reqs == len(prompts)]
            assert max(full) == wanted


def test_acceptance_is_that_of_a_constant_number(plain: list[list[int]]) -> None:
    """Drafts of a varying number are as good as others: what is left out spoils nothing that comes later."""
    lengths = {}
    for name, speculative, k in (("constant", {}, 1), ("dynamic", schedule(1, 1), K)):
        with engine("eagle_mrv2", k=k, speculative=speculative) as llm:
            acceptance = Acceptance(llm)
            assert greedy(llm, PROMPTS, TOKENS) == plain
            lengths[name] = acceptance.length
    assert lengths["dynamic"] == pytest.approx(lengths["constant"], abs=0.05)


@pytest.mark.skipif(installed_version() >= Version("0.32"), reason="vLLM's own from 0.32 on")
def test_stock_drafts_all() -> None:
    """What the behaviour is for: below 0.32 vLLM's speculator runs K times, whatever will be verified."""
    with engine("eagle", k=K, speculative=schedule(K, 1), async_scheduling=True) as llm:
        speculator = speculator_of(llm)
        drafts: list[tuple[int, int]] = []
        passes = 0

        def forward(*args: Any, original: Any = speculator.model.forward, **kwargs: Any) -> Any:
            nonlocal passes
            passes += 1
            return original(*args, **kwargs)

        def propose(batch: Any, *args: Any, original: Any = speculator.propose, **kwargs: Any) -> Any:
            nonlocal passes
            passes = 0
            drafted = original(batch, *args, **kwargs)
            drafts.append((batch.num_reqs, passes))
            return drafted

        speculator.model.forward, speculator.propose = forward, propose
        with recorded_verifications(llm) as verified:
            greedy(llm, PROMPTS, TOKENS)
        assert {passes for _, passes in drafts} == {K}
        assert (MANY, K) in drafts
        assert max(number for num_reqs, number in verified if num_reqs == MANY) == 1
