"""Settings that arrive in another process: it then checks its workers, even if it did not load the plugin."""

from __future__ import annotations

import copyreg
from typing import Any

from vllm_eagle_mrv2 import __version__, patches
from vllm_eagle_mrv2.config.method import Settings
from vllm_eagle_mrv2.errors import EagleMRV2Error
from vllm_eagle_mrv2.patches.runner_choice import select_v2_by_environment


def with_check() -> None:
    """Have this process pickle settings with the check of the workers."""
    copyreg.pickle(Settings, _reduced)  # type: ignore[arg-type]


def arrived(fields: dict[str, Any], version: str = "an earlier version") -> Settings:
    """Return unpickled settings, choose their runner, and put the check in place.

    Raises:
        EagleMRV2Error: another version of this package has sent them, whose ranks may draft otherwise.
    """
    if version != __version__:
        raise EagleMRV2Error(
            f"this process has vllm-eagle-mrv2 {__version__}, and the engine is configured with {version}; install the "
            "same version on all nodes."
        )
    settings = Settings(**fields)
    select_v2_by_environment(settings)  # Ray Serve makes a configuration in another process than the engine
    with_check()  # they may be sent on
    patches.hook(patches.patch_of("vllm.v1.engine.core:EngineCore._initialize_kv_caches"))
    return settings


def _reduced(settings: Settings) -> tuple[Any, ...]:
    return arrived, (vars(settings), __version__)
