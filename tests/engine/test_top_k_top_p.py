"""Probabilistic drafts under the requests' top-k and top-p."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import Acceptance, engine, held_out_prompts, speculator_of

from .test_behaviours import check_follows_the_target, sampled_and_ranks

FILTERS: dict[str, Any] = {"top_k": 20, "top_p": 0.8}
PROBABILISTIC = {"draft_sample_method": "probabilistic"}


@pytest.fixture(autouse=True)
def stock_filters_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own kernel for the target's logits does not run in Triton's interpreter."""
    from vllm.v1.sample.ops import topk_topp_sampler

    if not torch.cuda.is_available():
        monkeypatch.setattr(topk_topp_sampler, "HAS_TRITON", False)


def test_output_follows_the_target() -> None:
    """Drafts come from another distribution than the head's, and the rejection sampler is told of that one."""
    check_follows_the_target(sampled_and_ranks({}, prompts=32, **FILTERS))


def test_more_is_accepted() -> None:
    from vllm import SamplingParams

    prompts = held_out_prompts(16)
    lengths, left_out = {}, {}
    for name, disable in (("on", []), ("off", ["draft_top_k_top_p"])):
        with engine("eagle_mrv2", speculative=PROBABILISTIC, options={"disable": disable}, max_num_seqs=16) as llm:
            speculator, acceptance = speculator_of(llm), Acceptance(llm)
            params = [
                SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True, seed=n, **FILTERS) for n in range(15)
            ]
            # One request in the batch has no filters, and its drafts come from all of the vocabulary.
            params.append(SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True, seed=15))
            llm.generate(prompts, params, use_tqdm=False)
            lengths[name] = acceptance.length
            left_out[name] = torch.isinf(speculator.draft_logits).float().mean(-1)  # [requests, K]
    assert int((left_out["on"] > 0.9).all(-1).sum()) == 15
    assert int((left_out["on"] == 0.0).all(-1).sum()) == 1
    assert not left_out["off"].any()
    assert lengths["on"] > lengths["off"] + 0.1
