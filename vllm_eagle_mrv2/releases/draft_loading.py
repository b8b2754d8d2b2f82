"""What later vLLM releases fixed in the loading of a draft model, for the releases before them.

Stock builds the draft by the target's configuration and hands it the target's embedding and head (`load_eagle_model`).
`repaired` surrounds that call for a speculator of ours and replaces nothing of vLLM's, so that stock's engines in the
same process load as before.  A fix is one function, or one `DraftBackend`; the releases that lack it stand with it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from vllm_eagle_mrv2.errors import EagleMRV2Error
from vllm_eagle_mrv2.releases.surface import Symbol

_MISSING = object()


@dataclass(frozen=True)
class DraftBackend:
    """A backend that the speculative configuration names for the draft, and Model Runner V2 ignores."""

    option: str
    section: str
    """The part of vLLM's configuration that names the target's backend."""
    field: str
    """How it is called there."""
    releases: str


DRAFT_BACKENDS = (
    DraftBackend("moe_backend", "kernel_config", "moe_backend", "<0.30"),  # #54788
    DraftBackend("attention_backend", "attention_config", "backend", ">=0.22,<0.30"),  # #54826
)
LANGUAGE_MODEL_HEAD = "<0.26"
"""Releases that need `head_in_sight` (#47914, #48700)."""
BASE_EMBEDDING = "<0.24"
"""Releases that need `unwrap_embedding`."""
TEXT_EMBEDDING = ">=0.28,<0.32"
"""Releases that need `lend_text_embedding` (#57630)."""
CACHE_LAYOUTS = ">=0.22,<0.23"
"""Releases that need `check_cache_layouts`: later ones have blocks first in every backend for NVIDIA GPUs."""

_LORA = "vllm.lora.layers"
_MODELS = "vllm.model_executor.models.interfaces"
SYMBOLS: tuple[Symbol, ...] = (
    Symbol(
        "vllm.v1.worker.gpu.spec_decode.eagle.utils",
        "load_eagle_model",
        ("target_model", "vllm_config"),
        why="reads the configuration and the target's layers that are put before it",
        releases="<0.30",
    ),
    Symbol("vllm.config.speculative", "SpeculativeConfig.moe_backend", releases="<0.30"),
    Symbol("vllm.config.vllm", "VllmConfig.kernel_config", releases="<0.30"),
    Symbol("vllm.config.kernel", "KernelConfig.moe_backend", releases="<0.30"),
    Symbol("vllm.config.speculative", "SpeculativeConfig.attention_backend", releases=">=0.22,<0.30"),
    Symbol("vllm.config.vllm", "VllmConfig.attention_config", releases=">=0.22,<0.30"),
    Symbol("vllm.config.attention", "AttentionConfig.backend", releases=">=0.22,<0.30"),
    Symbol(f"{_LORA}.base", "BaseLayerWithLoRA", releases=BASE_EMBEDDING),
    Symbol(f"{_LORA}.vocal_parallel_embedding", "VocabParallelEmbeddingWithLoRA.base_layer", releases=BASE_EMBEDDING),
    Symbol(
        _MODELS,
        "SupportsMultiModal._embed_text_input_ids",
        ("input_ids", "embed_input_ids", "is_multimodal"),
        why="lent to drafts that lack it",
        releases=TEXT_EMBEDDING,
    ),
    Symbol(_MODELS, "SupportsMultiModal._has_oov_mm_tokens", releases=TEXT_EMBEDDING),
    Symbol(_MODELS, "SupportsMultiModal.embed_input_ids", releases=TEXT_EMBEDDING),
    Symbol(
        "vllm.v1.attention.backend",
        "AttentionBackend.get_kv_cache_block_dim",
        ("block_size", "num_kv_heads", "head_size"),
        releases=CACHE_LAYOUTS,
    ),
)


@contextmanager
def repaired(speculator: Any, target: Any) -> Iterator[None]:
    """While a speculator loads its draft: with every fix that the installed release lacks.

    Args:
        speculator: a subclass of stock's.
        target: the target model, loaded.
    """
    from vllm_eagle_mrv2.releases import installed_version

    release = installed_version()
    with ExitStack() as loading:
        config = draft_config(speculator.vllm_config, release)
        loading.enter_context(_held(speculator, "vllm_config", config))
        if release in SpecifierSet(LANGUAGE_MODEL_HEAD):
            loading.enter_context(head_in_sight(target))
        yield
    if release in SpecifierSet(BASE_EMBEDDING):
        unwrap_embedding(speculator.model)
    if release in SpecifierSet(TEXT_EMBEDDING):
        lend_text_embedding(speculator.model, target)


def draft_config(vllm_config: Any, release: Version) -> Any:
    """What the draft is built by: the target's configuration, with the backends that were asked for the draft.

    A backend that was not asked for is the target's, as from 0.30 on.
    """
    config = vllm_config
    for backend in DRAFT_BACKENDS:
        if release not in SpecifierSet(backend.releases):
            continue
        asked = getattr(vllm_config.speculative_config, backend.option)
        if asked is not None:
            # Shallow copies: the draft's layers register in the target's own compilation configuration.
            section = copy.copy(getattr(vllm_config, backend.section))
            setattr(section, backend.field, asked)
            config = copy.copy(config)
            setattr(config, backend.section, section)
    return config


def head_in_sight(target: Any) -> AbstractContextManager[None]:
    """Meanwhile a multimodal target has its language model's head where stock looks for it."""
    head = getattr(_language_model(target), "lm_head", None)
    if head is None or getattr(target, "lm_head", None) is not None:
        return nullcontext()
    return _held(target, "lm_head", head)


def unwrap_embedding(draft: Any) -> None:
    """Take LoRA off the embedding that a draft has from the target.

    Its kernel reads which adapter each token has from what was prepared for the target's tokens, past whose end a draft
    would read; nor is the draft a part of the adapter.
    """
    from vllm.lora.layers.base import BaseLayerWithLoRA

    embedding = getattr(draft.model, "embed_tokens", None)
    if isinstance(embedding, BaseLayerWithLoRA):
        draft.model.embed_tokens = embedding.base_layer


def lend_text_embedding(draft: Any, target: Any) -> None:
    """Complete a draft that took ``embed_input_ids`` from `SupportsMultiModal`, and not what that calls."""
    from vllm.model_executor.models.interfaces import SupportsMultiModal

    took = getattr(type(draft), "embed_input_ids", None) is SupportsMultiModal.embed_input_ids
    if took and not hasattr(draft, "_embed_text_input_ids"):
        draft._embed_text_input_ids = MethodType(SupportsMultiModal._embed_text_input_ids, draft)
        draft._has_oov_mm_tokens = getattr(target, "_has_oov_mm_tokens", False)


def check_cache_layouts(speculator: Any, kv_cache_config: Any) -> None:
    """Refuse a draft's attention backend that would lay its cache over a target layer's in another order.

    Layers of several groups share memory block by block, which is wrong where one backend has blocks first and the
    other keys and values.  Beside Mamba layers stock brings all into one order.

    Raises:
        EagleMRV2Error: with the cause and the remedy.
    """
    backend = speculator.speculative_config.attention_backend
    layers = speculator.vllm_config.compilation_config.static_forward_context
    shared = [tensor.shared_by for tensor in kv_cache_config.kv_cache_tensors]
    if backend is None or not all(hasattr(layers[name], "impl") for names in shared for name in names):
        return
    for names in shared:
        if speculator.draft_attn_layer_names.isdisjoint(names):
            continue
        if len({layers[name].get_attn_backend().get_kv_cache_block_dim(16, 1, 64) for name in names}) > 1:
            raise EagleMRV2Error(
                f"attention_backend={backend.name} of the speculative configuration orders the KV cache otherwise than "
                "the target's backend, with which the draft shares memory on this vLLM release; leave it out, or give "
                "--attention-backend the same."
            )


def _language_model(target: Any) -> Any:
    return target.get_language_model() if hasattr(target, "get_language_model") else target


@contextmanager
def _held(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute has another value meanwhile; where there was none, there is none afterwards."""
    before = getattr(owner, name, _MISSING)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
