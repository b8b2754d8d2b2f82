"""Dummy runs, which an idle data-parallel rank makes: no live request's keys, values and draft logits change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import engine, greedy, held_out_prompts, runner_of, speculator_of

K = 3
TOKENS = 16
PROMPTS = held_out_prompts(3)


def draft_state(speculator: Any) -> list[torch.Tensor]:
    """Copies of the draft's keys and values, and of its logits, as bytes: unwritten memory may hold NaN."""
    layers = speculator.vllm_config.compilation_config.static_forward_context
    caches: list[torch.Tensor] = []
    for name in speculator.draft_attn_layer_names:
        cache = layers[name].kv_cache
        caches.extend([cache] if isinstance(cache, torch.Tensor) else cache)
    return [tensor.clone().contiguous().view(torch.uint8) for tensor in (*caches, speculator.draft_logits)]


@pytest.mark.parametrize("num_requests", [1, 4])
def test_live_requests_keep_their_state(num_requests: int) -> None:
    from vllm import SamplingParams

    probabilistic = {"draft_sample_method": "probabilistic"}
    with engine("eagle_mrv2", k=K, speculative=probabilistic) as llm:
        expected = greedy(llm, PROMPTS, TOKENS)
        core, runner, speculator = llm.llm_engine, runner_of(llm), speculator_of(llm)
        for row, prompt in enumerate(PROMPTS):
            core.add_request(str(row), prompt, SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True))
        finished: dict[str, list[int]] = {}
        for step in range(200):
            if step in (2, 4):
                before = draft_state(speculator)
                assert any(bool(tensor.any()) for tensor in before)
                runner._dummy_run(num_requests * (K + 1), uniform_decode=True)
                assert all(torch.equal(*pair) for pair in zip(before, draft_state(speculator), strict=True))
            for output in core.step():
                if output.finished:
                    finished[output.request_id.split("-")[0]] = list(output.outputs[0].token_ids)
            if not core.has_unfinished_requests():
                break
        assert [finished[str(row)] for row in range(len(PROMPTS))] == expected
