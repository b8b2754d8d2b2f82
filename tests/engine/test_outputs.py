"""The same text comes out: greedy equality with the run without speculation, in float32, token by token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support import Acceptance, engine, greedy, held_out_prompts, speculator_of

PROMPTS = 24
TOKENS = 24


@pytest.fixture(scope="module")
def plain() -> Iterator[dict[str, list[int]]]:
    """Greedy continuations without speculation, by prompt."""
    prompts = held_out_prompts(PROMPTS)
    with engine(None) as llm:
        yield dict(zip(prompts, greedy(llm, prompts, TOKENS), strict=True))


@pytest.fixture(scope="module")
def stock_acceptance() -> dict[str, tuple[float, list[list[int]]]]:
    """Acceptance length and output of the stock speculator, by family."""
    measured = {}
    for family in ("eagle", "eagle3"):
        with engine(family, family=family) as llm:
            assert type(speculator_of(llm)).__module__.startswith("vllm.")
            acceptance = Acceptance(llm)
            output = greedy(llm, held_out_prompts(8), TOKENS)
            measured[family] = (acceptance.length, output)
    return measured


@pytest.mark.parametrize("family", ["eagle", "eagle3"])
def test_dozens_of_prompts(
    family: str, plain: dict[str, list[int]], stock_acceptance: dict[str, tuple[float, list[list[int]]]]
) -> None:
    with engine("eagle_mrv2", family=family) as llm:
        assert type(speculator_of(llm)).__name__ == "EagleMRV2Speculator"
        acceptance = Acceptance(llm)
        outputs = greedy(llm, list(plain)[:8], TOKENS)
        length = acceptance.length
        outputs += greedy(llm, list(plain)[8:], TOKENS)
    assert outputs == list(plain.values())
    assert length >= stock_acceptance[family][0] - 0.02
    assert length > 1.8


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_number_of_draft_tokens(k: int, plain: dict[str, list[int]]) -> None:
    prompts = list(plain)[:4]
    with engine("eagle_mrv2", k=k) as llm:
        acceptance = Acceptance(llm)
        assert greedy(llm, prompts, TOKENS) == [plain[prompt] for prompt in prompts]
        assert len(acceptance.by_position) == k
        assert acceptance.by_position[0] > 0.4


CASES: dict[str, dict[str, Any]] = {
    # Prompts are longer than a step's token budget: prefills in chunks, beside requests that decode.
    "chunked prefill in mixed batches": {"max_num_batched_tokens": 24, "max_num_seqs": 3},
    "more requests than rows": {"max_num_seqs": 2},
    "one row": {"max_num_seqs": 1},
    "prefix caching": {"enable_prefix_caching": True},
    "async scheduling": {"async_scheduling": True},
    "synchronous scheduling": {"async_scheduling": False},
}


@pytest.mark.parametrize("case", CASES)
def test_ways_of_scheduling(case: str, plain: dict[str, list[int]]) -> None:
    prompts = list(plain)[:6]
    with engine("eagle_mrv2", **CASES[case]) as llm:
        assert greedy(llm, prompts, TOKENS) == [plain[prompt] for prompt in prompts]
        # With cached prefixes the second time.
        assert greedy(llm, prompts[::-1], TOKENS) == [plain[prompt] for prompt in prompts[::-1]]


def test_preemption_and_resumption(plain: dict[str, list[int]]) -> None:
    prompts = list(plain)[:6]
    with engine("eagle_mrv2", num_gpu_blocks_override=8, block_size=32, max_model_len=128) as llm:
        assert greedy(llm, prompts, TOKENS) == [plain[prompt] for prompt in prompts]
        preempted = [metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions"]
    assert sum(preempted) > 0


def test_requests_that_end_at_max_model_len() -> None:
    prompts = held_out_prompts(3)
    limit: dict[str, Any] = {"max_model_len": 80, "max_num_batched_tokens": 128}
    with engine(None, **limit) as llm:
        expected = greedy(llm, prompts, max_tokens=100)
        lengths = [len(llm.get_tokenizer().encode(prompt)) for prompt in prompts]
    with engine("eagle_mrv2", k=5, **limit) as llm:
        assert greedy(llm, prompts, max_tokens=100) == expected
    assert [prompt + len(output) for prompt, output in zip(lengths, expected, strict=True)] == [80] * 3


def test_aborted_requests(plain: dict[str, list[int]]) -> None:
    from vllm import SamplingParams

    prompts = list(plain)[:4]
    with engine("eagle_mrv2") as llm:
        core = llm.llm_engine
        for row, prompt in enumerate(prompts):
            core.add_request(str(row), prompt, SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True))
        finished: dict[str, list[int]] = {}
        for step in range(400):
            if step == 3:
                core.abort_request(["1", "2"])
            for output in core.step():
                if output.finished:
                    finished[output.request_id.split("-")[0]] = list(output.outputs[0].token_ids)
            if not core.has_unfinished_requests():
                break
        # The rows of the aborted requests are free for new ones.
        again = greedy(llm, prompts, TOKENS)
    assert finished["0"] == plain[prompts[0]]
    assert finished["3"] == plain[prompts[3]]
    assert again == [plain[prompt] for prompt in prompts]
