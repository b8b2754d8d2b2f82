"""Patch of vLLM's factory of speculators."""

from __future__ import annotations

from typing import Any

from vllm_eagle_mrv2 import patches
from vllm_eagle_mrv2.config.method import mark, settings_of
from vllm_eagle_mrv2.patches.wrap import Function


def our_speculator(original: Function) -> Function:
    """Wrap ``init_speculator``: it makes this package's speculator for a configuration with settings, and marks it."""

    def init_speculator(vllm_config: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
        settings = settings_of(vllm_config.speculative_config)
        if settings is None:
            return original(vllm_config, device, *args, **kwargs)
        from vllm_eagle_mrv2 import releases  # not for an engine that did not ask for them

        release, version = releases.installed()
        patches.apply(patches.Scope.WORKER, version)
        speculator = release.speculator_class(settings.family)(vllm_config, device)
        mark(speculator, settings)
        return speculator

    return init_speculator
