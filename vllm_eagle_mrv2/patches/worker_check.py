"""The check that an engine drafts with ``eagle_mrv2`` where it was asked for.

A worker that did not load the plugin runs none of its hooks, and a worker class of somebody else's may make its
speculator in another way.  Either would draft with stock's speculator, unnoticed.  So the engine core asks every worker
once they are up, before the KV cache is made.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import wrapt

from vllm_eagle_mrv2.config.method import METHOD, settings_of
from vllm_eagle_mrv2.errors import EagleMRV2Error
from vllm_eagle_mrv2.releases.surface import class_path


def install() -> None:
    """Have the engine core of this process ask its workers; may be called again."""
    wrapt.register_post_import_hook(_wrap_engine_core, "vllm.v1.engine.core")


def _wrap_engine_core(module: ModuleType) -> None:
    from vllm_eagle_mrv2.patches.engine_args import wrap

    def initialize_kv_caches(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: Any, vllm_config: Any) -> Any:
            if settings_of(vllm_config.speculative_config) is not None:
                try:
                    check(self.collective_rpc(complaint))
                except EagleMRV2Error:
                    self.model_executor.shutdown()  # or workers of their own would live as long as this process
                    raise
            return original(self, vllm_config)

        return wrapped

    wrap(module.EngineCore, "_initialize_kv_caches", initialize_kv_caches)


def check(complaints: Iterable[str | None]) -> None:
    """Refuse an engine with a worker that drafts otherwise.

    Args:
        complaints: what `complaint` answered in each worker, by rank.

    Raises:
        EagleMRV2Error: the first complaint.
    """
    for rank, text in enumerate(complaints):
        if text is not None:
            raise EagleMRV2Error(f"method={METHOD} was asked for, but the worker of rank {rank} drafts with {text}.")


def complaint(worker: Any) -> str | None:
    """What a worker drafts with instead of ``eagle_mrv2``, why, and what helps; None where nothing is wrong.

    It is called in the worker's process, where the plugin may not be loaded.  Only the last pipeline stage drafts;
    Model Runner V1 does not say which stage it is, and is wrong in all of them.
    """
    runner = getattr(worker, "model_runner", None)
    speculator = getattr(runner, "speculator", None)
    if settings_of(speculator) is not None or not getattr(runner, "is_last_pp_rank", True):
        return None
    drafter = getattr(runner, "drafter", None) if speculator is None else speculator
    return f"{'nothing' if drafter is None else class_path(type(drafter))}: {_cause(runner)}"


def _cause(runner: object) -> str:
    from vllm_eagle_mrv2.patches import engine_args

    if engine_args.are_installed():
        return f"its {class_path(type(runner))} does not call vLLM's init_speculator; use vLLM's own worker classes"
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and METHOD not in plugins.split(","):
        return (
            f"VLLM_PLUGINS={plugins} keeps the plugin out of its process; have VLLM_PLUGINS name {METHOD} there, "
            "or unset it"
        )
    return "its process did not load the plugin; install vllm-eagle-mrv2 with pip into the environment of the workers"
