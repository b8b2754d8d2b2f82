"""What a kernel must know of the GPU that it runs on."""

from __future__ import annotations

import functools
from typing import Any

import torch

from vllm_eagle_mrv2.kernels.measured import MEASURED

_H200_MULTIPROCESSORS = 132


def is_measured(device: torch.device) -> bool:
    """Whether kernels that stand for a library's are known to be faster on an NVIDIA GPU."""
    return torch.cuda.get_device_capability(device) in MEASURED


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a device; those of an H200 where it has none, for the interpreter."""
    if device.type != "cuda":
        return _H200_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def stages(wanted: int, tile: int, device: torch.device) -> int:
    """How many tiles of so many bytes the shared memory of a device holds, up to what is wanted, one at least."""
    if device.type != "cuda":
        return wanted
    properties: Any = torch.cuda.get_device_properties(device)  # whose stub lacks it
    return max(1, min(wanted, int(properties.shared_memory_per_block_optin) // tile))
