"""How a draft phase runs on a release, by attention backend, as far as known before an engine starts."""

from __future__ import annotations

from typing import Any, NamedTuple

from packaging.version import Version

ONE_GRAPH = "one graph"
FUSED = "fused decodes"
BY_STEPS = "by steps"

_LLAMA_LAYERS = ("llama", "llama_eagle", "llama_eagle3")
"""Modules of drafts with layers that use vLLM's LlamaAttention."""


class DraftPath(NamedTuple):
    """How the draft phase runs if the draft's layers use these attention backends."""

    backends: str
    path: str


def draft_paths(draft_model_config: Any, version: Version) -> list[DraftPath]:
    """Return a draft's paths on a GPU, with vLLM's default CUDA graphs and one data-parallel rank.

    Args:
        draft_model_config: vLLM's ``ModelConfig`` of the draft.
        version: the vLLM version.
    """
    if draft_model_config.use_mla:
        refreshing = []
        if version >= Version("0.28"):
            refreshing.append("Triton MLA")
        if version >= Version("0.32"):
            refreshing.append("sparse MLA with FlashAttention")
        known = [DraftPath(", ".join(refreshing), ONE_GRAPH)] if refreshing else []
        return [*known, DraftPath("other MLA backends" if known else "MLA backends", BY_STEPS)]
    by_plan = FUSED if attends_by_ours(draft_model_config) else BY_STEPS
    return [
        DraftPath("FlashAttention, Triton attention", ONE_GRAPH),
        DraftPath("FlashInfer, where its decodes need a plan", by_plan),
        DraftPath("other backends", BY_STEPS),
    ]


def attends_by_ours(draft_model_config: Any) -> bool:
    """Whether this package has an attention kernel for the layers of a draft."""
    from vllm.model_executor.models.registry import ModelRegistry

    models = [ModelRegistry.models.get(name) for name in draft_model_config.architectures]
    return any(getattr(model, "module_name", "").rpartition(".")[2] in _LLAMA_LAYERS for model in models)
