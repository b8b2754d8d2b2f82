"""What vLLM 0.28 to 0.33 share: one graph for all draft decodes, where backends refresh their metadata on the device.

The speculators subclass the stock ones, which keep everything but drafting: expert load balancing, prefill context
parallelism, watermarks, adaptive verification, and the sharing of top-k indices by MTP heads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from packaging.version import Version
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager, prepare_inputs_to_capture
from vllm.v1.worker.gpu.dp_utils import dispatch_cg_and_sync_dp
from vllm.v1.worker.utils import get_uniform_decode_token_count

from vllm_eagle_mrv2.batch.buffers import DraftBatch, TargetStates
from vllm_eagle_mrv2.drafting.capture import CapturedAttentionState, DecodeCapture, PrefillCapture
from vllm_eagle_mrv2.drafting.graphs import longest_query
from vllm_eagle_mrv2.drafting.loop import GraphRun
from vllm_eagle_mrv2.releases import installed_version
from vllm_eagle_mrv2.releases.common import StockAdapter
from vllm_eagle_mrv2.releases.draft_lengths import lengths_by_batch_size

_DECODE_FLAG = "has_prefill" if installed_version() < Version("0.31") else "decode_graph_eligible"
"""The field of a batch that distinguishes decodes from prefills."""


@dataclasses.dataclass(frozen=True)
class DraftBatchDescriptor(BatchExecutionDescriptor):
    """Descriptor of a graph of all draft decodes for one of several numbers of draft tokens."""

    num_draft_tokens: int = 0


class PrefillEagleCudaGraphManager(PrefillCapture, CudaGraphManager):
    """Graphs of the draft prefill, in the target's memory pool."""


class DecodeEagleCudaGraphManager(DecodeCapture, CudaGraphManager):
    """Graphs of the draft decodes, in the target's memory pool; one per K where K is dynamic."""

    graphs: dict[Any, Any]
    _capture_descs: dict[CUDAGraphMode, list[Any]]

    def specialize(self, draft_lengths: list[int]) -> None:
        """Capture every descriptor once per number of draft tokens; may be called again before another capture."""
        self._capture_descs = {
            mode: [
                DraftBatchDescriptor(**vars(descriptor), num_draft_tokens=length)
                for descriptor in descriptors
                for length in draft_lengths
            ]
            if not any(isinstance(descriptor, DraftBatchDescriptor) for descriptor in descriptors)
            else descriptors
            for mode, descriptors in self._capture_descs.items()
        }

    def for_draft_length(self, descriptor: Any, num_draft_tokens: int) -> Any:
        """Return the descriptor of a captured graph with this many draft tokens, else one that runs eagerly."""
        if descriptor.cg_mode != CUDAGraphMode.FULL or descriptor in self.graphs:
            return descriptor
        specialized = DraftBatchDescriptor(**vars(descriptor), num_draft_tokens=num_draft_tokens)
        if specialized in self.graphs:
            return specialized
        return dataclasses.replace(descriptor, cg_mode=CUDAGraphMode.NONE)


