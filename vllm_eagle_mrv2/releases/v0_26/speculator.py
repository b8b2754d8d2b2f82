"""Speculators on vLLM 0.26 and 0.27."""

from __future__ import annotations

import inspect

from vllm.v1.worker.gpu.cudagraph_utils import prepare_inputs_to_capture
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator

from vllm_eagle_mrv2.config.method import Family
from vllm_eagle_mrv2.releases import v0_26
from vllm_eagle_mrv2.releases.common import StockAdapter
from vllm_eagle_mrv2.releases.per_step import PerStepAdapter

# 0.27 builds metadata for PIECEWISE captures too, and takes an argument for FULL graphs (#49364).
_ASKS_FOR_FULL = "full_cudagraph" in inspect.signature(prepare_inputs_to_capture).parameters


class _Adapter(PerStepAdapter):
    release = v0_26.RELEASE

    def capture_options(self, piecewise: bool, manager: object) -> dict[str, bool]:
        return {"full_cudagraph": not piecewise} if _ASKS_FOR_FULL else super().capture_options(piecewise, manager)


class EagleMRV2Speculator(_Adapter, EagleSpeculator):
    """EAGLE and EAGLE-3."""


class EagleMRV2MTPSpeculator(_Adapter, MTPSpeculator):
    """Multi-token prediction heads."""


def speculator_class(family: Family) -> type[StockAdapter]:
    """Return the speculator class of a family."""
    return EagleMRV2MTPSpeculator if family == "mtp" else EagleMRV2Speculator
