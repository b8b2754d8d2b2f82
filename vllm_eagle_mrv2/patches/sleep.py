"""Keeps the draft's buffers through a level-2 sleep, which drops everything allocated during loading (#49774).

The caller loads the weights again after the sleep, but nothing restores buffers such as RoPE tables.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_eagle_mrv2.drafting.drafter import drafter_of
from vllm_eagle_mrv2.patches.wrap import Function


def buffers_saved(original: Function) -> Function:
    """Wrap ``Worker.sleep``: a level-2 sleep first copies the draft's buffers to the CPU."""

    def sleep(self: Any, level: int = 1) -> None:
        drafter = drafter_of(getattr(self.model_runner, "speculator", None))
        if level == 2 and drafter is not None:
            drafter.saved_buffers = {
                name: buffer.to("cpu", copy=True) for name, buffer in drafter.stock.model.named_buffers()
            }
        original(self, level)

    return sleep


def buffers_restored(original: Function) -> Function:
    """Wrap ``Worker.wake_up``: it copies the saved buffers back into the draft."""

    def wake_up(self: Any, tags: list[str] | None = None) -> None:
        original(self, tags)
        drafter = drafter_of(getattr(self.model_runner, "speculator", None))
        if drafter is not None and (tags is None or "weights" in tags):
            with torch.inference_mode():  # the buffers may be inference tensors
                for name, buffer in drafter.stock.model.named_buffers():
                    if name in drafter.saved_buffers:
                        buffer.copy_(drafter.saved_buffers[name])
            drafter.saved_buffers = {}

    return wake_up
