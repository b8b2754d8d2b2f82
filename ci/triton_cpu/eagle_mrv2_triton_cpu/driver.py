"""The driver half of the backend: one device, the host, always there."""

import os
import platform
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from eagle_mrv2_triton_cpu.interpreter import complete_the_interpreter

complete_the_interpreter()


class HostDriver(DriverBase):
    """Describes the host as device 0 with stream 0."""

    def __init__(self) -> None:
        super().__init__()
        self.utils = SimpleNamespace(get_device_properties=_device_properties)

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Raises RuntimeError: launchers are for compiled kernels."""
        raise RuntimeError(f"no launcher for an argument of type {ty}: this environment interprets Triton kernels")

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", platform.machine(), 0)

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        import torch

        return torch.cpu

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        """There is one device."""

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_benchmarker(self) -> Callable[..., Any]:
        return _time_once


def _device_properties(device: int) -> dict[str, int]:
    return {"max_shared_mem": 1 << 30, "multiprocessor_count": os.cpu_count() or 1, "warpSize": 1}


def _time_once(kernel_call: Callable[[], Any], *, quantiles: Sequence[float] | None = None, **unused: Any) -> Any:
    """Milliseconds of one interpreted call; the same number for every quantile asked for.

    Autotuned kernels work this way, but what the autotuner picks here says nothing about a GPU.
    """
    started = time.perf_counter()
    kernel_call()
    elapsed = (time.perf_counter() - started) * 1e3
    return elapsed if quantiles is None else [elapsed] * len(quantiles)
