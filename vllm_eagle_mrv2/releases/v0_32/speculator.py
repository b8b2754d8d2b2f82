"""Speculators on vLLM 0.32 and 0.33."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator

from vllm_eagle_mrv2.batch.buffers import DraftBatch
from vllm_eagle_mrv2.config.method import Family
from vllm_eagle_mrv2.drafting.loop import GraphRun
from vllm_eagle_mrv2.releases import v0_32
from vllm_eagle_mrv2.releases.common import StockAdapter
from vllm_eagle_mrv2.releases.fused import FusedAdapter


class _Adapter(FusedAdapter):
    release = v0_32.RELEASE
    dp_sync_argument = "dp_sync_state"

    supports_decode_metadata_update: bool

    def propose(
        self, *batch: Any, dp_sync_state: Any = None, num_speculative_tokens: int | None = None, **how: Any
    ) -> torch.Tensor:
        """Return draft tokens [num_reqs, K] int64, always K columns wide, with the stock speculator's arguments."""
        draft_tokens = self._propose(*batch, dp_sync=dp_sync_state, num_draft_tokens=num_speculative_tokens, **how)
        if num_speculative_tokens == 0:
            with torch.inference_mode():
                draft_tokens.fill_(-1)
        return draft_tokens

    def compute_draft_logits(self, hidden_states: torch.Tensor, spec_step_idx: int) -> torch.Tensor:
        """Return logits [n, vocab], in the dtype of the stored logits if they are stored."""
        logits: torch.Tensor = super().compute_draft_logits(hidden_states, spec_step_idx)  # type: ignore[misc]
        return logits if self.draft_logits is None else logits.to(self.draft_logits.dtype)

    def begin_decode(self, batch: DraftBatch) -> None:
        super().begin_decode(batch)
        if batch.dummy_run and batch.dp_sync is not None:
            # From 0.33 on a dummy batch can have more requests than the ranks agreed on for the decodes.
            batch.num_reqs = min(batch.num_reqs, batch.dp_sync.num_reqs)

    @property
    def builders_refresh(self) -> bool:
        return self.supports_decode_metadata_update

    def refresh_by_builders(self, num_reqs: int, num_tokens: int, attn_metadata: Any) -> Any:
        stock: Any = self
        stock._update_draft_decode_metadata(attn_metadata, num_reqs)
        return attn_metadata

    def prepare_fused_replay(self, batch: DraftBatch, run: GraphRun) -> None:
        for groups in self.attn_groups:
            for group in groups:
                group.map_to_kernel_block_table(self.block_tables.input_block_tables[group.kv_cache_group_id])


class EagleMRV2Speculator(_Adapter, EagleSpeculator):
    """EAGLE and EAGLE-3."""


class EagleMRV2MTPSpeculator(_Adapter, MTPSpeculator):
    """Multi-token prediction heads."""


def speculator_class(family: Family) -> type[StockAdapter]:
    """Return the speculator class of a family."""
    return EagleMRV2MTPSpeculator if family == "mtp" else EagleMRV2Speculator
