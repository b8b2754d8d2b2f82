"""The draft loop: propose, draft prefill, draft decode.

EAGLE drafts K tokens in one draft prefill over the target's batch, which yields the first token, and K - 1 draft
decodes of one token per request.  The loop uses vLLM only through a `ReleaseAdapter`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from vllm_eagle_mrv2.batch.buffers import DraftBatch, DraftBuffers, Lookup, SlotTable, TargetStates
from vllm_eagle_mrv2.batch.queue import BatchQueue
from vllm_eagle_mrv2.draft_model.rows_read import RowsRead
from vllm_eagle_mrv2.drafting.phase_graphs import PhaseGraphs
from vllm_eagle_mrv2.drafting.protocols import Descriptor, GraphManager, GraphMode
from vllm_eagle_mrv2.kernels.decode_inputs import prepare_decode_inputs
from vllm_eagle_mrv2.kernels.lookup import look_up_drafts, store_found_logits
from vllm_eagle_mrv2.kernels.prefill_inputs import prepare_prefill_inputs
from vllm_eagle_mrv2.kernels.step_update import update_after_step
from vllm_eagle_mrv2.telemetry import counters

if TYPE_CHECKING:
    from vllm_eagle_mrv2.releases.adapter import ReleaseAdapter


_WORTH_PICKING = 50_000_000_000
"""Multiplications that cost more than picking rows for three products: about 0.15 ms on an H100."""
_WORTH_LAUNCHING = 2 * _WORTH_PICKING
"""Multiplications that take an H100 longer than the CPU takes to launch the pass without a graph."""


@dataclass(frozen=True)
class GraphRun:
    """How a forward pass runs, as chosen by the release's dispatch."""

    manager: GraphManager  # that was asked
    descriptor: Descriptor
    full: bool  # whether a FULL graph is replayed
    num_tokens_across_dp: Any = None  # [dp_size] int32 on the CPU, under data parallelism

    def replay(self) -> None:
        """Replay the FULL graph."""
        self.manager.run_fullgraph(self.descriptor)


class ForwardInputs(NamedTuple):
    """What a forward pass of the draft gets besides the tokens, positions and hidden states in the buffers."""

    num_reqs: int
    num_tokens: int  # with padding
    attn_metadata: Any
    slot_mappings: Any  # by layer
    num_tokens_across_dp: Any  # [dp_size] int32 on the CPU, under data parallelism
    mode: GraphMode
    mm_inputs: Any = None


def without_graph(inputs: ForwardInputs) -> ForwardInputs:
    """Return the inputs of the same pass, launched kernel by kernel."""
    modes: Any = type(inputs.mode)
    return inputs._replace(mode=modes.NONE)


@dataclass(frozen=True)
class LoopConfig:
    """Values that stay the same for the life of an engine."""

    max_model_len: int
    sample_offset: int  # what this release's sampler adds to positions, 0 or 1
    filters: bool  # whether drafts honour the requests' top-k and top-p


def draft_max_seq_len(
    seq_lens_cpu_upper_bound: torch.Tensor, num_reqs: int, num_draft_tokens: int, max_model_len: int
) -> int:
    """Return the longest sequence that drafting for this batch can reach (#43991).

    With ``max_model_len`` as the bound, some kernels read block tables past their valid entries and others split their
    work for a context that does not exist.

    Args:
        seq_lens_cpu_upper_bound: [>= num_reqs] int32 on the CPU; an upper bound, because the number of rejected tokens
            is known only on the device.
        num_reqs: live requests, at least one.
        num_draft_tokens: K of this batch.
        max_model_len: the model's limit.
    """
    longest = int(seq_lens_cpu_upper_bound[:num_reqs].max())
    return min(longest + num_draft_tokens, max_model_len)


