"""Speculators on vLLM 0.28."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator

from vllm_eagle_mrv2.config.method import Family
from vllm_eagle_mrv2.draft_model.sampling import OwnSampling
from vllm_eagle_mrv2.releases import v0_28
from vllm_eagle_mrv2.releases.autoregressive import AutoRegressiveAdapter
from vllm_eagle_mrv2.releases.common import StockAdapter


class _Adapter(OwnSampling, AutoRegressiveAdapter):
    release = v0_28.RELEASE
    sample_offset = 0
    logits_after_temperature = False
    dp_sync_argument = None

    def propose(self, *batch: Any, num_tokens_across_dp: Any = None, **how: Any) -> torch.Tensor:
        """Return draft tokens [num_reqs, K] int64; like stock, ignores ``num_tokens_across_dp``."""
        return self._propose(*batch, **how)


class EagleMRV2Speculator(_Adapter, EagleSpeculator):
    """EAGLE and EAGLE-3."""


class EagleMRV2MTPSpeculator(_Adapter, MTPSpeculator):
    """Multi-token prediction heads."""


def speculator_class(family: Family) -> type[StockAdapter]:
    """Return the speculator class of a family."""
    return EagleMRV2MTPSpeculator if family == "mtp" else EagleMRV2Speculator
