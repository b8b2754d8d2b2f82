"""How much of a kernel's input its shared memory holds."""

from __future__ import annotations

import functools

import torch


@functools.cache
def stages(wanted: int, tile: int, device: torch.device) -> int:
    """How many tiles of so many bytes the shared memory of a device holds, up to what is wanted, one at least."""
    if device.type != "cuda":
        return wanted
    shared_memory: int = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return max(1, min(wanted, shared_memory // tile))
