"""Patches of vLLM's engine arguments and configuration for the method ``eagle_mrv2``, and of its speculator factory."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, cast

from packaging.version import Version
from pydantic import ValidationError

from vllm_eagle_mrv2 import __version__
from vllm_eagle_mrv2.config import captured_sizes, kill_switch, one_model
from vllm_eagle_mrv2.config.checkpoints import Reader, check_weights
from vllm_eagle_mrv2.config.draft_config import fit_to_target
from vllm_eagle_mrv2.config.families import METHOD, Family
from vllm_eagle_mrv2.config.heads import check_fit
from vllm_eagle_mrv2.config.method import (
    MARKER,
    Settings,
    canonical,
    is_on,
    is_ours,
    mark,
    names,
    parse_short_form,
    settings_of,
    translate,
)
from vllm_eagle_mrv2.config.options import OPTIONS_KEY, parse_options
from vllm_eagle_mrv2.errors import EagleMRV2Error
from vllm_eagle_mrv2.patches import sent_settings
from vllm_eagle_mrv2.patches.wrap import Function

_V2_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
_OWN_LOAD_CONFIG = Version("0.31")
"""The first release that loads a draft by its ``draft_load_config`` and not as its target."""
_SET_BY_US = "01"  # vLLM reads it as 1, and it differs from a value that the user set


# Wrappers


def translated_first(original: Function) -> Function:
    """Wrap ``EngineArgs.create_engine_config``: it accepts the method, and raises this package's own error messages."""

    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        settings = take_settings(self)
        _select_v2_by_environment(settings)
        with _our_sentence_alone():
            config = original(self, *args, **kwargs)
        if settings is not None and settings_of(config.speculative_config) is None:
            raise EagleMRV2Error(
                f"vLLM replaced the speculative configuration that asked for method={METHOD}; give the target as "
                "the model, and the draft as model of the speculative configuration."
            )
        if settings is not None:
            _name_in_caches(config)
            from vllm_eagle_mrv2.patches import metrics

            metrics.offer(config, settings)
        return config

    return create_engine_config


def settings_attached(original: Function) -> Function:
    """Wrap ``EngineArgs.create_speculative_config``: its result is checked and carries the settings."""

    def create_speculative_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        settings = take_settings(self)
        if settings is None:
            return original(self, *args, **kwargs)
        # vLLM's schema does not know this key; it is put back for the next use of these arguments.
        self.speculative_config = {k: v for k, v in self.speculative_config.items() if k != MARKER}
        try:
            config = original(self, *args, **kwargs)
        except (ValueError, NotImplementedError) as error:
            draft = self.speculative_config.get("model", "in the target")
            raise refused_by_vllm(draft, settings.family, first_sentence(error)) from error
        finally:
            self.speculative_config = {**self.speculative_config, MARKER: settings}
        check_translated(config, settings)
        check_fit(config)
        from vllm_eagle_mrv2 import releases

        fit_to_target(config, releases.installed_version())
        mark(config, settings)
        sent_settings.with_check()
        return config

    return create_speculative_config


def parser_taught(original: Function) -> Function:
    """Wrap ``EngineArgs.add_cli_args``: the parser accepts the method."""

    def add_cli_args(*args: Any, **kwargs: Any) -> Any:
        parser = original(*args, **kwargs)
        teach_parser(parser)
        return parser

    return add_cli_args


def always_v2(original: Function) -> Function:
    """Wrap ``VllmConfig.use_v2_model_runner``: it is true for an engine with ``eagle_mrv2``.

    0.20 has no such property and reads VLLM_USE_V2_MODEL_RUNNER, which is set while the latest engine of the process
    uses ``eagle_mrv2``.
    """

    def use_v2_model_runner(self: Any) -> bool:
        return settings_of(self.speculative_config) is not None or bool(original(self))

    return use_v2_model_runner


def limits_in_our_words(original: Function) -> Function:
    """Wrap ``VllmConfig._validate_v2_model_runner``: its messages name ``eagle_mrv2`` if it was asked for."""

    def validate(self: Any) -> None:
        if settings_of(self.speculative_config) is None:
            original(self)
            return
        from vllm.logger import init_logger

        from vllm_eagle_mrv2 import releases
        from vllm_eagle_mrv2.releases import v2_limits

        listed = v2_limits.listed_by_vllm(original, self)
        for warning in v2_limits.check(self, listed, releases.installed_version()):
            init_logger("vllm.eagle_mrv2").warning("%s", warning)

    return validate


def prefills_captured(original: Function) -> Function:
    """Wrap ``VllmConfig._set_cudagraph_sizes``: to vLLM's own choice it adds larger sizes (`config.captured_sizes`)."""

    def set_cudagraph_sizes(self: Any) -> None:
        compilation = self.compilation_config
        given = compilation.cudagraph_capture_sizes or compilation.max_cudagraph_capture_size
        original(self)
        sizes = compilation.cudagraph_capture_sizes
        if given or not sizes or settings_of(self.speculative_config) is None:
            return
        sizes += captured_sizes.beyond(sizes[-1], self)
        compilation.max_cudagraph_capture_size = sizes[-1]

    return set_cudagraph_sizes


