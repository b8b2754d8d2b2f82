"""Adapter and graph managers of vLLM 0.23 to 0.25."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator

from vllm_eagle_mrv2.config.families import Family
from vllm_eagle_mrv2.drafting.capture import CollectsAttentionState
from vllm_eagle_mrv2.releases import per_step, v0_23
from vllm_eagle_mrv2.releases.per_step import PerStepAdapter

_BALANCES_DRAFTS = hasattr(EagleSpeculator, "_prepare_eplb_forward")


class PrefillEagleCudaGraphManager(CollectsAttentionState, per_step.PrefillEagleCudaGraphManager):
    """Graphs of the draft prefill, in the target's memory pool."""


class DecodeEagleCudaGraphManager(CollectsAttentionState, per_step.DecodeEagleCudaGraphManager):
    """Graphs of the draft decodes, in the target's memory pool."""


class Adapter(PerStepAdapter):
    """vLLM 0.23 to 0.25."""

    release = v0_23.RELEASE
    prefill_manager_class = PrefillEagleCudaGraphManager
    decode_manager_class = DecodeEagleCudaGraphManager
    takes_target_inputs = True

    @staticmethod
    def stock_class(family: Family) -> Any:
        return MTPSpeculator if family == "mtp" else EagleSpeculator

    def before_forward(self, num_tokens: int) -> None:
        """Prepare expert load balancing, which includes drafts from 0.25 on."""
        if _BALANCES_DRAFTS:
            super().before_forward(num_tokens)
