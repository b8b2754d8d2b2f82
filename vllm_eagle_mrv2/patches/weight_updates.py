"""Renews copies of weights when the weights of a running engine are replaced (reinforcement learning)."""

from __future__ import annotations

from typing import Any

from vllm_eagle_mrv2.drafting.drafter import drafter_of
from vllm_eagle_mrv2.patches.wrap import Function


def copies_renewed(original: Function) -> Function:
    """Wrap a worker method that ends a weight update: it then renews the copies."""

    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        drafter = drafter_of(getattr(self.model_runner, "speculator", None))
        if drafter is not None:
            drafter.renew_copied_weights()
        return result

    return update
