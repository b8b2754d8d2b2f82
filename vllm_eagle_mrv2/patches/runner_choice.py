"""Selects Model Runner V2 where only the environment can: on vLLM 0.20, in every process of an engine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_eagle_mrv2.config.method import Settings

_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
_SET_BY_US = "01"  # vLLM reads it as 1, and it differs from a value that the user set


def select_v2_by_environment(settings: Settings | None) -> None:
    """Set VLLM_USE_V2_MODEL_RUNNER for an engine with ``eagle_mrv2`` if the release needs it; unset it for others."""
    before = os.environ.get(_VARIABLE)
    if settings is None and before == _SET_BY_US:
        del os.environ[_VARIABLE]
    elif settings is not None and before is None and _needed():
        os.environ[_VARIABLE] = _SET_BY_US
    else:
        return
    from vllm import envs

    # An engine in this process has vLLM keep what it reads from the environment.
    getattr(vars(envs)["__getattr__"], "cache_clear", lambda: None)()


def _needed() -> bool:
    from vllm_eagle_mrv2 import releases  # an engine that did not ask for ``eagle_mrv2`` does not import them

    return releases.release_for(str(releases.installed_version())).v2_by_environment
