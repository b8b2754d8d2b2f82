"""Patches of vLLM's engine arguments and configuration for the method ``eagle_mrv2``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm_eagle_mrv2.config import captured_sizes
from vllm_eagle_mrv2.config.cache_names import name_in_caches
from vllm_eagle_mrv2.config.command_line import teach_parser
from vllm_eagle_mrv2.config.draft_config import fit_to_target
from vllm_eagle_mrv2.config.engine_arguments import check_lookup, check_translated, take_settings
from vllm_eagle_mrv2.config.families import METHOD
from vllm_eagle_mrv2.config.heads import check_fit
from vllm_eagle_mrv2.config.method import MARKER, mark, settings_of
from vllm_eagle_mrv2.config.vllm_errors import first_sentence, our_sentence_alone, refused_by_vllm
from vllm_eagle_mrv2.errors import EagleMRV2Error
from vllm_eagle_mrv2.patches import sent_settings
from vllm_eagle_mrv2.patches.runner_choice import select_v2_by_environment
from vllm_eagle_mrv2.patches.wrap import Function

if TYPE_CHECKING:
    from packaging.version import Version

    from vllm_eagle_mrv2.releases.spec import Release


def translated_first(original: Function) -> Function:
    """Wrap ``EngineArgs.create_engine_config``: it accepts the method, and raises this package's own error messages."""

    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        settings = take_settings(self, _installed)
        select_v2_by_environment(settings)
        with our_sentence_alone():
            config = original(self, *args, **kwargs)
        if settings is not None and settings_of(config.speculative_config) is None:
            raise EagleMRV2Error(
                f"vLLM replaced the speculative configuration that asked for method={METHOD}; give the target as "
                "the model, and the draft as model of the speculative configuration."
            )
        if settings is not None:
            check_lookup(config, settings)
            name_in_caches(config)
            if _has_front_end(*args, **kwargs):
                from vllm_eagle_mrv2.patches import metrics

                metrics.offer(config, settings)
        return config

    return create_engine_config


def settings_attached(original: Function) -> Function:
    """Wrap ``EngineArgs.create_speculative_config``: its result is checked and carries the settings."""

    def create_speculative_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        settings = take_settings(self, _installed)
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
        fit_to_target(config, _installed()[1])
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

    def validate(self: Any, *args: Any, **kwargs: Any) -> None:
        if settings_of(self.speculative_config) is None:
            original(self, *args, **kwargs)
            return
        from vllm.logger import init_logger

        from vllm_eagle_mrv2.releases import v2_limits

        listed = v2_limits.listed_by_vllm(original, self)
        for warning in v2_limits.check(self, listed, _installed()[1]):
            init_logger("vllm.eagle_mrv2").warning("%s", warning)

    return validate


def prefills_captured(original: Function) -> Function:
    """Wrap ``VllmConfig._set_cudagraph_sizes``: to vLLM's own choice it adds larger sizes (`config.captured_sizes`)."""

    def set_cudagraph_sizes(self: Any, *args: Any, **kwargs: Any) -> None:
        compilation = self.compilation_config
        given = compilation.cudagraph_capture_sizes or compilation.max_cudagraph_capture_size
        original(self, *args, **kwargs)
        sizes = compilation.cudagraph_capture_sizes
        settings = settings_of(self.speculative_config)
        if given or not sizes or settings is None:
            return
        if larger := captured_sizes.beyond(sizes[-1], self):
            mark(self.speculative_config, replace(settings, vllm_largest=sizes[-1]))
            sizes += larger
            compilation.max_cudagraph_capture_size = sizes[-1]

    return set_cudagraph_sizes


def _installed() -> tuple[Release, Version]:
    """The installed release and its version; an engine that did not ask for ``eagle_mrv2`` does not import them."""
    from vllm_eagle_mrv2 import releases

    return releases.installed()


def _has_front_end(usage_context: Any = None, headless: bool = False) -> bool:
    """Whether metrics can be shown by who makes a configuration; arguments as of ``create_engine_config``."""
    from vllm import envs

    return not (headless or getattr(envs, "VLLM_USE_RUST_FRONTEND", False))