class DraftLoop:
    """Drafts K tokens for every request of a batch."""

    def __init__(self, adapter: ReleaseAdapter, config: LoopConfig, buffers: DraftBuffers) -> None:
        self.adapter = adapter
        self.config = config
        self.buffers = buffers
        self.queue = BatchQueue(buffers.input_ids.device, filters=config.filters)
        """Hands batches to the draft prefill, which may run in a graph or eagerly."""
        self.counter = counters.DraftCounter()
        """Counts draft phases by the path they took."""
        self.sample: Callable[[torch.Tensor], torch.Tensor] = adapter.sample
        """Drafts from hidden states [n, H]: a row of keys or one token for each of the n rows (`how_drafted`)."""
        self.build_metadata = adapter.build_decode_metadata
        """Builds attention metadata and slot mappings of a draft decode."""
        self.rows_read = RowsRead(buffers.last_token_indices)
        """Tells the draft's layers which rows of a draft prefill are read."""
        self.weights_of_read_rows = 0
        """Number of the draft's weights that need to multiply only these rows."""
        self.lookup: Lookup | None = None
        """The requests' texts, if drafts are looked up in them."""
        self.slot_table: SlotTable | None = None
        """Where the slots of draft decodes are written, if they can be looked up one step ahead."""
        self.phase_graphs = PhaseGraphs(adapter)
        """The graphs that contain a whole draft phase, once they are captured."""
        self.target_outputs: TargetStates | None = None
        """Output buffers of the target's FULL graphs, if the draft prefill graphs start by reading them."""
        self.warms_up = False
        """Whether passes outside a graph are only warm-ups for its capture."""
        self._drafts = [buffers.draft_tokens[:num_reqs] for num_reqs in range(buffers.max_num_reqs + 1)]

    def propose(self, batch: DraftBatch) -> torch.Tensor:
        """Draft for a batch.

        Returns:
            [num_reqs, K] int64, a view of the persistent ``draft_tokens``; only the first ``batch.num_draft_tokens``
            columns are drafts of this batch.  With ``batch.erases`` all are -1.
        """
        run = self.phase_graphs.run_for(batch)
        if run is not None:
            path = counters.ONE_GRAPH
            self._leave_states(batch, run, batch.num_tokens_padded)
            self.queue.put(batch)
            run.replay()
        else:
            with torch.inference_mode():
                self.adapter.limit_lengths(self._max_seq_len(batch))
                self._run_prefill(batch)
                path = self._run_decodes(batch) if batch.num_draft_tokens > 1 else counters.PREFILL_ONLY
        if not batch.dummy_run:
            cells = self.counter.cells
            cells[path] += 1
            cells[counters.DRAFT_LENGTH] = batch.num_draft_tokens
        drafts = self._drafts[batch.num_reqs]
        if batch.erases:
            with torch.inference_mode():
                drafts.fill_(-1)
        return drafts

    def _max_seq_len(self, batch: DraftBatch) -> int:
        return draft_max_seq_len(
            batch.seq_lens_cpu_upper_bound, batch.num_reqs, batch.num_draft_tokens, self.config.max_model_len
        )

    # Draft prefill

    def _run_prefill(self, batch: DraftBatch) -> None:
        adapter = self.adapter
        self.queue.put(batch)
        self._fill_inputs(batch.num_reqs)
        num_tokens, num_tokens_padded = adapter.begin_prefill(batch)
        # Where there are phase graphs, all uniform ones are such, and none was for this batch: ask for a mixed one.
        run = adapter.dispatch_prefill(batch, num_tokens, num_tokens_padded, uniform=not self.phase_graphs)
        self._leave_states(batch, run, num_tokens_padded)
        attn_metadata, slot_mappings = self._prefill_metadata(batch, run)
        adapter.before_forward(num_tokens)
        adapter.hooks.on_prefill_begin(batch.num_reqs)
        if run.full:
            # The target's builders have already refreshed the buffers that the graph reads (#40410).
            run.replay()
        else:
            drafts = batch.num_draft_tokens > 0
            inputs = _inputs(batch, run, attn_metadata, slot_mappings)._replace(mm_inputs=batch.mm_inputs)
            if self.leaves_graph(inputs.mode, inputs.num_tokens, batch.num_reqs if drafts else 0):
                inputs = without_graph(inputs)
            self.prefill(inputs, drafts=drafts)
        adapter.hooks.on_prefill_end(batch.num_reqs)

    def _fill_inputs(self, num_reqs: int) -> None:
        prepare_prefill_inputs(self.buffers, self.queue, num_reqs, sample_offset=self.config.sample_offset)

    def _leave_states(self, batch: DraftBatch, run: GraphRun, num_tokens: int) -> None:
        """Copy the target's hidden states to where the draft prefill reads them."""
        if run.full and self.target_outputs is not None:
            for output, given in zip(self.target_outputs.used, batch.target_states.used, strict=True):
                if output.data_ptr() != given.data_ptr():  # the target ran without a FULL graph
                    with torch.inference_mode():
                        output[:num_tokens].copy_(given[:num_tokens])
        else:
            self._take_states(batch.target_states, num_tokens)

    @torch.inference_mode()
    def _take_states(self, states: TargetStates, num_tokens: int) -> None:
        self.buffers.hidden_states[:num_tokens].copy_(self.adapter.combine(states, num_tokens))

    def _prefill_metadata(self, batch: DraftBatch, run: GraphRun) -> tuple[Any, Any]:
        """Return the attention metadata and slot mappings that the target built for this batch (#40410)."""
        return batch.attn_metadata, batch.slot_mappings

    def prefill(self, inputs: ForwardInputs, *, drafts: bool = True, slot_table: SlotTable | None = None) -> None:
        """Run a draft prefill: forward pass over the target's batch, first draft token, inputs of the first decode.

        A FULL graph contains all of it.  A batch that drafts nothing runs only to write its keys and values.  With
        ``slot_table`` the slots of the first decode are written too.
        """
        buffers, config, num_reqs = self.buffers, self.config, inputs.num_reqs
        with self._reading(inputs, drafts=drafts):
            for_head, for_next_step = self.adapter.run_draft_model(inputs)
        if not drafts:
            return
        prepare_decode_inputs(
            buffers,
            self.sample(for_head.index_select(0, buffers.last_token_indices[:num_reqs])),
            for_next_step,
            num_reqs,
            config.max_model_len,
            slot_table,
            sample_offset=config.sample_offset,
        )
        if self.lookup is not None:
            look_up_drafts(buffers, self.lookup, num_reqs)
            if self.lookup.draft_logits is not None:
                store_found_logits(buffers, self.lookup, num_reqs, steps_ago=1)

    def _reading(self, inputs: ForwardInputs, *, drafts: bool) -> AbstractContextManager[None]:
        """Context of a draft prefill, after which at most the hidden state of each request's last token is read."""
        # A PIECEWISE graph serves a number of tokens, of however many requests.
        if not self.weights_of_read_rows or inputs.mode.name == "PIECEWISE":
            return nullcontext()
        if not drafts:
            return self.rows_read.only(0)
        if inputs.num_reqs > 1 and self._unread(inputs.num_tokens, inputs.num_reqs) < _WORTH_PICKING:
            return nullcontext()
        return self.rows_read.only(inputs.num_reqs)

    def leaves_graph(self, mode: GraphMode, num_tokens: int, rows_read: int) -> bool:
        """Whether a draft prefill of which so many rows are read runs without its graph, which multiplies all rows."""
        return mode.name == "PIECEWISE" and self._unread(num_tokens, rows_read) > _WORTH_LAUNCHING

    def _unread(self, num_tokens: int, rows_read: int) -> int:
        """Multiplications of a draft prefill with rows that are not read, apart from those for keys and values."""
        return (num_tokens - rows_read) * self.weights_of_read_rows

    def phase(
        self,
        inputs: ForwardInputs,
        *,
        num_draft_tokens: int,
        states: TargetStates | None = None,
        fills_inputs: bool = False,
        decodes: ForwardInputs | None = None,
    ) -> None:
        """Run a draft prefill, optionally with its inputs before it and all draft decodes after it.

        Args:
            inputs: of the draft prefill.
            num_draft_tokens: K of the batches that the pass is for.
            states: the target's hidden states to take first.
            fills_inputs: fills the buffers first, from the queue.
            decodes: inputs of the draft decodes that follow.
        """
        if fills_inputs:
            self._fill_inputs(inputs.num_reqs)
        if states is not None:
            self._take_states(states, inputs.num_tokens)
        slot_table = None if decodes is None else self._slots_ahead(decodes)
        self.prefill(inputs, drafts=num_draft_tokens > 0, slot_table=slot_table)
        if decodes is None:
            return
        hooks, num_reqs = self.adapter.hooks, inputs.num_reqs
        hooks.on_prefill_end(num_reqs)
        hooks.on_multi_step_decode_begin(num_reqs)
        self.decode_all(decodes._replace(mode=inputs.mode), num_draft_tokens, slots_known=slot_table is not None)
        hooks.on_multi_step_decode_end(num_reqs)
        hooks.on_prefill_begin(num_reqs)  # the state that the next pass expects

    # Draft decodes

    def _run_decodes(self, batch: DraftBatch) -> int:
        adapter, num_draft_tokens = self.adapter, batch.num_draft_tokens
        adapter.begin_decode(batch)
        run = adapter.dispatch_decode(batch)
        path = counters.FUSED if adapter.decodes_fused(run) else counters.BY_STEPS
        adapter.hooks.on_multi_step_decode_begin(batch.num_reqs)
        if path == counters.FUSED and run.full:
            adapter.prepare_fused_replay(batch, run)
            run.replay()
        elif path == counters.FUSED:
            self.decode_all(self._decode_inputs(batch, run, step=1), num_draft_tokens)
        else:
            for step in range(1, num_draft_tokens):
                inputs = self._decode_inputs(batch, run, step)
                if run.full:
                    run.replay()
                else:
                    self.decode(inputs, num_draft_tokens)
        adapter.hooks.on_multi_step_decode_end(batch.num_reqs)
        return path if run.full else counters.EAGER

    def _decode_inputs(self, batch: DraftBatch, run: GraphRun, step: int) -> ForwardInputs:
        """Build attention metadata and slot mappings of a draft decode (#38311, #41162)."""
        built = (None, None) if batch.skip_attn else self.build_metadata(batch, run, step)
        return _inputs(batch, run, *built)

    def decode_all(self, inputs: ForwardInputs, num_draft_tokens: int, *, slots_known: bool = False) -> None:
        """Run all draft decodes, refreshing the metadata on the device before each; one graph contains them (#46849).

        Args:
            inputs: of the first draft decode, its metadata not yet refreshed.
            num_draft_tokens: K of this batch.
            slots_known: the preceding pass has already written the slots of the first decode.
        """
        slot_table = self._slots_ahead(inputs)
        steps = range(1, num_draft_tokens)
        if self.warms_up and not torch.cuda.is_current_stream_capturing():
            steps = steps[:2]  # the other steps launch the same kernels as the second
        for step in steps:
            if inputs.attn_metadata is not None:
                known = slot_table is not None and (step > 1 or slots_known)
                inputs = self._refresh_metadata(inputs, step, slots_known=known)
            self.decode(inputs, num_draft_tokens, slot_table)

    def _slots_ahead(self, inputs: ForwardInputs) -> SlotTable | None:
        """Return where each pass writes the next draft decode's slots; None if slots are mapped at every step."""
        return self.slot_table if inputs.attn_metadata is not None else None

    def _refresh_metadata(self, inputs: ForwardInputs, step: int, *, slots_known: bool) -> ForwardInputs:
        """Update the previous step's attention metadata and slot mappings with device work only."""
        if not slots_known:
            self.adapter.map_decode_slots(inputs.num_reqs, inputs.num_tokens)
        return inputs._replace(attn_metadata=self.adapter.refresh_decode_metadata(inputs))

    def decode(self, inputs: ForwardInputs, num_draft_tokens: int, slot_table: SlotTable | None = None) -> None:
        """Run one draft decode and prepare the inputs of the next.

        The step number is data on the device, so one graph serves every step.  With ``slot_table`` the slots of the
        next decode are written too.
        """
        num_reqs = inputs.num_reqs
        self.adapter.before_forward(num_reqs)
        for_head, for_next_step = self.adapter.run_draft_model(inputs)
        drafted = self.sample(for_head[:num_reqs])
        if self.lookup is not None and self.lookup.draft_logits is not None:
            store_found_logits(self.buffers, self.lookup, num_reqs)
        update_after_step(
            self.buffers,
            drafted,
            for_next_step,
            num_reqs,
            num_draft_tokens,
            self.config.max_model_len,
            slot_table,
            self.lookup,
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


def _inputs(batch: DraftBatch, run: GraphRun, attn_metadata: Any, slot_mappings: Any) -> ForwardInputs:
    descriptor = run.descriptor
    return ForwardInputs(
        batch.num_reqs,
        descriptor.num_tokens,
        attn_metadata,
        slot_mappings,
        run.num_tokens_across_dp,
        descriptor.cg_mode,
    )
