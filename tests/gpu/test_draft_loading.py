"""What a draft is loaded with: an attention backend of its own, and the target's embedding without LoRA."""

from __future__ import annotations

from typing import Any

import pytest
from packaging.version import Version
from release_under_test import release
from support import Acceptance, engine, greedy, held_out_prompts, runner_of, speculator_of

from .test_graphs import SIZES, TOKENS

PROMPTS = held_out_prompts(4)


@pytest.mark.skipif(release < Version("0.22"), reason="vLLM 0.20 has no attention_backend for a draft")
@pytest.mark.parametrize(("target", "draft"), [("FLASH_ATTN", "TRITON_ATTN"), ("TRITON_ATTN", "FLASH_ATTN")])
def test_draft_attends_by_its_own_backend(target: str, draft: str) -> None:
    by_target: dict[str, Any] = {"attention_config": {"backend": target}, "compilation_config": SIZES}
    with engine("eagle_mrv2", **by_target) as llm:
        acceptance = Acceptance(llm)
        expected = greedy(llm, PROMPTS, TOKENS)
        length = acceptance.length
    with engine("eagle_mrv2", speculative={"attention_backend": draft}, **by_target) as llm:
        speculator = speculator_of(llm)
        layers = speculator.vllm_config.compilation_config.static_forward_context
        backends = {name: layer.get_attn_backend().get_name() for name, layer in layers.items()}
        of_draft = {name: backends.pop(name) for name in speculator.draft_attn_layer_names}
        assert set(of_draft.values()) == {draft}
        assert set(backends.values()) == {target}
        # Our kernel takes the place of FlashAttention's, and Triton's metadata is what the draft's own builder makes.
        assert speculator.drafter.attends_by_ours is (draft == "FLASH_ATTN")
        assert {group.backend.get_name() for groups in speculator.attn_groups for group in groups} == {draft}
        acceptance = Acceptance(llm)
        assert greedy(llm, PROMPTS, TOKENS) == expected
        assert acceptance.length == pytest.approx(length, abs=0.1)


@pytest.mark.skipif(Version("0.22") > release or release >= Version("0.23"), reason="backends agree on the layout")
def test_cache_layouts_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_eagle_mrv2.releases import draft_loading

    asked_of: list[object] = []
    monkeypatch.setattr(draft_loading, "check_cache_layouts", lambda speculator, _: asked_of.append(speculator))
    with engine("eagle_mrv2", enforce_eager=True) as llm:
        assert asked_of == [speculator_of(llm)]


def test_draft_embeds_without_lora() -> None:
    """Through LoRA it would read, past the end, which adapter each token of the target's batch has."""
    from vllm.lora.layers.base import BaseLayerWithLoRA

    with engine("eagle_mrv2", enable_lora=True, enforce_eager=True) as llm:
        embedding = runner_of(llm).model.model.embed_tokens
        assert isinstance(embedding, BaseLayerWithLoRA)
        assert speculator_of(llm).model.model.embed_tokens is embedding.base_layer
        acceptance = Acceptance(llm)
        assert all(len(tokens) == TOKENS for tokens in greedy(llm, PROMPTS, TOKENS))
        assert acceptance.length > 1.8
