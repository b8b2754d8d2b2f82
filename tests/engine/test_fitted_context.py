"""Contexts that vLLM fits to the memory of the KV cache once the speculator is made."""

from __future__ import annotations

import pytest
from support import engine, greedy, held_out_prompts, runner_of, speculator_of

pytestmark = pytest.mark.engine

K = 3


def test_drafts_keep_to_a_context_fitted_to_the_memory() -> None:
    with engine("eagle_mrv2", k=K, max_model_len=-1, max_num_seqs=1, kv_cache_memory_bytes=2**21) as llm:
        limit = llm.llm_engine.model_config.max_model_len
        speculator = speculator_of(llm)
        assert speculator.max_model_len == speculator.drafter.loop.config.max_model_len == limit
        assert limit < speculator.draft_model_config.hf_config.max_position_embeddings
        # vLLM 0.27 counts the block that no request gets, and a request that needs it waits for ever.
        cache, prompts = runner_of(llm).vllm_config.cache_config, held_out_prompts(1)
        room = (cache.num_gpu_blocks - 1) * cache.block_size - K
        prompt = len(llm.get_tokenizer().encode(prompts[0]))
        (tokens,) = greedy(llm, prompts, max_tokens=min(limit, room) - prompt)
        assert len(tokens) > limit // 2
