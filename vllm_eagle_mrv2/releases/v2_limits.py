"""Features that Model Runner V2 does not support on a release.

``eagle_mrv2`` selects Model Runner V2, which excludes these features.  vLLM itself lists most of them when it makes an
engine's configuration, and that list decides.  The table describes them, and adds those that vLLM does not list.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from vllm_eagle_mrv2.config.families import METHOD
from vllm_eagle_mrv2.errors import EagleMRV2Error


@dataclass(frozen=True)
class Limit:
    """One unsupported feature."""

    what: str
    """The feature, as messages name it."""
    releases: str = ""
    """Version specifier of the releases that do not support it; empty for all."""
    vllm: str = ""
    """Its name in vLLM's own list, or the beginning of that name; empty if no release lists it."""
    asked: Callable[[Any], bool] | None = None
    """Whether a ``VllmConfig`` asks for it, if some of the releases do not list it; None leaves the check to vLLM."""
    refused: bool = True
    """Whether an engine that asks for it is refused; otherwise it runs without the feature, with a warning."""


def _mode(config: Any) -> str:
    return str(getattr(config.compilation_config.mode, "name", ""))


def _has_plugins(config: Any) -> bool:
    return bool(config.model_config.logits_processors or entry_points(group="vllm.logits_processors"))


def _prunes_video(config: Any) -> bool:
    multimodal = config.model_config.multimodal_config
    return multimodal is not None and bool(multimodal.is_multimodal_pruning_enabled())


def _parallelizes_sequences(config: Any) -> bool:
    asked = getattr(config.compilation_config.pass_config, "enable_sp", False)
    return bool(asked) and config.parallel_config.tensor_parallel_size > 1


def _rests_a_hybrid(config: Any) -> bool:
    """Whether a schedule drafts nothing at some load for a target with recurrent layers."""
    schedule = getattr(config.speculative_config, "num_speculative_tokens_per_batch_size", None) or ()
    return bool(config.model_config.is_hybrid) and any(not length for *_, length in schedule)


def _caches_a_hybrid(config: Any) -> bool:
    return bool(config.model_config.is_hybrid and config.cache_config.enable_prefix_caching)


def _has_stages(config: Any) -> bool:
    return bool(config.parallel_config.pipeline_parallel_size > 1)


def _on_cpu(_: Any) -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _without_triton(_: Any) -> bool:
    from vllm.triton_utils import HAS_TRITON

    return not HAS_TRITON


