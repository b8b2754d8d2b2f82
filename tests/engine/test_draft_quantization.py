"""FP8 drafts in real engines: the same output, nearly the same drafts, and weights that are loaded again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_model import mtp_engine, our_mtp_speculator, write_mtp_model
from release_under_test import PROBABILISTIC
from safetensors.torch import load_file
from support import PAIR, Acceptance, engine, greedy, held_out_prompts, recorded_log, runner_of, speculator_of

from vllm_eagle_mrv2.draft_model import fp8

FP8 = {"draft_quantization": "fp8"}
PROMPTS = held_out_prompts(16)


@pytest.fixture(autouse=True)
def weights_stay(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without oneDNN vLLM leaves the weights of linear layers as they are on a CPU."""
    from vllm import _custom_ops

    with monkeypatch.context() as patch:
        patch.setattr(_custom_ops, "_supports_onednn", False)
        yield


def drafting(llm: Any) -> tuple[list[list[int]], float]:
    acceptance = Acceptance(llm)
    return greedy(llm, PROMPTS), acceptance.length


def bits(layers: list[Any]) -> list[torch.Tensor]:
    return [layer.weight.view(torch.uint8).clone() for layer in layers]


@pytest.mark.parametrize("family", ["eagle", "eagle3"])
def test_the_same_output_and_nearly_the_same_drafts(family: str) -> None:
    with engine("eagle_mrv2", family=family) as llm:
        tokens, length = drafting(llm)
    with recorded_log() as log, engine("eagle_mrv2", family=family, options=FP8) as llm:
        assert any("draft weights fp8, " in line for line in log)
        rounded_tokens, rounded_length = drafting(llm)
        products = speculator_of(llm).drafter.products
        assert products.view_of_head.copied is (family == "eagle")  # an EAGLE-3 head has its own rows
        assert {layer.weight.dtype for layer in products.rounded} == {torch.float8_e4m3fn}
        assert len(products.rounded) == (5 if family == "eagle" else 6)
    assert rounded_tokens == tokens
    assert rounded_length == pytest.approx(length, abs=0.05)


def test_weights_that_are_loaded_again() -> None:
    """The draft's as vLLM updates those of a draft, into the memory that graphs read; the target's with its head."""
    from vllm.model_executor.model_loader.reload import layerwise

    with engine("eagle_mrv2", options=FP8) as llm:
        expected, speculator, config = drafting(llm), speculator_of(llm), runner_of(llm).vllm_config
        products = speculator.drafter.products
        layers = [*products.rounded, products.view_of_head.view]
        memory, before = [layer.weight.data_ptr() for layer in layers], bits(layers)
        with torch.inference_mode():
            for layer in layers:
                layer.weight.view(torch.uint8).zero_()
        assert drafting(llm)[1] < 1.5
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(config), torch.inference_mode():
            layerwise.initialize_layerwise_reload(speculator.model)
            speculator.model.load_weights(load_file(PAIR / "eagle" / "model.safetensors").items())
            layerwise.finalize_layerwise_reload(speculator.model, config.speculative_config.draft_model_config)
        llm.collective_rpc("reload_weights")
        assert [layer.weight.data_ptr() for layer in layers] == memory
        assert all(map(torch.equal, bits(layers), before))
        assert drafting(llm) == expected


def test_a_reduced_vocabulary_keeps_rounded_rows(tmp_path: Path) -> None:
    vocab = json.loads((PAIR / "target" / "config.json").read_text())["vocab_size"]
    ranking = tmp_path / "ranking.json"
    ranking.write_text(json.dumps({"vocab_size": vocab, "tokens": list(range(vocab))}))
    options = {**FP8, "draft_vocab": {"size": vocab - 16, "ranking": str(ranking)}}
    with engine("eagle_mrv2", options=options) as llm:
        drafter = speculator_of(llm).drafter
        expected, kept = drafting(llm), drafter.trimmed.kept
        assert fp8.is_rounded(kept)
        assert not drafter.products.view_of_head.copied
        (before,) = bits([kept])
        with torch.inference_mode():
            kept.weight.view(torch.uint8).zero_()
        llm.collective_rpc("reload_weights")
        assert bits([kept])[0].equal(before)
        assert drafting(llm) == expected


def test_sampled_drafts() -> None:
    with engine("eagle_mrv2", speculative=PROBABILISTIC, options=FP8) as llm:
        speculator, acceptance = speculator_of(llm), Acceptance(llm)
        speculator.draft_logits.fill_(123.0)
        greedy(llm, PROMPTS, temperature=0.8, seed=3)
        assert acceptance.length > 1.3
        assert bool((speculator.draft_logits != 123.0).any())


def test_an_mtp_head(tmp_path: Path) -> None:
    """Its layers have biases, and its head is the target's."""
    model = write_mtp_model(tmp_path / "target")
    asked = {"method": "eagle_mrv2", "num_speculative_tokens": 3}
    found = []
    for options in ({}, FP8):
        with mtp_engine(model, asked, additional_config={"eagle_mrv2": options}) as llm:
            our_mtp_speculator(llm)
            found.append(drafting(llm))
            products = speculator_of(llm).drafter.products
            assert len(products.rounded) == (4 if options else 0)  # its projection of inputs is PyTorch's own
            assert products.view_of_head.copied is bool(options)
            assert {layer.weight.dtype for layer in products.rounded} <= {torch.float8_e4m3fn}
    (texts, length), (rounded_texts, rounded_length) = found
    assert rounded_texts == texts
    assert rounded_length == pytest.approx(length, abs=0.1)
