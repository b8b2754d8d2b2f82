"""Names of classes, by which vLLM's are told apart without importing them."""

from __future__ import annotations


def class_path(cls: type) -> str:
    """The dotted path of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"
