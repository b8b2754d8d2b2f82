"""What vLLM 0.28 to 0.33 share: one graph for all draft decodes, where backends refresh their metadata on the device.

The speculators subclass the stock ones, which keep everything but drafting: expert load balancing, prefill context
parallelism, watermarks, adaptive verification, and the sharing of top-k indices by MTP heads.
"""

from __future__ import annotations

from itertools import chain
from typing import Any, ClassVar

import torch
from packaging.version import Version
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import prepare_inputs_to_capture
from vllm.v1.worker.gpu.dp_utils import dispatch_cg_and_sync_dp
from vllm.v1.worker.utils import get_uniform_decode_token_count

from vllm_eagle_mrv2.batch.buffers import DraftBatch
from vllm_eagle_mrv2.config.options import Options
from vllm_eagle_mrv2.drafting.capture import AskedGraphs, CapturedAttentionState
from vllm_eagle_mrv2.drafting.loop import ForwardInputs, GraphRun
from vllm_eagle_mrv2.releases import installed_version
from vllm_eagle_mrv2.releases.adapter import ReleaseAdapter, longest_query
from vllm_eagle_mrv2.releases.graph_managers import graph_managers
from vllm_eagle_mrv2.releases.speculators import speculator_class

_DECODE_FLAG = "has_prefill" if installed_version() < Version("0.31") else "decode_graph_eligible"
"""The field of a batch that distinguishes decodes from prefills."""

_STEP_IN_NOISE = installed_version() >= Version("0.33")
"""Whether the stock sampler's random numbers depend on the draft step."""


