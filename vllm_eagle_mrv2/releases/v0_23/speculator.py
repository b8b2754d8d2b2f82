"""Speculators and graph managers on vLLM 0.23 to 0.25."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator

from vllm_eagle_mrv2.config.method import Family
from vllm_eagle_mrv2.drafting.capture import Pass
from vllm_eagle_mrv2.patches.model_runner import TakesTargetInputs
from vllm_eagle_mrv2.releases import per_step, v0_23
from vllm_eagle_mrv2.releases.common import StockAdapter
from vllm_eagle_mrv2.releases.per_step import PerStepAdapter

_BALANCES_DRAFTS = hasattr(EagleSpeculator, "_prepare_eplb_forward")


class _WithAttentionState:
    """Supports a capture loop that also collects the attention state of each pass; returns None for it."""

    def pass_factory(self, make_pass: Callable[[Any], Pass]) -> Callable[..., tuple[Pass, None]]:
        return lambda descriptor, warmup=False: (make_pass(descriptor), None)


class PrefillEagleCudaGraphManager(_WithAttentionState, per_step.PrefillEagleCudaGraphManager):
    """Graphs of the draft prefill, in the target's memory pool."""


class DecodeEagleCudaGraphManager(_WithAttentionState, per_step.DecodeEagleCudaGraphManager):
    """Graphs of one draft decode step, in the target's memory pool."""


class _Adapter(TakesTargetInputs, PerStepAdapter):
    release = v0_23.RELEASE
    prefill_manager_class = PrefillEagleCudaGraphManager
    decode_manager_class = DecodeEagleCudaGraphManager

    def capture(self, attn_states: Any = None) -> None:
        """Capture the draft's graphs; the target's attention states belong to another pass and are not used."""
        super().capture()

    def before_forward(self, num_tokens: int) -> None:
        """Prepare expert load balancing, which includes drafts from 0.25 on."""
        if _BALANCES_DRAFTS:
            super().before_forward(num_tokens)


class EagleMRV2Speculator(_Adapter, EagleSpeculator):
    """EAGLE and EAGLE-3."""


class EagleMRV2MTPSpeculator(_Adapter, MTPSpeculator):
    """Multi-token prediction heads."""


def speculator_class(family: Family) -> type[StockAdapter]:
    """Return the speculator class of a family."""
    return EagleMRV2MTPSpeculator if family == "mtp" else EagleMRV2Speculator
