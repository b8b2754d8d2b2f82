"""Contexts that vLLM fits to the memory of the KV cache once the speculator is made."""

from __future__ import annotations

import pytest
from support import engine, greedy, held_out_prompts, speculator_of

pytestmark = pytest.mark.engine


def test_drafts_keep_to_a_context_fitted_to_the_memory() -> None:
    with engine("eagle_mrv2", max_model_len=-1, max_num_seqs=1, kv_cache_memory_bytes=2**21) as llm:
        limit = llm.llm_engine.model_config.max_model_len
        speculator = speculator_of(llm)
        assert speculator.max_model_len == speculator.loop.config.max_model_len == limit
        assert limit < speculator.draft_model_config.hf_config.max_position_embeddings
        (tokens,) = greedy(llm, held_out_prompts(1), max_tokens=limit)
        assert len(tokens) > limit // 2
