"""The draft loop: propose, draft prefill, draft decode.

EAGLE drafts K tokens in one draft prefill over the target's batch, which yields the first token, and K - 1 draft
decodes of one token per request.  The loop uses vLLM only through a `ReleaseAdapter`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from vllm_eagle_mrv2.batch.buffers import DraftBatch, DraftBuffers, SlotTable, TargetStates
from vllm_eagle_mrv2.batch.queue import BatchQueue
from vllm_eagle_mrv2.drafting.attn_metadata import draft_max_seq_len
from vllm_eagle_mrv2.drafting.capture import CapturedAttentionState
from vllm_eagle_mrv2.kernels.decode_inputs import prepare_decode_inputs
from vllm_eagle_mrv2.kernels.prefill_inputs import prepare_prefill_inputs
from vllm_eagle_mrv2.kernels.step_update import update_after_step
from vllm_eagle_mrv2.telemetry import counters
from vllm_eagle_mrv2.telemetry.counters import DraftCounter


@dataclass(frozen=True)
class GraphRun:
    """How a forward pass runs, as chosen by the release's dispatch."""

    descriptor: Any  # the release's batch descriptor
    mode: Any  # the release's CUDA graph mode
    full: bool  # whether a FULL graph is replayed
    num_tokens: int  # with padding
    num_tokens_across_dp: Any = None  # [dp_size] int32 on the CPU, under data parallelism


