"""How this package replaces a function of somebody else's: by a wrapper that is given the original, once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

Function = Callable[..., Any]
Wrapper = Callable[[Function], Function]

_ORIGINAL = "_eagle_mrv2_original"


def wrap(owner: Any, name: str, wrapper: Wrapper) -> None:
    """Put ``wrapper(original)`` in the place of a function, a static method or a property's getter.

    What is wrapped already, and what the owner does not have, stays as it is: a vLLM that lacks something is refused
    where ``eagle_mrv2`` is asked for, and only there.
    """
    attribute = inspect.getattr_static(owner, name, None)
    original = original_of(attribute)
    if original is None or hasattr(original, _ORIGINAL):
        return
    wrapped = functools.wraps(original)(wrapper(original))
    setattr(wrapped, _ORIGINAL, original)
    if isinstance(attribute, property):
        setattr(owner, name, property(wrapped, doc=attribute.__doc__))
    else:
        setattr(owner, name, staticmethod(wrapped) if isinstance(attribute, staticmethod) else wrapped)


def original_of(attribute: Any) -> Any:
    """The function in a static method or a property; anything else as it is."""
    if isinstance(attribute, property):
        return attribute.fget
    return attribute.__func__ if isinstance(attribute, staticmethod) else attribute
