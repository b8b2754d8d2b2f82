"""The adapter of vLLM 0.32 and 0.33."""

from __future__ import annotations

from typing import Any

from vllm_eagle_mrv2.batch.buffers import DraftBatch
from vllm_eagle_mrv2.drafting.loop import ForwardInputs, GraphRun
from vllm_eagle_mrv2.releases import v0_32
from vllm_eagle_mrv2.releases.fused import FusedAdapter


class Adapter(FusedAdapter):
    """vLLM 0.32 and 0.33."""

    release = v0_32.RELEASE
    dp_sync_argument = "dp_sync_state"
    stores_by_dtype = True

    def read(
        self, *batch: Any, dp_sync_state: Any = None, num_speculative_tokens: int | None = None, **how: Any
    ) -> DraftBatch:
        erases = num_speculative_tokens == 0  # the model runner reads all K columns
        return super().read(
            *batch, dp_sync=dp_sync_state, num_draft_tokens=num_speculative_tokens, erases=erases, **how
        )

    def begin_decode(self, batch: DraftBatch) -> None:
        super().begin_decode(batch)
        if batch.dummy_run and batch.dp_sync is not None:
            # From 0.33 on a dummy batch can have more requests than the ranks agreed on for the decodes.
            batch.num_reqs = min(batch.num_reqs, batch.dp_sync.num_reqs)

    @property
    def builders_refresh(self) -> bool:
        return bool(self.stock.supports_decode_metadata_update)

    def refresh_by_builders(self, inputs: ForwardInputs) -> Any:
        self.stock._update_draft_decode_metadata(inputs.attn_metadata, inputs.num_reqs)
        return inputs.attn_metadata

    def prepare_fused_replay(self, batch: DraftBatch, run: GraphRun) -> None:
        for groups in self.stock.attn_groups:
            for group in groups:
                group.map_to_kernel_block_table(self.stock.block_tables.input_block_tables[group.kv_cache_group_id])
