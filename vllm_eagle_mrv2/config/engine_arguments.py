"""Translates vLLM's engine arguments that ask for ``eagle_mrv2``, and checks what vLLM made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from vllm_eagle_mrv2.config import kill_switch, one_model
from vllm_eagle_mrv2.config.checkpoints import Reader, check_weights
from vllm_eagle_mrv2.config.families import METHOD
from vllm_eagle_mrv2.config.method import MARKER, Settings, is_on, is_ours, parse_short_form, translate
from vllm_eagle_mrv2.config.options import parse_options
from vllm_eagle_mrv2.config.vocab_ranking import KeptTokens
from vllm_eagle_mrv2.errors import EagleMRV2Error

if TYPE_CHECKING:
    from vllm_eagle_mrv2.releases.spec import Release

_OWN_LOAD_CONFIG = Version("0.31")
"""The first release that loads a draft by its ``draft_load_config`` and not as its target."""


def take_settings(engine_args: Any, installed: Callable[[], tuple[Release, Version]]) -> Settings | None:
    """Translate an ``EngineArgs`` that asks for ``eagle_mrv2`` in place, and store the settings in its dictionary.

    Args:
        engine_args: vLLM's ``EngineArgs``.
        installed: returns the installed release and its version (`releases.installed`); not called if the method was
            not asked for or is switched off, which any vLLM may serve.

    Returns:
        the settings, or None if ``eagle_mrv2`` was not asked for or is switched off.

    Raises:
        EagleMRV2Error: the settings cannot be served here.
    """
    given = engine_args.speculative_config
    short = getattr(engine_args, "spec_method", None)
    if isinstance(given, str):
        given = parse_short_form(given) or given
    if isinstance(given, dict) and MARKER in given:
        settings = _put_together(given[MARKER])
        method, *draft = settings.asked or (METHOD,)
        unchanged = given.get("method") == settings.family
        as_before = [given.get("model"), given.get("revision")] == draft
        as_before &= parse_options(engine_args.additional_config) == settings.options
        as_before &= is_on(given.get("enforce_eager")) == settings.enforce_eager
        if unchanged and as_before and not kill_switch.is_on():
            return settings
        # The arguments were used before, and since then they were changed or switched off: translate them again.
        given = {key: value for key, value in given.items() if key != MARKER}
        if unchanged:
            given["method"] = method
        engine_args.speculative_config = given
    if not (is_ours(short) or (isinstance(given, dict) and is_ours(given.get("method")))):
        return None
    asked = dict(given) if isinstance(given, dict) else {}
    if is_ours(short):
        if "method" in asked:
            raise EagleMRV2Error("--spec-method and method in --speculative-config exclude each other; give one.")
        asked["method"] = short
        engine_args.spec_method = None
    for field, key in (("spec_model", "model"), ("spec_tokens", "num_speculative_tokens")):
        value = getattr(engine_args, field, None)
        if value is not None:
            if key in asked:
                raise EagleMRV2Error(
                    f"--{field.replace('_', '-')} and {key} in --speculative-config exclude each other; give one."
                )
            asked[key] = value
            setattr(engine_args, field, None)

    reader = Reader(engine_args.trust_remote_code, engine_args.config_format, engine_args.hf_token)
    if kill_switch.is_on():
        asked = one_model.split(engine_args, asked, reader)
        engine_args.speculative_config = kill_switch.stock_config(asked, engine_args.model, reader)
        return None

    options = parse_options(engine_args.additional_config)
    release, version = installed()
    release.check_disabled(options.disable, version)
    asked = one_model.split(engine_args, asked, reader)
    translated, settings = translate(asked, engine_args.model, options, reader)
    release.check_settings(settings)
    if "model" in translated:
        own = translated.get("draft_load_config") if version >= _OWN_LOAD_CONFIG else None
        load_format = own.get("load_format") if isinstance(own, dict) else None
        check_weights(translated["model"], load_format or engine_args.load_format)
    engine_args.speculative_config = {**translated, MARKER: settings}
    return settings


def _put_together(settings: Any) -> Settings:
    """Return settings that ``dataclasses.asdict`` may have taken apart with the arguments."""
    if isinstance(settings, Settings):
        return settings
    kept = settings["kept_tokens"]
    return Settings(**settings | {"kept_tokens": None if kept is None else KeptTokens(**kept)})


def check_translated(config: Any, settings: Settings) -> None:
    """Refuse a translated configuration that vLLM would not serve with this package's speculator.

    Refused are a draft for which vLLM infers another method than its checkpoint declares, a draft that vLLM runs with
    another speculator, and a draft vocabulary that belongs to another model.

    Args:
        config: vLLM's ``SpeculativeConfig`` for the translated method.
        settings: what the user asked for.

    Raises:
        EagleMRV2Error: with the cause and the remedy.
    """
    if config.method != settings.family:
        raise EagleMRV2Error(
            f"vLLM reads the draft {config.model} as method={config.method} where its checkpoint is of the "
            f"family {settings.family}; rename its folder, whose name misleads vLLM."
        )
    for predicate, kind in (("use_gemma4_mtp", "a Gemma 4 MTP head"), ("use_multi_module_mtp", "several MTP modules")):
        if getattr(config, predicate, lambda: False)():
            raise EagleMRV2Error(
                f"the draft {config.model} has {kind}, which vLLM drafts for with a speculator of its own; "
                f"use method={config.method} instead of {METHOD}."
            )
    if settings.kept_tokens is not None:
        settings.kept_tokens.within(config.draft_model_config.get_vocab_size())
    if settings.options.draft_quantization is not None:
        _check_weights_to_round(config)


def check_lookup(config: Any, settings: Settings) -> None:
    """Refuse ``lookup_drafts`` beside what judges, marks or prefers the drafts of a head.

    Args:
        config: vLLM's ``VllmConfig``.
        settings: what the user asked for.

    Raises:
        EagleMRV2Error: with the cause and the remedy.
    """
    if not settings.options.lookup_drafts:
        return
    if getattr(config.speculative_config, "enable_adaptive_verification", False):  # from 0.30 on
        raise EagleMRV2Error(
            "enable_adaptive_verification judges a draft by what the head thinks of it, which says nothing of one "
            "that lookup_drafts has found; leave one of them out."
        )
    if getattr(config.speculative_config, "rejection_sample_method", None) == "fly":  # from 0.33 on
        raise EagleMRV2Error(
            "rejection_sample_method=fly keeps drafts that the target would not choose, and with lookup_drafts those "
            "that repeat the request's text; leave one of them out."
        )
    watermark = getattr(config, "watermark_config", None)  # from 0.30 on
    if watermark is not None and not watermark.allow_target_only_watermarking:
        raise EagleMRV2Error(
            "drafts that lookup_drafts finds carry no watermark; leave it out, or set allow_target_only_watermarking "
            "in the watermark_config."
        )


def _check_weights_to_round(config: Any) -> None:
    head = getattr(config, "draft_lm_head_quantization", None)  # from 0.33 on
    if head is not None:
        raise EagleMRV2Error(
            f"draft_lm_head_quantization={head} has vLLM round the draft's head, and draft_quantization of {METHOD} "
            "rounds it with the draft's layers; leave one of them out."
        )
    # The quantization of an MTP head's configuration is the target's, which often leaves the head as it is.
    quantization = None if config.method == "mtp" else config.draft_model_config.quantization
    if quantization is not None:
        raise EagleMRV2Error(
            f"draft_quantization rounds the weights of a draft, and those of {config.model} are quantized already "
            f"({quantization}); leave draft_quantization out."
        )
