"""Each behaviour that shows without graphs: right when on, and wrong in the way that it prevents when off."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from packaging.version import Version
from release_under_test import release
from scipy import stats
from support import (
    PAIR,
    Acceptance,
    engine,
    greedy,
    held_out_prompts,
    recorded_log,
    recorded_max_seq_lens,
    recorded_slots,
    speculator_of,
)

from vllm_eagle_mrv2.config.behaviours import Behaviour

TEMPERATURE = 0.9


def sampled(
    options: dict[str, Any],
    prompts: int = 64,
    top_k: int = 0,
    top_p: float = 1.0,
    method: str = "standard",
    **overrides: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [n] sampled at `TEMPERATURE` with probabilistic drafts, and the target's own distribution of each [n, V].

    The first token of each request is left out: it comes from the prompt, with no draft.
    """
    from transformers import AutoModelForCausalLM
    from vllm import SamplingParams

    texts = (held_out_prompts(16) * 4)[:prompts]
    params = [
        SamplingParams(temperature=TEMPERATURE, top_k=top_k, top_p=top_p, max_tokens=16, ignore_eos=True, seed=seed)
        for seed in range(prompts)
    ]
    with engine(
        "eagle_mrv2",
        speculative={"draft_sample_method": "probabilistic", "rejection_sample_method": method},
        options=options,
        max_num_seqs=64,
        **overrides,
    ) as llm:
        acceptance = Acceptance(llm)
        outputs = llm.generate(texts, params, use_tqdm=False)
        # A probabilistic drafter that is never accepted would pass the test without being tested.
        assert acceptance.by_position[0] > 0.2
    target = AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32)
    tokens, probabilities = [], []
    for output in outputs:
        generated = torch.tensor(list(output.outputs[0].token_ids))
        ids = torch.tensor([*output.prompt_token_ids, *generated.tolist()])
        with torch.inference_mode():
            logits = target(ids[None]).logits[0, len(output.prompt_token_ids) : -1]
        tokens.append(generated[1:])
        probabilities.append(kept(logits / TEMPERATURE, top_k, top_p))
    return torch.cat(tokens), torch.cat(probabilities)


def kept(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Probabilities [n, V] after top-k, and top-p of what that leaves."""
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], float("-inf"))
    probabilities, order = logits.softmax(-1).sort(descending=True)
    probabilities[probabilities.cumsum(-1) - probabilities >= top_p] = 0.0
    return torch.zeros_like(logits).scatter(-1, order, probabilities / probabilities.sum(-1, keepdim=True))


def sampled_and_ranks(options: dict[str, Any], **overrides: Any) -> np.ndarray:
    """Where sampled tokens fall in the target's own distribution.

    The probability integral transform: with the tokens in order of falling probability under the target, given what
    stands before, a token's place ``F(before it) + U * p(it)`` is uniform on [0, 1] if, and only if, it was sampled
    from the target.
    """
    tokens, probabilities = sampled(options, **overrides)
    ordered, order = probabilities.sort(descending=True)
    rank = (order == tokens[:, None]).int().argmax(-1, keepdim=True)
    own = ordered.gather(1, rank)[:, 0]
    before = ordered.cumsum(-1).gather(1, rank)[:, 0] - own
    place = before + torch.rand(len(tokens), generator=torch.Generator().manual_seed(0)) * own
    return place.clamp(0, 1).numpy()


def uniform_p_value(places: np.ndarray) -> float:
    counts, _ = np.histogram(places, bins=20, range=(0, 1))
    return float(stats.chisquare(counts).pvalue)


def deviation(places: np.ndarray) -> float:
    """Of the mean place from that of the target's samples, in standard deviations; unlikely tokens have high places."""
    return float((places.mean() - 0.5) * np.sqrt(12 * len(places)))


def check_follows_the_target(places: np.ndarray) -> None:
    assert uniform_p_value(places) > 1e-3
    assert abs(deviation(places)) < 3.3  # one in a thousand


@pytest.mark.parametrize(("family", "method"), [("eagle", "standard"), ("eagle", "block"), ("eagle3", "block")])
def test_sampled_output_follows_the_target(family: str, method: str) -> None:
    """EAGLE-3's drafts are drawn from a vocabulary of its own."""
    check_follows_the_target(sampled_and_ranks({}, family=family, method=method))


def test_sampled_output_is_biased_without_draft_logits() -> None:
    """The rejection sampler takes the drafts for those of another distribution."""
    assert abs(deviation(sampled_and_ranks({"disable": ["draft_logits_in_replay"]}))) > 4


exact_in_the_heads_dtype = pytest.mark.skipif(
    release < Version("0.28"),
    reason="draft_logits_dtype=head is refused, as logits are stored after temperature",
)


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [("float32", torch.float32), pytest.param("head", torch.float32, marks=exact_in_the_heads_dtype)],
)
def test_draft_logits_are_stored_for_every_step(dtype: str, stored: torch.dtype) -> None:
    with engine(
        "eagle_mrv2",
        speculative={"draft_sample_method": "probabilistic"},
        options={"draft_logits_dtype": dtype},
    ) as llm:
        speculator = speculator_of(llm)
        unwritten = 123.0
        speculator.draft_logits.fill_(unwritten)
        greedy(llm, held_out_prompts(3), 8, temperature=0.8, seed=3)
        assert speculator.draft_logits.dtype == stored
        written = (speculator.draft_logits != unwritten).any(dim=-1)
        assert int(written[:, 0].sum()) == 3
        assert bool((written == written[:, :1]).all())


