"""What vLLM 0.20 to 0.27 share: a stock speculator that builds metadata on the CPU between draft steps.

The adapter builds metadata on the CPU only for attention backends that require it.  The builders of FlashAttention and
Triton attention do device work on persistent buffers only, so their work is captured with the steps, and all draft
decodes form one graph (#46849, in the form that these releases allow).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata, build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager, get_uniform_token_count, prepare_inputs_to_capture
from vllm.v1.worker.gpu.dp_utils import dispatch_cg_and_sync_dp

from vllm_eagle_mrv2.batch.buffers import DraftBatch
from vllm_eagle_mrv2.config.behaviours import Behaviour
from vllm_eagle_mrv2.draft_model.sampling import OwnSampling
from vllm_eagle_mrv2.drafting.capture import DecodeCapture, PrefillCapture
from vllm_eagle_mrv2.drafting.graphs import longest_query
from vllm_eagle_mrv2.drafting.loop import GraphRun
from vllm_eagle_mrv2.errors import EagleMRV2Error
from vllm_eagle_mrv2.releases.common import StockAdapter
from vllm_eagle_mrv2.releases.draft_lengths import FollowsSchedule, hidden_schedule
from vllm_eagle_mrv2.releases.surface import class_path

_CAPTURABLE_BUILDERS = frozenset(
    {
        "vllm.v1.attention.backends.flash_attn.FlashAttentionMetadataBuilder",
        "vllm.v1.attention.backends.triton_attn.TritonAttentionMetadataBuilder",
    }
)
_FLASHINFER = "vllm.v1.attention.backends.flashinfer.FlashInferMetadataBuilder"


class PrefillEagleCudaGraphManager(PrefillCapture, CudaGraphManager):
    """Graphs of the draft prefill, in the target's memory pool."""


class DecodeEagleCudaGraphManager(DecodeCapture, CudaGraphManager):
    """Graphs of the draft decodes, in the target's memory pool."""


