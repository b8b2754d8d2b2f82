"""What the workers of live engines share: the engine's arguments, its start, and the answers to jobs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

from vllm_eagle_mrv2.cli.common.engine_process import OnTokens
from vllm_eagle_mrv2.cli.common.types import Job, Started

CPU_ARGUMENTS = {"enforce_eager": True, "dtype": "float32"}


def engine_arguments(job: Job) -> dict[str, Any]:
    """The arguments of a job's engine on this machine."""
    from vllm.platforms import current_platform

    arguments = job.arguments | (CPU_ARGUMENTS if current_platform.is_cpu() else {})
    return {"model": job.model, "speculative_config": job.speculative_config, **arguments, **job.overrides}


def started() -> Started:
    """The version and the device of an engine that has started in this process."""
    import vllm
    from vllm.platforms import current_platform

    return Started(
        vllm_version=vllm.__version__,
        device=current_platform.device_type,
        device_name=current_platform.get_device_name() or current_platform.device_type,
    )


class Worker:
    """The first job starts an engine, the others measure it.

    Args:
        start: starts the engine, which has ``started`` and ``measure``.
        task: kind of the jobs that measure.
    """

    def __init__(self, start: Callable[[Job], Any], task: type[BaseModel]) -> None:
        self._start, self._task = start, task
        self._engine: Any = None

    def answer(self, job: str, on_tokens: OnTokens) -> BaseModel:
        """The answer to a job, for `cli.common.engine_process.serve`."""
        if self._engine is None:
            self._engine = self._start(Job.model_validate_json(job))
            started: Started = self._engine.started
            return started
        measured: BaseModel = self._engine.measure(self._task.model_validate_json(job))
        return measured


def percentile(values: list[float], percent: float) -> float:
    """The smallest value that at least ``percent`` of the values do not exceed (nearest rank); 0 without values."""
    if not values:  # every request ended with its first output
        return 0.0
    return sorted(values)[max(math.ceil(percent / 100 * len(values)), 1) - 1]
