"""What is added to stock's loading of a draft, by release; stock's part is played by stand-ins of its structure."""

from __future__ import annotations

import copy
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import nn

from vllm_eagle_mrv2 import releases
from vllm_eagle_mrv2.config.behaviours import Behaviour
from vllm_eagle_mrv2.config.options import Options
from vllm_eagle_mrv2.errors import EagleMRV2Error
from vllm_eagle_mrv2.releases import draft_loading

from .stock import drafter_on, stock_speculator


class Target(nn.Module):
    """A language model of 8 tokens."""

    model: Any

    def __init__(self, embedding: nn.Module | None = None) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = embedding or nn.Embedding(8, 4)
        self.lm_head = nn.Linear(4, 8)


class MultimodalTarget(nn.Module):
    """It holds a language model, head and all."""

    def __init__(self) -> None:
        super().__init__()
        self.language_model = Target()

    def get_language_model(self) -> nn.Module:
        return self.language_model


class Stock:
    """A speculator that shares layers where stock's below 0.24 looks for them."""

    def __init__(self, draft: Any, vllm_config: Any = None) -> None:
        self.draft = draft
        self.vllm_config = vllm_config or configuration()
        self.built_by: Any = None

    def load_model(self, target: Any) -> None:
        self.built_by = self.vllm_config
        self.model = self.draft
        language = target.get_language_model() if hasattr(target, "get_language_model") else target
        self.model.model.embed_tokens = language.model.embed_tokens
        if getattr(target, "lm_head", None) is not None:
            self.model.lm_head = target.lm_head


def configuration(**asked: Any) -> Any:
    """A target's configuration, and what was asked for its draft."""
    from vllm.config import KernelConfig
    from vllm.config.attention import AttentionConfig

    return SimpleNamespace(
        kernel_config=KernelConfig(moe_backend="marlin"),
        attention_config=AttentionConfig(backend="FLASH_ATTN"),
        speculative_config=SimpleNamespace(**{"moe_backend": None, "attention_backend": None} | asked),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )


def bare_draft() -> nn.Module:
    draft = nn.Module()
    draft.model = nn.Module()
    return draft


def load(monkeypatch: pytest.MonkeyPatch, release: str, speculator: Any, target: Any) -> Any:
    """The draft that a release's speculator of ours loads."""
    monkeypatch.setattr(releases, "installed_version", lambda: Version(release))
    with draft_loading.repaired(speculator, target):
        speculator.load_model(target)
    return speculator.model


# The draft's own backends


@pytest.mark.parametrize(
    ("release", "moe", "attention"),
    [
        ("0.20.2", "triton", "FLASH_ATTN"),  # which has no field for attention
        ("0.22.1", "triton", "TRITON_ATTN"),
        ("0.29.0", "triton", "TRITON_ATTN"),
        ("0.30.0", "marlin", "FLASH_ATTN"),  # where stock does it afterwards
    ],
)
def test_draft_is_built_by_its_own_backends(
    monkeypatch: pytest.MonkeyPatch, release: str, moe: str, attention: str
) -> None:
    config = configuration(moe_backend="triton", attention_backend="TRITON_ATTN")
    if release == "0.20.2":
        del config.speculative_config.attention_backend
    sections = config.kernel_config, config.attention_config
    before = copy.deepcopy(sections)
    speculator = Stock(bare_draft(), config)
    load(monkeypatch, release, speculator, Target())
    built_by = speculator.built_by
    assert built_by.kernel_config.moe_backend == moe
    assert getattr(built_by.attention_config.backend, "name", built_by.attention_config.backend) == attention
    # Its layers register where the target's have; and the target's own configuration is as it was.
    assert built_by.compilation_config is config.compilation_config
    assert speculator.vllm_config is config
    assert (config.kernel_config, config.attention_config) == before
    assert config.kernel_config is sections[0]


def test_backends_not_asked_for_are_the_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    speculator = Stock(bare_draft())
    load(monkeypatch, "0.29.0", speculator, Target())
    assert speculator.built_by is speculator.vllm_config


# What the target shares


