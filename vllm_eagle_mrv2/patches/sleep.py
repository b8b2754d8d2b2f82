"""Buffers of a draft through a level-2 sleep, which drops all that was made while weights were loaded (#49774).

Weights come back from whoever updates them; buffers, tables of RoPE for instance, come from nowhere.  Up to 0.26 vLLM
keeps the target's alone.  One more seam, made only in processes that build our speculator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.worker.gpu_worker import Worker

from vllm_eagle_mrv2.patches.engine_args import wrap
from vllm_eagle_mrv2.releases.common import StockAdapter


def install() -> None:
    """Wrap the worker's methods, once."""
    wrap(Worker, "sleep", _saving)
    wrap(Worker, "wake_up", _restoring)


def _saving(original: Callable[..., None]) -> Callable[..., None]:
    def sleep(self: Any, level: int = 1) -> None:
        speculator = getattr(self.model_runner, "speculator", None)
        if level == 2 and isinstance(speculator, StockAdapter):
            speculator.saved_buffers = {
                name: buffer.to("cpu", copy=True) for name, buffer in speculator.model.named_buffers()
            }
        original(self, level)

    return sleep


def _restoring(original: Callable[..., None]) -> Callable[..., None]:
    def wake_up(self: Any, tags: list[str] | None = None) -> None:
        original(self, tags)
        speculator = getattr(self.model_runner, "speculator", None)
        if isinstance(speculator, StockAdapter) and (tags is None or "weights" in tags):
            with torch.inference_mode():  # they may have been made in it
                for name, buffer in speculator.model.named_buffers():
                    if name in speculator.saved_buffers:
                        buffer.copy_(speculator.saved_buffers[name])
            speculator.saved_buffers = {}

    return wake_up
