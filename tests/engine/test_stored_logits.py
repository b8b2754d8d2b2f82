"""Draft logits lie in the row of the request that they are of, where the rejection sampler looks for them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support import engine, has_cuda, held_out_prompts, speculator_of

pytestmark = pytest.mark.skipif(has_cuda(), reason="in 16 bit a request is sampled otherwise beside others")

TEMPERATURES = (0.5, 0.8, 1.2)


def stored_logits(llm: Any, prompts: list[str], temperatures: list[float]) -> list[tuple[list[int], torch.Tensor]]:
    """Of each request, its sampled tokens, and [n, K, V] what its row holds after each of its n draft phases."""
    from vllm import SamplingParams

    speculator = speculator_of(llm)
    logits: dict[str, list[torch.Tensor]] = {}

    def propose(batch: Any, original: Any = speculator.drafter.loop.propose) -> Any:
        drafted = original(batch)
        states = batch.source.idx_mapping_np[: batch.num_reqs]
        for name, state in zip(batch.source.req_ids, states, strict=True):
            logits.setdefault(name, []).append(speculator.draft_logits[int(state)].clone())
        return drafted

    speculator.drafter.loop.propose = propose
    try:
        params = [SamplingParams(temperature=heat, seed=7, max_tokens=10, ignore_eos=True) for heat in temperatures]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    finally:
        del speculator.drafter.loop.propose
    by_order = sorted(logits, key=lambda name: int(name.split("-")[0]))
    return [
        (list(output.outputs[0].token_ids), torch.stack(logits[name]))
        for output, name in zip(outputs, by_order, strict=True)
    ]


@pytest.mark.parametrize("family", ["eagle", "eagle3"])
def test_each_request_has_its_own(family: str) -> None:
    """A request that runs alone cannot have those of another."""
    prompts = held_out_prompts(len(TEMPERATURES))
    speculative = {"draft_sample_method": "probabilistic"}
    with engine("eagle_mrv2", family=family, speculative=speculative) as llm:
        together = stored_logits(llm, prompts, list(TEMPERATURES))
        for prompt, heat, (tokens, logits) in zip(prompts, TEMPERATURES, together, strict=True):
            ((alone, expected),) = stored_logits(llm, [prompt], [heat])
            assert tokens == alone
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    first = [logits[0] for _, logits in together]
    assert all(not torch.allclose(a, b, atol=0.5) for a, b in itertools.pairwise(first)), "could be swapped"
