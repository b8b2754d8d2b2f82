"""Checks that every worker of an engine with ``eagle_mrv2`` drafts with it.

A worker that did not load the plugin runs none of its hooks, and a third-party worker class may make its speculator in
another way.  Either would silently draft with the stock speculator.  The engine core therefore asks every worker after
start-up, before the KV cache is made.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from vllm_eagle_mrv2 import patches, releases
from vllm_eagle_mrv2.classes import class_path
from vllm_eagle_mrv2.config.draft_lengths import lengths_to_choose_from
from vllm_eagle_mrv2.config.families import METHOD
from vllm_eagle_mrv2.config.method import settings_of
from vllm_eagle_mrv2.draft_length.notes import GraphTime, note_graph_times
from vllm_eagle_mrv2.errors import EagleMRV2Error
from vllm_eagle_mrv2.patches.wrap import Function


def workers_asked(original: Function) -> Function:
    """Wrap ``EngineCore._initialize_kv_caches``, which precedes the scheduler: it asks the workers first.

    Where the number of draft tokens is chosen, it asks them afterwards what their graphs take.
    """

    def initialize_kv_caches(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        chooses = bool(lengths_to_choose_from(vllm_config))
        if settings_of(vllm_config.speculative_config) is not None:
            try:
                check(self.collective_rpc(complaint))
            except EagleMRV2Error:
                self.model_executor.shutdown()  # or worker processes would live as long as this process
                raise
            if chooses:
                patches.apply(patches.Scope.SCHEDULER, releases.installed_version())
        result = original(self, vllm_config, *args, **kwargs)
        if chooses:
            note_graph_times(vllm_config, self.collective_rpc(graph_times)[0])
        return result

    return initialize_kv_caches


def check(complaints: Iterable[str | None]) -> None:
    """Refuse an engine if one of its workers does not draft with ``eagle_mrv2``.

    Args:
        complaints: the result of `complaint` in each worker, by rank.

    Raises:
        EagleMRV2Error: the first complaint.
    """
    for rank, text in enumerate(complaints):
        if text is not None:
            raise EagleMRV2Error(f"method={METHOD} was asked for, but the worker of rank {rank} drafts with {text}.")


def complaint(worker: Any) -> str | None:
    """What a worker drafts with instead of ``eagle_mrv2``, with the cause and the remedy; None if nothing is wrong.

    This runs in the worker's process, where the plugin may not be loaded.  Only the last pipeline stage drafts.  Model
    Runner V1 does not say which stage it is on, and is wrong on every stage.
    """
    runner = getattr(worker, "model_runner", None)
    speculator = getattr(runner, "speculator", None)
    if settings_of(speculator) is not None or not getattr(runner, "is_last_pp_rank", True):
        return None
    drafter = getattr(runner, "drafter", None) if speculator is None else speculator
    return f"{'nothing' if drafter is None else class_path(type(drafter))}: {_cause(runner)}"


def graph_times(worker: Any) -> list[GraphTime]:
    """What the graphs of an iteration take in a worker; nothing without such graphs."""
    from vllm_eagle_mrv2.drafting.drafter import drafter_of  # every engine core imports this module, stock's too

    drafter = drafter_of(worker.model_runner.speculator)
    return [] if drafter is None else drafter.graphs.times()


def _cause(runner: object) -> str:
    if patches.installed():
        return f"its {class_path(type(runner))} does not call vLLM's init_speculator; use vLLM's own worker classes"
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and METHOD not in plugins.split(","):
        return (
            f"VLLM_PLUGINS={plugins} keeps the plugin out of its process; have VLLM_PLUGINS name {METHOD} there, "
            "or unset it"
        )
    return "its process did not load the plugin; install vllm-eagle-mrv2 with pip into the environment of the workers"
