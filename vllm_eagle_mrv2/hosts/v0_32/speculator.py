"""Speculators and graph managers on vLLM 0.32.

They subclass the release's own, which keep what is not drafting: expert load balancing, prefill context parallelism,
watermarks, adaptive verification, the sharing of top-k indices by MTP heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import prepare_inputs_to_capture
from vllm.v1.worker.gpu.dp_utils import dispatch_cg_and_sync_dp
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import (
    SpeculatorBatchDescriptor,
    SpeculatorCudaGraphManager,
)
from vllm.v1.worker.utils import get_uniform_decode_token_count

from vllm_eagle_mrv2.buffers import DraftBatch
from vllm_eagle_mrv2.cudagraph import CapturedAttentionState, DecodeCapture, PrefillCapture
from vllm_eagle_mrv2.hosts import v0_32
from vllm_eagle_mrv2.hosts.common import StockHost
from vllm_eagle_mrv2.method import Family
from vllm_eagle_mrv2.speculator import GraphRun


class PrefillEagleCudaGraphManager(PrefillCapture, SpeculatorCudaGraphManager):
    """Graphs of the draft prefill, in the target's memory pool."""


class DecodeEagleCudaGraphManager(DecodeCapture, SpeculatorCudaGraphManager):
    """Graphs of the draft decodes, in the target's memory pool; one for each K where K is dynamic."""

    _capture_descs: dict[CUDAGraphMode, list[Any]]

    def specialize(self, draft_lengths: list[int]) -> None:
        """Capture every descriptor once for each of these numbers of draft tokens."""
        self._capture_descs = {
            mode: [
                SpeculatorBatchDescriptor(**vars(descriptor), num_speculative_tokens=length)
                for descriptor in descriptors
                for length in draft_lengths
            ]
            for mode, descriptors in self._capture_descs.items()
        }


