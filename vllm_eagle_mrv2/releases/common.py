"""What the speculators of all releases share: the draft loop joined to a stock speculator.

`StockAdapter` is mixed in before a stock speculator class.  It imports none of vLLM's private modules; it uses
attributes of the stock class, which are in the releases' lists of needed symbols.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, cast

import torch

from vllm_eagle_mrv2.batch.buffers import DraftBatch, DraftBuffers, SlotTable, TargetStates
from vllm_eagle_mrv2.config.behaviours import Behaviour
from vllm_eagle_mrv2.config.method import METHOD, settings_of
from vllm_eagle_mrv2.draft_model import attention, compile_ahead, linear
from vllm_eagle_mrv2.draft_model.attention import DecodeMetadata
from vllm_eagle_mrv2.draft_model.head import DraftHead
from vllm_eagle_mrv2.draft_model.last_row import only_row
from vllm_eagle_mrv2.draft_model.logits_processor import DraftLogits
from vllm_eagle_mrv2.draft_model.trimmed_head import TrimmedHead
from vllm_eagle_mrv2.drafting.defects import loop_class
from vllm_eagle_mrv2.drafting.graphs import DraftGraphs
from vllm_eagle_mrv2.drafting.loop import DraftConfig, GraphRun, ReleaseAdapter
from vllm_eagle_mrv2.errors import EagleMRV2Error
from vllm_eagle_mrv2.kernels.few_rows_product import few_rows_keys
from vllm_eagle_mrv2.kernels.filter_logits import filter_logits
from vllm_eagle_mrv2.releases import draft_loading
from vllm_eagle_mrv2.releases.spec import Release
from vllm_eagle_mrv2.releases.unused_drafts import drafts_unused
from vllm_eagle_mrv2.telemetry.counters import DraftCounter
from vllm_eagle_mrv2.telemetry.start_line import Facts


class StockAdapter(DraftGraphs):
    """The part of the `ReleaseAdapter` of a stock speculator that all releases share."""

    release: Release
    sample_offset: int
    """Which position the release's sampler takes: the last token's (0) or the one after it (1)."""
    greedy_is_argmax = True
    """Whether the release drafts by argmax where no logits are stored."""
    slot_table: SlotTable | None = None
    saved_buffers: Mapping[str, torch.Tensor] = {}  # the draft's, while the engine sleeps
    _draft_logits: DraftLogits | None = None
    _trimmed: TrimmedHead | None = None
    _attends_by_ours = False  # every attention layer of the draft uses SingleTokenAttention in draft decodes
    _one_row_is_enough = False  # a draft prefill of one request computes only the row that is read
    _skips_unused = False  # no drafting where no request of the batch can use drafts
    _products = linear.Installed()
    _announced = False

    # Attributes and methods of the stock speculator.
    method: str
    model_state: Any
    kv_cache_config: Any
    block_tables: Any
    req_states: Any = None  # the model runner's
    sampling_states: Any = None  # the target sampler's
    temperature: torch.Tensor
    seeds: torch.Tensor
    draft_logits: torch.Tensor | None
    current_draft_step: torch.Tensor
    draft_max_seq_len: int
    dp_rank: int
    speculative_config: Any
    max_model_len: int
    _run_model: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    _prepare_eplb_forward: Callable[[int], None]

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        settings = settings_of(vllm_config.speculative_config)
        if settings is None:
            raise EagleMRV2Error(
                f"{type(self).__name__} was made for a configuration without method=eagle_mrv2; "
                "ask for it in the speculative configuration."
            )
        self.settings = settings
        self.options = settings.options
        if not linear.named_in_caches(vllm_config):
            self.options = self.options.without(Behaviour.ROW_PRODUCTS)  # reported by a warning
        super().__init__(vllm_config, device)
        stock: Any = self
        self.filters_drafts = self.draft_logits is not None and self.options.enabled(Behaviour.DRAFT_TOP_K_TOP_P)
        # Ranks with different numbers of draft tokens would wait for each other in the draft's collectives.
        self._skips_unused = self.dp_size == 1 and self.options.enabled(Behaviour.SKIP_UNUSED_DRAFTS)
        draft_step = torch.zeros(self.max_num_reqs, dtype=torch.int64, device=device)
        self.current_draft_step = draft_step[0]  # a scalar, as the release's sampler expects
        self.loop = loop_class(self.options)(
            cast(ReleaseAdapter, self),  # a release's subclass completes it
            DraftConfig(
                num_draft_tokens=self.num_speculative_steps,
                max_model_len=self.max_model_len,
                sample_offset=self.sample_offset,
                filters=self.filters_drafts,
            ),
            DraftBuffers(
                input_ids=self.input_buffers.input_ids,
                positions=self.input_buffers.positions,
                query_start_loc=self.input_buffers.query_start_loc,
                seq_lens=self.input_buffers.seq_lens,
                idx_mapping=stock.idx_mapping,
                temperature=self.temperature,
                seeds=self.seeds,
                hidden_states=stock.hidden_states,
                last_token_indices=stock.last_token_indices,
                sample_positions=torch.zeros(self.max_num_reqs, dtype=torch.int64, device=device),
                draft_tokens=stock.draft_tokens,
                draft_step=draft_step,
                num_rejected=torch.zeros(self.max_num_reqs, dtype=torch.int32, device=device),
                live_reqs=torch.zeros((), dtype=torch.int32, device=device),
                top_k=torch.full((self.max_num_reqs,), 2**31 - 1, dtype=torch.int32, device=device),
                top_p=torch.ones(self.max_num_reqs, dtype=torch.float32, device=device),
            ),
        )

        if self._leads:
            self.loop.counter = DraftCounter.of_rank(self.vllm_config.parallel_config.data_parallel_index)

    def load_model(self, target_model: Any) -> None:
        """Load the draft, replace its attention and linear kernels, and trim its head if ``draft_vocab`` is set."""
        with draft_loading.repaired(self, target_model):
            super().load_model(target_model)  # type: ignore[misc]
        local = self.greedy_is_argmax and self.options.enabled(Behaviour.LOCAL_ARGMAX)
        self._draft_logits = DraftLogits.of(self.model, target_model, local=local)
        offsets = DraftHead(self.model).offsets
        greedy = self.draft_logits is None and self.options.enabled(Behaviour.TWO_STAGE_ARGMAX)
        if self.options.enabled(Behaviour.SINGLE_TOKEN_ATTENTION):
            block_size = self.vllm_config.cache_config.block_size or 16
            # A rank that runs part of the tokens has its own positions.
            positions = None if self._prefills_in_parts else self.loop.buffers.positions
            self._attends_by_ours = attention.install(
                self.model, target_model, block_size, positions, self.max_model_len
            )
        if self.options.enabled(Behaviour.ROW_PRODUCTS):
            few = self._draft_few_rows if greedy and offsets is None else None
            self._products = linear.install(self.model, target_model, self._draft_logits, few)
            self._one_row_is_enough = self._products.one_row and not self._prefills_in_parts
        head = getattr(getattr(self.model, "lm_head", None), "weight", None)
        if greedy and head is not None and self.settings.kept_tokens is None:
            limits = (self.loop.config.max_model_len, self.sample_offset)
            drafts = self._drafts_ahead(head.data, offsets)
            launches = functools.partial(compile_ahead.between_passes, self.loop.buffers, drafts, *limits)
            compile_ahead.submit(self.device, launches)
        if self.settings.kept_tokens is not None:
            self._trimmed = TrimmedHead.of(self.model, self._draft_logits, self.settings.kept_tokens, self.device)

    def _drafts_ahead(self, head: torch.Tensor, offsets: torch.Tensor | None) -> Callable[[], list[torch.Tensor]]:
        """Return a call that launches drafting from a head [N, H] without stored logits, for compiling ahead."""
        return functools.partial(compile_ahead.argmax, head, offsets)

    def _draft_few_rows(self, hidden_states: torch.Tensor, weight: torch.Tensor) -> object:
        """Fused head kernel for at most 32 rows, where no logits are stored."""
        return few_rows_keys(hidden_states, weight)

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        """Create the draft's metadata builders; vLLM may call this more than once."""
        self._take_limit()
        super().set_attn(*args, **kwargs)
        if self._attends_by_ours:
            for builder in self._builders():
                if hasattr(builder, "aot_schedule"):
                    builder.aot_schedule = False  # the schedule would not be read
        self.slot_table = _slot_table(self.block_tables)
        if self.filters_drafts:
            self._filter_draft_logits()

    def _take_limit(self) -> None:
        """Read vLLM's ``max_model_len``, which may have been fitted to the memory since ``__init__`` (#57034)."""
        limit = self.vllm_config.model_config.max_model_len
        if "max_model_len" in vars(self):  # a property from 0.33 on
            self.max_model_len = limit
        self.loop.config = dataclasses.replace(self.loop.config, max_model_len=limit)

    def _builders(self) -> list[Any]:
        return [group.get_metadata_builder(0) for group in chain.from_iterable(self.attn_groups)]

    def _decodes_without_builders(self) -> bool:
        """Whether every layer of the draft uses `SingleTokenAttention` over the blocks in the block tables."""
        return (
            self._attends_by_ours
            and self.block_tables.cp_size == 1
            and not self._prefills_in_parts
            # From 0.32 on a backend may have smaller blocks than the block tables.
            and not any(getattr(group, "kernel_block_size", None) for group in chain.from_iterable(self.attn_groups))
            # On newer GPUs FlashInfer chooses kernels that need no plan; they are kept.
            and not any(getattr(builder, "use_trtllm_decode_attention", False) for builder in self._builders())
        )

    @property
    def _prefills_in_parts(self) -> bool:
        """Whether ranks split a prefill's tokens (prefill context parallelism)."""
        return bool(getattr(self.vllm_config.parallel_config, "prefill_context_parallel_size", 1) > 1)

    def decode_metadata(self, num_reqs: int) -> dict[str, DecodeMetadata]:
        """Return attention metadata of draft decodes by layer; lengths and blocks are views of the buffers."""
        seq_lens = self.loop.buffers.seq_lens[:num_reqs]
        return {
            layer: DecodeMetadata(num_reqs, seq_lens, table[:num_reqs])
            for groups, table in zip(self.attn_groups, self.block_tables.input_block_tables, strict=True)
            for group in groups
            for layer in group.layer_names
        }

    def renew_copied_weights(self) -> None:
        """Copy the trimmed head again; called after weights were replaced in place."""
        if self._trimmed is not None:
            self._trimmed.renew()

    def _propose(
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
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
        dp_sync: Any = None,
        num_draft_tokens: int | None = None,
    ) -> torch.Tensor:
        """Draft for the model runner's batch with the arguments of ``propose``; returns [num_reqs, K] int64."""
        if num_draft_tokens is None:
            num_draft_tokens = self.num_speculative_steps
        if (
            self._skips_unused
            and not dummy_run
            and not input_batch.num_draft_tokens  # none to verify, as for prefill chunks and first tokens
            and drafts_unused(input_batch, self.req_states)
        ):
            num_draft_tokens = 0
        # In the profile run there are no sampling states yet.
        filters = self.sampling_states if self.filters_drafts else None
        return self.loop.propose(
            DraftBatch(
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
            )
        )

    def announce(self) -> None:
        """Log what is active and what is slower than it could be, once per engine."""
        if self._announced or not self._leads or self.vllm_config.parallel_config.data_parallel_rank_local:
            return
        self._announced = True
        from vllm.logger import init_logger

        logger, facts = init_logger("vllm.eagle_mrv2"), Facts.of(self)
        logger.info(facts.line())
        for warning in facts.warnings():
            logger.warning(warning)
        if not self.loop.counter.shared:
            logger.info("%s shows no counters in /metrics, as no front-end on this machine started the worker", METHOD)

    @property
    def _leads(self) -> bool:
        """Whether this is the first of the ranks that draft for the same batch."""
        parallel = self.vllm_config.parallel_config
        prefill_ranks = getattr(parallel, "prefill_context_parallel_size", 1)
        return bool(parallel.rank % (parallel.tensor_parallel_size * prefill_ranks) == 0)

    # ReleaseAdapter methods that all releases share

    def decodes_fused(self, run: GraphRun) -> bool:
        return self.refreshes_in_graph

    def combine(self, states: TargetStates) -> torch.Tensor:
        if not states.aux:
            return states.last
        draft: Any = self.model
        combined: torch.Tensor = draft.combine_hidden_states(torch.cat(list(states.aux), dim=-1))
        return combined

    def begin_prefill(self, batch: DraftBatch) -> tuple[int, int]:
        return batch.num_tokens, batch.num_tokens_padded

    def begin_decode(self, batch: DraftBatch) -> None:
        """Do nothing by default."""

    def before_forward(self, num_tokens: int) -> None:
        self._prepare_eplb_forward(num_tokens)

    def while_prefilling(self, num_reqs: int, mode: Any) -> AbstractContextManager[None]:
        # A PIECEWISE graph serves a number of tokens, of however many requests.
        if num_reqs != 1 or mode.name == "PIECEWISE" or not self._one_row_is_enough:
            return nullcontext()
        return only_row(self.loop.buffers.last_token_indices[:1])

    def run_draft_model(
        self,
        num_tokens: int,
        attn_metadata: Any,
        slot_mappings: Any,
        num_tokens_across_dp: Any,
        mode: Any,
        mm_inputs: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._run_model(num_tokens, attn_metadata, slot_mappings, num_tokens_across_dp, mode, mm_inputs)

    def sample(self, hidden_states: torch.Tensor, positions: torch.Tensor, idx_mapping: torch.Tensor) -> torch.Tensor:
        if self.draft_logits is None and self.greedy_is_argmax and self._head is not None:
            return self._head.keys(hidden_states)
        stock: Any = self
        sampled: torch.Tensor = stock.sample_draft(
            hidden_states,
            positions,
            idx_mapping,
            self.temperature,
            self.seeds,
            self.current_draft_step,
            self.draft_logits,
        )
        return sampled

    @functools.cached_property
    def _head(self) -> DraftHead | None:
        """The `DraftHead` that drafts from the head's own rows; None where something else reads the logits too."""
        estimator = getattr(self, "acceptance_estimator", None)  # of adaptive verification, from 0.30 on
        if estimator is not None or not self.options.enabled(Behaviour.TWO_STAGE_ARGMAX):
            return None
        return DraftHead(self.model, self._draft_logits, self._trimmed)

    def _filter_draft_logits(self) -> None:
        """Apply the requests' top-k and top-p to the draft's logits, whichever sampler reads them."""
        draft: Any = self.model
        if "compute_logits" in vars(draft):
            return
        compute_logits, buffers = draft.compute_logits, self.loop.buffers

        def filtered(*args: Any, **kwargs: Any) -> torch.Tensor:
            logits: torch.Tensor = compute_logits(*args, **kwargs)
            rows = buffers.idx_mapping[: logits.shape[0]]
            filter_logits(logits, rows, buffers.temperature, buffers.top_k, buffers.top_p)
            return logits

        draft.compute_logits = filtered

    def replay_prefill(self, run: GraphRun) -> None:
        self.prefill_cudagraph_manager.run_fullgraph(run.descriptor)

    def replay_decode(self, run: GraphRun) -> None:
        self.decode_cudagraph_manager.run_fullgraph(run.descriptor)

    def prepare_fused_replay(self, batch: DraftBatch, run: GraphRun) -> None:
        """Do nothing by default."""

    def map_decode_slots(self, num_reqs: int, num_tokens: int) -> None:
        raise NotImplementedError("this release has no refresh that a graph can hold")

    def refresh_decode_metadata(self, num_reqs: int, num_tokens: int, attn_metadata: Any) -> Any:
        if self.needs_no_builder:
            return self.decode_metadata(num_reqs)
        return self.refresh_by_builders(num_reqs, num_tokens, attn_metadata)

    def build_decode_metadata(self, batch: DraftBatch, run: GraphRun, step: int) -> tuple[Any, Any]:
        slot_mappings = self.decode_slot_mappings(batch, run.num_tokens)
        if self.needs_no_builder:
            attn_metadata: Any = self.decode_metadata(run.descriptor.num_reqs or batch.num_reqs)
        else:
            attn_metadata = self.build_by_builders(batch, run, step, slot_mappings)
        return attn_metadata, self.slot_mappings_by_layer(slot_mappings, self.kv_cache_config)

    # Supplied by each release

    @property
    def builders_refresh(self) -> bool:
        """Whether every builder of the draft can refresh its decode metadata on the device."""
        raise NotImplementedError

    slot_mappings_by_layer: Callable[[torch.Tensor, Any], dict[str, torch.Tensor]]

    def decode_slot_mappings(self, batch: DraftBatch, num_tokens: int) -> torch.Tensor:
        """Return [groups, num_tokens] slots for the positions in the buffers."""
        raise NotImplementedError

    def build_by_builders(self, batch: DraftBatch, run: GraphRun, step: int, slot_mappings: torch.Tensor) -> Any:
        """Build attention metadata of a draft decode with the draft's own builders."""
        raise NotImplementedError

    def refresh_by_builders(self, num_reqs: int, num_tokens: int, attn_metadata: Any) -> Any:
        """Refresh the builders' metadata with device work only; returns the metadata to use."""
        raise NotImplementedError("this release has no refresh that a graph can hold")


def _slot_table(tables: Any) -> SlotTable | None:
    """Return the slot table from vLLM's ``BlockTables``; None unless one table determines the slots."""
    if tables.num_kv_cache_groups != 1 or tables.cp_size != 1:
        return None
    # Read from the device tensor, because the releases name the block size attribute differently.
    block_size = int(tables.block_sizes_tensor[0])
    return SlotTable(tables.block_tables[0].gpu, tables.slot_mappings[0], block_size)