@exact_in_the_heads_dtype
def test_float32_draft_logits_under_a_half_precision_model() -> None:
    half: dict[str, Any] = {"dtype": "bfloat16", "speculative": {"draft_sample_method": "probabilistic"}}
    with engine("eagle_mrv2", **half) as llm:
        assert speculator_of(llm).draft_logits.dtype == torch.float32
        single = greedy(llm, held_out_prompts(2), 8, temperature=0.8, seed=3)
    with engine("eagle_mrv2", options={"draft_logits_dtype": "head"}, **half) as llm:
        assert speculator_of(llm).draft_logits.dtype == torch.bfloat16
        # The head's logits are exact in both, so that the samples are the same.
        assert greedy(llm, held_out_prompts(2), 8, temperature=0.8, seed=3) == single


def test_each_draft_step_has_metadata_of_its_own() -> None:
    late, right_slots = {}, {}
    for name, disable in (("fresh", []), ("stale", ["decode_metadata_rebuild"])):
        with engine("eagle_mrv2", k=7, options={"disable": disable}) as llm:
            acceptance = Acceptance(llm)
            with recorded_slots(speculator_of(llm)) as right:
                greedy(llm, held_out_prompts(6), 32)
            late[name] = sum(acceptance.by_position[3:])
            right_slots[name] = right
    assert all(right_slots["fresh"])
    # Of K - 1 = 6 draft decodes the first alone is right.
    assert right_slots["stale"].count(True) <= len(right_slots["stale"]) // 4
    # Later drafts read keys and values that were never written for them.
    assert late["stale"] < 0.95 * late["fresh"]


def test_max_seq_len_of_the_draft_is_the_batchs() -> None:
    seen: dict[str, set[int]] = {}
    for name, disable in (("on", []), ("off", ["actual_max_seq_len"])):
        with engine("eagle_mrv2", options={"disable": disable}) as llm:
            seen[name] = recorded_max_seq_lens(speculator_of(llm))
            tokens = greedy(llm, held_out_prompts(1), 16)
            prompt = len(llm.get_tokenizer().encode(held_out_prompts(1)[0]))
            assert len(tokens[0]) == 16
    # The longest draft starts when one token is left to sample.
    assert prompt + 3 < max(seen["on"]) <= prompt + 16 + 2 * 4
    assert seen["off"] == {256}


class Opaque:
    """What a vLLM platform of somebody else may take in the place of a dictionary."""

    def compute_hash(self) -> str:
        return "opaque"


@pytest.mark.parametrize(("additional_config", "off"), [({}, False), (Opaque(), True)])
def test_products_are_stocks_where_compiled_models_cannot_be_told_apart(additional_config: Any, off: bool) -> None:
    with recorded_log() as log, engine("eagle_mrv2", additional_config=additional_config) as llm:
        assert any("by this additional_config" in line for line in log) is off
        assert speculator_of(llm).drafter.options.enabled(Behaviour.ROW_PRODUCTS) is not off
        assert greedy(llm, held_out_prompts(1), 4)