@pytest.mark.parametrize("release", ["0.20.2", "0.25.1"])
def test_head_of_a_multimodal_target_is_shared(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    target = MultimodalTarget()
    draft = load(monkeypatch, release, Stock(bare_draft()), target)
    assert draft.lm_head is target.language_model.lm_head
    assert not hasattr(target, "lm_head")
    assert "lm_head" not in dict(target.named_children())


def test_target_is_as_before_where_loading_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    target, speculator = MultimodalTarget(), Stock(nn.Module(), configuration(moe_backend="triton"))
    config = speculator.vllm_config
    with pytest.raises(AttributeError):
        load(monkeypatch, "0.25.1", speculator, target)
    assert not hasattr(target, "lm_head")
    assert speculator.vllm_config is config


def test_head_of_a_target_stays_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target()
    head = target.lm_head
    assert load(monkeypatch, "0.25.1", Stock(bare_draft()), target).lm_head is head
    assert target.lm_head is head


@pytest.mark.parametrize("release", ["0.20.2", "0.23.0", "0.27.1"])
def test_layers_are_shared_without_lora(monkeypatch: pytest.MonkeyPatch, one_rank: None, release: str) -> None:
    """The embedding of a tied target is its head, too."""
    from vllm.lora.layers import VocabParallelEmbeddingWithLoRA
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    embedding = VocabParallelEmbedding(8, 4)
    target = Target(VocabParallelEmbeddingWithLoRA(embedding))
    target.lm_head = target.model.embed_tokens
    draft = load(monkeypatch, release, Stock(bare_draft()), target)
    assert draft.model.embed_tokens is embedding
    assert draft.lm_head is embedding
    assert isinstance(target.model.embed_tokens, VocabParallelEmbeddingWithLoRA)
    assert isinstance(target.lm_head, VocabParallelEmbeddingWithLoRA)


# Drafts that merge what a multimodal target embeds


def eagle_with_embeddings() -> nn.Module:
    """As stock's EAGLE heads for Llama 4 and Mistral Large 3 are on 0.28 to 0.31."""
    from vllm.model_executor.models.interfaces import SupportsMultiModal

    class Draft(nn.Module):
        model: Any
        embed_input_ids = SupportsMultiModal.embed_input_ids

        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Module()
            self.model.embed_input_ids = lambda ids: self.model.embed_tokens(ids)

        def get_language_model(self) -> Any:
            return self.model

    return Draft()


@pytest.mark.parametrize("out_of_vocabulary", [False, True])
@pytest.mark.parametrize("release", ["0.28.0", "0.31.0"])
def test_draft_embeds_text_and_images(monkeypatch: pytest.MonkeyPatch, release: str, out_of_vocabulary: bool) -> None:
    target: Any = Target()
    target._has_oov_mm_tokens = out_of_vocabulary
    draft: Any = load(monkeypatch, release, Stock(eagle_with_embeddings()), target)
    image_token = 100 if out_of_vocabulary else 7
    ids = torch.tensor([1, image_token, 2])
    image = torch.full((1, 4), 5.0)
    with torch.no_grad():
        embedded = draft.embed_input_ids(ids, [image], is_multimodal=torch.tensor([False, True, False]))
        text = target.model.embed_tokens.weight[[1, 2]]
    assert torch.equal(embedded[[0, 2]], text)
    assert torch.equal(embedded[1:2], image)
    # As in draft decodes.
    assert torch.equal(draft.embed_input_ids(ids[:1]), text[:1])


def test_stocks_own_heads_embed() -> None:
    """The classes themselves, whichever way the installed release has them."""
    from vllm.model_executor.models.llama4_eagle import EagleLlama4ForCausalLM
    from vllm.model_executor.models.mistral_large_3_eagle import EagleMistralLarge3ForCausalLM

    target = Target()
    for cls in (EagleLlama4ForCausalLM, EagleMistralLarge3ForCausalLM):
        draft: Any = object.__new__(cls)
        nn.Module.__init__(draft)
        draft.model = nn.Module()
        draft.model.embed_input_ids = target.model.embed_tokens
        draft_loading.lend_text_embedding(draft, target)
        ids = torch.tensor([1, 2])
        assert torch.equal(draft.embed_input_ids(ids), target.model.embed_tokens(ids))


def test_targets_embed_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that is whole, or has nothing of it, stays as it is."""
    draft = bare_draft()
    load(monkeypatch, "0.29.0", Stock(draft), Target())
    assert "_embed_text_input_ids" not in vars(draft)


# One memory, two layouts


def attention(blocks_dim: int) -> Any:
    backend = SimpleNamespace(get_kv_cache_block_dim=lambda block_size, num_kv_heads, head_size: blocks_dim)
    return SimpleNamespace(impl=None, get_attn_backend=lambda: backend)


def caches(layers: dict[str, Any], *shared: list[str], asked: str | None = "TRITON_ATTN") -> tuple[Any, Any]:
    """A speculator whose draft has the layer ``draft``, and a cache that layers share."""
    backend = None if asked is None else SimpleNamespace(name=asked)
    speculator = SimpleNamespace(
        draft_attn_layer_names={"draft"},
        speculative_config=SimpleNamespace(attention_backend=backend),
        vllm_config=SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers)),
    )
    return speculator, SimpleNamespace(kv_cache_tensors=[SimpleNamespace(shared_by=names) for names in shared])


def test_caches_of_two_layouts_in_one_memory_are_refused() -> None:
    layers = {"draft": attention(0), "target": attention(1), "like the draft": attention(0)}
    with pytest.raises(EagleMRV2Error, match="attention_backend=TRITON_ATTN") as refused:
        draft_loading.check_cache_layouts(*caches(layers, ["target"], ["target", "draft"]))
    assert "\n" not in str(refused.value)
    draft_loading.check_cache_layouts(*caches(layers, ["target"], ["draft"]))
    draft_loading.check_cache_layouts(*caches(layers, ["target"], ["draft", "like the draft"]))
    draft_loading.check_cache_layouts(*caches(layers, ["target", "draft"], asked=None))


def test_stock_orders_caches_beside_mamba() -> None:
    layers = {"draft": attention(0), "target": attention(1), "mamba": SimpleNamespace()}
    draft_loading.check_cache_layouts(*caches(layers, ["target", "draft", "mamba"]))


# All adapters load so


def test_drafters_load_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configuration(moe_backend="triton")
    speculator = stock_speculator(draft=bare_draft())
    vars(speculator.vllm_config).update(vars(config))
    speculator.load_model = functools.partial(Stock.load_model, speculator)
    off = {Behaviour.SINGLE_TOKEN_ATTENTION, Behaviour.ROW_PRODUCTS, Behaviour.TWO_STAGE_ARGMAX}
    drafter = drafter_on(speculator, options=Options(disable=frozenset(off)))
    monkeypatch.setattr(releases, "installed_version", lambda: Version("0.25.1"))
    target = MultimodalTarget()
    with drafter.loading(target):
        speculator.load_model(target)
    assert speculator.built_by.kernel_config.moe_backend == "triton"
    assert speculator.model.lm_head is target.language_model.lm_head
