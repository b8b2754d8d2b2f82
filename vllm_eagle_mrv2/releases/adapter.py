"""What the draft needs from a vLLM release, and what all releases share of it.

A `ReleaseAdapter` is constructed with vLLM's speculator, calls what that inherits from stock, and sets what vLLM reads
there.  This module imports none of vLLM's private modules; the attributes of the speculator that it uses are in the
releases' lists of needed symbols.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, ClassVar

import torch

from vllm_eagle_mrv2.batch.buffers import DraftBatch, DraftBuffers, SlotTable, TargetStates
from vllm_eagle_mrv2.config.behaviours import Behaviour
from vllm_eagle_mrv2.config.draft_lengths import lengths_to_choose_from
from vllm_eagle_mrv2.config.families import METHOD, Family
from vllm_eagle_mrv2.config.options import Options
from vllm_eagle_mrv2.draft_length.notes import mark_drafted, planned_drafts
from vllm_eagle_mrv2.draft_model import compile_ahead
from vllm_eagle_mrv2.draft_model.attention import DecodeMetadata
from vllm_eagle_mrv2.draft_model.head import DraftHead
from vllm_eagle_mrv2.draft_model.logits_processor import FewRows
from vllm_eagle_mrv2.drafting.capture import AskedGraphs, CapturedAttentionState, GraphManagers
from vllm_eagle_mrv2.drafting.loop import ForwardInputs, GraphRun
from vllm_eagle_mrv2.drafting.protocols import Descriptor
from vllm_eagle_mrv2.kernels.few_rows_product import few_rows_keys
from vllm_eagle_mrv2.kernels.filter_logits import filter_logits
from vllm_eagle_mrv2.kernels.sample_with_logits import sample_with_logits
from vllm_eagle_mrv2.releases import draft_loading, installed_version
from vllm_eagle_mrv2.releases.schedule import lengths_by_batch_size
from vllm_eagle_mrv2.releases.spec import Release


class PassHooks:
    """Calls around the passes of a phase, for MTP heads that share top-k indices; these do nothing."""

    def on_prefill_begin(self, num_reqs: int) -> None: ...

    def on_prefill_end(self, num_reqs: int) -> None: ...

    def on_multi_step_decode_begin(self, num_reqs: int) -> None: ...

    def on_multi_step_decode_end(self, num_reqs: int) -> None: ...


class ReleaseAdapter:
    """A vLLM release, as the draft loop and its graphs see it.

    Args:
        stock: vLLM's speculator, after its ``__init__``.
        options: the options in force.
        asked: the graph settings before vLLM fitted them to the target.
    """

    release: ClassVar[Release]
    sample_offset: ClassVar[int]
    """Which position the release's sampler takes: the last token's (0) or the one after it (1)."""
    managers: ClassVar[GraphManagers]
    greedy_is_argmax: ClassVar[bool] = True
    """Whether the release drafts by argmax where no logits are stored."""
    samples_apart: ClassVar[bool] = True
    """Whether the release's sampler draws drafts by other random numbers than the target's tokens.

    Below 0.29 it does not, and draws what it drafts later for the same position by the same ones again, which biases
    sampled output.  Below 0.25 it also writes the logits of padded rows into the rows of live requests.
    """
    stores_by_dtype: ClassVar[bool] = False
    """Whether the release's sampler takes logits in the dtype of the stored logits only."""
    looks_up_length: ClassVar[bool] = False
    """Whether the adapter looks up how many tokens to draft; later releases are told by the model runner."""
    run_model_name: ClassVar[str] = "_run_model"
    """Name of the speculator's method that runs the draft model."""
    takes_target_inputs: ClassVar[bool] = False
    """Whether the speculator lacks the target's input buffers and attention groups unless a patch gives it them."""
    rebuilds_before_replay: bool = False
    """Whether the CPU builds metadata before each replay of a graph of all draft decodes."""
    slot_mappings_by_layer: Callable[[torch.Tensor, Any], dict[str, torch.Tensor]]

    @staticmethod
    def stock_class(family: Family) -> Any:
        """Return vLLM's speculator class for a family."""
        raise NotImplementedError

    @staticmethod
    def stored_logits(spec: tuple[torch.dtype, float], options: Options) -> tuple[torch.dtype, float]:
        """Return dtype and fill value of the stored logits, given vLLM's, where the release asks its speculator."""
        return spec

    def __init__(self, stock: Any, options: Options, asked: AskedGraphs) -> None:
        self.stock = stock
        self.options = options
        self.asked = asked
        self.buffers = _buffers_of(stock)
        stock.current_draft_step = self.buffers.draft_step[0]  # a scalar, as the release's sampler expects
        alone = stock.dp_size == 1
        self.filters_drafts = stock.draft_logits is not None and options.enabled(Behaviour.DRAFT_TOP_K_TOP_P)
        # Ranks with different numbers of draft tokens would wait for each other in the draft's collectives.
        self.skips_unused = alone and options.enabled(Behaviour.SKIP_UNUSED_DRAFTS)
        self.schedule: list[int] | None = None
        """Number of draft tokens by number of requests, as the scheduler looks it up; None if it does not."""
        if alone or not self.looks_up_length:
            self.schedule = lengths_by_batch_size(stock.speculative_config, stock.max_num_reqs)
        self.draft_lengths = frozenset(
            (self.schedule or ())[1:]  # batch sizes count from 1
            or lengths_to_choose_from(stock.vllm_config)
            or (stock.num_speculative_steps,)
        )
        """Every number of draft tokens that the scheduler may ask for."""
        self.head: DraftHead | None = None
        """The head that drafts from its own rows; None where something else reads the logits too."""
        self.hooks = PassHooks()
        """What to call around the passes of a phase."""
        self.capturing = False
        self.req_states: Any = None  # the model runner's
        self.sampling_states: Any = None  # the target sampler's
        self.needs_no_builder = False
        """Whether draft decodes need only `decode_metadata`, without a builder or a plan."""
        self.splits_blocks = False
        """Whether a backend of the draft has tables of its own, for blocks smaller than the cache's (from 0.32 on)."""
        self.refreshes_in_graph = False
        """Whether decode metadata can be refreshed inside a graph, for every attention backend of the draft."""

    # Before and after the model is loaded and the KV cache is made

    def loading(self, target_model: Any) -> AbstractContextManager[None]:
        """Context in which vLLM loads the draft, with what later releases mended of it."""
        return draft_loading.repaired(self.stock, target_model)

    def check_caches(self, kv_cache_config: Any) -> None:
        """Refuse KV caches that the draft cannot share with the target; the default takes all."""

    def decode_capture_sizes(self) -> AbstractContextManager[None]:
        """Context in which the builders and the manager of draft decodes read the configured capture sizes."""
        return nullcontext()

    def take_head(self, head: DraftHead | None) -> None:
        """Draft from this head of the loaded model, and finish the logits that the release's sampler stores."""
        self.head = head
        draft = self.stock.model
        if self.stock.draft_logits is None or "compute_logits" in vars(draft):
            return
        compute_logits = draft.compute_logits
        draft.compute_logits = lambda *args, **kwargs: self._finished(compute_logits(*args, **kwargs))

    def _finished(self, logits: torch.Tensor) -> torch.Tensor:
        """Return draft logits [n, C] as they are stored: with the requests' top-k and top-p, in the stored dtype."""
        if self.filters_drafts:
            buffers = self.buffers
            rows = buffers.idx_mapping[: len(logits)]
            filter_logits(logits, rows, buffers.temperature, buffers.top_k, buffers.top_p)
        return logits.to(self.stock.draft_logits.dtype) if self.stores_by_dtype else logits

    def take_attention(self, *, by_ours: bool) -> None:
        """Look at the draft's metadata builders, which vLLM has just made.

        Args:
            by_ours: every attention layer of the draft uses `SingleTokenAttention` in draft decodes.
        """
        if by_ours:
            for builder in self.builders():
                if hasattr(builder, "aot_schedule"):
                    builder.aot_schedule = False  # the schedule would not be read
        groups = chain.from_iterable(self.stock.attn_groups)
        self.splits_blocks = any(getattr(group, "kernel_block_size", None) for group in groups)
        self.needs_no_builder = by_ours and self._tables_hold_the_blocks()
        self.refreshes_in_graph = self.needs_no_builder or self.builders_refresh

    def _tables_hold_the_blocks(self) -> bool:
        """Whether the block tables say where every key and value of the draft is."""
        return (
            self.stock.block_tables.cp_size == 1
            and not self.prefills_in_parts
            and not self.splits_blocks
            # On newer GPUs FlashInfer chooses kernels that need no plan; they are kept.
            and not any(getattr(builder, "use_trtllm_decode_attention", False) for builder in self.builders())
        )

    def builders(self) -> list[Any]:
        """The metadata builders of the draft."""
        return [group.get_metadata_builder(0) for group in chain.from_iterable(self.stock.attn_groups)]

    def supplies(self, behaviour: Behaviour) -> bool:
        """Whether this package supplies a behaviour on the installed release, be it switched on or off."""
        return self.release.supplier(behaviour, installed_version()) == METHOD

    @property
    def builders_refresh(self) -> bool:
        """Whether every builder of the draft can refresh its decode metadata on the device."""
        raise NotImplementedError

    @property
    def prefills_in_parts(self) -> bool:
        """Whether ranks split a prefill's tokens (prefill context parallelism)."""
        return bool(getattr(self.stock.vllm_config.parallel_config, "prefill_context_parallel_size", 1) > 1)

    @property
    def pcp_manager(self) -> Any:
        """vLLM's manager of prefill context parallelism; None without it."""
        return None

    @property
    def decodes_follow_prefill(self) -> bool:
        """Whether the CPU has nothing to do between a draft prefill and the last draft decode."""
        # Data-parallel ranks agree on each graph separately; expert load balancing is told of every forward pass.
        balanced = self.stock.vllm_config.parallel_config.enable_eplb
        alone = self.pcp_manager is None and self.stock.dp_size == 1 and not balanced
        # A backend's own tables are written between the draft prefill and the draft decodes.
        return self.refreshes_in_graph and alone and not self.splits_blocks

    def slot_table(self) -> SlotTable | None:
        """Return the slot table from vLLM's ``BlockTables``; None unless one table determines the slots."""
        tables = self.stock.block_tables
        if tables.num_kv_cache_groups != 1 or tables.cp_size != 1:
            return None
        # From 0.22 to 0.31 the tables hold the attention backend's blocks, which may be smaller than the cache's.
        block_sizes = getattr(tables, "kernel_block_sizes", tables.block_sizes_tensor)
        return SlotTable(tables.block_tables[0].gpu, tables.slot_mappings[0], int(block_sizes[0]))

    def prepare_capture(
        self, manager: Any, descriptor: Descriptor, num_reqs: int, input_buffers: Any, attn_groups: Any
    ) -> CapturedAttentionState:
        """Build the dummy attention inputs of a pass with the given builders and buffers."""
        raise NotImplementedError

    # The batch

    def read(
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
        *,
        num_tokens_across_dp: Any = None,  # not read, as by the stock speculators of 0.20 to 0.28
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
        dp_sync: Any = None,
        num_draft_tokens: int | None = None,
        erases: bool = False,
    ) -> DraftBatch:
        """Return the model runner's batch from the arguments of its call to ``propose``."""
        if self.looks_up_length and not dummy_run:
            num_draft_tokens = planned_drafts(input_batch)
            if self.schedule is not None:
                # The scheduler reads the same entry of the same table for the next step.
                num_draft_tokens = self.schedule[input_batch.num_reqs]
            if num_draft_tokens is not None:
                mark_drafted(input_batch, num_draft_tokens)
        if num_draft_tokens is None:
            num_draft_tokens = self.stock.num_speculative_steps
        if (
            self.skips_unused
            and not dummy_run
            and not input_batch.num_draft_tokens  # none to verify, as for prefill chunks and first tokens
            and drafts_unused(input_batch, self.req_states)
        ):
            num_draft_tokens = 0
        # In the profile run there are no sampling states yet.
        filters = self.sampling_states if self.filters_drafts else None
        return DraftBatch(
            num_reqs=input_batch.num_reqs,
            num_tokens=input_batch.num_tokens,
            num_tokens_padded=input_batch.num_tokens_after_padding,
            num_draft_tokens=num_draft_tokens,
            input_ids=input_batch.input_ids,
            positions=input_batch.positions,
            query_start_loc=input_batch.query_start_loc,
            seq_lens=input_batch.seq_lens,
            seq_lens_cpu_upper_bound=input_batch.seq_lens_cpu_upper_bound,
            idx_mapping=input_batch.idx_mapping,
            target_states=TargetStates(last_hidden_states, aux_hidden_states or ()),
            num_sampled=num_sampled,
            num_rejected=num_rejected,
            last_sampled=last_sampled,
            next_prefill_tokens=next_prefill_tokens,
            temperature=temperature,
            seeds=seeds,
            top_k=None if filters is None else filters.top_k.gpu,
            top_p=None if filters is None else filters.top_p.gpu,
            attn_metadata=attn_metadata,
            slot_mappings=slot_mappings,
            mm_inputs=mm_inputs,
            dp_sync=dp_sync,
            source=input_batch,
            dummy_run=dummy_run,
            skip_attn=dummy_run and skip_attn_for_dummy_run,
            eager=is_profile,
            erases=erases,
        )

    def limit_lengths(self, max_seq_len: int) -> None:
        """Build attention metadata for sequences of at most this length from now on."""
        self.stock.draft_max_seq_len = max_seq_len

    def query_len(self, batch: DraftBatch, num_tokens: int) -> int | None:
        """Return the query length that all requests of a decode batch share; None if there is none."""
        raise NotImplementedError

    # Passes

    def begin_prefill(self, batch: DraftBatch) -> tuple[int, int]:
        """Called once the batch's tokens are in the buffers; returns the tokens to run, without and with padding."""
        return batch.num_tokens, batch.num_tokens_padded

    def begin_decode(self, batch: DraftBatch) -> None:
        """Called before the draft decodes, once the first draft tokens are in the buffers."""

    def dispatch_prefill(
        self, batch: DraftBatch, num_tokens: int, num_tokens_padded: int, *, uniform: bool = True
    ) -> GraphRun:
        """Choose the graph of a draft prefill; data-parallel ranks agree on it.

        Args:
            batch: to draft for.
            num_tokens: to run.
            num_tokens_padded: the same, with padding.
            uniform: whether a graph for requests with the same number of tokens may be taken.
        """
        raise NotImplementedError

    def dispatch_decode(self, batch: DraftBatch) -> GraphRun:
        """Choose the graph of a draft decode of one token per request; data-parallel ranks agree on it."""
        raise NotImplementedError

    def graph_run(self, manager: Any, descriptor: Any, num_tokens_across_dp: Any) -> GraphRun:
        """Return the result of a dispatch."""
        return GraphRun(manager, descriptor, descriptor.cg_mode.name == "FULL", num_tokens_across_dp)

    def of_draft_length(self, run: GraphRun, num_draft_tokens: int) -> GraphRun:
        """Return the run of the draft decodes for so many draft tokens, which is eager where there is no such graph."""
        if not run.full:
            return run
        descriptor = self.stock.decode_cudagraph_manager.of_draft_length(run.descriptor, num_draft_tokens)
        if descriptor is run.descriptor:
            return run
        if descriptor is None:
            eager: Any = run.descriptor
            descriptor = dataclasses.replace(eager, cg_mode=type(eager.cg_mode).NONE)
        return self.graph_run(run.manager, descriptor, run.num_tokens_across_dp)

    def decodes_fused(self, run: GraphRun) -> bool:
        """Whether all draft decodes run in one pass that refreshes their metadata on the device."""
        return self.refreshes_in_graph

    def combine(self, states: TargetStates, num_tokens: int) -> torch.Tensor:
        """Return the hidden states [num_tokens, H] that the draft starts from."""
        if not states.aux:
            return states.last[:num_tokens]
        layers = torch.cat([each[:num_tokens] for each in states.aux], dim=-1)
        combined: torch.Tensor = self.stock.model.combine_hidden_states(layers)
        return combined

    def before_forward(self, num_tokens: int) -> None:
        """Called before each forward pass of the draft with its unpadded number of tokens (expert load balancing)."""
        self.stock._prepare_eplb_forward(num_tokens)

    def run_draft_model(self, inputs: ForwardInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one forward pass over the first rows of the buffers.

        Returns:
            hidden states for the head and hidden states for the next step, both [num_tokens, H]; often the same.
        """
        run_model = getattr(self.stock, self.run_model_name)
        hidden: tuple[torch.Tensor, torch.Tensor] = run_model(
            inputs.num_tokens,
            inputs.attn_metadata,
            inputs.slot_mappings,
            inputs.num_tokens_across_dp,
            inputs.mode,
            inputs.mm_inputs,
        )
        return hidden

    def sample(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Draft from hidden states [n, H] for step ``draft_step``, and store the logits in the row of each request.

        A head with a vocabulary of its own has a fraction of the target's columns to filter and to draw from.

        Returns:
            drafts for n rows, in a form of `how_drafted`.
        """
        num_reqs, buffers, stock = len(hidden_states), self.buffers, self.stock
        offsets = None if self.head is None else self.head.offsets
        if self.head is not None and offsets is not None and getattr(stock, "draft_watermarker", None) is None:
            logits = self._finished(self.head.logits(hidden_states))
        elif self.samples_apart:
            return self._sample_without_head(hidden_states, stock.draft_logits)
        else:
            logits, offsets = stock.model.compute_logits(hidden_states), None
        return sample_with_logits(
            logits,
            buffers.idx_mapping[:num_reqs],
            buffers.temperature,
            buffers.seeds,
            buffers.sample_positions[:num_reqs],
            stock.current_draft_step,
            stock.draft_logits,
            salted=True,
            after_temperature=not self.release.logits_of_any_dtype,
            fp64=stock.use_fp64_gumbel,
            offsets=offsets,
        )

    def sample_unstored(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Draft from hidden states [n, H] without storing logits, greedily on every release but 0.20."""
        if self.head is not None:
            return self.head.keys(hidden_states)
        return self._sample_without_head(hidden_states, None)

    def _sample_without_head(self, hidden_states: torch.Tensor, draft_logits: torch.Tensor | None) -> torch.Tensor:
        num_reqs, buffers, stock = len(hidden_states), self.buffers, self.stock
        sampled: torch.Tensor = stock.sample_draft(
            hidden_states,
            buffers.sample_positions[:num_reqs],
            buffers.idx_mapping[:num_reqs],
            buffers.temperature,
            self.noise_seeds(),
            stock.current_draft_step,
            draft_logits,
        )
        return sampled

    def noise_seeds(self) -> torch.Tensor:
        """Return [R] int64, by which the release's sampler draws its random numbers in this draft step."""
        return self.buffers.seeds

    # Kernels that are compiled ahead

    @property
    def few_rows(self) -> FewRows:
        """Fused head kernel for at most 32 rows, where no logits are stored; does not keep the engine alive."""
        return few_rows_keys

    def drafts_ahead(self, head: torch.Tensor, offsets: torch.Tensor | None) -> Callable[[], list[torch.Tensor]]:
        """Return a call that launches drafting from a head [N, H] without stored logits, for compiling ahead."""
        return functools.partial(compile_ahead.argmax, head, offsets)

    # Metadata of draft decodes

    def decode_metadata(self, num_reqs: int) -> Mapping[str, DecodeMetadata]:
        """Return attention metadata of draft decodes by layer, where `needs_no_builder` holds.

        Lengths and blocks are views of the buffers.
        """
        seq_lens = self.buffers.seq_lens[:num_reqs]
        return {
            layer: DecodeMetadata(num_reqs, seq_lens, table[:num_reqs])
            for groups, table in zip(self.stock.attn_groups, self.stock.block_tables.input_block_tables, strict=True)
            for group in groups
            for layer in group.layer_names
        }

    def build_decode_metadata(self, batch: DraftBatch, run: GraphRun, step: int) -> tuple[Any, Any]:
        """Build attention metadata and slot mappings for the positions and lengths in the buffers."""
        slot_mappings = self.map_decode_slots(batch.num_reqs, run.descriptor.num_tokens, idle=batch.dummy_run)
        if self.needs_no_builder:
            attn_metadata: Any = self.decode_metadata(run.descriptor.num_reqs or batch.num_reqs)
        else:
            attn_metadata = self.build_by_builders(batch, run, step)
        return attn_metadata, self.slot_mappings_by_layer(slot_mappings, self.stock.kv_cache_config)

    def refresh_decode_metadata(self, inputs: ForwardInputs) -> Any:
        """Update the metadata with device work only; returns the metadata to use from then on."""
        if self.needs_no_builder:
            return self.decode_metadata(inputs.num_reqs)
        return self.refresh_by_builders(inputs)

    def prepare_fused_replay(self, batch: DraftBatch, run: GraphRun) -> None:
        """Called before the replay of a graph that contains all draft decodes."""

    def map_decode_slots(self, num_reqs: int, num_tokens: int, *, idle: bool = False) -> torch.Tensor:
        """Write the slots for the positions in the buffers with device work only, -1 for padding.

        Args:
            num_reqs: live requests.
            num_tokens: the same, with padding.
            idle: the rows map to no request, as in a dummy run.

        Returns:
            [groups, num_tokens] int64.
        """
        buffers = self.buffers
        slots: torch.Tensor = self.stock.block_tables.compute_slot_mappings(
            # Padded rows have no tokens, so their idx_mapping of -1 is not looked up.
            buffers.idx_mapping[:num_reqs],
            buffers.query_start_loc[: num_reqs + 1],
            buffers.positions[:num_reqs],
            num_tokens,
        )
        return slots

    def build_by_builders(self, batch: DraftBatch, run: GraphRun, step: int) -> Any:
        """Build attention metadata of a draft decode with the draft's own builders."""
        raise NotImplementedError

    def refresh_by_builders(self, inputs: ForwardInputs) -> Any:
        """Refresh the builders' metadata with device work only; returns the metadata to use."""
        raise NotImplementedError

    def rebuild_prefill_metadata(self, batch: DraftBatch, run: GraphRun) -> tuple[Any, Any]:
        """Build attention metadata and slot mappings of a draft prefill with the draft's own builders."""
        raise NotImplementedError


def _buffers_of(stock: Any) -> DraftBuffers:
    """The buffers of vLLM's speculator, and those that it lacks."""
    device, max_num_reqs, inputs = stock.device, stock.max_num_reqs, stock.input_buffers
    return DraftBuffers(
        input_ids=inputs.input_ids,
        positions=inputs.positions,
        query_start_loc=inputs.query_start_loc,
        seq_lens=inputs.seq_lens,
        idx_mapping=stock.idx_mapping,
        temperature=stock.temperature,
        seeds=stock.seeds,
        hidden_states=stock.hidden_states,
        last_token_indices=stock.last_token_indices,
        sample_positions=torch.zeros(max_num_reqs, dtype=torch.int64, device=device),
        draft_tokens=stock.draft_tokens,
        draft_step=torch.zeros(max_num_reqs, dtype=torch.int64, device=device),
        num_rejected=torch.zeros(max_num_reqs, dtype=torch.int32, device=device),
        live_reqs=torch.zeros((), dtype=torch.int32, device=device),
        top_k=torch.full((max_num_reqs,), 2**31 - 1, dtype=torch.int32, device=device),
        top_p=torch.ones(max_num_reqs, dtype=torch.float32, device=device),
    )


def longest_query(batch: DraftBatch) -> int:
    """Return the longest query of a batch, in tokens; a single request skips the slow NumPy reduction."""
    return batch.num_tokens if batch.num_reqs == 1 else int(batch.source.num_scheduled_tokens.max())


def drafts_unused(input_batch: Any, req_states: Any) -> bool:
    """Whether the drafts of a batch that verifies no drafts are certain to go unused.

    The scheduler drops the drafts of every prefill chunk but the last.  The last chunk yields a token, and the request
    ends if that token reaches ``max_tokens``, which some releases' runners do not know of sessions.  From 0.33 on the
    scheduler tells the runner (#48244); the runner's own request states allow it on every release.
    """
    live = input_batch.num_reqs
    rows = input_batch.idx_mapping_np[:live]
    prefill_lens = req_states.prefill_len.np[rows]
    chunk = input_batch.seq_lens_cpu_upper_bound[:live].numpy() < prefill_lens
    ends = prefill_lens + 1 >= req_states.max_seq_len[rows]
    if hasattr(req_states, "sessions"):
        ends &= ~req_states.sessions[rows]
    return bool((chunk | ends).all())