class _Host(StockHost):
    host = v0_32.HOST
    sample_offset = 1
    prefill_manager_class = PrefillEagleCudaGraphManager
    decode_manager_class = DecodeEagleCudaGraphManager

    pcp_manager: Any
    supports_decode_metadata_update: bool
    speculative_config: Any

    def draft_logits_spec(self, vllm_config: Any) -> tuple[torch.dtype, float]:
        """dtype and fill of the stored draft logits; this release keeps them before temperature."""
        stock: tuple[torch.dtype, float] = super().draft_logits_spec(vllm_config)  # type: ignore[misc]
        return stock if self.options.draft_logits_dtype == "head" else (torch.float32, stock[1])

    def compute_draft_logits(self, hidden_states: torch.Tensor, spec_step_idx: int) -> torch.Tensor:
        """[n, vocab], in the dtype that they are stored in, where they are."""
        logits: torch.Tensor = super().compute_draft_logits(hidden_states, spec_step_idx)  # type: ignore[misc]
        return logits if self.draft_logits is None else logits.to(self.draft_logits.dtype)

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:
        """Draft tokens [num_reqs, K] int64, always of full width; the arguments are those of the stock speculator."""
        num_draft_tokens = self.num_speculative_steps if num_speculative_tokens is None else num_speculative_tokens
        draft_tokens = self.loop.propose(
            DraftBatch(
                num_reqs=input_batch.num_reqs,
                num_tokens=input_batch.num_tokens,
                num_tokens_padded=input_batch.num_tokens_after_padding,
                uniform_query_len=None,  # known in dispatch_prefill, which may run over other tokens
                num_draft_tokens=num_draft_tokens,
                input_ids=input_batch.input_ids,
                positions=input_batch.positions,
                query_start_loc=input_batch.query_start_loc,
                seq_lens=input_batch.seq_lens,
                seq_lens_cpu_upper_bound=input_batch.seq_lens_cpu_upper_bound,
                idx_mapping=input_batch.idx_mapping,
                hidden_states=self._draft_hidden_states(last_hidden_states, aux_hidden_states),
                num_sampled=num_sampled,
                num_rejected=num_rejected,
                last_sampled=last_sampled,
                next_prefill_tokens=next_prefill_tokens,
                temperature=temperature,
                seeds=seeds,
                attn_metadata=attn_metadata,
                slot_mappings=slot_mappings,
                mm_inputs=mm_inputs,
                dp_sync=dp_sync_state,
                source=input_batch,
                dummy_run=dummy_run,
                skip_attn=dummy_run and skip_attn_for_dummy_run,
                eager=is_profile,
            )
        )
        if num_draft_tokens == 0:
            # Dynamic K can be 0; the draft prefill above still filled the draft's KV cache.
            draft_tokens.fill_(-1)
        return draft_tokens

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
        if self.pcp_manager is not None and self._prefilling:
            restored: tuple[torch.Tensor, torch.Tensor] = self.pcp_manager.restore_draft_prefill(*hidden)
            return restored
        return hidden

    _prefilling = False

    def on_prefill_begin(self, num_reqs: int) -> None:
        self._prefilling = True
        super().on_prefill_begin(num_reqs)  # type: ignore[misc]

    def on_prefill_end(self, num_reqs: int) -> None:
        super().on_prefill_end(num_reqs)  # type: ignore[misc]
        self._prefilling = False

    def begin_decode(self, batch: DraftBatch) -> None:
        if self.pcp_manager is not None and not batch.dummy_run:
            self.block_tables.gather_block_tables(batch.source.idx_mapping, num_reqs_padded=batch.num_reqs)

    def dispatch_prefill(self, batch: DraftBatch, num_tokens: int, num_tokens_padded: int) -> GraphRun:
        query_len = get_uniform_decode_token_count(
            batch.num_reqs,
            num_tokens,
            batch.source.num_scheduled_tokens.max(),
            batch.source.decode_graph_eligible,
        )
        descriptor, sync = self._dispatch(
            self.prefill_cudagraph_manager, batch, num_tokens_padded, query_len, batch.dp_sync
        )
        return self._graph_run(descriptor, sync)

    def dispatch_decode(self, batch: DraftBatch) -> GraphRun:
        sync, num_tokens = None, batch.num_reqs
        if batch.dp_sync is not None:
            stock: Any = self
            sync, num_tokens = stock._build_uniform_batch_dp_sync(batch.dp_sync, batch.num_reqs, num_query_per_req=1)
        descriptor, sync = self._dispatch(self.decode_cudagraph_manager, batch, num_tokens, 1, sync)
        if self.decode_cudagraph_manager is not None:
            descriptor = self.decode_cudagraph_manager.specialize_spec_tokens(descriptor, batch.num_draft_tokens)
        return self._graph_run(descriptor, sync)

    def _dispatch(
        self, manager: Any, batch: DraftBatch, num_tokens: int, query_len: int | None, sync: Any
    ) -> tuple[Any, Any]:
        chosen: tuple[Any, Any] = dispatch_cg_and_sync_dp(
            manager,
            batch.num_reqs,
            num_tokens,
            uniform_token_count=query_len,
            dp_size=self.dp_size,
            dp_rank=self.dp_rank,
            need_eager=batch.eager,
            dp_sync_state=sync,
        )
        return chosen

    @staticmethod
    def _graph_run(descriptor: Any, sync: Any) -> GraphRun:
        across_dp = None if sync is None else sync.num_tokens_across_dp
        full = descriptor.cg_mode == CUDAGraphMode.FULL
        return GraphRun(descriptor, descriptor.cg_mode, full, descriptor.num_tokens, across_dp)

    @property
    def refreshes_in_graph(self) -> bool:
        return self.supports_decode_metadata_update

    def _slot_mappings(self, num_reqs: int, num_tokens: int) -> torch.Tensor:
        buffers = self.loop.buffers
        slots: torch.Tensor = self.block_tables.compute_slot_mappings(
            buffers.idx_mapping[:num_reqs],
            buffers.query_start_loc[: num_reqs + 1],
            buffers.positions[:num_reqs],
            num_tokens,
        )
        return slots

    def build_decode_metadata(self, batch: DraftBatch, run: GraphRun, step: int) -> tuple[Any, Any]:
        slot_mappings = self._slot_mappings(batch.num_reqs, run.num_tokens)
        stock: Any = self
        attn_metadata = stock._build_uniform_attn_metadata(
            batch_desc=run.descriptor,
            num_reqs=batch.num_reqs,
            num_query_per_req=1,
            seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound,
            step=step,
        )
        return attn_metadata, build_slot_mappings_by_layer(slot_mappings, self.kv_cache_config)

    def rebuild_prefill_metadata(self, batch: DraftBatch, run: GraphRun) -> tuple[Any, Any]:
        stock: Any = self
        attn_metadata = stock._build_attn_metadata(
            num_reqs=batch.num_reqs,
            batch_desc=run.descriptor,
            query_start_loc_np=batch.source.query_start_loc_np,
            seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound,
            step=0,
        )
        slot_mappings = self.block_tables.slot_mappings[:, : run.num_tokens]
        return attn_metadata, build_slot_mappings_by_layer(slot_mappings, self.kv_cache_config)

    def refresh_decode_metadata(self, num_reqs: int, num_tokens: int, attn_metadata: Any) -> None:
        self._slot_mappings(num_reqs, num_tokens)
        stock: Any = self
        stock._update_draft_decode_metadata(attn_metadata, num_reqs)

    def prepare_fused_replay(self) -> None:
        for groups in self.attn_groups:
            for group in groups:
                group.map_to_kernel_block_table(self.block_tables.input_block_tables[group.kv_cache_group_id])

    def _capture_decodes(self, manager: Any, make_inputs: Callable[[Any], CapturedAttentionState]) -> None:
        if self.refreshes_in_graph and self.speculative_config.uses_dynamic_speculative_decoding():
            schedule = build_dynamic_sd_schedule_lookup(
                self.speculative_config.num_speculative_tokens_per_batch_size,
                vllm_max_batch_size=self.max_num_reqs,
                vllm_num_speculative_tokens=self.vllm_config.num_speculative_tokens,
            )
            manager.specialize(sorted(set(schedule) - {0, 1}, reverse=True))
        manager.capture_fresh(
            self.loop.decode_all if self.refreshes_in_graph else self.loop.decode,
            make_inputs,
            "Capturing draft decode CUDA graphs",
            lambda descriptor: {
                "num_draft_tokens": getattr(descriptor, "num_speculative_tokens", self.num_speculative_steps)
            },
        )

    def prepare_capture(
        self, manager: Any, descriptor: Any, num_reqs: int, num_tokens: int, input_buffers: Any, attn_groups: Any
    ) -> tuple[Any, Any]:
        state = prepare_inputs_to_capture(
            num_reqs,
            num_tokens,
            self.model_state,
            input_buffers,
            self.block_tables,
            attn_groups,
            self.kv_cache_config,
            full_cudagraph=descriptor.cg_mode == CUDAGraphMode.FULL,
            max_query_len=descriptor.max_query_len or descriptor.uniform_token_count,
        )
        return state.attn_metadata, state.slot_mappings


class EagleMRV2Speculator(_Host, EagleSpeculator):
    """EAGLE and EAGLE-3."""


class EagleMRV2MTPSpeculator(_Host, MTPSpeculator):
    """Multi-token prediction heads."""


def speculator_class(family: Family) -> type[StockHost]:
    """The speculator of a family."""
    return EagleMRV2MTPSpeculator if family == "mtp" else EagleMRV2Speculator
