"""Captured sizes on a GPU: batches with prefills have CUDA graphs, and the output stays the same."""

from __future__ import annotations

from typing import Any

from support import engine, greedy, held_out_prompts

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