class FusedAdapter(StockAdapter):
    """Adapter of the releases with backends that may refresh decode metadata inside a graph."""

    sample_offset = 1
    slot_mappings_by_layer = staticmethod(build_slot_mappings_by_layer)
    prefill_manager_class = PrefillEagleCudaGraphManager
    decode_manager_class = DecodeEagleCudaGraphManager

    dp_sync_argument: str | None
    """Name of the dispatch argument for a reusable agreement of the data-parallel ranks; None if there is none."""

    # Of the stock speculator.
    pcp_manager: Any = None  # exists from 0.30 on
    speculative_config: Any

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._draft_lengths = lengths_by_batch_size(self.speculative_config, self.max_num_reqs)

    def draft_logits_spec(self, vllm_config: Any) -> tuple[torch.dtype, float]:
        """Return dtype and fill value of the stored draft logits; these releases store them before temperature."""
        stock: tuple[torch.dtype, float] = super().draft_logits_spec(vllm_config)  # type: ignore[misc]
        return stock if self.options.draft_logits_dtype == "head" else (torch.float32, stock[1])

    @property
    def decodes_follow_prefill(self) -> bool:
        return super().decodes_follow_prefill and self._draft_lengths is None and self.pcp_manager is None

    def _find_target_outputs(self) -> TargetStates | None:
        # With prefill context parallelism the draft's tokens are a shard, not those of the target's graph.
        return super()._find_target_outputs() if self.pcp_manager is None else None

    def begin_prefill(self, batch: DraftBatch) -> tuple[int, int]:
        if self.pcp_manager is not None:
            self.pcp_manager.prepare_draft_prefill(batch.source, self.loop.buffers.input_ids[: batch.num_tokens_padded])
            shard = self.pcp_manager.draft_prefill_batch
            if shard is not None:
                return shard.num_tokens, shard.num_tokens_after_padding
        return batch.num_tokens, batch.num_tokens_padded

    def run_draft_model(
        self,
        num_tokens: int,
        attn_metadata: Any,
        slot_mappings: Any,
        num_tokens_across_dp: Any,
        mode: Any,
        mm_inputs: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = super().run_draft_model(
            num_tokens, attn_metadata, slot_mappings, num_tokens_across_dp, mode, mm_inputs
        )
        if self.pcp_manager is None:
            return hidden
        # Restores a shard to the whole batch; a whole batch is returned unchanged.
        restored: tuple[torch.Tensor, torch.Tensor] = self.pcp_manager.restore_draft_prefill(*hidden)
        return restored

    def begin_decode(self, batch: DraftBatch) -> None:
        if self.pcp_manager is not None and not batch.dummy_run:
            self.block_tables.gather_block_tables(batch.source.idx_mapping, num_reqs_padded=batch.num_reqs)

    def query_len(self, batch: DraftBatch, num_tokens: int) -> int | None:
        flag = getattr(batch.source, _DECODE_FLAG)
        tokens: int | None = get_uniform_decode_token_count(batch.num_reqs, num_tokens, longest_query(batch), flag)
        return tokens

    def dispatch_prefill(self, batch: DraftBatch, num_tokens: int, num_tokens_padded: int) -> GraphRun:
        query_len = self.query_len(batch, num_tokens)
        return self._dispatch(self.prefill_cudagraph_manager, batch, num_tokens_padded, query_len, batch.dp_sync)

    def dispatch_decode(self, batch: DraftBatch) -> GraphRun:
        sync, num_tokens = self.decode_dp_sync(batch)
        run = self._dispatch(self.decode_cudagraph_manager, batch, num_tokens, 1, sync)
        if not run.full:
            return run
        return self._graph_run(
            self.decode_cudagraph_manager.for_draft_length(run.descriptor, batch.num_draft_tokens),
            run.num_tokens_across_dp,
        )

    def decode_dp_sync(self, batch: DraftBatch) -> tuple[Any, int]:
        """Return what the data-parallel ranks already agreed on for the draft decodes, and the tokens to dispatch."""
        if batch.dp_sync is None:
            return None, batch.num_reqs
        stock: Any = self
        known: tuple[Any, int] = stock._build_uniform_batch_dp_sync(batch.dp_sync, batch.num_reqs, num_query_per_req=1)
        return known

    def _dispatch(self, manager: Any, batch: DraftBatch, num_tokens: int, query_len: int | None, sync: Any) -> GraphRun:
        known = {} if self.dp_sync_argument is None else {self.dp_sync_argument: sync}
        descriptor, agreed = dispatch_cg_and_sync_dp(
            manager,
            batch.num_reqs,
            num_tokens,
            uniform_token_count=query_len,
            dp_size=self.dp_size,
            dp_rank=self.dp_rank,
            need_eager=batch.eager,
            **known,
        )
        # 0.28 returns the token counts themselves.
        return self._graph_run(descriptor, getattr(agreed, "num_tokens_across_dp", agreed))

    @staticmethod
    def _graph_run(descriptor: Any, num_tokens_across_dp: Any) -> GraphRun:
        full = descriptor.cg_mode == CUDAGraphMode.FULL
        return GraphRun(descriptor, descriptor.cg_mode, full, descriptor.num_tokens, num_tokens_across_dp)

    # Metadata of draft decodes

    def compute_slot_mappings(self, num_reqs: int, num_tokens: int) -> torch.Tensor:
        """Return [groups, num_tokens] slots for the positions in the buffers, -1 for padding; one kernel launch."""
        buffers = self.loop.buffers
        slots: torch.Tensor = self.block_tables.compute_slot_mappings(
            buffers.idx_mapping[:num_reqs],
            buffers.query_start_loc[: num_reqs + 1],
            buffers.positions[:num_reqs],
            num_tokens,
        )
        return slots

    def uniform_metadata(self, batch: DraftBatch, run: GraphRun, step: int) -> Any:
        """Build attention metadata for one token per request with the draft's own builders."""
        stock: Any = self
        return stock._build_uniform_attn_metadata(
            batch_desc=run.descriptor,
            num_reqs=batch.num_reqs,
            num_query_per_req=1,
            seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound,
            step=step,
        )

    def ragged_metadata(self, batch: DraftBatch, run: GraphRun) -> Any:
        """Build attention metadata for the target's batch with the draft's own builders."""
        stock: Any = self
        return stock._build_attn_metadata(
            num_reqs=batch.num_reqs,
            batch_desc=run.descriptor,
            query_start_loc_np=batch.source.query_start_loc_np,
            seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound,
            step=0,
        )

    def decode_slot_mappings(self, batch: DraftBatch, num_tokens: int) -> torch.Tensor:
        return self.compute_slot_mappings(batch.num_reqs, num_tokens)

    def build_by_builders(self, batch: DraftBatch, run: GraphRun, step: int, slot_mappings: torch.Tensor) -> Any:
        return self.uniform_metadata(batch, run, step)

    def rebuild_prefill_metadata(self, batch: DraftBatch, run: GraphRun) -> tuple[Any, Any]:
        slot_mappings = self.block_tables.slot_mappings[:, : run.num_tokens]
        attn_metadata = self.ragged_metadata(batch, run)
        return attn_metadata, build_slot_mappings_by_layer(slot_mappings, self.kv_cache_config)

    def map_decode_slots(self, num_reqs: int, num_tokens: int) -> None:
        self.compute_slot_mappings(num_reqs, num_tokens)

    @property
    def refreshes_in_graph(self) -> bool:
        return self.needs_no_builder or self.builders_refresh

    def refresh_by_builders(self, num_reqs: int, num_tokens: int, attn_metadata: Any) -> Any:
        for groups in self.attn_groups:
            for group in groups:
                group.update_draft_decode_metadata(attn_metadata)
        return attn_metadata

    # Capture

    def _capture_decodes(self, manager: Any, make_inputs: Callable[[Any], CapturedAttentionState]) -> None:
        if self.refreshes_in_graph and self._draft_lengths is not None:
            # Batch sizes count from 1; a batch that drafts one token has no draft decodes.
            manager.specialize(sorted(set(self._draft_lengths[1:]) - {0, 1}, reverse=True))
        manager.capture_fresh(
            self.loop.decode_all if self.refreshes_in_graph else self.loop.decode,
            make_inputs,
            "Capturing draft decode CUDA graphs",
            lambda descriptor: {
                "num_draft_tokens": getattr(descriptor, "num_draft_tokens", self.num_speculative_steps)
            },
        )

    def prepare_capture(
        self, manager: Any, descriptor: Any, num_reqs: int, num_tokens: int, input_buffers: Any, attn_groups: Any
    ) -> tuple[Any, Any]:
        full = descriptor.cg_mode == CUDAGraphMode.FULL
        # A graph for mixed batches may replay one prefill that fills it; 0.28 to 0.30 leave that to the caller.
        widest = num_tokens if full else None
        attn_metadata, slot_mappings = prepare_inputs_to_capture(
            num_reqs,
            num_tokens,
            self.model_state,
            input_buffers,
            self.block_tables,
            attn_groups,
            self.kv_cache_config,
            full_cudagraph=full,
            max_query_len=descriptor.max_query_len or descriptor.uniform_token_count or widest,
        )
        return attn_metadata, slot_mappings
