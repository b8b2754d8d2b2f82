"""Describes what the draft of an engine really does, once its metadata builders and graph managers exist.

The start-up line reports it, and a warning names each slower path with its cause and the remedy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from vllm_eagle_mrv2 import __version__
from vllm_eagle_mrv2.config import captured_sizes
from vllm_eagle_mrv2.config.behaviours import Behaviour
from vllm_eagle_mrv2.config.draft_lengths import asks_for_choice, lengths_to_choose_from, why_not_chosen
from vllm_eagle_mrv2.config.families import METHOD
from vllm_eagle_mrv2.config.method import Settings
from vllm_eagle_mrv2.draft_model import fp8
from vllm_eagle_mrv2.kernels.measured import about

if TYPE_CHECKING:
    from vllm_eagle_mrv2.drafting.drafter import Drafter


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts about a draft that the start-up line and the warnings report."""

    vllm: str
    adapter: str
    settings: Settings
    num_draft_tokens: int  # K
    draft_logits: str | None  # dtype and size of the stored draft logits
    draft_vocab: str | None  # "kept of all" tokens of a trimmed head
    draft_weights: str | None  # of FP8, and what they take
    texts: str | None  # what the texts take in which drafts are looked up
    ours: frozenset[Behaviour]
    """Behaviours that this package supplies on this release and that are switched on, whether or not they run."""

    # vLLM's graph modes
    asked_mode: Any
    target_mode: Any
    prefill_mode: Any
    decode_mode: Any
    largest_graph: int  # tokens; 0 without any
    largest_asked: int  # tokens; below 0.25 vLLM captures multiples of K + 1 up to this
    graphs_pay_up_to: int  # tokens
    max_num_seqs: int

    decode_graphs: bool  # draft decodes have graphs
    fused: bool  # one graph holds all draft decodes
    one_graph: bool  # whole draft phases have graphs
    slots_ahead: bool  # each step computes the slots of the next one

    backends: str  # names of the draft's attention backends
    needs_no_builder: bool  # draft decodes run without metadata from a builder
    builders_refresh: bool  # builders can update their metadata on the device
    host_builds: bool  # but the host builds the metadata before each replay
    kv_cache_groups: int
    context_parallel: int
    data_parallel: int

    draft_argmax: bool  # greedy drafts are an argmax over the draft's own head
    local_argmax: bool  # and each rank takes it over its own shard
    filters: bool  # requests' top-k and top-p are honoured
    products: bool  # some products use this package's kernels
    products_cached: bool  # vLLM's cache of compiled models can tell them apart
    unmeasured: str | None  # what is left to PyTorch because it was not measured on this GPU
    quantized: tuple[str, ...]  # quantization method of each layer that is left to vLLM
    head_unrounded: bool  # the draft's weights are FP8, but not those of its head
    attention: bool  # draft decodes use this package's attention kernel
    skips_unused: bool  # batches in which no request can use drafts are skipped
    asks_dynamic: bool  # the user asked for a K that follows the batch size
    dynamic: bool
    lengths: tuple[int, ...]  # of which K is chosen at run time; none if it is not
    why_constant: str | None  # why K is not chosen although the user asked for it

    @classmethod
    def of(cls, drafter: Drafter) -> Facts:
        """The facts of a drafter that is ready for graph capture."""
        import vllm

        stock, adapter, graphs, options = drafter.stock, drafter.adapter, drafter.graphs, drafter.options
        logits, trimmed, tables = stock.draft_logits, drafter.trimmed, stock.block_tables
        decode_graphs = stock.num_speculative_steps > 1 and any(stock.decode_cudagraph_manager._capture_descs.values())
        draft_argmax = logits is None and adapter.head is not None
        captured = stock.vllm_config.compilation_config.cudagraph_capture_sizes or [0]
        return cls(
            vllm=vllm.__version__,
            adapter=adapter.release.name,
            settings=drafter.settings,
            num_draft_tokens=stock.num_speculative_steps,
            draft_logits=None if logits is None else _size(logits),
            draft_vocab=None if trimmed is None else f"{trimmed.size} of {trimmed.vocab_size}",
            draft_weights=_rounded(drafter),
            texts=None if drafter.loop.lookup is None else _mebibytes(drafter.loop.lookup.tokens),
            ours=frozenset(b for b in Behaviour if adapter.supplies(b) and options.enabled(b)),
            asked_mode=adapter.asked.mode or graphs.target_mode,
            target_mode=graphs.target_mode,
            prefill_mode=stock.prefill_cudagraph_manager.cudagraph_mode,
            decode_mode=stock.decode_cudagraph_manager.cudagraph_mode,
            largest_graph=max(captured),
            largest_asked=max([*captured, *(adapter.asked.capture_sizes or ())]),
            graphs_pay_up_to=captured_sizes.largest(stock.vllm_config),
            max_num_seqs=stock.vllm_config.scheduler_config.max_num_seqs,
            decode_graphs=decode_graphs,
            fused=decode_graphs and adapter.refreshes_in_graph,
            one_graph=bool(graphs.find_phase_graphs()),
            slots_ahead=drafter.loop.slot_table is not None,
            backends=", ".join(sorted({group.backend.get_name() for group in chain.from_iterable(stock.attn_groups)})),
            needs_no_builder=adapter.needs_no_builder,
            builders_refresh=adapter.builders_refresh,
            host_builds=adapter.rebuilds_before_replay,
            kv_cache_groups=tables.num_kv_cache_groups,
            context_parallel=tables.cp_size,
            data_parallel=stock.dp_size,
            draft_argmax=draft_argmax,
            local_argmax=draft_argmax and drafter.logits is not None and drafter.logits.local,
            filters=adapter.filters_drafts,
            products=stock.device.type == "cuda" and (drafter.products.layers > 0 or drafter.products.head),
            products_cached=drafter.named_in_caches,
            unmeasured=_unmeasured(stock.device),
            quantized=drafter.products.quantized,
            head_unrounded=options.draft_quantization is not None
            and drafter.products.view_of_head is None
            and getattr(stock.model, "lm_head", None) not in drafter.products.rounded,
            attention=drafter.attends_by_ours,
            skips_unused=adapter.skips_unused,
            asks_dynamic=bool(getattr(stock.speculative_config, "num_speculative_tokens_per_batch_size", None)),
            dynamic=adapter.schedule is not None,
            lengths=lengths_to_choose_from(stock.vllm_config),
            why_constant=why_not_chosen(stock.vllm_config) if asks_for_choice(stock.vllm_config) else None,
        )

    @property
    def active(self) -> list[Behaviour]:
        """The behaviours in ``ours`` that really run, sorted."""
        stores, decodes = self.draft_logits is not None, self.num_draft_tokens > 1
        graphs = bool(self.prefill_mode) or self.decode_graphs
        runs = {
            Behaviour.DRAFT_LOGITS_IN_REPLAY: stores and graphs,
            Behaviour.DECODE_METADATA_REBUILD: decodes,
            Behaviour.FULL_DECODE_ONLY: self.decode_graphs,
            Behaviour.TARGET_METADATA_REUSE: True,
            Behaviour.ACTUAL_MAX_SEQ_LEN: decodes and not self.needs_no_builder,
            Behaviour.SHARED_GRAPH_POOL: graphs and bool(self.target_mode),
            Behaviour.PADDING_WITHOUT_LOGITS: stores and graphs,
            Behaviour.SINGLE_TOKEN_CAPTURE_SIZES: self.decode_graphs,
            Behaviour.LENGTHS_WITHOUT_SYNC: decodes and not self.needs_no_builder,
            Behaviour.INDEPENDENT_DRAFT_NOISE: stores,
            Behaviour.DYNAMIC_DRAFT_LENGTH: self.dynamic,
            Behaviour.DRAFT_ENFORCE_EAGER: self.settings.enforce_eager,
            Behaviour.FUSED_DRAFT_DECODE: self.fused,
            Behaviour.SKIP_UNUSED_DRAFTS: self.skips_unused,
            Behaviour.TWO_STAGE_ARGMAX: self.draft_argmax,
            Behaviour.LOCAL_ARGMAX: self.local_argmax,
            Behaviour.ONE_DRAFT_GRAPH: self.one_graph,
            Behaviour.DRAFT_GRAPHS_BY_SUPPORT: self.decode_graphs and not _has_decodes(self.target_mode),
            Behaviour.DRAFT_TOP_K_TOP_P: self.filters,
            Behaviour.ROW_PRODUCTS: self.products,
            Behaviour.SINGLE_TOKEN_ATTENTION: self.attention and decodes,
        }
        return sorted(behaviour for behaviour in self.ours if runs[behaviour])

    def line(self) -> str:
        """The start-up line."""
        parts = [
            f"adapter {self.adapter}",
            f"family {self.settings.family}",
            f"K={self.num_draft_tokens}" if not self.lengths else f"K of {', '.join(map(str, self.lengths))}",
            f"draft prefill graphs {self.prefill_mode.name}",
            f"draft decode graphs {self.decode_mode.name if self.decode_graphs else 'NONE'}",
        ]
        if self.target_mode and self.largest_graph:
            parts.append(f"graphs up to {self.largest_graph} tokens")
        parts.append(f"draft logits {self.draft_logits or 'none, greedy'}")
        if self.draft_vocab is not None:
            parts.append(f"draft vocabulary {self.draft_vocab}")
        if self.draft_weights is not None:
            parts.append(f"draft weights {self.draft_weights}")
        if self.texts is not None:
            parts.append(f"texts {self.texts}")
        parts.append(f"active beyond this release: {', '.join(self.active) or 'nothing'}")
        if self.settings.options.disable:
            parts.append(f"disabled: {', '.join(sorted(self.settings.options.disable))}")
        return f"{METHOD} {__version__} drafts on vLLM {self.vllm}: {', '.join(parts)}"

    def warnings(self) -> Iterator[str]:
        """A sentence for each slower path that ``disable`` did not ask for, with the cause and the remedy."""
        enabled = self.settings.options.enabled
        if self.asked_mode and self.settings.enforce_eager:
            yield (
                f"{METHOD} drafts without CUDA graphs, as enforce_eager of the speculative configuration says; "
                "leave it out to draft faster."
            )
        elif self.asked_mode and self.num_draft_tokens > 1:
            yield from self._about_decode_graphs()
        query_len = 1 + self.num_draft_tokens
        worth = min(self.max_num_seqs * query_len, self.graphs_pay_up_to)
        if self.target_mode and self.largest_graph and self.largest_asked < worth:
            yield (
                f"{METHOD} has the target verify the drafts of more than {self.largest_graph // query_len} requests "
                f"outside of CUDA graphs, as the largest of cudagraph_capture_sizes is {self.largest_asked}; give no "
                f"sizes, or max_cudagraph_capture_size={worth}."
            )
        if self.asks_dynamic and not self.dynamic and Behaviour.DYNAMIC_DRAFT_LENGTH in self.ours:
            yield (
                f"{METHOD} drafts {self.num_draft_tokens} tokens whatever the batch size, as data-parallel ranks that "
                "draft different numbers would wait for each other; leave num_speculative_tokens_per_batch_size out."
            )
        if self.why_constant is not None:
            yield f"{METHOD} does not choose the number of draft tokens, as {self.why_constant}."
        if self.quantized and enabled(Behaviour.ROW_PRODUCTS):
            yield (
                f"{METHOD} leaves {len(self.quantized)} layers of the draft to vLLM's kernels, as their weights are "
                f"quantized ({', '.join(sorted(set(self.quantized)))}); row_products takes a head that is not."
            )
        if self.head_unrounded:
            yield (
                f"{METHOD} leaves the weights of the draft's head as they are, as it has no LogitsProcessor of its "
                "own; draft_quantization rounds its layers alone."
            )
        if self.draft_weights is not None and not self.products:
            yield (
                f"{METHOD} widens the draft's weights at each product on a CPU, which takes longer than whole weights; "
                "leave draft_quantization out."
            )
        elif self.draft_weights is not None and self.unmeasured is not None:
            yield (
                f"{METHOD} multiplies with FP8 weights on a GPU on which it was not measured; "
                "vllm-eagle-mrv2 bench says what that gains."
            )
        elif self.unmeasured is not None and enabled(Behaviour.ROW_PRODUCTS):
            yield self.unmeasured
        if not self.products_cached:
            yield (
                f"{METHOD} leaves the draft's products to vLLM, whose cache of compiled models could not tell them "
                "apart by this additional_config; give a dictionary for it."
            )

    def _about_decode_graphs(self) -> Iterator[str]:
        enabled = self.settings.options.enabled
        if not self.decode_graphs:
            if enabled(Behaviour.DRAFT_GRAPHS_BY_SUPPORT):
                yield f"{METHOD} runs draft decodes without CUDA graphs, as {self._why_no_graphs()}."
        elif not self.fused:
            if enabled(Behaviour.FUSED_DRAFT_DECODE):
                yield f"{METHOD} replays a graph for each draft decode, not one for all, as {self._why_by_steps()}."
        elif self.host_builds:
            yield (
                f"{METHOD} has the host build metadata before each replay of the draft decodes, as the attention "
                f"backend {self.backends} needs it on this vLLM; {_OTHER_BACKEND}."
            )
        if self.decode_graphs and self.fused and not self.slots_ahead:
            yield f"{METHOD} maps slots anew at each draft decode, as {self._why_no_slots()}."

    def _why_no_graphs(self) -> str:
        if self.decode_mode:
            return "none of cudagraph_capture_sizes fits max_num_seqs; add sizes from 1 on"
        if not _has_decodes(self.asked_mode):
            return f"cudagraph_mode={self.asked_mode.name} has none for decodes; FULL_AND_PIECEWISE has"
        if self.data_parallel > 1:
            return (
                "under data parallelism they have the target's, which has none with the attention backend "
                f"{self.backends}; {_OTHER_BACKEND}"
            )
        return f"the attention backend {self.backends} supports none; {_OTHER_BACKEND}"

    def _why_by_steps(self) -> str:
        if self.context_parallel > 1:
            return "the host builds their metadata under decode context parallelism; use tensor parallelism alone"
        return f"the attention backend {self.backends} has the host build their metadata; {_OTHER_BACKEND}"

    def _why_no_slots(self) -> str:
        if self.context_parallel > 1:
            return "ranks share the KV cache out under decode context parallelism; use tensor parallelism alone"
        return (
            f"the KV cache has {self.kv_cache_groups} groups; "
            "--disable-hybrid-kv-cache-manager makes them one, which takes more memory"
        )


