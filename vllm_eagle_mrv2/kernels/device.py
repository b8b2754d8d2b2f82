"""Properties of the GPU that kernels depend on."""

from __future__ import annotations

import functools
from typing import Any

import torch

from vllm_eagle_mrv2.kernels.measured import MEASURED

_H200_MULTIPROCESSORS = 132


def is_measured(device: torch.device) -> bool:
    """Whether kernels that replace a library's were measured to be faster on this NVIDIA GPU."""
    return torch.cuda.get_device_capability(device) in MEASURED


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; on other devices (Triton interpreter) that of an H200."""
    if device.type != "cuda":
        return _H200_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def converts_fp8(device: torch.device) -> bool:
    """Whether a device has instructions for e4m3: NVIDIA GPUs from compute capability 8.9 on, Triton's interpreter."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


@functools.cache
def stages(wanted: int, tile: int, device: torch.device) -> int:
    """Return how many tiles of ``tile`` bytes fit in a device's shared memory: at most ``wanted``, at least one."""
    if device.type != "cuda":
        return wanted
    properties: Any = torch.cuda.get_device_properties(device)  # the type stub lacks the attribute
    return max(1, min(wanted, int(properties.shared_memory_per_block_optin) // tile))
