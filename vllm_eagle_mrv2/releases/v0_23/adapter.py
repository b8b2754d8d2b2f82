"""The adapter of vLLM 0.23 to 0.25."""

from __future__ import annotations

from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

from vllm_eagle_mrv2.drafting.capture import CollectsAttentionState
from vllm_eagle_mrv2.releases import v0_23
from vllm_eagle_mrv2.releases.graph_managers import graph_managers
from vllm_eagle_mrv2.releases.per_step import PerStepAdapter
from vllm_eagle_mrv2.releases.speculators import speculator_class

_BALANCES_DRAFTS = hasattr(EagleSpeculator, "_prepare_eplb_forward")


class Adapter(PerStepAdapter):
    """vLLM 0.23 to 0.25."""

    release = v0_23.RELEASE
    stock_class = staticmethod(speculator_class)
    managers = graph_managers(CollectsAttentionState)
    takes_target_inputs = True

    def before_forward(self, num_tokens: int) -> None:
        """Prepare expert load balancing, which includes drafts from 0.25 on."""
        if _BALANCES_DRAFTS:
            super().before_forward(num_tokens)
