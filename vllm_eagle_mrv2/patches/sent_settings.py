"""Settings that arrive in another process: it then checks its workers, even if it did not load the plugin."""

from __future__ import annotations

import copyreg
from typing import Any

from vllm_eagle_mrv2 import patches
from vllm_eagle_mrv2.config.method import Settings


def with_check() -> None:
    """Have this process pickle settings with the check of the workers."""
    copyreg.pickle(Settings, _reduced)  # type: ignore[arg-type]


def arrived(fields: dict[str, Any]) -> Settings:
    """Return unpickled settings, and put the check in place."""
    with_check()  # they may be sent on
    patches.hook(patches.patch_of("vllm.v1.engine.core:EngineCore._initialize_kv_caches"))
    return Settings(**fields)


def _reduced(settings: Settings) -> tuple[Any, ...]:
    return arrived, (vars(settings),)