_OTHER_BACKEND = "choose another attention backend, such as FLASH_ATTN"


def _unmeasured(device: torch.device) -> str | None:
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return about(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))


def _has_decodes(mode: Any) -> bool:
    """Whether a graph mode has FULL graphs for decodes."""
    return bool(mode.decode_mode().name == "FULL")


def _rounded(drafter: Drafter) -> str | None:
    """The dtype of a draft's rounded weights, and how much less memory than before they take, or more with copies."""
    products, trimmed = drafter.products, drafter.trimmed
    if not products.rounded:
        return None
    saved = sum(map(fp8.bytes_saved, products.rounded))
    if products.view_of_head is not None and products.view_of_head.copied:
        saved -= fp8.bytes_taken(products.view_of_head.view)
    if trimmed is not None and trimmed.kept is not None:
        saved -= fp8.bytes_taken(trimmed.kept)
    return f"fp8, {abs(saved) / 2**20:.1f} MiB {'less' if saved >= 0 else 'more'}"


def _size(logits: Any) -> str:
    return f"{str(logits.dtype).removeprefix('torch.')}, {_mebibytes(logits)}"


def _mebibytes(tensor: torch.Tensor) -> str:
    return f"{tensor.numel() * tensor.element_size() / 2**20:.1f} MiB"
