"""Launches of Triton kernels, which a thread can turn into compilations alone."""

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
    """``kernel[grid]``; while this thread `compiles_alone`, what compiles the kernel for the same arguments."""
    if _thread.compiles:
        return functools.partial(kernel.warmup, grid=grid)
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
