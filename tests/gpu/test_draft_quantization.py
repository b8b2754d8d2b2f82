"""FP8 drafts with graphs and compiled models: the same output, about the same drafts, through a sleep too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from packaging.version import Version
from release_under_test import PROBABILISTIC, release
from support import Acceptance, engine, greedy, held_out_prompts, runner_of, speculator_of

from vllm_eagle_mrv2.draft_model import fp8, linear

from .test_graphs import SIZES, TOKENS, counted_replays
from .test_sleep import after_sleeps

FP8 = {"draft_quantization": "fp8"}
PROMPTS = held_out_prompts(48)


def linear_layers(llm: Any) -> list[Any]:
    """The draft's own linear layers."""
    from vllm.model_executor.layers.linear import LinearBase

    shared = set(runner_of(llm).model.modules())
    return [
        layer for layer in speculator_of(llm).model.modules() if isinstance(layer, LinearBase) and layer not in shared
    ]


@pytest.mark.parametrize(("family", "k"), [("eagle", 3), ("eagle3", 3), ("eagle", 1)])
def test_the_same_output_and_nearly_the_same_drafts(
    family: str, k: int, record_property: Callable[[str, object], None]
) -> None:
    lengths, texts = [], []
    for options in (None, FP8):
        with engine("eagle_mrv2", family=family, k=k, options=options, compilation_config=SIZES) as llm:
            assert {layer.weight.dtype for layer in linear_layers(llm)} == {
                torch.bfloat16 if options is None else torch.float8_e4m3fn
            }
            with counted_replays(speculator_of(llm)) as replays:
                texts.append([greedy(llm, PROMPTS[:n], TOKENS) for n in (1, 3, 8)])
            assert replays["prefill"] > 10
            acceptance = Acceptance(llm)
            greedy(llm, PROMPTS, TOKENS)
            lengths.append(acceptance.length)
    record_property("bfloat16", lengths[0])
    record_property("fp8", lengths[1])
    assert texts[1] == texts[0]
    assert lengths[1] == pytest.approx(lengths[0], abs=0.05)


@pytest.mark.parametrize("converts", [True, False])
def test_without_a_product_of_fp8_matrices(converts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs without instructions for FP8, and as for layers of an odd size."""
    monkeypatch.setattr(linear, "_has_fp8_product", lambda device: False)
    if not converts:
        for module in ("row_product", "few_rows_product"):
            monkeypatch.setattr(f"vllm_eagle_mrv2.kernels.{module}.as_read", lambda values: values.view(torch.uint8))
    with engine("eagle_mrv2", options=FP8, compilation_config=SIZES) as llm:
        acceptance = Acceptance(llm)
        greedy(llm, PROMPTS[:8], TOKENS)
        length = acceptance.length
    monkeypatch.undo()
    with engine("eagle_mrv2", options=FP8, compilation_config=SIZES) as llm:
        acceptance = Acceptance(llm)
        greedy(llm, PROMPTS[:8], TOKENS)
        assert length == pytest.approx(acceptance.length, abs=0.1)


@pytest.mark.skipif(release < Version("0.33"), reason="vLLM rounds no head of a draft before 0.33")
def test_the_head_that_vllm_rounds() -> None:
    """By an option of its own, which leaves the layers as they are."""
    texts = []
    for speculative in ({}, {"draft_lm_head_quantization": "fp8"}):
        with engine("eagle_mrv2", speculative=speculative, compilation_config=SIZES) as llm:
            dtype = speculator_of(llm).model.lm_head.weight.dtype
            assert (dtype == torch.bfloat16) is not bool(speculative)
            assert {layer.weight.dtype for layer in linear_layers(llm)} == {torch.bfloat16}
            acceptance = Acceptance(llm)
            texts.append(greedy(llm, PROMPTS[:8], TOKENS))
            assert acceptance.length > 1.5
    assert texts[0] == texts[1]


def test_sampled_drafts() -> None:
    with engine("eagle_mrv2", options=FP8, speculative=PROBABILISTIC, compilation_config=SIZES) as llm:
        acceptance = Acceptance(llm)
        greedy(llm, PROMPTS[:8], TOKENS, temperature=0.7, seed=3, top_p=0.9)
        assert acceptance.length > 1.5


@pytest.mark.own_process
@pytest.mark.skipif(release < Version("0.22"), reason="after a sleep vLLM 0.20 itself finds no block tables")
def test_the_same_drafts_after_a_sleep() -> None:
    with engine("eagle_mrv2", options=FP8, compilation_config=SIZES, enable_sleep_mode=True) as llm:
        before = greedy(llm, PROMPTS[:5], TOKENS)
        drafter = speculator_of(llm).drafter
        copied = drafter.products.view_of_head.view
        rounded = copied.weight.clone()
        for level in after_sleeps(llm):
            if level == 2:
                with torch.inference_mode():
                    copied.weight.view(torch.uint8).zero_()
                drafter.renew_copied_weights()
            assert copied.weight.view(torch.uint8).equal(rounded.view(torch.uint8))
            acceptance = Acceptance(llm)
            assert greedy(llm, PROMPTS[:5], TOKENS) == before
            assert acceptance.length > 1.5
    assert fp8.is_rounded(copied)
