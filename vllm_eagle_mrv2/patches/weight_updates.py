"""Renews copies of weights when the weights of a running engine are replaced (reinforcement learning)."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from vllm_eagle_mrv2.patches.wrap import Function


@runtime_checkable
class CopiesWeights(Protocol):
    """A speculator that holds copies of its draft's or target's weights."""

    def renew_copied_weights(self) -> None:
        """Copy the weights again, into the same memory."""


def copies_renewed(original: Function) -> Function:
    """Wrap a worker method that ends a weight update: it then renews the copies."""

    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        speculator = getattr(self.model_runner, "speculator", None)
        if isinstance(speculator, CopiesWeights):
            speculator.renew_copied_weights()
        return result

    return update