class FusedAdapter(ReleaseAdapter):
    """Adapter of the releases with backends that may refresh decode metadata inside a graph."""

    sample_offset = 1
    stock_class = staticmethod(speculator_class)
    slot_mappings_by_layer = staticmethod(build_slot_mappings_by_layer)
    managers = graph_managers()
    dp_sync_argument: ClassVar[str | None]
    """Name of the dispatch argument for a reusable agreement of the data-parallel ranks; None if there is none."""

    @staticmethod
    def stored_logits(spec: tuple[torch.dtype, float], options: Options) -> tuple[torch.dtype, float]:
        # These releases store logits before temperature.
        return spec if options.draft_logits_dtype == "head" else (torch.float32, spec[1])

    def __init__(self, stock: Any, options: Options, asked: AskedGraphs) -> None:
        super().__init__(stock, options, asked)
        self.hooks = stock

    @property
    def pcp_manager(self) -> Any:
        return getattr(self.stock, "pcp_manager", None)  # exists from 0.30 on

    def begin_prefill(self, batch: DraftBatch) -> tuple[int, int]:
        if self.pcp_manager is not None:
            self.pcp_manager.prepare_draft_prefill(batch.source, self.buffers.input_ids[: batch.num_tokens_padded])
            shard = self.pcp_manager.draft_prefill_batch
            if shard is not None:
                return shard.num_tokens, shard.num_tokens_after_padding
        return super().begin_prefill(batch)

    def run_draft_model(self, inputs: ForwardInputs) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = super().run_draft_model(inputs)
        if self.pcp_manager is None:
            return hidden
        # Restores a shard to the whole batch; a whole batch is returned unchanged.
        restored: tuple[torch.Tensor, torch.Tensor] = self.pcp_manager.restore_draft_prefill(*hidden)
        return restored

    def begin_decode(self, batch: DraftBatch) -> None:
        if self.pcp_manager is not None and not batch.dummy_run:
            self.stock.block_tables.gather_block_tables(batch.source.idx_mapping, num_reqs_padded=batch.num_reqs)

    # Dispatch

    def query_len(self, batch: DraftBatch, num_tokens: int) -> int | None:
        flag = getattr(batch.source, _DECODE_FLAG)
        tokens: int | None = get_uniform_decode_token_count(batch.num_reqs, num_tokens, longest_query(batch), flag)
        return tokens

    def dispatch_prefill(
        self, batch: DraftBatch, num_tokens: int, num_tokens_padded: int, *, uniform: bool = True
    ) -> GraphRun:
        query_len = self.query_len(batch, num_tokens) if uniform else None
        return self._dispatch(self.stock.prefill_cudagraph_manager, batch, num_tokens_padded, query_len, batch.dp_sync)

    def dispatch_decode(self, batch: DraftBatch) -> GraphRun:
        sync, num_tokens = self.decode_dp_sync(batch)
        run = self._dispatch(self.stock.decode_cudagraph_manager, batch, num_tokens, 1, sync)
        return self.of_draft_length(run, batch.num_draft_tokens)

    def decode_dp_sync(self, batch: DraftBatch) -> tuple[Any, int]:
        """Return what the data-parallel ranks already agreed on for the draft decodes, and the tokens to dispatch."""
        if batch.dp_sync is None:
            return None, batch.num_reqs
        known: tuple[Any, int] = self.stock._build_uniform_batch_dp_sync(
            batch.dp_sync, batch.num_reqs, num_query_per_req=1
        )
        return known

    def _dispatch(self, manager: Any, batch: DraftBatch, num_tokens: int, query_len: int | None, sync: Any) -> GraphRun:
        known = {} if self.dp_sync_argument is None else {self.dp_sync_argument: sync}
        descriptor, agreed = dispatch_cg_and_sync_dp(
            manager,
            batch.num_reqs,
            num_tokens,
            uniform_token_count=query_len,
            dp_size=self.stock.dp_size,
            dp_rank=self.stock.dp_rank,
            need_eager=batch.eager,
            **known,
        )
        # 0.28 returns the token counts themselves.
        return self.graph_run(manager, descriptor, getattr(agreed, "num_tokens_across_dp", agreed))

    def noise_seeds(self) -> torch.Tensor:
        # In block verification drafts decide how many of those before them are accepted.  What is drafted again for a
        # position must not get the same random numbers.
        block = self.stock.speculative_config.rejection_sample_method == "block"
        if _STEP_IN_NOISE or not block or self.stock.draft_logits is None:
            return super().noise_seeds()
        mixed: torch.Tensor = self.buffers.seeds ^ (self.buffers.draft_step[0] << 32)
        return mixed

    # Metadata of draft decodes

    def build_by_builders(self, batch: DraftBatch, run: GraphRun, step: int) -> Any:
        return self.stock._build_uniform_attn_metadata(
            batch_desc=run.descriptor,
            num_reqs=batch.num_reqs,
            num_query_per_req=1,
            seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound,
            step=step,
        )

    def rebuild_prefill_metadata(self, batch: DraftBatch, run: GraphRun) -> tuple[Any, Any]:
        slot_mappings = self.stock.block_tables.slot_mappings[:, : run.descriptor.num_tokens]
        attn_metadata = self.ragged_metadata(batch, run)
        return attn_metadata, build_slot_mappings_by_layer(slot_mappings, self.stock.kv_cache_config)

    def ragged_metadata(self, batch: DraftBatch, run: GraphRun) -> Any:
        """Build attention metadata for the target's batch with the draft's own builders."""
        return self.stock._build_attn_metadata(
            num_reqs=batch.num_reqs,
            batch_desc=run.descriptor,
            query_start_loc_np=batch.source.query_start_loc_np,
            seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound,
            step=0,
        )

    def refresh_by_builders(self, inputs: ForwardInputs) -> Any:
        for group in chain.from_iterable(self.stock.attn_groups):
            group.update_draft_decode_metadata(inputs.attn_metadata)
        return inputs.attn_metadata

    # Capture

    def prepare_capture(
        self, manager: Any, descriptor: Any, num_reqs: int, input_buffers: Any, attn_groups: Any
    ) -> CapturedAttentionState:
        full, num_tokens, stock = descriptor.cg_mode == CUDAGraphMode.FULL, descriptor.num_tokens, self.stock
        # A graph for mixed batches may replay one prefill that fills it; 0.28 to 0.30 leave that to the caller.
        widest = num_tokens if full else None
        return CapturedAttentionState(
            *prepare_inputs_to_capture(
                num_reqs,
                num_tokens,
                stock.model_state,
                input_buffers,
                stock.block_tables,
                attn_groups,
                stock.kv_cache_config,
                full_cudagraph=full,
                max_query_len=descriptor.max_query_len or descriptor.uniform_token_count or widest,
            )
        )
