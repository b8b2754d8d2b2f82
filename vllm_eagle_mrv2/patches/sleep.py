"""Buffers of a draft through a level-2 sleep, which drops all that was made while weights were loaded (#49774).

Weights come back from whoever updates them; buffers, tables of RoPE for instance, come from nowhere.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_eagle_mrv2.patches.wrap import Function
from vllm_eagle_mrv2.releases.common import StockAdapter


def buffers_saved(original: Function) -> Function:
    """``Worker.sleep`` that copies the draft's buffers to the CPU first."""

    def sleep(self: Any, level: int = 1) -> None:
        speculator = getattr(self.model_runner, "speculator", None)
        if level == 2 and isinstance(speculator, StockAdapter):
            speculator.saved_buffers = {
                name: buffer.to("cpu", copy=True) for name, buffer in speculator.model.named_buffers()
            }
        original(self, level)

    return sleep


def buffers_restored(original: Function) -> Function:
    """``Worker.wake_up`` that copies them back where they lay."""

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
