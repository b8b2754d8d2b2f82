"""The draft's CUDA graphs: which there are, and their capture."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from vllm_eagle_mrv2.batch.buffers import TargetStates
from vllm_eagle_mrv2.config.behaviours import Behaviour
from vllm_eagle_mrv2.draft_length.notes import GraphTime
from vllm_eagle_mrv2.drafting.capture import decode_mode
from vllm_eagle_mrv2.drafting.loop import DraftLoop, ForwardInputs, without_graph
from vllm_eagle_mrv2.drafting.phase_graphs import PhaseGraphs
from vllm_eagle_mrv2.drafting.protocols import Descriptor, GraphManager, GraphMode

if TYPE_CHECKING:
    from vllm_eagle_mrv2.releases.adapter import ReleaseAdapter


_TIMED_REQUESTS = (1, 4, 16, 64, 256)
"""Numbers of requests for which graphs are timed, or the next larger captured ones."""
_REPLAYS = 2
"""Timed replays of a graph, after one that is not: all take a second or two with an 8B target."""


def seconds_of(target: GraphManager, draft: GraphManager, descriptor: Descriptor) -> float:
    """Time the replay of the target's graph and the draft's; waits for the device."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for replay in range(1 + _REPLAYS):
        if replay == 1:
            begin.record()
        target.run_fullgraph(descriptor)
        draft.run_fullgraph(descriptor)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / _REPLAYS


