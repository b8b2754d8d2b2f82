"""Speculators and graph managers on vLLM 0.26."""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata, build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import (
    CudaGraphManager,
    get_uniform_token_count,
    prepare_inputs_to_capture,
)
from vllm.v1.worker.gpu.dp_utils import dispatch_cg_and_sync_dp
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator

from vllm_eagle_mrv2.buffers import DraftBatch
from vllm_eagle_mrv2.cudagraph import DecodeCapture, PrefillCapture
from vllm_eagle_mrv2.errors import EagleMRV2Error
from vllm_eagle_mrv2.hosts import v0_26
from vllm_eagle_mrv2.hosts.common import StockHost
from vllm_eagle_mrv2.method import Family
from vllm_eagle_mrv2.speculator import GraphRun


class PrefillEagleCudaGraphManager(PrefillCapture, CudaGraphManager):
    """Graphs of the draft prefill, in the target's memory pool."""


class DecodeEagleCudaGraphManager(DecodeCapture, CudaGraphManager):
    """Graphs of one draft decode step, in the target's memory pool."""


class _Host(StockHost):
    host = v0_26.HOST
    sample_offset = 0
    prefill_manager_class = PrefillEagleCudaGraphManager
    decode_manager_class = DecodeEagleCudaGraphManager

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        if self.options.draft_logits_dtype == "head" and self.draft_logits is not None:
            raise EagleMRV2Error(
                "draft_logits_dtype=head is not exact on vLLM 0.26, whose rejection sampler reads logits after "
                "temperature; leave it at float32."
            )

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
        num_tokens_across_dp: torch.Tensor | None = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
    ) -> torch.Tensor:
        """Draft tokens [num_reqs, K] int64; the arguments are those of the stock speculator."""
        return self.loop.propose(
            DraftBatch(
                num_reqs=input_batch.num_reqs,
                num_tokens=input_batch.num_tokens,
                num_tokens_padded=input_batch.num_tokens_after_padding,
                uniform_query_len=get_uniform_token_count(
                    input_batch.num_reqs, input_batch.num_tokens, input_batch.num_scheduled_tokens.max()
                ),
                num_draft_tokens=self.num_speculative_steps,
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
                source=input_batch,
                dummy_run=dummy_run,
                skip_attn=dummy_run and skip_attn_for_dummy_run,
                eager=is_profile,
            )
        )

    # The stock speculator of this release has no such hooks.

    def on_prefill_begin(self, num_reqs: int) -> None: ...

    def on_prefill_end(self, num_reqs: int) -> None: ...

    def on_multi_step_decode_begin(self, num_reqs: int) -> None: ...

    def on_multi_step_decode_end(self, num_reqs: int) -> None: ...

    def dispatch_prefill(self, batch: DraftBatch, num_tokens: int, num_tokens_padded: int) -> GraphRun:
        return self._dispatch(self.prefill_cudagraph_manager, batch, num_tokens_padded, batch.uniform_query_len)

    def dispatch_decode(self, batch: DraftBatch) -> GraphRun:
        return self._dispatch(self.decode_cudagraph_manager, batch, batch.num_reqs, 1)

    def _dispatch(self, manager: Any, batch: DraftBatch, num_tokens: int, query_len: int | None) -> GraphRun:
        descriptor, across_dp = dispatch_cg_and_sync_dp(
            manager,
            batch.num_reqs,
            num_tokens,
            query_len,
            dp_size=self.dp_size,
            dp_rank=self.dp_rank,
            need_eager=batch.eager,
        )
        full = descriptor.cg_mode == CUDAGraphMode.FULL
        return GraphRun(descriptor, descriptor.cg_mode, full, descriptor.num_tokens, across_dp)

    def build_decode_metadata(self, batch: DraftBatch, run: GraphRun, step: int) -> tuple[Any, Any]:
        live, buffers = batch.num_reqs, self.loop.buffers
        if batch.dummy_run:
            # The rows name no request, and this release's kernel does not skip them.
            slot_mappings = self.block_tables.get_dummy_slot_mappings(run.num_tokens)
        else:
            slot_mappings = self.block_tables.compute_slot_mappings(
                buffers.idx_mapping[:live],
                buffers.query_start_loc[: live + 1],
                buffers.positions[:live],
                run.num_tokens,
            )
        rows = run.descriptor.num_reqs or live
        query_start_loc_cpu, seq_lens_bound = self._cpu_lengths(batch, live, rows, step)
        attn_metadata = build_attn_metadata(
            attn_groups=self.attn_groups,
            num_reqs=rows,
            num_tokens=run.num_tokens,
            query_start_loc_gpu=buffers.query_start_loc[: rows + 1],
            query_start_loc_cpu=query_start_loc_cpu,
            max_query_len=1,
            seq_lens=buffers.seq_lens[:rows],
            max_seq_len=self.draft_max_seq_len,
            block_tables=[table[:rows] for table in self.block_tables.input_block_tables],
            slot_mappings=slot_mappings,
            kv_cache_config=self.kv_cache_config,
            # Without a bound some builders fetch the lengths from the device, one synchronization a step.
            seq_lens_cpu_upper_bound=seq_lens_bound,
        )
        return attn_metadata, build_slot_mappings_by_layer(slot_mappings, self.kv_cache_config)

    def _cpu_lengths(self, batch: DraftBatch, live: int, rows: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[rows + 1] and [rows] int32 on the CPU: query starts and length bounds of a draft decode."""
        bound = torch.zeros(rows, dtype=torch.int32)
        torch.add(batch.seq_lens_cpu_upper_bound[:live], step, out=bound[:live])
        return _decode_query_start_loc(live, rows), bound.clamp_(max=self.max_model_len)

    def rebuild_prefill_metadata(self, batch: DraftBatch, run: GraphRun) -> tuple[Any, Any]:
        live, buffers, source = batch.num_reqs, self.loop.buffers, batch.source
        rows = run.descriptor.num_reqs or live
        slot_mappings = self.block_tables.slot_mappings[:, : run.num_tokens]
        starts = torch.full((rows + 1,), batch.num_tokens, dtype=torch.int32)
        starts[: live + 1] = torch.from_numpy(source.query_start_loc_np[: live + 1])
        attn_metadata = build_attn_metadata(
            attn_groups=self.attn_groups,
            num_reqs=rows,
            num_tokens=run.num_tokens,
            query_start_loc_gpu=buffers.query_start_loc[: rows + 1],
            query_start_loc_cpu=starts,
            max_query_len=int(source.num_scheduled_tokens.max()),
            seq_lens=buffers.seq_lens[:rows],
            max_seq_len=self.draft_max_seq_len,
            block_tables=[table[:rows] for table in self.block_tables.input_block_tables],
            slot_mappings=slot_mappings,
            kv_cache_config=self.kv_cache_config,
            seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound,
        )
        return attn_metadata, build_slot_mappings_by_layer(slot_mappings, self.kv_cache_config)

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
            skip_attn=descriptor.cg_mode == CUDAGraphMode.PIECEWISE and not manager.use_breakable_cg,
        )
        return state.attn_metadata, state.slot_mappings


@functools.lru_cache(maxsize=4096)
def _decode_query_start_loc(live: int, rows: int) -> torch.Tensor:
    """[rows + 1] int32 on the CPU: one token for each live request, none for the padding; never written."""
    return torch.arange(rows + 1, dtype=torch.int32).clamp_(max=live)


class EagleMRV2Speculator(_Host, EagleSpeculator):
    """EAGLE and EAGLE-3."""


class EagleMRV2MTPSpeculator(_Host, MTPSpeculator):
    """Multi-token prediction heads."""


def speculator_class(family: Family) -> type[StockHost]:
    """The speculator of a family."""
    return EagleMRV2MTPSpeculator if family == "mtp" else EagleMRV2Speculator
