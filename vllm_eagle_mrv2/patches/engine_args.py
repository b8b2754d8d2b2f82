"""The places where this package hooks into vLLM.

Each is a wrapper that calls the original for everything that is not ours.  They are put in place when vLLM imports
the module concerned, so that loading the plugin imports nothing:

* ``EngineArgs.create_engine_config`` / ``create_speculative_config``: accept the method and translate it;
* ``EngineArgs.add_cli_args``: understand the method on the command line;
* ``VllmConfig.use_v2_model_runner``: true for an engine that asked for us (0.20 has no such property and reads
  VLLM_USE_V2_MODEL_RUNNER, which is set while the latest engine of the process asks for us);
* ``VllmConfig._validate_v2_model_runner``: what Model Runner V2 does not serve is refused in our words;
* ``spec_decode.init_speculator``: make our speculator for a marked configuration, and mark it;
* ``EngineCore._initialize_kv_caches``: before it, ask the workers what they draft with (`worker_check`).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, cast

import wrapt
from pydantic import ValidationError

from vllm_eagle_mrv2.config import kill_switch, one_model
from vllm_eagle_mrv2.config.checkpoints import Reader, check_weights
from vllm_eagle_mrv2.config.draft_config import fit_to_target
from vllm_eagle_mrv2.config.families import Family
from vllm_eagle_mrv2.config.heads import check_fit
from vllm_eagle_mrv2.config.method import (
    MARKER,
    METHOD,
    Settings,
    canonical,
    is_ours,
    mark,
    names,
    parse_short_form,
    settings_of,
    translate,
)
from vllm_eagle_mrv2.config.options import OPTIONS_KEY, parse_options
from vllm_eagle_mrv2.errors import EagleMRV2Error
from vllm_eagle_mrv2.patches import last_line, worker_check

_V2_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
_SET_BY_US = "01"  # the same to vLLM as 1, and told from a user's
_installed = False


def install() -> None:
    """Register every seam once; those whose module is already imported take effect now."""
    global _installed
    if _installed:
        return
    _installed = True
    last_line.install()
    wrapt.register_post_import_hook(_wrap_engine_args, "vllm.engine.arg_utils")
    wrapt.register_post_import_hook(_wrap_vllm_config, "vllm.config.vllm")
    wrapt.register_post_import_hook(_wrap_init_speculator, "vllm.v1.worker.gpu.spec_decode")
    wrapt.register_post_import_hook(_wrap_init_speculator, "vllm.v1.worker.gpu.model_runner")
    worker_check.install()


def are_installed() -> bool:
    """Whether this process loaded the plugin."""
    return _installed


def wrap(owner: Any, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put ``wrapper(original)`` in the place of an attribute, once.

    A vLLM without the attribute stays as it is: only ``eagle_mrv2`` is refused there.
    """
    original = getattr(owner, name, None)
    if original is not None and not hasattr(original, "_eagle_mrv2_original"):
        wrapped = functools.wraps(original)(wrapper(original))
        wrapped._eagle_mrv2_original = original  # type: ignore[attr-defined]
        setattr(owner, name, wrapped)


