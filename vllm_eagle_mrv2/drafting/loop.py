"""The draft loop: propose, draft prefill, draft decode.

EAGLE drafts K tokens in one draft prefill over the target's batch, which yields the first, and K - 1 draft decodes of
one token a request.  The loop knows no vLLM: what it needs of it, it asks of a `ReleaseAdapter`.
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
    """How a forward pass runs: what the release's dispatch chose."""

    descriptor: Any  # the release's own batch descriptor
    mode: Any  # the release's CUDA-graph mode
    full: bool  # replay of a FULL graph
    num_tokens: int  # with padding
    num_tokens_across_dp: Any = None  # [dp_size] int32 on the CPU, under data parallelism


class ReleaseAdapter(Protocol):
    """What the loop needs of a vLLM release."""

    draft_logits: torch.Tensor | None
    """[R, K, V]: where probabilistic drafting stores logits; None drafts greedily."""

    draft_max_seq_len: int
    """Longest sequence for attention metadata built from now on."""

    refreshes_in_graph: bool
    """Every attention backend of the draft can bring its decode metadata up to date inside a graph."""

    def decodes_fused(self, run: GraphRun) -> bool:
        """Whether all draft decodes run in one go, their metadata refreshed on the device."""

    def phase_run(self, batch: DraftBatch) -> GraphRun | None:
        """The graph of the whole draft phase, from its inputs to all draft decodes; None where a batch has none."""

    target_outputs: TargetStates | None
    """Where the target's FULL graphs leave their output, if those of draft prefills begin with taking it from there."""

    def combine(self, states: TargetStates) -> torch.Tensor:
        """[n, H]: what the draft starts from."""

    def begin_prefill(self, batch: DraftBatch) -> tuple[int, int]:
        """Called with the batch's tokens in place; the tokens to run over, without and with padding."""

    def dispatch_prefill(self, batch: DraftBatch, num_tokens: int, num_tokens_padded: int) -> GraphRun:
        """Choose the graph of a draft prefill; agrees across data-parallel ranks."""

    def dispatch_decode(self, batch: DraftBatch) -> GraphRun:
        """Choose the graph of a draft decode of one token a request; agrees across data-parallel ranks."""

    def on_prefill_begin(self, num_reqs: int) -> None: ...

    def on_prefill_end(self, num_reqs: int) -> None: ...

    def on_multi_step_decode_begin(self, num_reqs: int) -> None: ...

    def on_multi_step_decode_end(self, num_reqs: int) -> None: ...

    def before_forward(self, num_tokens: int) -> None:
        """Called before each forward pass of the draft with its unpadded tokens (expert load balancing)."""

    def while_prefilling(self, num_reqs: int, mode: Any) -> AbstractContextManager[None]:
        """In force while the draft runs over a batch, of whose requests the last tokens' states are read alone."""

    def run_draft_model(
        self,
        num_tokens: int,
        attn_metadata: Any,
        slot_mappings: Any,
        num_tokens_across_dp: Any,
        mode: Any,
        mm_inputs: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One forward pass over the first rows of the buffers.

        Returns:
            hidden states for the head and hidden states for the next step, both [num_tokens, H]; often the same.
        """

    def sample(self, hidden_states: torch.Tensor, positions: torch.Tensor, idx_mapping: torch.Tensor) -> torch.Tensor:
        """Draft from hidden states [n, H] for step ``draft_step``.

        Probabilistic drafting also stores the logits in ``draft_logits``, in the row of each request.

        Returns:
            tokens for n rows, in a form of `how_drafted`, of which the next kernel takes the best.
        """

    def rebuild_prefill_metadata(self, batch: DraftBatch, run: GraphRun) -> tuple[Any, Any]:
        """Attention metadata and slot mappings of a draft prefill through the draft's own builders."""

    def begin_decode(self, batch: DraftBatch) -> None:
        """Called before the draft decodes, with the first draft tokens in place."""

    def build_decode_metadata(self, batch: DraftBatch, run: GraphRun, step: int) -> tuple[Any, Any]:
        """Slot mappings, then attention metadata, for the positions and lengths in the buffers."""

    slot_table: SlotTable | None
    """Where the slots of draft decodes go, if they can be looked up a step ahead."""

    def map_decode_slots(self, num_reqs: int, num_tokens: int) -> None:
        """Bring slot mappings up to date by device work alone."""

    def refresh_decode_metadata(self, num_reqs: int, num_tokens: int, attn_metadata: Any) -> Any:
        """Bring metadata up to date by device work alone; the metadata to go on with."""

    def prepare_fused_replay(self, batch: DraftBatch, run: GraphRun) -> None:
        """Called before the replay of a graph that holds all draft decodes."""

    def replay_prefill(self, run: GraphRun) -> None: ...

    def replay_decode(self, run: GraphRun) -> None: ...


@dataclass(frozen=True)
class DraftConfig:
    """What stays the same for the life of an engine."""

    num_draft_tokens: int  # K
    max_model_len: int
    sample_offset: int  # what this release's sampler adds to positions, 0 or 1
    filters: bool  # drafts honour the requests' top-k and top-p


class DraftLoop:
    """Drafts K tokens for every request of a batch."""

    def __init__(self, adapter: ReleaseAdapter, config: DraftConfig, buffers: DraftBuffers) -> None:
        self.adapter = adapter
        self.config = config
        self.buffers = buffers
        self.queue = BatchQueue(buffers.input_ids.device, filters=config.filters)
        """Brings batches to the draft prefill, wherever it runs."""
        self.counter = DraftCounter()
        """Counts draft phases by the path that they took."""
        self.warms_up = False
        """Whether passes outside of a graph are but to warm up for its capture."""
        self._drafts = [buffers.draft_tokens[:num_reqs] for num_reqs in range(buffers.max_num_reqs + 1)]

    def propose(self, batch: DraftBatch) -> torch.Tensor:
        """Draft for a batch.

        Returns:
            [num_reqs, K] int64, a view of the persistent ``draft_tokens``; only the first
            ``batch.num_draft_tokens`` columns are of this call.
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
        """Fill the buffers, and choose how the draft prefill runs, over how many tokens."""
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
        """The target's states to where the draft prefill looks for them."""
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
            # The target's builders refreshed the very buffers that the graph reads (#40410).
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
        """Attention metadata and slot mappings of a draft prefill: the target's, of this very batch (#40410)."""
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
        """A draft prefill; where asked for its inputs and the target's states before it, all draft decodes after it."""
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
        adapter.on_prefill_begin(num_reqs)  # as the next pass expects it

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
        """Draft prefill: forward over the target's batch, the first draft token, and what the first decode starts from.

        FULL graphs hold all of it.  A batch that drafts nothing runs for its keys and values alone.  With
        ``slot_table`` the first decode's slots are left behind as well.
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
        """All draft decodes, the metadata refreshed on the device before each; one graph holds them (#46849).

        ``slots_known``: what ran before has left the slots of the first one.
        """
        slot_table = self._slots_ahead(attn_metadata)
        steps = range(1, num_draft_tokens)
        if self.warms_up and not torch.cuda.is_current_stream_capturing():
            steps = steps[:2]  # all others are as the second
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
        """Where each draft decode's slots are left by what runs before it; None where they are mapped anew."""
        return self.adapter.slot_table if attn_metadata is not None else None

    def _build_metadata(self, batch: DraftBatch, run: GraphRun, step: int) -> tuple[Any, Any]:
        """Attention metadata and slot mappings of a draft decode (#38311, #41162)."""
        return self.adapter.build_decode_metadata(batch, run, step)

    def _refresh_metadata(
        self, num_reqs: int, num_tokens: int, attn_metadata: Any, step: int, slots_known: bool
    ) -> Any:
        """The same by device work alone, from the metadata of the step before."""
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
        """One draft decode and the update to the next; the step is data on the device, so that one graph serves all.

        With ``slot_table`` the update leaves the next decode's slots behind as well.
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
        """Bring what a dummy run left behind back into range before a warm-up or capture pass of a step."""
        buffers = self.buffers
        buffers.last_token_indices.zero_()
        buffers.idx_mapping.zero_()
        buffers.sample_positions.zero_()
        buffers.num_rejected.zero_()
        buffers.live_reqs.fill_(buffers.max_num_reqs)
        buffers.draft_step.fill_(step)
