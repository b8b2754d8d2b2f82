"""Captured sizes on a GPU: batches with prefills have CUDA graphs, and the output stays the same."""

from __future__ import annotations

from typing import Any

import pytest
from support import engine, greedy, held_out_prompts, runner_of, speculator_of

TOKENS = 16


def outputs(**arguments: Any) -> tuple[int, list[list[int]]]:
    """Tokens of the largest graph of an engine, and what it makes of eight prompts of 150 tokens.

    In 16 bit two tokens may nearly tie, and attention sums up otherwise in batches that may have a graph.
    """
    with engine("eagle_mrv2", dtype="float32", max_num_batched_tokens=2048, **arguments) as llm:
        largest = max(llm.llm_engine.vllm_config.compilation_config.cudagraph_capture_sizes)
        tokenizer = llm.get_tokenizer()
        texts = [tokenizer.encode(prompt * 20)[:150] for prompt in held_out_prompts(8)]
        prompts: Any = [{"prompt_token_ids": text} for text in texts]
        return largest, greedy(llm, prompts, TOKENS)


def test_batches_with_prefills_have_graphs() -> None:
    without, expected = outputs(max_cudagraph_capture_size=512)
    largest, found = outputs()
    assert without == 512
    assert largest == 2048
    assert found == expected


def test_prefills_are_not_split_beyond_vllms_own_sizes() -> None:
    """Of eight requests vLLM captures 64 tokens; FlashAttention can split up to that, and decodes of any number."""
    with engine("eagle_mrv2", max_num_batched_tokens=2048) as llm:
        builders = [
            builder
            for groups in (runner_of(llm).attn_groups, speculator_of(llm).attn_groups)
            for group in groups[0]
            for builder in group.metadata_builders
        ]
        if not builders[0].max_num_splits:
            pytest.skip("this FlashAttention splits in no graph")
        batches: dict[bool, set[int]] = {True: set(), False: set()}
        for builder in builders:

            def build(*args: Any, original: Any = builder.build, **kwargs: Any) -> Any:
                built = original(*args, **kwargs)
                batches[built.num_actual_tokens > 64].add(built.max_num_splits)
                return built

            builder.build = build
        prompts: Any = [{"prompt_token_ids": [5 + number] * 150} for number in range(8)]
        greedy(llm, prompts, TOKENS)
    assert batches == {True: {0}, False: {builders[0].max_num_splits}}
