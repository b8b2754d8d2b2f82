"""Fixes of later vLLM releases for the loading of a draft model, for the releases before them.

Stock builds the draft from the target's configuration and gives it the target's embedding and head
(`load_eagle_model`).  `repaired` surrounds this call for a speculator of this package and replaces nothing in vLLM, so
stock engines in the same process load as before.  Each fix is one function or one `DraftBackend`, with a version
specifier of the releases that need it.
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
    """A draft backend in the speculative configuration that Model Runner V2 ignores on some releases."""

    option: str
    section: str
    """The part of vLLM's configuration that names the target's backend."""
    field: str
    """Its name there."""
    releases: str


DRAFT_BACKENDS = (
    DraftBackend("moe_backend", "kernel_config", "moe_backend", "<0.30"),  # #54788
    DraftBackend("attention_backend", "attention_config", "backend", ">=0.22,<0.30"),  # #54826
)
LANGUAGE_MODEL_HEAD = "<0.26"
"""Releases that need `head_in_sight` (#47914, #48700)."""
BASE_LAYERS = "<0.28"
"""Releases that need `unwrap_layers`: the embedding's wrapper is shared below 0.24, that of a tied head below 0.28."""
TEXT_EMBEDDING = ">=0.28,<0.32"
"""Releases that need `lend_text_embedding` (#57630)."""
CACHE_LAYOUTS = ">=0.22,<0.23"
"""Releases that need `check_cache_layouts`: in later ones every NVIDIA backend has the block dimension first."""

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
    Symbol(f"{_LORA}.base", "BaseLayerWithLoRA", releases=BASE_LAYERS),
    Symbol(f"{_LORA}.vocal_parallel_embedding", "VocabParallelEmbeddingWithLoRA.base_layer", releases=BASE_LAYERS),
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
    """Apply every fix that the installed release lacks while a speculator loads its draft.

    Args:
        speculator: a subclass of the stock speculator.
        target: the loaded target model.
    """
    from vllm_eagle_mrv2.releases import installed_version

    release = installed_version()
    with ExitStack() as loading:
        config = draft_config(speculator.vllm_config, release)
        loading.enter_context(_held(speculator, "vllm_config", config))
        if release in SpecifierSet(LANGUAGE_MODEL_HEAD):
            loading.enter_context(head_in_sight(target))
        yield
    if release in SpecifierSet(BASE_LAYERS):
        unwrap_layers(speculator.model)
    if release in SpecifierSet(TEXT_EMBEDDING):
        lend_text_embedding(speculator.model, target)


def draft_config(vllm_config: Any, release: Version) -> Any:
    """The configuration that the draft is built from: the target's, with the backends that the user set for the draft.

    Without a setting the draft uses the target's backend, as from 0.30 on.
    """
    config = vllm_config
    for backend in DRAFT_BACKENDS:
        if release not in SpecifierSet(backend.releases):
            continue
        asked = getattr(vllm_config.speculative_config, backend.option)
        if asked is not None:
            # The copies are shallow: the draft's layers must register in the target's own compilation configuration.
            section = copy.copy(getattr(vllm_config, backend.section))
            setattr(section, backend.field, asked)
            config = copy.copy(config)
            setattr(config, backend.section, section)
    return config


def head_in_sight(target: Any) -> AbstractContextManager[None]:
    """Temporarily give a multimodal target its language model's ``lm_head``, where stock looks for it."""
    head = getattr(_language_model(target), "lm_head", None)
    if head is None or getattr(target, "lm_head", None) is not None:
        return nullcontext()
    return _held(target, "lm_head", head)


def unwrap_layers(draft: Any) -> None:
    """Remove the LoRA wrapper from the embedding and the head that a draft shares with the target.

    The embedding's kernel reads the adapter of each token from indices prepared for the target's tokens, and a draft
    would read past their end.  The head of some tied targets is their wrapped embedding, which multiplies with the
    target's logits processor only.  The LoRA adapter does not apply to the draft either.
    """
    from vllm.lora.layers.base import BaseLayerWithLoRA

    for owner, name in ((draft.model, "embed_tokens"), (draft, "lm_head")):
        layer = getattr(owner, name, None)
        if isinstance(layer, BaseLayerWithLoRA):
            setattr(owner, name, layer.base_layer)


def lend_text_embedding(draft: Any, target: Any) -> None:
    """Give a draft with `SupportsMultiModal.embed_input_ids` the attributes that this method needs and it lacks."""
    from vllm.model_executor.models.interfaces import SupportsMultiModal

    took = getattr(type(draft), "embed_input_ids", None) is SupportsMultiModal.embed_input_ids
    if took and not hasattr(draft, "_embed_text_input_ids"):
        draft._embed_text_input_ids = MethodType(SupportsMultiModal._embed_text_input_ids, draft)
        draft._has_oov_mm_tokens = getattr(target, "_has_oov_mm_tokens", False)


def check_cache_layouts(speculator: Any, kv_cache_config: Any) -> None:
    """Refuse an attention backend of the draft if its KV cache shares memory with a target layer in another layout.

    Layers of several groups share memory block by block.  This fails if one backend has the block dimension first and
    the other the dimension of keys and values.  With Mamba layers stock converts all of them to one layout.

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
    """Temporarily set an attribute; afterwards restore its old value, or delete it if it had none."""
    before = getattr(owner, name, _MISSING)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
