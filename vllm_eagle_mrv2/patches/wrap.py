"""Replaces a function of another package, at most once, by a wrapper around the original."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

Function = Callable[..., Any]
Wrapper = Callable[[Function], Function]

_ORIGINAL = "_eagle_mrv2_original"


def wrap(owner: Any, name: str, wrapper: Wrapper) -> None:
    """Replace a function, a static method or a property's getter by ``wrapper(original)``.

    Attributes that are already wrapped, do not exist or are something else are left alone: a vLLM that lacks something
    is refused only when an engine asks for ``eagle_mrv2``.
    """
    attribute = inspect.getattr_static(owner, name, None)
    original = original_of(attribute)
    if not callable(original) or hasattr(original, _ORIGINAL):
        return
    wrapped = functools.wraps(original)(wrapper(original))
    setattr(wrapped, _ORIGINAL, original)
    if isinstance(attribute, property):
        setattr(owner, name, property(wrapped, doc=attribute.__doc__))
    else:
        setattr(owner, name, staticmethod(wrapped) if isinstance(attribute, staticmethod) else wrapped)


def original_of(attribute: Any) -> Any:
    """The function inside a static method or a property; anything else is returned unchanged."""
    if isinstance(attribute, property):
        return attribute.fget
    return attribute.__func__ if isinstance(attribute, staticmethod) else attribute
