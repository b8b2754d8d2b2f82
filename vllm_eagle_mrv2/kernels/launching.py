"""Launches of Triton kernels: before the one ahead has ended, or as compilations alone."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl


class _Process:
    pdl_allowed = True


class _Thread(threading.local):
    compiles = False


_thread = _Thread()


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """``kernel[grid]``; while this thread `compiles_alone`, what compiles the kernel for the same arguments."""
    if _thread.compiles:
        return functools.partial(_compile, kernel, grid)
    call: Callable[..., Any] = kernel[grid]
    return call


def allow_pdl(allowed: bool) -> None:
    """Whether kernels of this process, which drafts for one engine, may use programmatic dependent launch."""
    _Process.pdl_allowed = allowed


def uses_pdl() -> bool:
    """Whether kernels are launched so, which takes a GPU from compute capability 9.0 on."""
    return _Process.pdl_allowed and _has_pdl()


def pdl() -> dict[str, bool]:
    """Arguments to launch a kernel with that may begin before the kernel ahead of it has ended.

    Programmatic dependent launch brings its programs to the chip while those of the kernel ahead are still there, if
    that one is ours too; see `wait_for_kernel_ahead`.
    """
    return {"PDL": True, "launch_pdl": True} if uses_pdl() else {"PDL": False}


@functools.cache
def _has_pdl() -> bool:
    return torch.version.hip is None and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


@triton.jit
def wait_for_kernel_ahead(PDL: tl.constexpr):
    """Come back when all that the kernels ahead have written is there, and let the next kernel begin.

    To be called once by every program, before it returns, writes, or reads what any kernel of a draft writes.  The next
    kernel comes no earlier, so that not more than two are under way: what a program reads before it calls this must be
    safe from the one kernel ahead alone.  Before any loop: from within one that is pipelined loads move ahead of it
    (triton-lang/triton#11905), or it does not compile for Blackwell (vllm-project/vllm#30872).
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@contextlib.contextmanager
def compiles_alone() -> Iterator[None]:
    """Compile what this thread would launch.

    The GPU is left alone, so that another thread may be capturing a graph; tensors may be of the meta device.
    """
    _thread.compiles = True
    try:
        yield
    finally:
        _thread.compiles = False


def _compile(kernel: Any, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
    compiled = kernel.warmup(*args, grid=grid, **kwargs)
    if compiled is None:  # a hook of Triton's has taken it over
        return
    driver: Any = triton.runtime.driver.active
    if not isinstance(driver.launcher_cls, Launchers):
        driver.launcher_cls = Launchers(driver.launcher_cls)
    driver.launcher_cls.make(compiled)


class Launchers:
    """In the place of a Triton driver's class of launchers: those that were made ahead are there already.

    Up to 3.6 Triton runs a C compiler for each, 0.2 s long, when its kernel is launched for the first time.  They are
    not left to the files that it keeps of them: Inductor may change where those are while an engine starts.
    """

    def __init__(self, launcher_cls: Callable[[Any, Any], Any]) -> None:
        self._launcher_cls = launcher_cls
        self._made: dict[Any, Any] = {}

    def make(self, compiled: Any) -> None:
        """Make the launcher of a compiled kernel."""
        if compiled.src not in self._made:
            self._made[compiled.src] = self._launcher_cls(compiled.src, compiled.metadata)

    def __call__(self, src: Any, metadata: Any) -> Any:
        """The launcher of a kernel that was compiled of such source."""
        return self._made.get(src) or self._launcher_cls(src, metadata)
