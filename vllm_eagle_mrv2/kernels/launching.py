"""Launches of Triton kernels, which a thread can turn into compilations only."""

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
    """Return ``kernel[grid]`` or, within `compiles_alone`, a call that only compiles for the same arguments."""
    if _thread.compiles:
        return functools.partial(_compile, kernel, grid)
    call: Callable[..., Any] = kernel[grid]
    return call


@contextlib.contextmanager
def compiles_alone() -> Iterator[None]:
    """Compile the kernels that this thread launches, without running them.

    The GPU is not used, so another thread may capture a graph meanwhile.  Tensors may be on the meta device.
    """
    _thread.compiles = True
    try:
        yield
    finally:
        _thread.compiles = False


def _compile(kernel: Any, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
    compiled = kernel.warmup(*args, grid=grid, **kwargs)
    if compiled is None:  # a Triton hook has taken over the compilation
        return
    driver: Any = triton.runtime.driver.active
    if not isinstance(driver.launcher_cls, Launchers):
        driver.launcher_cls = Launchers(driver.launcher_cls)
    driver.launcher_cls.make(compiled)


class Launchers:
    """Replaces a Triton driver's launcher class and returns launchers that were made ahead.

    Up to 3.6, Triton runs a C compiler for each launcher, for 0.2 s, at the first launch of its kernel.  Launchers are
    kept in memory and not only in Triton's cache files, because Inductor may move the cache while an engine starts.
    """

    def __init__(self, launcher_cls: Callable[[Any, Any], Any]) -> None:
        self._launcher_cls = launcher_cls
        self._made: dict[Any, Any] = {}

    def make(self, compiled: Any) -> None:
        """Make the launcher of a compiled kernel."""
        if compiled.src not in self._made:
            self._made[compiled.src] = self._launcher_cls(compiled.src, compiled.metadata)

    def __call__(self, src: Any, metadata: Any) -> Any:
        """Return the launcher of a kernel compiled from this source, made ahead or now."""
        return self._made.get(src) or self._launcher_cls(src, metadata)
