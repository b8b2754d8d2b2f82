"""Speculators on vLLM 0.29 to 0.31."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator

from vllm_eagle_mrv2.config.method import Family
from vllm_eagle_mrv2.releases import v0_29
from vllm_eagle_mrv2.releases.autoregressive import AutoRegressiveAdapter
from vllm_eagle_mrv2.releases.common import StockAdapter


class _Adapter(AutoRegressiveAdapter):
    release = v0_29.RELEASE
    dp_sync_argument = "dp_sync"

    def propose(self, *batch: Any, **how: Any) -> torch.Tensor:
        """Return draft tokens [num_reqs, K] int64, with the arguments of the stock speculator."""
        return self._propose(*batch, **how)


class EagleMRV2Speculator(_Adapter, EagleSpeculator):
    """EAGLE and EAGLE-3."""


class EagleMRV2MTPSpeculator(_Adapter, MTPSpeculator):
    """Multi-token prediction heads."""


def speculator_class(family: Family) -> type[StockAdapter]:
    """Return the speculator class of a family."""
    return EagleMRV2MTPSpeculator if family == "mtp" else EagleMRV2Speculator