class ReleaseAdapter(Protocol):
    """What the draft loop needs from a vLLM release."""

    draft_logits: torch.Tensor | None
    """[R, K, V]: where probabilistic drafting stores logits; None means greedy drafting."""

    draft_max_seq_len: int
    """Maximum sequence length for attention metadata that is built from now on."""

    refreshes_in_graph: bool
    """Whether every attention backend of the draft can refresh its decode metadata inside a graph."""

    def decodes_fused(self, run: GraphRun) -> bool:
        """Whether all draft decodes run in one pass that refreshes their metadata on the device."""

    def phase_run(self, batch: DraftBatch) -> GraphRun | None:
        """Return the graph of the whole draft phase, from inputs to the last draft decode, or None."""

    target_outputs: TargetStates | None
    """Output buffers of the target's FULL graphs, if the draft prefill graphs start by reading them."""

    def combine(self, states: TargetStates) -> torch.Tensor:
        """Return the hidden states [n, H] that the draft starts from."""

    def begin_prefill(self, batch: DraftBatch) -> tuple[int, int]:
        """Called once the batch's tokens are in the buffers; returns the tokens to run, without and with padding."""

    def dispatch_prefill(self, batch: DraftBatch, num_tokens: int, num_tokens_padded: int) -> GraphRun:
        """Choose the graph of a draft prefill; data-parallel ranks agree on it."""

    def dispatch_decode(self, batch: DraftBatch) -> GraphRun:
        """Choose the graph of a draft decode of one token per request; data-parallel ranks agree on it."""

    def on_prefill_begin(self, num_reqs: int) -> None: ...

    def on_prefill_end(self, num_reqs: int) -> None: ...

    def on_multi_step_decode_begin(self, num_reqs: int) -> None: ...

    def on_multi_step_decode_end(self, num_reqs: int) -> None: ...

    def before_forward(self, num_tokens: int) -> None:
        """Called before each forward pass of the draft with its unpadded number of tokens (expert load balancing)."""

    def while_prefilling(self, num_reqs: int, mode: Any) -> AbstractContextManager[None]:
        """Context of a draft prefill; afterwards only the hidden state of each request's last token is read."""

    def run_draft_model(
        self,
        num_tokens: int,
        attn_metadata: Any,
        slot_mappings: Any,
        num_tokens_across_dp: Any,
        mode: Any,
        mm_inputs: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one forward pass over the first rows of the buffers.

        Returns:
            hidden states for the head and hidden states for the next step, both [num_tokens, H]; often the same.
        """

    def sample(self, hidden_states: torch.Tensor, positions: torch.Tensor, idx_mapping: torch.Tensor) -> torch.Tensor:
        """Draft from hidden states [n, H] for step ``draft_step``.

        Probabilistic drafting also stores the logits in ``draft_logits``, in the row of each request.

        Returns:
            drafts for n rows, in a form of `how_drafted`, which the next kernel reduces to one token per row.
        """

    def rebuild_prefill_metadata(self, batch: DraftBatch, run: GraphRun) -> tuple[Any, Any]:
        """Build attention metadata and slot mappings of a draft prefill with the draft's own builders."""

    def begin_decode(self, batch: DraftBatch) -> None:
        """Called before the draft decodes, once the first draft tokens are in the buffers."""

    def build_decode_metadata(self, batch: DraftBatch, run: GraphRun, step: int) -> tuple[Any, Any]:
        """Build attention metadata and slot mappings for the positions and lengths in the buffers."""

    slot_table: SlotTable | None
    """Where the slots of draft decodes are written, if they can be looked up one step ahead."""

    def map_decode_slots(self, num_reqs: int, num_tokens: int) -> None:
        """Update the slot mappings with device work only."""

    def refresh_decode_metadata(self, num_reqs: int, num_tokens: int, attn_metadata: Any) -> Any:
        """Update the metadata with device work only; returns the metadata to use from then on."""

    def prepare_fused_replay(self, batch: DraftBatch, run: GraphRun) -> None:
        """Called before the replay of a graph that contains all draft decodes."""

    def replay_prefill(self, run: GraphRun) -> None: ...

    def replay_decode(self, run: GraphRun) -> None: ...


@dataclass(frozen=True)
class DraftConfig:
    """Values that stay the same for the life of an engine."""

    num_draft_tokens: int  # K
    max_model_len: int
    sample_offset: int  # what this release's sampler adds to positions, 0 or 1
    filters: bool  # whether drafts honour the requests' top-k and top-p


class DraftLoop:
    """Drafts K tokens for every request of a batch."""

    def __init__(self, adapter: ReleaseAdapter, config: DraftConfig, buffers: DraftBuffers) -> None:
        self.adapter = adapter
        self.config = config
        self.buffers = buffers
        self.queue = BatchQueue(buffers.input_ids.device, filters=config.filters)
        """Hands batches to the draft prefill, which may run in a graph or eagerly."""
        self.counter = DraftCounter()
        """Counts draft phases by the path they took."""
        self.warms_up = False
        """Whether passes outside a graph are only warm-ups for its capture."""
        self._drafts = [buffers.draft_tokens[:num_reqs] for num_reqs in range(buffers.max_num_reqs + 1)]

    def propose(self, batch: DraftBatch) -> torch.Tensor:
        """Draft for a batch.

        Returns:
            [num_reqs, K] int64, a view of the persistent ``draft_tokens``; only the first
            ``batch.num_draft_tokens`` columns are written by this call.
        """
        run = self.adapter.phase_run(batch)
        if run is not None:
            path = self._replay_phase(batch, run)
        else:
            with torch.inference_mode():
                path = self._draft(batch)
        if not batch.dummy_run:
            self.counter.count(path, batch.num_draft_tokens)
        return self._drafts[batch.num_reqs]

    def _draft(self, batch: DraftBatch) -> int:
        self.adapter.draft_max_seq_len = self._max_seq_len(batch)
        self._run_prefill(batch)
        return self._run_decodes(batch) if batch.num_draft_tokens > 1 else counters.PREFILL_ONLY

    def _max_seq_len(self, batch: DraftBatch) -> int:
        return draft_max_seq_len(
            batch.seq_lens_cpu_upper_bound, batch.num_reqs, batch.num_draft_tokens, self.config.max_model_len
        )

    def _prepare_prefill(self, batch: DraftBatch) -> tuple[GraphRun, int]:
        """Fill the buffers; return how the draft prefill runs and over how many tokens."""
        adapter = self.adapter
        self.queue.put(batch)
        self._fill_inputs(batch.num_reqs)
        num_tokens, num_tokens_padded = adapter.begin_prefill(batch)
        run = adapter.dispatch_prefill(batch, num_tokens, num_tokens_padded)
        self._leave_states(batch, run, num_tokens_padded)
        return run, num_tokens

    def _fill_inputs(self, num_reqs: int) -> None:
        prepare_prefill_inputs(self.buffers, self.queue, num_reqs, sample_offset=self.config.sample_offset)

    def _leave_states(self, batch: DraftBatch, run: GraphRun, num_tokens: int) -> None:
        """Copy the target's hidden states to where the draft prefill reads them."""
        if run.full and self.adapter.target_outputs is not None:
            for output, given in zip(self.adapter.target_outputs.used, batch.target_states.used, strict=True):
                if output.data_ptr() != given.data_ptr():  # the target ran without a FULL graph
                    with torch.inference_mode():
                        output[:num_tokens].copy_(given[:num_tokens])
        else:
            self._take_states(batch.target_states, num_tokens)

    @torch.inference_mode()
    def _take_states(self, states: TargetStates, num_tokens: int) -> None:
        self.buffers.hidden_states[:num_tokens].copy_(self.adapter.combine(states.rows(num_tokens)))

    def _replay_phase(self, batch: DraftBatch, run: GraphRun) -> int:
        self._leave_states(batch, run, batch.num_tokens_padded)
        self.queue.put(batch)
        self.adapter.replay_prefill(run)
        return counters.ONE_GRAPH

    def _run_prefill(self, batch: DraftBatch) -> None:
        run, num_tokens = self._prepare_prefill(batch)
        adapter = self.adapter
        attn_metadata, slot_mappings = self._prefill_metadata(batch, run)
        adapter.before_forward(num_tokens)
        adapter.on_prefill_begin(batch.num_reqs)
        if run.full:
            # The target's builders have already refreshed the buffers that the graph reads (#40410).
            adapter.replay_prefill(run)
        else:
            self.prefill(
                batch.num_reqs,
                run.num_tokens,
                attn_metadata,
                slot_mappings,
                run.num_tokens_across_dp,
                run.mode,
                batch.mm_inputs,
                drafts=batch.num_draft_tokens > 0,
            )
        adapter.on_prefill_end(batch.num_reqs)

    def _prefill_metadata(self, batch: DraftBatch, run: GraphRun) -> tuple[Any, Any]:
        """Return the attention metadata and slot mappings that the target built for this batch (#40410)."""
        return batch.attn_metadata, batch.slot_mappings

    def phase(
        self,
        num_reqs: int,
        num_tokens: int,
        attn_metadata: Any,
        slot_mappings: Any,
        num_tokens_across_dp: Any,
        mode: Any,
        states: TargetStates | None = None,
        inputs: bool = False,
        decodes: CapturedAttentionState | None = None,
    ) -> None:
        """Run a draft prefill, optionally with its inputs before it and all draft decodes after it.

        ``inputs`` fills the buffers first, ``states`` are the target's hidden states to take first, and ``decodes`` are
        the inputs of the draft decodes that follow."""
        if inputs:
            self._fill_inputs(num_reqs)
        if states is not None:
            self._take_states(states, num_tokens)
        slot_table = None if decodes is None else self._slots_ahead(decodes.attn_metadata)
        self.prefill(
            num_reqs, num_tokens, attn_metadata, slot_mappings, num_tokens_across_dp, mode, slot_table=slot_table
        )
        if decodes is None:
            return
        adapter = self.adapter
        adapter.on_prefill_end(num_reqs)
        adapter.on_multi_step_decode_begin(num_reqs)
        self.decode_all(*decodes, mode, self.config.num_draft_tokens, slots_known=slot_table is not None)
        adapter.on_multi_step_decode_end(num_reqs)
        adapter.on_prefill_begin(num_reqs)  # the state that the next pass expects

    def prefill(
        self,
        num_reqs: int,
        num_tokens: int,
        attn_metadata: Any,
        slot_mappings: Any,
        num_tokens_across_dp: Any,
        mode: Any,
        mm_inputs: Any = None,
        drafts: bool = True,
        slot_table: SlotTable | None = None,
    ) -> None:
        """Run a draft prefill: forward pass over the target's batch, first draft token, inputs of the first decode.

        A FULL graph contains all of it.  A batch that drafts nothing runs only to write its keys and values.  With
        ``slot_table`` the slots of the first decode are written too.
        """
        buffers, config = self.buffers, self.config
        with self.adapter.while_prefilling(num_reqs, mode):
            for_head, for_next_step = self.adapter.run_draft_model(
                num_tokens, attn_metadata, slot_mappings, num_tokens_across_dp, mode, mm_inputs
            )
        if not drafts:
            return
        drafted = self.adapter.sample(
            for_head[buffers.last_token_indices[:num_reqs]],
            buffers.sample_positions[:num_reqs],
            buffers.idx_mapping[:num_reqs],
        )
        prepare_decode_inputs(
            buffers,
            drafted,
            for_next_step,
            num_reqs,
            config.max_model_len,
            slot_table,
            sample_offset=config.sample_offset,
        )

    def _run_decodes(self, batch: DraftBatch) -> int:
        adapter = self.adapter
        adapter.begin_decode(batch)
        run = adapter.dispatch_decode(batch)
        adapter.on_multi_step_decode_begin(batch.num_reqs)
        if adapter.decodes_fused(run):
            path = counters.FUSED
            self._decode_fused(batch, run)
        else:
            path = counters.BY_STEPS
            self._decode_by_steps(batch, run)
        adapter.on_multi_step_decode_end(batch.num_reqs)
        return path if run.full else counters.EAGER

    def _decode_fused(self, batch: DraftBatch, run: GraphRun) -> None:
        if run.full:
            self.adapter.prepare_fused_replay(batch, run)
            self.adapter.replay_decode(run)
            return
        attn_metadata, slot_mappings = (None, None)
        if not batch.skip_attn:
            attn_metadata, slot_mappings = self._build_metadata(batch, run, step=1)
        self.decode_all(
            batch.num_reqs,
            run.num_tokens,
            attn_metadata,
            slot_mappings,
            run.num_tokens_across_dp,
            run.mode,
            batch.num_draft_tokens,
        )

    def _decode_by_steps(self, batch: DraftBatch, run: GraphRun) -> None:
        attn_metadata, slot_mappings = (None, None)
        for step in range(1, batch.num_draft_tokens):
            if not batch.skip_attn:
                attn_metadata, slot_mappings = self._build_metadata(batch, run, step)
            if run.full:
                self.adapter.replay_decode(run)
            else:
                self.decode(
                    batch.num_reqs,
                    run.num_tokens,
                    attn_metadata,
                    slot_mappings,
                    run.num_tokens_across_dp,
                    run.mode,
                    batch.num_draft_tokens,
                )

    def decode_all(
        self,
        num_reqs: int,
        num_tokens: int,
        attn_metadata: Any,
        slot_mappings: Any,
        num_tokens_across_dp: Any,
        mode: Any,
        num_draft_tokens: int,
        *,
        slots_known: bool = False,
    ) -> None:
        """Run all draft decodes, refreshing the metadata on the device before each; one graph contains them (#46849).

        ``slots_known``: the preceding pass has already written the slots of the first decode.
        """
        slot_table = self._slots_ahead(attn_metadata)
        steps = range(1, num_draft_tokens)
        if self.warms_up and not torch.cuda.is_current_stream_capturing():
            steps = steps[:2]  # the other steps launch the same kernels as the second
        for step in steps:
            if attn_metadata is not None:
                known = slot_table is not None and (step > 1 or slots_known)
                attn_metadata = self._refresh_metadata(num_reqs, num_tokens, attn_metadata, step, known)
            self.decode(
                num_reqs,
                num_tokens,
                attn_metadata,
                slot_mappings,
                num_tokens_across_dp,
                mode,
                num_draft_tokens,
                slot_table,
            )

    def _slots_ahead(self, attn_metadata: Any) -> SlotTable | None:
        """Return where each pass writes the next draft decode's slots; None if slots are mapped at every step."""
        return self.adapter.slot_table if attn_metadata is not None else None

    def _build_metadata(self, batch: DraftBatch, run: GraphRun, step: int) -> tuple[Any, Any]:
        """Build attention metadata and slot mappings of a draft decode (#38311, #41162)."""
        return self.adapter.build_decode_metadata(batch, run, step)

    def _refresh_metadata(
        self, num_reqs: int, num_tokens: int, attn_metadata: Any, step: int, slots_known: bool
    ) -> Any:
        """Update the previous step's attention metadata and slot mappings with device work only."""
        if not slots_known:
            self.adapter.map_decode_slots(num_reqs, num_tokens)
        return self.adapter.refresh_decode_metadata(num_reqs, num_tokens, attn_metadata)

    def decode(
        self,
        num_reqs: int,
        num_tokens: int,
        attn_metadata: Any,
        slot_mappings: Any,
        num_tokens_across_dp: Any,
        mode: Any,
        num_draft_tokens: int,
        slot_table: SlotTable | None = None,
    ) -> None:
        """Run one draft decode and prepare the inputs of the next.

        The step number is data on the device, so one graph serves every step.  With ``slot_table`` the slots of the
        next decode are written too.
        """
        buffers = self.buffers
        self.adapter.before_forward(num_reqs)
        for_head, for_next_step = self.adapter.run_draft_model(
            num_tokens, attn_metadata, slot_mappings, num_tokens_across_dp, mode
        )
        drafted = self.adapter.sample(
            for_head[:num_reqs],
            buffers.sample_positions[:num_reqs],
            buffers.idx_mapping[:num_reqs],
        )
        update_after_step(
            buffers, drafted, for_next_step, num_reqs, num_draft_tokens, self.config.max_model_len, slot_table
        )

    def reset_for_capture(self, step: int) -> None:
        """Reset values left by a dummy run to valid ones before a warm-up or capture pass of a step."""
        buffers = self.buffers
        buffers.last_token_indices.zero_()
        buffers.idx_mapping.zero_()
        buffers.sample_positions.zero_()
        buffers.num_rejected.zero_()
        buffers.live_reqs.fill_(buffers.max_num_reqs)
        buffers.draft_step.fill_(step)
