"""Launches of Triton kernels, which a thread can turn into compilations alone."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import triton


class _Thread(threading.local):
    compiles = False


_thread = _Thread()


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """``kernel[grid]``; while this thread `compiles_alone`, what compiles the kernel for the same arguments."""
    if _thread.compiles:
        return functools.partial(_compile, kernel, grid)
    call: Callable[..., Any] = kernel[grid]
    return call


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
