"""Weights that are replaced in a running engine (reinforcement learning): what we copied of them is copied again."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from vllm_eagle_mrv2.patches.wrap import Function


@runtime_checkable
class CopiesWeights(Protocol):
    """A speculator with copies of its draft's or target's weights."""

    def renew_copied_weights(self) -> None:
        """Copy them again, into the same memory."""


def copies_renewed(original: Function) -> Function:
    """A method of the worker's that ends an update, after which the copies are made again."""

    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        speculator = getattr(self.model_runner, "speculator", None)
        if isinstance(speculator, CopiesWeights):
            speculator.renew_copied_weights()
        return result

    return update