LIMITS: tuple[Limit, ...] = (
    Limit("hybrid and Mamba models", "<0.23", "hybrid/mamba models"),
    # Recurrent layers find one block more than attention layers, whose part of it is never computed (#45614).
    Limit(
        "prefix caching of hybrid and Mamba models (on by default: --no-enable-prefix-caching)",
        ">=0.23,<0.26",
        "hybrid/mamba models with align cache mode",
        _caches_a_hybrid,
    ),
    Limit("mamba_cache_mode=all", ">=0.30,<0.32", "mamba cache mode 'all'"),
    Limit(
        "models whose layers share KV caches (Gemma 3n, Gemma 4 E2B)",
        "<0.22",
        asked=lambda config: bool(getattr(config.model_config.hf_text_config, "num_kv_shared_layers", 0)),
    ),
    Limit("KV sharing fast prefill", "<0.30", "KV sharing fast prefill"),
    Limit(
        "prompt embeddings (--enable-prompt-embeds)",
        "<0.29",
        "prompt embeds",
        lambda config: config.model_config.enable_prompt_embeds,
    ),
    Limit("custom logits processors", "<0.31", "custom logits processors", _has_plugins),
    Limit("custom logits processors written for Model Runner V1", ">=0.31"),
    Limit(
        "logprobs_mode raw_logits or processed_logits",
        "<0.26",
        "logprobs mode",
        lambda config: config.model_config.logprobs_mode in ("raw_logits", "processed_logits"),
    ),
    Limit(
        "thinking budgets, which a reasoning parser or configuration asks for",
        ">=0.22,<0.23",
        "reasoning budget enforcement",
    ),
    Limit(
        "thinking_token_budget in requests",
        "<0.28,!=0.22.*",
        asked=lambda config: config.reasoning_config is not None,
        refused=False,
    ),
    Limit("requests with more than 1024 allowed_token_ids, 1024 logit_bias tokens or 128 stop_token_ids"),
    Limit("logprob_token_ids in requests"),  # the rejection sampler leaves them out (#44727)
    Limit("video pruning (--video-pruning-rate)", "<0.25", asked=_prunes_video),
    Limit("capture of routed experts (--enable-return-routed-experts)", "<0.28", "routed experts capture"),
    Limit("encoder-cache transfer (--ec-transfer-config)", "<0.28", "EC transfer"),
    Limit("dynamic numbers of speculative tokens", ">=0.24,<0.25", "dynamic speculative decoding"),
    # The layers take the state of the wrong token where no drafts are verified.
    Limit("0 draft tokens of a schedule with hybrid models", ">=0.25,<0.32", asked=_rests_a_hybrid),
    Limit(
        "adaptive verification with LoRA, with pipeline parallelism or without CUDA graphs",
        ">=0.28,<0.29",
        "adaptive verification",
    ),
    Limit(
        "parallel drafting (P-EAGLE)",
        vllm="parallel drafting",
        asked=lambda config: bool(config.speculative_config.parallel_drafting),
    ),
    # Other stages wait for samples of another shape, and embed drafts that only the last one has (#46994, #52295).
    Limit("drafting with pipeline_parallel_size above 1", "<0.30", "EAGLE3 with pipeline parallelism", _has_stages),
    # A request comes back before its first stage has taken what was sampled for it (#52071).
    Limit(
        "pipeline parallelism without asynchronous scheduling",
        ">=0.30",
        asked=lambda config: _has_stages(config) and not config.scheduler_config.async_scheduling,
    ),
    Limit(
        "pipeline parallelism with external_launcher",
        vllm="pipeline parallelism with external_launcher",
        asked=lambda config: (
            config.parallel_config.distributed_executor_backend == "external_launcher" and _has_stages(config)
        ),
    ),
    Limit(
        "prefill context parallelism with drafting",
        "<0.30",
        "prefill context parallelism",
        lambda config: config.parallel_config.prefill_context_parallel_size > 1,
    ),
    Limit(
        "prefill context parallelism with EAGLE heads",
        ">=0.30",
        asked=lambda config: (
            config.parallel_config.prefill_context_parallel_size > 1 and config.speculative_config.method != "mtp"
        ),
    ),
    Limit("sequence parallelism (enable_sp)", "<0.32", "sequence parallelism", _parallelizes_sequences),
    Limit(
        "dual batch overlap and micro-batches (--enable-dbo, --ubatch-size)",
        "",
        "dual batch overlap",
        lambda config: config.parallel_config.use_ubatching,
    ),
    Limit(
        "elastic expert parallelism",
        "<0.32",
        "elastic expert parallelism",
        lambda config: config.parallel_config.enable_elastic_ep,
    ),
    Limit(
        "compilation mode STOCK_TORCH_COMPILE",
        "<0.32",
        "stock torch.compile",
        lambda config: _mode(config) == "STOCK_TORCH_COMPILE",
    ),
    Limit(
        "calculate_kv_scales",
        "<0.30",
        asked=lambda config: bool(getattr(config.cache_config, "calculate_kv_scales", False)),
        refused=False,
    ),
    Limit("reload_weights and update_config of workers (collective_rpc)", "<0.22"),
    Limit("CPUs", "<0.23", asked=_on_cpu),
    Limit("installations without Triton", asked=_without_triton),
)


def limits_of(version: Version) -> list[Limit]:
    """The features that a release does not support."""
    return [limit for limit in LIMITS if version in SpecifierSet(limit.releases)]


def check(config: Any, by_vllm: list[str], version: Version) -> list[str]:
    """Refuse a configuration that asks for features that Model Runner V2 does not support.

    Args:
        config: a marked ``VllmConfig``.
        by_vllm: the unsupported features that vLLM lists for it.
        version: the vLLM release.

    Returns:
        warnings: a sentence for each feature that the engine runs without.

    Raises:
        EagleMRV2Error: with the cause and the remedy.
    """
    limits = limits_of(version)
    asked = [limit for limit in limits if limit.asked is not None and limit.asked(config)]
    named = [
        next((limit.what for limit in limits if limit.vllm and one.startswith(limit.vllm)), one) for one in by_vllm
    ]
    refused = dict.fromkeys([*named, *(limit.what for limit in asked if limit.refused)])
    runner = f"method={METHOD} runs on Model Runner V2, which on vLLM {version} does not support"
    if refused:
        raise EagleMRV2Error(
            f"{runner} {', nor '.join(refused)}; do without, or use method={config.speculative_config.method}, "
            "with which vLLM chooses the model runner itself."
        )
    return [f"{runner} {limit.what}." for limit in asked if not limit.refused]


def listed_by_vllm(validate: Callable[[Any], None], config: Any) -> list[str]:
    """The unsupported features that vLLM lists for a configuration, in vLLM's words.

    Args:
        validate: vLLM's own ``VllmConfig._validate_v2_model_runner``; on 0.20 its message is the only list.
        config: a ``VllmConfig``.
    """
    features = getattr(config, "_get_v2_model_runner_unsupported_features", None)
    if features is not None:
        return list(features())
    try:
        validate(config)
    except ValueError as refusal:
        return str(refusal).partition("support: ")[2].split(", ")
    return []