class DraftGraphs:
    """Makes the draft's graph managers, captures their graphs, and hands the loop those of whole draft phases.

    Args:
        adapter: of the installed release; its speculator holds the managers, as vLLM looks for them there.
        loop: the passes to capture.
        eager: the user wants no graphs of the draft.
    """

    def __init__(self, adapter: ReleaseAdapter, loop: DraftLoop, *, eager: bool = False) -> None:
        self.stock = adapter.stock
        self.adapter = adapter
        self.loop = loop
        self.target_mode: GraphMode | None = None
        """The mode that vLLM lowered the asked one to, as the target's attention backends support in verification."""
        self.target_graphs: Callable[[], Any] | None = None
        """Returns the target's current graph manager; set once the model runner has one."""
        self.scratch: Any = None  # workspace kept alive for the draft's graphs where the target has no graphs
        self._enabled = adapter.options.enabled
        self._eager = eager

    # Managers

    @contextmanager
    def builders_for_decodes(self) -> Iterator[None]:
        """Context in which vLLM makes the draft's metadata builders.

        Some allocate for CUDA graphs, depending on the graph mode and the capture sizes: FlashInfer's keeps 16 MiB of
        buffers for each size.
        """
        compilation = self.stock.vllm_config.compilation_config
        fitted = compilation.cudagraph_mode
        if self._decodes_by_support:
            compilation.cudagraph_mode = self.adapter.asked.mode
        try:
            with self.adapter.decode_capture_sizes():
                yield
        finally:
            compilation.cudagraph_mode = fitted

    def make_managers(self, target_mode: GraphMode | None = None) -> None:
        """Make the managers once both the target's graph mode and the draft's builders are known.

        Which is known first depends on the release; vLLM may also ask again after dropping the managers.
        """
        stock, adapter = self.stock, self.adapter
        self.target_mode = self.target_mode if target_mode is None else target_mode
        if self.target_mode is None or getattr(stock, "attn_groups", None) is None:
            return
        mode = decodes_by = self.target_mode
        if self._eager:
            modes: Any = type(mode)
            mode = decodes_by = modes.NONE
        elif self._decodes_by_support and self._single_token_graphs():
            decodes_by = adapter.asked.mode or decodes_by
        draft_decode_mode = decode_mode(decodes_by, full_decode_only=self._enabled(Behaviour.FULL_DECODE_ONLY))
        managers: Any = adapter.managers
        stock.prefill_cudagraph_manager = managers.prefill(
            stock.vllm_config, stock.device, mode, stock.num_speculative_steps + 1
        )
        with adapter.decode_capture_sizes():
            stock.decode_cudagraph_manager = managers.decode(
                stock.vllm_config, stock.device, draft_decode_mode, decode_query_len=1
            )
        if draft_decode_mode and not mode:
            # The target has no graphs.  If the draft's were the only graphs in the pool of the process, the pool would
            # be freed with them when the engine ends, and the next engine could not capture (0.22 to 0.24).
            pool = torch.cuda.graph_pool_handle()
            stock.prefill_cudagraph_manager.pool = stock.decode_cudagraph_manager.pool = pool

    @property
    def _decodes_by_support(self) -> bool:
        """Whether the draft's own attention backend decides the graph mode of draft decodes.

        False under data parallelism, where a rank can make the others run eagerly at sizes that have graphs.
        """
        return self._enabled(Behaviour.DRAFT_GRAPHS_BY_SUPPORT) and not self._eager and self.stock.dp_size == 1

    def _single_token_graphs(self) -> bool:
        """Whether every attention backend of the draft supports graphs with one token per request."""
        return self.adapter.needs_no_builder or all(
            group.get_metadata_builder(0).get_cudagraph_support(self.stock.vllm_config, group.kv_cache_spec).value > 0
            for group in chain.from_iterable(self.stock.attn_groups)
        )

    # Graphs of whole draft phases

    def find_phase_graphs(self) -> set[Descriptor]:
        """Return the descriptors of the draft prefill graphs that can contain the whole draft phase."""
        if not (
            self.adapter.decodes_follow_prefill
            and self._enabled(Behaviour.ONE_DRAFT_GRAPH)
            # Prefill metadata from the draft's own builders would share the buffers that the decodes refresh.
            and self._enabled(Behaviour.TARGET_METADATA_REUSE)
        ):
            return set()
        uniform = {1 + length for length in self.adapter.draft_lengths}
        return {each for each in self._full_prefills() if each.uniform_token_count in uniform}

    def _full_prefills(self) -> list[Descriptor]:
        """Return the descriptors of the FULL draft prefill graphs."""
        captured = self.stock.prefill_cudagraph_manager._capture_descs.items()
        return [each for mode, some in captured if mode.name == "FULL" for each in some]

    def _find_target_outputs(self) -> TargetStates | None:
        """Return the output buffers of the target's graphs if every FULL draft prefill graph can read them."""
        if self.target_graphs is None or not self._enabled(Behaviour.ONE_DRAFT_GRAPH):
            return None
        if self.stock.vllm_config.parallel_config.pipeline_parallel_size > 1:
            return None  # an EAGLE-3 head may read layers of other pipeline stages
        if self.adapter.pcp_manager is not None:
            return None  # the draft's tokens are a shard, not those of the target's graph
        target = self.target_graphs()
        if target.hidden_states is None:  # no FULL graph
            return None
        outputs = TargetStates(target.hidden_states, target.aux_hidden_states)
        if not outputs.aux and outputs.last.shape[1:] != self.loop.buffers.hidden_states.shape[1:]:
            return None  # vLLM hands the draft other states than the graph's outputs (DeepSeek V4)
        widest = max((each.num_tokens for each in self._full_prefills()), default=0)  # padding included
        return outputs if all(len(each) >= widest for each in outputs.used) else None

    # Capture

    def capture(self) -> None:
        """Capture the draft's graphs; every pass gets fresh dummy inputs."""
        self.loop.warms_up = self.stock.device.type == "cuda"  # other devices have no graphs
        self.adapter.capturing = True
        try:
            self._capture_prefills()
            if self.stock.num_speculative_steps > 1:
                self._capture_decodes()
        finally:
            self.adapter.capturing = self.loop.warms_up = False

    def _capture_prefills(self) -> None:
        stock, loop, hooks = self.stock, self.loop, self.adapter.hooks
        manager = stock.prefill_cudagraph_manager
        if manager.use_breakable_cg:
            manager.init_breakable_cg_runner(stock.model)
        loop.phase_graphs = phases = PhaseGraphs(self.adapter, self.find_phase_graphs())
        loop.target_outputs = self._find_target_outputs()
        self._leave_out_unused()
        loop.queue.clear()  # warm-up passes find no batch
        hooks.on_prefill_begin(stock.max_num_reqs)
        manager.capture_fresh(
            loop.phase,
            self._dummy_prefill,
            "Capturing draft prefill CUDA graphs",
            lambda descriptor: {
                "states": loop.target_outputs if descriptor.cg_mode.name == "FULL" else None,
                "fills_inputs": descriptor in phases.descriptors,
                "num_draft_tokens": self._drafts_in_graph_of(descriptor),
                "decodes": self._decodes_in_graph_of(descriptor),
            },
        )
        self._warm_up_first_drafts()
        loop.queue.clear()
        hooks.on_prefill_end(stock.max_num_reqs)

    def _leave_out_unused(self) -> None:
        """Have no draft prefills captured that no batch replays."""
        stock, leaves_graph = self.stock, self.loop.leaves_graph
        captured = stock.prefill_cudagraph_manager._capture_descs
        for mode, graphs in captured.items():
            captured[mode] = [each for each in graphs if not leaves_graph(mode, each.num_tokens, stock.max_num_reqs)]

    @torch.inference_mode()
    def times(self) -> list[GraphTime]:
        """Time the graphs of an iteration, the target's and the draft's, after their capture and before any request.

        For some numbers of requests, with each number of drafts.  Nothing where the draft phase is not one graph, nor
        for a target with experts: dummy tokens take few or none, and more of them would cost nothing.
        """
        target = None if self.target_graphs is None else self.target_graphs()
        if target is None or not self.loop.phase_graphs or self.stock.vllm_config.model_config.is_moe:
            return []
        draft, found = self.stock.prefill_cudagraph_manager, []
        self.adapter.capturing = True
        try:
            for descriptor in self._timed_graphs(target):
                self._dummy_prefill(descriptor)  # leaves inputs of that size in the target's buffers
                self.loop.queue.clear()
                seconds = seconds_of(target, draft, descriptor)
                found.append(GraphTime(descriptor.num_reqs, (descriptor.uniform_token_count or 1) - 1, seconds))
        finally:
            self.loop.queue.clear()  # each replay has taken an entry
            self.adapter.capturing = False
        return found

    def _timed_graphs(self, target: GraphManager) -> list[Any]:
        """Descriptors of the phase graphs to time, which the target has as well: for about 1, 4, 16, ... requests.

        In the same order on all ranks, which wait for each other in every pass.
        """
        known: list[Any] = [each for each in self.loop.phase_graphs.descriptors if each in target.graphs]
        sizes = sorted({each.num_reqs for each in known})
        wanted = {min((size for size in sizes if size >= many), default=sizes[-1]) for many in _TIMED_REQUESTS if sizes}
        return sorted(
            (each for each in known if each.num_reqs in wanted), key=lambda each: (each.num_tokens, each.num_reqs)
        )

    def _dummy_prefill(self, descriptor: Descriptor) -> ForwardInputs:
        # At run time the draft prefill reads the target's metadata, so its graphs are captured with those buffers.
        stock, of_target = self.stock, self._enabled(Behaviour.TARGET_METADATA_REUSE)
        buffers = stock.target_input_buffers if of_target else stock.input_buffers
        groups = stock.target_attn_groups if of_target else stock.attn_groups
        return self._dummy_inputs(stock.prefill_cudagraph_manager, descriptor, buffers, groups, step=0)

    @torch.inference_mode()
    def _warm_up_first_drafts(self) -> None:
        """Run a draft prefill of decodes that verify no drafts and get some: in no graph, and with kernels of its own.

        Such batches come where the number of draft tokens is no longer 0.
        """
        single = [each for each in self.loop.phase_graphs.descriptors if each.uniform_token_count == 1]
        if single:
            inputs = self._dummy_prefill(min(single, key=lambda each: each.num_tokens))
            self.loop.prefill(without_graph(inputs))

    def _drafts_in_graph_of(self, descriptor: Descriptor) -> int:
        """Return the number of draft tokens for which a draft prefill graph is made."""
        in_phase = descriptor in self.loop.phase_graphs.descriptors
        return (descriptor.uniform_token_count or 1) - 1 if in_phase else self.stock.num_speculative_steps

    def _decodes_in_graph_of(self, descriptor: Descriptor) -> ForwardInputs | None:
        """Return dummy inputs of the draft decodes that a draft prefill graph contains; None if it has none."""
        if descriptor not in self.loop.phase_graphs.descriptors or self._drafts_in_graph_of(descriptor) < 2:
            return None
        of_prefill: Any = descriptor
        return self._dummy_decodes(
            dataclasses.replace(of_prefill, num_tokens=descriptor.num_reqs, uniform_token_count=1)
        )

    def _capture_decodes(self) -> None:
        stock, adapter = self.stock, self.adapter
        manager = stock.decode_cudagraph_manager
        fused = adapter.refreshes_in_graph
        if fused and len(adapter.draft_lengths) > 1:
            # A batch that drafts one token has no draft decodes.
            manager.specialize(sorted(adapter.draft_lengths - {0, 1}, reverse=True))
        adapter.hooks.on_multi_step_decode_begin(stock.max_num_reqs)
        manager.capture_fresh(
            self.loop.decode_all if fused else self.loop.decode,
            self._dummy_decodes,
            "Capturing draft decode CUDA graphs",
            lambda descriptor: {
                "num_draft_tokens": getattr(descriptor, "num_draft_tokens", stock.num_speculative_steps)
            },
        )
        adapter.hooks.on_multi_step_decode_end(stock.max_num_reqs)

    def _dummy_decodes(self, descriptor: Descriptor) -> ForwardInputs:
        stock = self.stock
        return self._dummy_inputs(
            stock.decode_cudagraph_manager, descriptor, stock.input_buffers, stock.attn_groups, step=1
        )

    def _dummy_inputs(
        self, manager: Any, descriptor: Descriptor, input_buffers: Any, attn_groups: Any, step: int
    ) -> ForwardInputs:
        stock, adapter = self.stock, self.adapter
        self.loop.reset_for_capture(step)
        num_tokens = descriptor.num_tokens
        num_reqs = descriptor.num_reqs or min(num_tokens, stock.max_num_reqs)
        full = descriptor.cg_mode.name == "FULL"
        unbuilt = full and manager is stock.decode_cudagraph_manager and adapter.needs_no_builder
        attn_metadata, slot_mappings = adapter.prepare_capture(
            manager,
            descriptor,
            num_reqs,
            input_buffers,
            # Empty groups skip the builders, which would prepare for a graph of their own; FlashInfer's allocates
            # memory for each size.
            [[] for _ in attn_groups] if unbuilt else attn_groups,
        )
        if unbuilt:
            attn_metadata = adapter.decode_metadata(num_reqs)
        across_dp = None
        if stock.dp_size > 1:
            across_dp = torch.full((stock.dp_size,), num_tokens, dtype=torch.int32)
        return ForwardInputs(num_reqs, num_tokens, attn_metadata, slot_mappings, across_dp, descriptor.cg_mode)
