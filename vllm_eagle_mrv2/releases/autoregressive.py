"""What vLLM 0.28 to 0.31 share, beyond `FusedAdapter`.

The CPU may have to build metadata before a graph of all draft decodes is replayed, and the stock speculators do not
follow the scheduler's number of draft tokens.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

from packaging.version import Version
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_eagle_mrv2.batch.buffers import DraftBatch
from vllm_eagle_mrv2.classes import class_path
from vllm_eagle_mrv2.drafting.loop import GraphRun
from vllm_eagle_mrv2.releases import installed_version
from vllm_eagle_mrv2.releases.fused import FusedAdapter
from vllm_eagle_mrv2.releases.schedule import hidden_schedule

_BACKENDS = "vllm.v1.attention.backends"
_REFRESH_IS_COMPLETE = {
    f"{_BACKENDS}.flash_attn.FlashAttentionMetadataBuilder",
    f"{_BACKENDS}.triton_attn.TritonAttentionMetadataBuilder",
    f"{_BACKENDS}.mla.triton_mla.TritonMLAMetadataBuilder",
}
"""Builders that need no build on the CPU after a refresh on the device, as 0.32 requires of every refresh."""

_BUILDS_BY_DESCRIPTOR = hasattr(DraftModelSpeculator, "_build_uniform_attn_metadata")  # from 0.30 on
_KNOWS_DECODE_DP_SYNC = hasattr(DraftModelSpeculator, "_build_uniform_batch_dp_sync")  # from 0.30 on
_SLOTS_FOR_IDLE_ROWS = installed_version() < Version("0.31")
"""Whether slots are computed for rows that map to no request, from memory outside the block table."""


def refresh_is_complete(attn_groups: Any) -> bool:
    """Whether no builder needs a build on the CPU before a replay."""
    builders = [group.get_metadata_builder() for group in chain.from_iterable(attn_groups)]
    return all(
        class_path(type(builder)) in _REFRESH_IS_COMPLETE and getattr(builder, "rswa_window", None) is None
        for builder in builders
    )


class AutoRegressiveAdapter(FusedAdapter):
    """Adapter of vLLM 0.28 to 0.31."""

    looks_up_length = True

    def decode_capture_sizes(self) -> AbstractContextManager[None]:
        return hidden_schedule(self.stock.speculative_config)

    @property
    def builders_refresh(self) -> bool:
        return bool(self.stock.use_fused_multi_step_decode)

    def take_attention(self, *, by_ours: bool) -> None:
        super().take_attention(by_ours=by_ours)
        self.rebuilds_before_replay = not (self.needs_no_builder or refresh_is_complete(self.stock.attn_groups))

    @property
    def decodes_follow_prefill(self) -> bool:
        return super().decodes_follow_prefill and not self.rebuilds_before_replay

    def dispatch_decode(self, batch: DraftBatch) -> GraphRun:
        if batch.dummy_run and _SLOTS_FOR_IDLE_ROWS:
            # Rows without tokens get no slots, eagerly and in a graph.
            self.buffers.query_start_loc.zero_()
        return super().dispatch_decode(batch)

    def decode_dp_sync(self, batch: DraftBatch) -> tuple[Any, int]:
        return super().decode_dp_sync(batch) if _KNOWS_DECODE_DP_SYNC else (None, batch.num_reqs)

    def build_by_builders(self, batch: DraftBatch, run: GraphRun, step: int) -> Any:
        if _BUILDS_BY_DESCRIPTOR:
            return super().build_by_builders(batch, run, step)
        return self._build_before_0_30(batch, run, step)

    def ragged_metadata(self, batch: DraftBatch, run: GraphRun) -> Any:
        if _BUILDS_BY_DESCRIPTOR:
            return super().ragged_metadata(batch, run)
        return self._build_before_0_30(batch, run, step=0, query_start_loc_np=batch.source.query_start_loc_np)

    def _build_before_0_30(self, batch: DraftBatch, run: GraphRun, step: int, **layout: Any) -> Any:
        return self.stock._build_draft_attn_metadata(
            num_reqs=batch.num_reqs,
            num_reqs_padded=run.descriptor.num_reqs or batch.num_reqs,
            num_tokens_padded=run.descriptor.num_tokens,
            seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound,
            step=step,
            **layout,
        )

    def prepare_fused_replay(self, batch: DraftBatch, run: GraphRun) -> None:
        if self.rebuilds_before_replay:
            self.map_decode_slots(batch.num_reqs, run.descriptor.num_tokens)
            self.build_by_builders(batch, run, step=1)
