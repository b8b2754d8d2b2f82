"""Launches of Triton kernels, which a thread can turn into compilations only."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any


class _Thread(threading.local):
    compiles = False


_thread = _Thread()


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """Return ``kernel[grid]`` or, within `compiles_alone`, a call that only compiles for the same arguments."""
    if _thread.compiles:
        return functools.partial(kernel.warmup, grid=grid)
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
