"""What vLLM 0.20 to 0.27 share: a stock speculator that builds metadata on the CPU between draft steps.

The adapter builds metadata on the CPU only for attention backends that require it.  The builders of FlashAttention and
Triton attention do device work on persistent buffers only, so their work is captured with the steps, and all draft
decodes form one graph (#46849, in the form that these releases allow).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata, build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import get_uniform_token_count, prepare_inputs_to_capture
from vllm.v1.worker.gpu.dp_utils import dispatch_cg_and_sync_dp

from vllm_eagle_mrv2.batch.buffers import DraftBatch
from vllm_eagle_mrv2.classes import class_path
from vllm_eagle_mrv2.config.behaviours import Behaviour
from vllm_eagle_mrv2.drafting.capture import AskedGraphs, CapturedAttentionState
from vllm_eagle_mrv2.drafting.loop import ForwardInputs, GraphRun
from vllm_eagle_mrv2.drafting.protocols import Descriptor
from vllm_eagle_mrv2.releases.adapter import ReleaseAdapter, longest_query
from vllm_eagle_mrv2.releases.graph_managers import graph_managers
from vllm_eagle_mrv2.releases.schedule import hidden_schedule

_CAPTURABLE_BUILDERS = frozenset(
    {
        "vllm.v1.attention.backends.flash_attn.FlashAttentionMetadataBuilder",
        "vllm.v1.attention.backends.triton_attn.TritonAttentionMetadataBuilder",
    }
)
_FLASHINFER = "vllm.v1.attention.backends.flashinfer.FlashInferMetadataBuilder"


class PerStepAdapter(ReleaseAdapter):
    """Adapter of the releases whose own speculator builds metadata anew at each step."""

    sample_offset = 0
    samples_apart = False
    looks_up_length = True
    slot_mappings_by_layer = staticmethod(build_slot_mappings_by_layer)
    managers = graph_managers()

    @contextlib.contextmanager
    def decode_capture_sizes(self) -> Iterator[None]:
        """Restore the requested capture sizes: draft decodes run one token per request, not K + 1.

        The target's graph manager rounds them to multiples of K + 1 (0.20 to 0.24).
        """
        compilation = self.stock.vllm_config.compilation_config
        rounded = AskedGraphs.of(compilation)
        compilation.cudagraph_capture_sizes = self.asked.capture_sizes
        compilation.max_cudagraph_capture_size = self.asked.max_capture_size
        try:
            with hidden_schedule(self.stock.speculative_config):
                yield
        finally:
            compilation.cudagraph_capture_sizes = rounded.capture_sizes
            compilation.max_cudagraph_capture_size = rounded.max_capture_size

    def take_attention(self, *, by_ours: bool) -> None:
        super().take_attention(by_ours=by_ours)
        self.refreshes_in_graph = self.refreshes_in_graph and self.options.enabled(Behaviour.FUSED_DRAFT_DECODE)

    @property
    def builders_refresh(self) -> bool:
        return self.stock.block_tables.cp_size == 1 and all(map(_builds_on_device, self.builders()))

    def decodes_fused(self, run: GraphRun) -> bool:
        return run.full and self.refreshes_in_graph

    # Dispatch

    def query_len(self, batch: DraftBatch, num_tokens: int) -> int | None:
        # Only scheduled tokens count; the padding of the target's graph belongs to no query.
        tokens: int | None = get_uniform_token_count(batch.num_reqs, num_tokens, longest_query(batch))
        return tokens

    def dispatch_prefill(
        self, batch: DraftBatch, num_tokens: int, num_tokens_padded: int, *, uniform: bool = True
    ) -> GraphRun:
        query_len = self.query_len(batch, num_tokens) if uniform else None
        return self._dispatch(self.stock.prefill_cudagraph_manager, batch, num_tokens_padded, query_len)

    def dispatch_decode(self, batch: DraftBatch) -> GraphRun:
        run = self._dispatch(self.stock.decode_cudagraph_manager, batch, batch.num_reqs, 1)
        return self.of_draft_length(run, batch.num_draft_tokens)

    def _dispatch(self, manager: Any, batch: DraftBatch, num_tokens: int, query_len: int | None) -> GraphRun:
        descriptor, across_dp = dispatch_cg_and_sync_dp(
            manager,
            batch.num_reqs,
            num_tokens,
            query_len,
            dp_size=self.stock.dp_size,
            dp_rank=self.stock.dp_rank,
            need_eager=batch.eager,
        )
        return self.graph_run(manager, descriptor, across_dp)

    # Passes

    def begin_decode(self, batch: DraftBatch) -> None:
        self.before_forward(batch.num_reqs)

    def before_forward(self, num_tokens: int) -> None:
        # A captured graph would keep the padded number of tokens.
        if not self.capturing:
            super().before_forward(num_tokens)

    def prepare_fused_replay(self, batch: DraftBatch, run: GraphRun) -> None:
        if batch.dummy_run:
            # The rows of a dummy run map to no request; without tokens, no block table is read for them.
            self.buffers.query_start_loc.zero_()

    # Metadata of draft decodes

    def map_decode_slots(self, num_reqs: int, num_tokens: int, *, idle: bool = False) -> torch.Tensor:
        if idle:  # the kernel of these releases does not skip such rows
            dummy: torch.Tensor = self.stock.block_tables.get_dummy_slot_mappings(num_tokens)
            return dummy
        return super().map_decode_slots(num_reqs, num_tokens)

    def refresh_by_builders(self, inputs: ForwardInputs) -> Any:
        num_reqs = inputs.num_reqs
        with _schedules_kept(self.builders()):
            return self._build(
                num_reqs,
                inputs.num_tokens,
                _decode_query_start_loc(num_reqs, num_reqs),
                max_query_len=1,
                length_bounds=None,
                max_seq_len=self.stock.max_model_len,
            )

    def build_by_builders(self, batch: DraftBatch, run: GraphRun, step: int) -> Any:
        rows = run.descriptor.num_reqs or batch.num_reqs
        return self._build(
            rows,
            run.descriptor.num_tokens,
            _decode_query_start_loc(batch.num_reqs, rows),
            max_query_len=1,
            length_bounds=self._length_bounds(batch, rows, step),
        )

    def rebuild_prefill_metadata(self, batch: DraftBatch, run: GraphRun) -> tuple[Any, Any]:
        live, source, num_tokens = batch.num_reqs, batch.source, run.descriptor.num_tokens
        rows = run.descriptor.num_reqs or live
        starts = torch.full((rows + 1,), batch.num_tokens, dtype=torch.int32)
        starts[: live + 1] = torch.from_numpy(source.query_start_loc_np[: live + 1])
        attn_metadata = self._build(
            rows,
            num_tokens,
            starts,
            max_query_len=int(source.num_scheduled_tokens.max()),
            length_bounds=batch.seq_lens_cpu_upper_bound,
        )
        slot_mappings = self.stock.block_tables.slot_mappings[:, :num_tokens]
        return attn_metadata, build_slot_mappings_by_layer(slot_mappings, self.stock.kv_cache_config)

    def _build(
        self,
        rows: int,
        num_tokens: int,
        query_start_loc_cpu: torch.Tensor,
        *,
        max_query_len: int,
        length_bounds: torch.Tensor | None,
        max_seq_len: int | None = None,
    ) -> Any:
        buffers, stock = self.buffers, self.stock
        tables = stock.block_tables
        return build_attn_metadata(
            attn_groups=stock.attn_groups,
            num_reqs=rows,
            num_tokens=num_tokens,
            query_start_loc_gpu=buffers.query_start_loc[: rows + 1],
            query_start_loc_cpu=query_start_loc_cpu,
            max_query_len=max_query_len,
            seq_lens=buffers.seq_lens[:rows],
            max_seq_len=stock.draft_max_seq_len if max_seq_len is None else max_seq_len,
            block_tables=[table[:rows] for table in tables.input_block_tables],
            slot_mappings=tables.slot_mappings[:, :num_tokens],
            kv_cache_config=stock.kv_cache_config,
            # Without a bound some builders copy the lengths from the device, with one synchronization per step.
            seq_lens_cpu_upper_bound=length_bounds,
        )

    def _length_bounds(self, batch: DraftBatch, rows: int, step: int) -> torch.Tensor:
        """Return [rows] int32 on the CPU: upper bounds of the sequence lengths in a draft decode."""
        bound = torch.zeros(rows, dtype=torch.int32)
        live = batch.num_reqs
        torch.add(batch.seq_lens_cpu_upper_bound[:live], step, out=bound[:live])
        return bound.clamp_(max=self.stock.max_model_len)

    # Capture

    def prepare_capture(
        self, manager: Any, descriptor: Descriptor, num_reqs: int, input_buffers: Any, attn_groups: Any
    ) -> CapturedAttentionState:
        stock = self.stock
        return CapturedAttentionState(
            *prepare_inputs_to_capture(
                num_reqs,
                descriptor.num_tokens,
                stock.model_state,
                input_buffers,
                stock.block_tables,
                attn_groups,
                stock.kv_cache_config,
                **self.capture_options(descriptor.cg_mode == CUDAGraphMode.PIECEWISE, manager),
            )
        )

    def capture_options(self, piecewise: bool, manager: Any) -> dict[str, bool]:
        """Return the arguments that tell the preparation of dummy inputs about the kind of graph."""
        return {"skip_attn": piecewise and not manager.use_breakable_cg}


def _builds_on_device(builder: Any) -> bool:
    """Whether a builder's ``build`` for one token per request does only device work, on persistent buffers."""
    name = class_path(type(builder))
    # FlashInfer's own decode kernels need a plan from the CPU.  XQA and trtllm-gen read lengths and block tables on the
    # device.
    device_lengths = name == _FLASHINFER and getattr(builder, "use_trtllm_decode_attention", False)
    return name in _CAPTURABLE_BUILDERS or device_lengths


class _Schedule:
    """Replaces the buffer into which FlashAttention's builder copies schedules; returns the newest one itself."""

    def __setitem__(self, rows: slice, value: Any) -> None:
        if isinstance(value, torch.Tensor):  # not the zeros that pad it
            self._newest = value

    def __getitem__(self, rows: slice) -> torch.Tensor:
        return self._newest


@contextlib.contextmanager
def _schedules_kept(builders: Iterable[Any]) -> Iterator[None]:
    """Keep schedules that are built during a capture in the graph's own memory.

    The builder's buffer would add a copy and a fill at every draft step.
    """
    buffers = [(builder, builder.scheduler_metadata) for builder in builders if hasattr(builder, "scheduler_metadata")]
    try:
        for builder, _ in buffers:
            builder.scheduler_metadata = _Schedule()
        yield
    finally:
        for builder, buffer in buffers:
            builder.scheduler_metadata = buffer


@functools.lru_cache(maxsize=4096)
def _decode_query_start_loc(live: int, rows: int) -> torch.Tensor:
    """Return [rows + 1] int32 on the CPU: one token per live request, none for padding; must not be modified."""
    return torch.arange(rows + 1, dtype=torch.int32).clamp_(max=live)