def _wrap_engine_args(arg_utils: ModuleType) -> None:
    engine_args = arg_utils.EngineArgs

    def create_engine_config(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
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
                from vllm_eagle_mrv2.telemetry import metrics

                metrics.offer(config, settings)
            return config

        return wrapped

    def create_speculative_config(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            settings = take_settings(self)
            if settings is None:
                return original(self, *args, **kwargs)
            # vLLM's schema does not know our key; it goes back for the next use of these arguments.
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
            return config

        return wrapped

    def add_cli_args(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            parser = original(*args, **kwargs)
            teach_parser(parser)
            return parser

        return wrapped

    wrap(engine_args, "create_engine_config", create_engine_config)
    wrap(engine_args, "create_speculative_config", create_speculative_config)
    original_add = engine_args.__dict__.get("add_cli_args")
    if isinstance(original_add, staticmethod) and not hasattr(original_add.__func__, "_eagle_mrv2_original"):
        wrapped = functools.wraps(original_add.__func__)(add_cli_args(original_add.__func__))
        wrapped._eagle_mrv2_original = original_add.__func__  # type: ignore[attr-defined]
        engine_args.add_cli_args = staticmethod(wrapped)


@contextlib.contextmanager
def _our_sentence_alone() -> Iterator[None]:
    """Pydantic wraps what is raised while it makes a configuration into a report of its own; ours comes out of it."""
    try:
        yield
    except ValidationError as report:
        for error in report.errors():
            refusal = error.get("ctx", {}).get("error")
            if isinstance(refusal, EagleMRV2Error):
                raise refusal from None
        raise


def refused_by_vllm(draft: str, family: Family, reason: str) -> EagleMRV2Error:
    """What is said of a draft that vLLM itself does not take."""
    return EagleMRV2Error(
        f"vLLM refuses the draft {draft} for method={family} ({reason}); give a draft, or "
        "settings of the speculative configuration, that it takes."
    )


def first_sentence(error: Exception) -> str:
    """The first sentence of an error of vLLM's, which may be a validation error of many lines or list everything."""
    text = str(error)
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        text = f"{'.'.join(map(str, first['loc']))} {first['msg']}".strip()
    return text.strip().partition("\n")[0].partition(". ")[0].removeprefix("Value error, ").rstrip(".")


def check_translated(config: Any, settings: Settings) -> None:
    """Refuse drafts that vLLM reads otherwise than their checkpoint says, or runs with a speculator of their own, and
    a draft vocabulary that is of another model.

    Args:
        config: vLLM's ``SpeculativeConfig`` for the translated method.
        settings: what was asked for.

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


def take_settings(engine_args: Any) -> Settings | None:
    """Translate the method of an ``EngineArgs`` in place, where it is ours; the settings go into its dictionary.

    Returns:
        the settings, or None where ``eagle_mrv2`` was not asked for, or is switched off.

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
        if unchanged and not kill_switch.is_on():
            return settings
        # Somebody changed the method of arguments that were used before, or switched ours off: they start anew.
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
        check_weights(translated["model"], engine_args.load_format)
    engine_args.speculative_config = {**translated, MARKER: settings}
    return settings


def teach_parser(parser: argparse.ArgumentParser) -> None:
    """Let an argument parser of vLLM's accept the method: the short form, and ``--spec-method`` where there is one."""
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
    """Have vLLM cache compiled models of this engine apart from those of stock's method, which lack our operators, and
    of other drafts for its target and the same with other backends: the caches do not tell all of them apart.
    """
    if isinstance(config.additional_config, dict):
        speculative = config.speculative_config
        backends = [str(getattr(speculative, f"{kind}_backend", None)) for kind in ("attention", "moe")]
        draft = {f"{OPTIONS_KEY}_draft": ", ".join([speculative.draft_model_config.compute_hash(), *backends])}
        config.additional_config = {OPTIONS_KEY: {}, **config.additional_config, **draft}


def _select_v2_by_environment(settings: Settings | None) -> None:
    """On a release that knows no other way, set the variable for an engine of ours, and unset it for the next."""
    if settings is None:
        if os.environ.get(_V2_VARIABLE) == _SET_BY_US:
            del os.environ[_V2_VARIABLE]
        return
    from vllm_eagle_mrv2 import releases

    if releases.installed_release().v2_by_environment:
        os.environ.setdefault(_V2_VARIABLE, _SET_BY_US)


def _wrap_vllm_config(module: ModuleType) -> None:
    _wrap_use_v2_model_runner(module.VllmConfig)

    def validate(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: Any) -> None:
            if settings_of(self.speculative_config) is None:
                original(self)
                return
            from vllm.logger import init_logger

            from vllm_eagle_mrv2 import releases
            from vllm_eagle_mrv2.releases import v2_limits

            listed = v2_limits.listed_by_vllm(original, self)
            for warning in v2_limits.check(self, listed, releases.installed_version()):
                init_logger("vllm.eagle_mrv2").warning("%s", warning)

        return wrapped

    if hasattr(module.VllmConfig, "_validate_v2_model_runner"):
        wrap(module.VllmConfig, "_validate_v2_model_runner", validate)


def _wrap_use_v2_model_runner(config_class: Any) -> None:
    original = config_class.__dict__.get("use_v2_model_runner")
    if not isinstance(original, property) or hasattr(original.fget, "_eagle_mrv2_original"):
        return
    decide = original.fget

    def use_v2_model_runner(self: Any) -> bool:
        if settings_of(self.speculative_config) is not None:
            return True
        assert decide is not None
        return bool(decide(self))

    use_v2_model_runner._eagle_mrv2_original = decide  # type: ignore[attr-defined]
    config_class.use_v2_model_runner = property(use_v2_model_runner, doc=original.__doc__)


def _wrap_init_speculator(module: ModuleType) -> None:
    def init_speculator(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(vllm_config: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
            settings = settings_of(vllm_config.speculative_config)
            if settings is None:
                return original(vllm_config, device, *args, **kwargs)
            from vllm_eagle_mrv2 import releases

            speculator = releases.installed_release().make_speculator(vllm_config, device, settings)
            mark(speculator, settings)
            return speculator

        return wrapped

    wrap(module, "init_speculator", init_speculator)
