"""Weights that are replaced in a running engine (reinforcement learning): what we copied of them is copied again.

One more seam, made only in processes whose draft has a copy: the worker's methods that end an update.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from vllm.v1.worker.gpu_worker import Worker

from vllm_eagle_mrv2.patches.engine_args import wrap


@runtime_checkable
class CopiesWeights(Protocol):
    """A speculator with copies of its draft's or target's weights."""

    def renew_copied_weights(self) -> None:
        """Copy them again, into the same memory."""


def install() -> None:
    """Wrap ``reload_weights`` and the last call of a weight transfer, once."""
    last_call = "finish_weight_update" if hasattr(Worker, "finish_weight_update") else "update_weights"
    for name in ("reload_weights", last_call):
        wrap(Worker, name, _renewing)


def _renewing(original: Any) -> Any:
    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        speculator = getattr(self.model_runner, "speculator", None)
        if isinstance(speculator, CopiesWeights):
            speculator.renew_copied_weights()
        return result

    return update