class PerStepAdapter(FollowsSchedule, OwnSampling, StockAdapter):
    """Adapter of the releases with builders that cannot refresh the metadata of draft decodes."""

    sample_offset = 0
    slot_mappings_by_layer = staticmethod(build_slot_mappings_by_layer)
    prefill_manager_class: type[PrefillCapture] = PrefillEagleCudaGraphManager
    decode_manager_class: type[DecodeCapture] = DecodeEagleCudaGraphManager
    builders_refresh = False  # set in `set_attn`

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        # Saved before the target's graph manager rounds them to multiples of K + 1 (0.20 to 0.24).
        compilation = vllm_config.compilation_config
        self._capture_sizes = (compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size)
        super().__init__(vllm_config, device)
        if self.options.draft_logits_dtype == "head" and self.draft_logits is not None:
            raise EagleMRV2Error(
                "draft_logits_dtype=head is not exact below vLLM 0.28, whose rejection sampler reads logits after "
                "temperature; leave it at float32."
            )
        self._capturing = False

    @contextlib.contextmanager
    def _decode_capture_sizes(self) -> Iterator[None]:
        """Restore the requested capture sizes: draft decodes run one token per request, not K + 1."""
        compilation = self.vllm_config.compilation_config
        rounded = (compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size)
        compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = self._capture_sizes
        try:
            with hidden_schedule(self.speculative_config):
                yield
        finally:
            compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = rounded

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        super().set_attn(*args, **kwargs)
        self.builders_refresh = self.block_tables.cp_size == 1 and all(map(_builds_on_device, self._builders()))

    def propose(self, *batch: Any, num_tokens_across_dp: Any = None, **how: Any) -> torch.Tensor:
        """Return draft tokens [num_reqs, K] int64; like stock, ignores ``num_tokens_across_dp``."""
        return self._propose(*batch, **how)

    # Hooks that the stock speculators of these releases lack.

    def on_prefill_begin(self, num_reqs: int) -> None: ...

    def on_prefill_end(self, num_reqs: int) -> None: ...

    def on_multi_step_decode_begin(self, num_reqs: int) -> None: ...

    def on_multi_step_decode_end(self, num_reqs: int) -> None: ...

    def query_len(self, batch: DraftBatch, num_tokens: int) -> int | None:
        # Only scheduled tokens count; the padding of the target's graph belongs to no query.
        tokens: int | None = get_uniform_token_count(batch.num_reqs, num_tokens, longest_query(batch))
        return tokens

    def dispatch_prefill(self, batch: DraftBatch, num_tokens: int, num_tokens_padded: int) -> GraphRun:
        query_len = self.query_len(batch, num_tokens)
        return self._dispatch(self.prefill_cudagraph_manager, batch, num_tokens_padded, query_len)

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

    def capture(self) -> None:
        self._capturing = True
        try:
            super().capture()
        finally:
            self._capturing = False

    @property
    def refreshes_in_graph(self) -> bool:
        return (
            (self.needs_no_builder or self.builders_refresh)
            and self._draft_lengths is None  # a graph contains a fixed number of steps
            and self.options.enabled(Behaviour.FUSED_DRAFT_DECODE)
        )

    def decodes_fused(self, run: GraphRun) -> bool:
        return run.full and self.refreshes_in_graph

    def map_decode_slots(self, num_reqs: int, num_tokens: int) -> None:
        buffers = self.loop.buffers
        self.block_tables.compute_slot_mappings(
            # Padded rows have no tokens, so their idx_mapping of -1 is not looked up.
            buffers.idx_mapping[:num_reqs],
            buffers.query_start_loc[: num_reqs + 1],
            buffers.positions[:num_reqs],
            num_tokens,
        )

    def refresh_by_builders(self, num_reqs: int, num_tokens: int, attn_metadata: Any) -> Any:
        slot_mappings = self.block_tables.slot_mappings[:, :num_tokens]
        with _schedules_kept(chain.from_iterable(self.attn_groups)):
            return self._build(
                num_reqs,
                num_tokens,
                _decode_query_start_loc(num_reqs, num_reqs),
                1,
                slot_mappings,
                None,
                max_seq_len=self.max_model_len,
            )

    def before_forward(self, num_tokens: int) -> None:
        # A captured graph would keep the padded number of tokens.
        if not self._capturing:
            super().before_forward(num_tokens)

    def begin_decode(self, batch: DraftBatch) -> None:
        self.before_forward(batch.num_reqs)

    def prepare_fused_replay(self, batch: DraftBatch, run: GraphRun) -> None:
        if batch.dummy_run:
            # The rows of a dummy run map to no request; without tokens, no block table is read for them.
            self.loop.buffers.query_start_loc.zero_()

    def decode_slot_mappings(self, batch: DraftBatch, num_tokens: int) -> torch.Tensor:
        if batch.dummy_run:
            # The rows map to no request, and the kernel of these releases does not skip them.
            dummy: torch.Tensor = self.block_tables.get_dummy_slot_mappings(num_tokens)
            return dummy
        self.map_decode_slots(batch.num_reqs, num_tokens)
        slots: torch.Tensor = self.block_tables.slot_mappings[:, :num_tokens]
        return slots

    def build_by_builders(self, batch: DraftBatch, run: GraphRun, step: int, slot_mappings: torch.Tensor) -> Any:
        rows = run.descriptor.num_reqs or batch.num_reqs
        return self._build(
            rows,
            run.num_tokens,
            _decode_query_start_loc(batch.num_reqs, rows),
            1,
            slot_mappings,
            self._length_bounds(batch, rows, step),
        )

    def rebuild_prefill_metadata(self, batch: DraftBatch, run: GraphRun) -> tuple[Any, Any]:
        live, source = batch.num_reqs, batch.source
        rows = run.descriptor.num_reqs or live
        slot_mappings = self.block_tables.slot_mappings[:, : run.num_tokens]
        starts = torch.full((rows + 1,), batch.num_tokens, dtype=torch.int32)
        starts[: live + 1] = torch.from_numpy(source.query_start_loc_np[: live + 1])
        attn_metadata = self._build(
            rows,
            run.num_tokens,
            starts,
            int(source.num_scheduled_tokens.max()),
            slot_mappings,
            batch.seq_lens_cpu_upper_bound,
        )
        return attn_metadata, build_slot_mappings_by_layer(slot_mappings, self.kv_cache_config)

    def _build(
        self,
        rows: int,
        num_tokens: int,
        query_start_loc_cpu: torch.Tensor,
        max_query_len: int,
        slot_mappings: torch.Tensor,
        length_bounds: torch.Tensor | None,
        max_seq_len: int | None = None,
    ) -> Any:
        buffers = self.loop.buffers
        return build_attn_metadata(
            attn_groups=self.attn_groups,
            num_reqs=rows,
            num_tokens=num_tokens,
            query_start_loc_gpu=buffers.query_start_loc[: rows + 1],
            query_start_loc_cpu=query_start_loc_cpu,
            max_query_len=max_query_len,
            seq_lens=buffers.seq_lens[:rows],
            max_seq_len=self.draft_max_seq_len if max_seq_len is None else max_seq_len,
            block_tables=[table[:rows] for table in self.block_tables.input_block_tables],
            slot_mappings=slot_mappings,
            kv_cache_config=self.kv_cache_config,
            # Without a bound some builders copy the lengths from the device, with one synchronization per step.
            seq_lens_cpu_upper_bound=length_bounds,
        )

    def _length_bounds(self, batch: DraftBatch, rows: int, step: int) -> torch.Tensor:
        """Return [rows] int32 on the CPU: upper bounds of the sequence lengths in a draft decode."""
        bound = torch.zeros(rows, dtype=torch.int32)
        live = batch.num_reqs
        torch.add(batch.seq_lens_cpu_upper_bound[:live], step, out=bound[:live])
        return bound.clamp_(max=self.max_model_len)

    def prepare_capture(
        self, manager: Any, descriptor: Any, num_reqs: int, num_tokens: int, input_buffers: Any, attn_groups: Any
    ) -> tuple[Any, Any]:
        attn_metadata, slot_mappings = prepare_inputs_to_capture(
            num_reqs,
            num_tokens,
            self.model_state,
            input_buffers,
            self.block_tables,
            attn_groups,
            self.kv_cache_config,
            **self.capture_options(descriptor.cg_mode == CUDAGraphMode.PIECEWISE, manager),
        )
        return attn_metadata, slot_mappings

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
def _schedules_kept(groups: Iterable[Any]) -> Iterator[None]:
    """Keep schedules that are built during a capture in the graph's own memory.

    The builder's buffer would add a copy and a fill at every draft step.
    """
    builders = [group.get_metadata_builder(0) for group in groups]
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