def our_speculator(original: Function) -> Function:
    """Wrap ``init_speculator``: it makes this package's speculator for a configuration with settings, and marks it."""

    def init_speculator(vllm_config: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
        settings = settings_of(vllm_config.speculative_config)
        if settings is None:
            return original(vllm_config, device, *args, **kwargs)
        from vllm_eagle_mrv2 import patches, releases

        patches.apply(patches.Scope.WORKER, releases.installed_version())
        speculator = releases.installed_release().speculator_class(settings.family)(vllm_config, device)
        mark(speculator, settings)
        return speculator

    return init_speculator


# Implementation


@contextlib.contextmanager
def _our_sentence_alone() -> Iterator[None]:
    """Raise the EagleMRV2Error that pydantic wrapped into a ValidationError while it made a configuration."""
    try:
        yield
    except ValidationError as report:
        for error in report.errors():
            refusal = error.get("ctx", {}).get("error")
            if isinstance(refusal, EagleMRV2Error):
                raise refusal from None
        raise


def refused_by_vllm(draft: str, family: Family, reason: str) -> EagleMRV2Error:
    """The error for a draft that vLLM itself refuses."""
    return EagleMRV2Error(
        f"vLLM refuses the draft {draft} for method={family} ({reason}); give a draft, or "
        "settings of the speculative configuration, that it takes."
    )


def first_sentence(error: Exception) -> str:
    """The first sentence of a vLLM error, which may be a validation error of many lines or a long list."""
    text = str(error)
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        text = f"{'.'.join(map(str, first['loc']))} {first['msg']}".strip()
    return text.strip().partition("\n")[0].partition(". ")[0].removeprefix("Value error, ").rstrip(".")


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
        settings.kept_tokens.check(config.draft_model_config.get_vocab_size())
    if settings.options.draft_quantization is not None:
        _check_weights_to_round(config)


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


def take_settings(engine_args: Any) -> Settings | None:
    """Translate an ``EngineArgs`` that asks for ``eagle_mrv2`` in place, and store the settings in its dictionary.

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
        settings = cast(Settings, given[MARKER])
        unchanged = given.get("method") == settings.family
        as_before = parse_options(engine_args.additional_config) == settings.options
        as_before &= is_on(given.get("enforce_eager")) == settings.enforce_eager
        if unchanged and as_before and not kill_switch.is_on():
            return settings
        # The arguments were used before, and since then they were changed or switched off: translate them again.
        given = {key: value for key, value in given.items() if key != MARKER}
        if unchanged:
            given["method"] = f"{METHOD}:{settings.family}"
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

    from vllm_eagle_mrv2 import releases

    options = parse_options(engine_args.additional_config)
    release = releases.installed_release()
    release.check_disabled(options.disable, releases.installed_version())
    asked = one_model.split(engine_args, asked, reader)
    translated, settings = translate(asked, engine_args.model, options, reader)
    release.check_settings(settings, engine_args)
    if "model" in translated:
        own = translated.get("draft_load_config") if releases.installed_version() >= _OWN_LOAD_CONFIG else None
        load_format = own.get("load_format") if isinstance(own, dict) else None
        check_weights(translated["model"], load_format or engine_args.load_format)
    engine_args.speculative_config = {**translated, MARKER: settings}
    return settings


def teach_parser(parser: argparse.ArgumentParser) -> None:
    """Let a vLLM argument parser accept the method in its short form and, if it has it, in ``--spec-method``."""
    for action in parser._actions:
        if "--speculative-config" in action.option_strings and action.type is not None:
            action.type = _short_form_first(action.type)  # type: ignore[arg-type]
        elif "--spec-method" in action.option_strings and action.choices is not None:
            action.choices = [*action.choices, *(name for name in names() if name not in action.choices)]
            action.type = lambda name: canonical(name) if is_ours(name) else name


def _short_form_first(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    @functools.wraps(parse)
    def parsed(text: str) -> Any:
        try:
            short = parse_short_form(text)
        except EagleMRV2Error as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return parse(text) if short is None else short

    return parsed


def _name_in_caches(config: Any) -> None:
    """Give vLLM's caches of compiled models an entry of their own for this engine.

    Without it the caches would not always tell this engine from one with the stock method, which lacks this package's
    operators, from one with another version of them, from one with another draft for the same target, or from one with
    other draft backends.
    """
    if isinstance(config.additional_config, dict):
        speculative = config.speculative_config
        backends = [str(getattr(speculative, f"{kind}_backend", None)) for kind in ("attention", "moe")]
        hashes = [speculative.draft_model_config.compute_hash(), *backends, __version__]
        draft = {f"{OPTIONS_KEY}_draft": ", ".join(hashes)}
        config.additional_config = {OPTIONS_KEY: {}, **config.additional_config, **draft}


def _select_v2_by_environment(settings: Settings | None) -> None:
    """Set VLLM_USE_V2_MODEL_RUNNER for an engine with ``eagle_mrv2`` if the release needs it; unset it for others."""
    if settings is None:
        if os.environ.get(_V2_VARIABLE) == _SET_BY_US:
            del os.environ[_V2_VARIABLE]
        return
    from vllm_eagle_mrv2 import releases

    if releases.installed_release().v2_by_environment:
        os.environ.setdefault(_V2_VARIABLE, _SET_BY_US)
