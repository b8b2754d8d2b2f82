"""The speculator that vLLM holds, and the drafter behind it.

vLLM calls its speculator; the speculator hands each call to its `Drafter`, which owns the draft loop and the draft's
graphs; these use vLLM through a `ReleaseAdapter`.  Nothing calls back into its owner.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from vllm_eagle_mrv2.batch.buffers import Lookup
from vllm_eagle_mrv2.config.behaviours import Behaviour
from vllm_eagle_mrv2.config.families import METHOD, Family
from vllm_eagle_mrv2.config.method import Settings, settings_of
from vllm_eagle_mrv2.draft_model import attention, compile_ahead, linear
from vllm_eagle_mrv2.draft_model.head import DraftHead
from vllm_eagle_mrv2.draft_model.logits_processor import DraftLogits
from vllm_eagle_mrv2.draft_model.trimmed_head import TrimmedHead
from vllm_eagle_mrv2.drafting.capture import AskedGraphs
from vllm_eagle_mrv2.drafting.defects import loop_class
from vllm_eagle_mrv2.drafting.graphs import DraftGraphs
from vllm_eagle_mrv2.drafting.loop import LoopConfig
from vllm_eagle_mrv2.errors import EagleMRV2Error
from vllm_eagle_mrv2.telemetry.counters import DraftCounter
from vllm_eagle_mrv2.telemetry.start_line import Facts

if TYPE_CHECKING:
    from vllm_eagle_mrv2.releases.adapter import ReleaseAdapter


def make_speculator_class(adapter_class: type[ReleaseAdapter], family: Family) -> type:
    """Return a subclass of vLLM's speculator for a family that drafts with this package."""
    stock_class: Any = adapter_class.stock_class(family)

    class EagleMRV2Speculator(stock_class):  # type: ignore[misc]
        """vLLM's speculator, which keeps everything but drafting, over a `Drafter`."""

        def __init__(self, vllm_config: Any, device: torch.device) -> None:
            settings = settings_of(vllm_config.speculative_config)
            if settings is None:
                raise EagleMRV2Error(
                    f"{type(self).__name__} was made for a configuration without method={METHOD}; "
                    "ask for it in the speculative configuration."
                )
            asked = AskedGraphs.of(vllm_config.compilation_config)
            super().__init__(vllm_config, device)
            self.drafter = Drafter(self, adapter_class, settings, asked)

        def draft_logits_spec(self, vllm_config: Any) -> tuple[torch.dtype, float]:
            settings: Any = settings_of(vllm_config.speculative_config)
            return adapter_class.stored_logits(super().draft_logits_spec(vllm_config), settings.options)

        def load_model(self, target_model: Any) -> None:
            with self.drafter.loading(target_model):
                super().load_model(target_model)

        def set_attn(self, model_state: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
            with self.drafter.taking_attention(kv_cache_config):
                super().set_attn(model_state, kv_cache_config, *args, **kwargs)

        def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
            self.drafter.graphs.make_managers(cudagraph_mode)

        def capture(self, attn_states: Any = None) -> None:
            # The target's attention states, which vLLM 0.22 to 0.25 pass, belong to another pass.
            self.drafter.graphs.capture()

        capture_model = capture  # its name in vLLM 0.20

        def propose(self, *batch: Any, **how: Any) -> torch.Tensor:
            """Return draft tokens [num_reqs, K] int64, always K columns wide."""
            return self.drafter.loop.propose(self.drafter.adapter.read(*batch, **how))

    EagleMRV2Speculator.__qualname__ = EagleMRV2Speculator.__name__
    return EagleMRV2Speculator


def drafter_of(speculator: object) -> Drafter | None:
    """The drafter of this package's speculator; None for any other."""
    drafter = getattr(speculator, "drafter", None)
    return drafter if isinstance(drafter, Drafter) else None


class Drafter:
    """What this package adds to one of vLLM's speculators, for the life of an engine.

    Args:
        stock: vLLM's speculator, after its ``__init__``.
        adapter_class: of the installed release.
        settings: what the user asked for.
        asked: the graph settings before vLLM fitted them to the target.
    """

    def __init__(self, stock: Any, adapter_class: type[ReleaseAdapter], settings: Settings, asked: AskedGraphs) -> None:
        self.stock = stock
        self.settings = settings
        self.options = settings.options
        self.named_in_caches = linear.named_in_caches(stock.vllm_config)
        if not self.named_in_caches:
            self.options = self.options.without(Behaviour.ROW_PRODUCTS)  # reported by a warning
        self.adapter = adapter_class(stock, self.options, asked)
        self.loop = loop_class(self.options)(
            self.adapter,
            LoopConfig(
                max_model_len=stock.max_model_len,
                sample_offset=self.adapter.sample_offset,
                filters=self.adapter.filters_drafts,
            ),
            self.adapter.buffers,
        )
        self.graphs = DraftGraphs(self.adapter, self.loop, eager=bool(settings.enforce_eager))
        if self._leads:
            self.loop.counter = DraftCounter.of_rank(stock.vllm_config.parallel_config.data_parallel_index)
            self.loop.counter.clear()  # what an earlier engine of this front-end left
        self.logits: DraftLogits | None = None
        self.trimmed: TrimmedHead | None = None
        self.products = linear.Installed()
        self.attends_by_ours = False
        """Whether every attention layer of the draft uses `SingleTokenAttention` in draft decodes."""
        self.saved_buffers: Mapping[str, torch.Tensor] = {}  # the draft's, while the engine sleeps
        self._announced = False

    @property
    def _leads(self) -> bool:
        """Whether this is the first of the ranks that draft for the same batch."""
        parallel = self.stock.vllm_config.parallel_config
        prefill_ranks = getattr(parallel, "prefill_context_parallel_size", 1)
        return bool(parallel.rank % (parallel.tensor_parallel_size * prefill_ranks) == 0)

    def look_up_in(self, tokens: torch.Tensor, lengths: torch.Tensor) -> None:
        """Look drafts up in the requests' texts.

        Args:
            tokens: [R, max_model_len] int32, by request state; in the device's memory.
            lengths: [R] int32, by request state: tokens of each text.
        """
        self.loop.lookup = Lookup.of(tokens, lengths, self.stock.num_speculative_steps, self.stock.draft_logits)

    @contextmanager
    def loading(self, target_model: Any) -> Iterator[None]:
        """Context in which vLLM loads the draft; afterwards its layers use this package's kernels."""
        with self.adapter.loading(target_model):
            yield
        enabled, adapter, model = self.options.enabled, self.adapter, self.stock.model
        local = adapter.greedy_is_argmax and enabled(Behaviour.LOCAL_ARGMAX)
        self.logits = DraftLogits.of(model, target_model, local=local)
        if enabled(Behaviour.SINGLE_TOKEN_ATTENTION):
            self._replace_attention(target_model)
        if enabled(Behaviour.ROW_PRODUCTS):
            self._replace_products(target_model)
        self._compile_drafting_ahead()
        if self.settings.kept_tokens is not None:
            self.trimmed = TrimmedHead.of(
                model, self.logits, self.settings.kept_tokens, self.stock.device, rounds=self._rounds
            )
        adapter.take_head(self._head())
        if self.stock.draft_logits is None:
            head = adapter.head if adapter.greedy_is_argmax else None
            self.loop.sample = adapter.sample_unstored if head is None else head.keys

    def _replace_attention(self, target_model: Any) -> None:
        stock = self.stock
        # A rank that runs part of the tokens has its own positions.
        positions = None if self.adapter.prefills_in_parts else self.loop.buffers.positions
        block_size = stock.vllm_config.cache_config.block_size or 16
        self.attends_by_ours = attention.install(
            stock.model, target_model, block_size, positions, stock.max_model_len, self.loop.rows_read
        )

    def _replace_products(self, target_model: Any) -> None:
        few = self.adapter.few_rows if self._drafts_greedily and DraftHead(self.stock.model).offsets is None else None
        trims = self.settings.kept_tokens is not None
        read = None if self.adapter.prefills_in_parts else self.loop.rows_read
        self.products = linear.install(
            self.stock.model, target_model, self.logits, few, read, rounds=self._rounds, trims=trims
        )
        self.loop.weights_of_read_rows = self.products.of_read_rows

    @property
    def _rounds(self) -> bool:
        return self.options.draft_quantization is not None

    @property
    def _drafts_greedily(self) -> bool:
        return self.stock.draft_logits is None and self.options.enabled(Behaviour.TWO_STAGE_ARGMAX)

    def _compile_drafting_ahead(self) -> None:
        model, loop = self.stock.model, self.loop
        head = getattr(getattr(model, "lm_head", None), "weight", None)
        if self._drafts_greedily and head is not None and self.settings.kept_tokens is None:
            rows = torch.empty(head.shape, dtype=loop.buffers.hidden_states.dtype, device="meta")
            drafts = self.adapter.drafts_ahead(rows, DraftHead(model).offsets)
            how = (loop.config.max_model_len, loop.config.sample_offset, loop.lookup)
            launches = functools.partial(compile_ahead.between_passes, loop.buffers, drafts, *how)
            compile_ahead.submit(self.stock.device, launches)

    def _head(self) -> DraftHead | None:
        """The `DraftHead` that drafts from the head's own rows; None where something else reads the logits too."""
        estimator = getattr(self.stock, "acceptance_estimator", None)  # of adaptive verification, from 0.30 on
        if estimator is not None or not self.options.enabled(Behaviour.TWO_STAGE_ARGMAX):
            return None
        return DraftHead(self.stock.model, self.logits, self.trimmed)

    @contextmanager
    def taking_attention(self, kv_cache_config: Any) -> Iterator[None]:
        """Context in which vLLM makes the draft's metadata builders, which it may do more than once."""
        self.adapter.check_caches(kv_cache_config)
        self._take_limit()
        with self.graphs.builders_for_decodes():
            yield
        self.adapter.take_attention(by_ours=self.attends_by_ours)
        self.loop.slot_table = self.adapter.slot_table()
        self.graphs.make_managers()

    def _take_limit(self) -> None:
        """Read vLLM's ``max_model_len``, which may have been fitted to the memory since ``__init__`` (#57034)."""
        limit = self.stock.vllm_config.model_config.max_model_len
        if "max_model_len" in vars(self.stock):  # a property from 0.33 on
            self.stock.max_model_len = limit
        self.loop.config = dataclasses.replace(self.loop.config, max_model_len=limit)

    def renew_copied_weights(self) -> None:
        """Copy the rows of a trimmed or rounded head again; called after weights were replaced in place."""
        if self.trimmed is not None:
            self.trimmed.renew()
        if self.products.view_of_head is not None:
            self.products.view_of_head.renew()

    def announce(self) -> None:
        """Log what is active and what is slower than it could be, once per engine."""
        if self._announced or not self._leads or self.stock.vllm_config.parallel_config.data_parallel_rank_local:
            return
        self._announced = True
        from vllm.logger import init_logger

        logger, facts = init_logger("vllm.eagle_mrv2"), Facts.of(self)
        logger.info(facts.line())
        for warning in facts.warnings():
            logger.warning(warning)
        if not self.loop.counter.shared:
            logger.info("%s shows no counters in /metrics, as no front-end on this machine started the worker", METHOD)
