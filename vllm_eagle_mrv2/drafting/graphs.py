"""CUDA graphs of the draft: which graphs exist, given the settings and the attention backends, and their capture."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import torch

from vllm_eagle_mrv2.batch.buffers import DraftBatch, TargetStates
from vllm_eagle_mrv2.config.behaviours import Behaviour
from vllm_eagle_mrv2.config.method import Settings
from vllm_eagle_mrv2.config.options import Options
from vllm_eagle_mrv2.drafting.capture import CapturedAttentionState, DecodeCapture, PrefillCapture, decode_mode
from vllm_eagle_mrv2.drafting.loop import DraftLoop, GraphRun


def longest_query(batch: DraftBatch) -> int:
    """Return the longest query of a batch, in tokens; a single request skips the slow NumPy reduction."""
    return batch.num_tokens if batch.num_reqs == 1 else int(batch.source.num_scheduled_tokens.max())


class DraftGraphs:
    """Chooses and captures the draft's CUDA graphs; mixed in before a stock speculator class."""

    prefill_manager_class: type[PrefillCapture]
    decode_manager_class: type[DecodeCapture]
    needs_no_builder = False
    """Whether draft decodes need only `decode_metadata`, without a builder or a plan; set in `set_attn`."""
    graph_scratch: Any = None  # workspace kept alive for the draft's graphs where the target has no graphs
    target_outputs: TargetStates | None = None
    target_graphs: Callable[[], Any] | None = None
    """Returns the target's current graph manager; set once the model runner has one."""

    settings: Settings
    options: Options
    loop: DraftLoop

    # Attributes of the stock speculator.
    vllm_config: Any
    device: torch.device
    model: torch.nn.Module
    attn_groups: Any
    target_input_buffers: Any
    target_attn_groups: Any
    input_buffers: Any
    dp_size: int
    max_num_reqs: int
    num_speculative_steps: int
    prefill_cudagraph_manager: Any
    decode_cudagraph_manager: Any

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        # The requested mode, before vLLM lowers it to what the target's attention backends support in verification.
        self._asked_mode = vllm_config.compilation_config.cudagraph_mode
        self._target_mode: Any = None  # the mode after that
        self._phase_graphs: set[Any] = set()
        """Descriptors of the draft prefill graphs that contain the whole draft phase."""
        self._phase_runs: dict[tuple[int, int], GraphRun] = {}
        """Dispatch results for these graphs, by a batch's number of requests and padded number of tokens."""
        super().__init__(vllm_config, device)  # type: ignore[call-arg]

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        """Create the draft's metadata builders; vLLM may call this more than once."""
        compilation = self.vllm_config.compilation_config
        fitted = compilation.cudagraph_mode
        if self._decodes_by_support:
            compilation.cudagraph_mode = self._asked_mode
        try:
            # Some builders allocate for CUDA graphs, depending on the graph mode and the capture sizes.
            with self._decode_capture_sizes():
                super().set_attn(*args, **kwargs)  # type: ignore[misc]
        finally:
            compilation.cudagraph_mode = fitted
        self.needs_no_builder = self._decodes_without_builders()
        self._make_graph_managers()

    def _decodes_without_builders(self) -> bool:
        """Whether draft decodes need no metadata builder; False by default."""
        return False

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Store the target's graph mode and create the managers; vLLM may call this again after dropping them."""
        self._target_mode = cudagraph_mode
        self._make_graph_managers()

    def _make_graph_managers(self) -> None:
        # Which is known first, the target's mode or the draft's builders, depends on the release.
        if self._target_mode is None or getattr(self, "attn_groups", None) is None:
            return
        enabled = self.options.enabled
        cudagraph_mode = decodes_by = self._target_mode
        if self._eager:
            cudagraph_mode = decodes_by = type(cudagraph_mode).NONE
        elif self._decodes_by_support and self._single_token_graphs():
            decodes_by = self._asked_mode or decodes_by
        draft_decode_mode = decode_mode(decodes_by, full_decode_only=enabled(Behaviour.FULL_DECODE_ONLY))
        manager: Any = self.prefill_manager_class
        self.prefill_cudagraph_manager = manager(
            self.vllm_config, self.device, cudagraph_mode, self.num_speculative_steps + 1
        )
        manager = self.decode_manager_class
        with self._decode_capture_sizes():
            self.decode_cudagraph_manager = manager(
                self.vllm_config, self.device, draft_decode_mode, decode_query_len=1
            )
        if draft_decode_mode and not cudagraph_mode:
            # The target has no graphs.  If the draft's were the only graphs in the pool of the process, the pool would
            # be freed with them when the engine ends, and the next engine could not capture (0.22 to 0.24).
            pool = torch.cuda.graph_pool_handle()
            self.prefill_cudagraph_manager.pool = self.decode_cudagraph_manager.pool = pool

    @property
    def _eager(self) -> bool:
        """Whether the draft, and only the draft, runs without CUDA graphs."""
        return bool(self.settings.enforce_eager)

    @property
    def _decodes_by_support(self) -> bool:
        """Whether the draft's own attention backend decides the graph mode of draft decodes.

        False under data parallelism, where a rank can make the others run eagerly at sizes that have graphs.  A
        FlashInfer builder configured for CUDA graphs keeps 16 MiB of buffers for each size that it sees.
        """
        return self.options.enabled(Behaviour.DRAFT_GRAPHS_BY_SUPPORT) and not self._eager and self.dp_size == 1

    def _single_token_graphs(self) -> bool:
        """Whether every attention backend of the draft supports graphs with one token per request."""
        return self.needs_no_builder or all(
            group.get_metadata_builder(0).get_cudagraph_support(self.vllm_config, group.kv_cache_spec).value > 0
            for group in chain.from_iterable(self.attn_groups)
        )

    def _decode_capture_sizes(self) -> AbstractContextManager[None]:
        """Context in which the builders and the manager of draft decodes read the configured capture sizes."""
        return nullcontext()

    @property
    def refreshes_in_graph(self) -> bool:
        """Whether draft decode metadata can be refreshed inside a graph; by default the CPU builds it."""
        return False

    @property
    def decodes_follow_prefill(self) -> bool:
        """Whether the CPU has nothing to do between a draft prefill and the last draft decode."""
        # Data-parallel ranks agree on each graph separately; expert load balancing is told of every forward pass.
        balanced = self.vllm_config.parallel_config.enable_eplb
        return self.refreshes_in_graph and self.dp_size == 1 and not balanced

    def phase_run(self, batch: DraftBatch) -> GraphRun | None:
        """Return the graph of a batch's whole draft phase, or None.

        Phase graphs exist only where each rank dispatches on its own."""
        uniform = self.num_speculative_steps + 1
        if not self._phase_graphs or batch.eager or self.query_len(batch, batch.num_tokens) != uniform:
            return None
        size = (batch.num_reqs, batch.num_tokens_padded)
        run = self._phase_runs.get(size)
        if run is None or not self.prefill_cudagraph_manager.graphs:  # vLLM may have dropped them
            run = self.dispatch_prefill(batch, batch.num_tokens, batch.num_tokens_padded)
            if not self.holds_draft_phase(run):
                return None
            self._phase_runs[size] = run
        return run

    def holds_draft_phase(self, run: GraphRun) -> bool:
        """Whether a draft prefill graph contains the whole draft phase."""
        return run.full and run.descriptor in self._phase_graphs

    def query_len(self, batch: DraftBatch, num_tokens: int) -> int | None:
        """Return the query length that all requests of a decode batch share; None if there is none."""
        raise NotImplementedError

    def dispatch_prefill(self, batch: DraftBatch, num_tokens: int, num_tokens_padded: int) -> GraphRun:
        """Choose the graph of a draft prefill; data-parallel ranks agree on it."""
        raise NotImplementedError

    def capture(self) -> None:
        """Capture the draft's graphs; every pass gets fresh dummy inputs."""
        self.loop.warms_up = self.device.type == "cuda"  # other devices have no graphs
        try:
            self._capture()
        finally:
            self.loop.warms_up = False

    def _capture(self) -> None:
        prefill, decode = self.prefill_cudagraph_manager, self.decode_cudagraph_manager
        if prefill.use_breakable_cg:
            prefill.init_breakable_cg_runner(self.model)
        reuse_target = self.options.enabled(Behaviour.TARGET_METADATA_REUSE)
        # At run time the draft prefill reads the target's metadata, so its graphs are captured with those buffers.
        buffers = self.target_input_buffers if reuse_target else self.input_buffers
        groups = self.target_attn_groups if reuse_target else self.attn_groups
        self._phase_graphs = self._find_phase_graphs()
        self._phase_runs.clear()
        self.loop.queue.clear()  # warm-up passes find no batch
        self.target_outputs = self._find_target_outputs()
        stock: Any = self
        stock.on_prefill_begin(self.max_num_reqs)
        prefill.capture_fresh(
            self.loop.phase,
            lambda descriptor: self._dummy_inputs(prefill, descriptor, buffers, groups, step=0),
            "Capturing draft prefill CUDA graphs",
            lambda descriptor: {
                "states": self.target_outputs if descriptor.cg_mode.name == "FULL" else None,
                "inputs": descriptor in self._phase_graphs,
                "decodes": self._decodes_in_graph_of(descriptor),
            },
        )
        self.loop.queue.clear()
        stock.on_prefill_end(self.max_num_reqs)
        if self.num_speculative_steps == 1:
            return
        stock.on_multi_step_decode_begin(self.max_num_reqs)
        self._capture_decodes(
            decode,
            lambda descriptor: self._dummy_inputs(decode, descriptor, self.input_buffers, self.attn_groups, step=1),
        )
        stock.on_multi_step_decode_end(self.max_num_reqs)

    def _find_target_outputs(self) -> TargetStates | None:
        """Return the output buffers of the target's graphs if every FULL draft prefill graph can read them."""
        if self.target_graphs is None or not self.options.enabled(Behaviour.ONE_DRAFT_GRAPH):
            return None
        if self.vllm_config.parallel_config.pipeline_parallel_size > 1:
            return None  # an EAGLE-3 head may read layers of other pipeline stages
        target = self.target_graphs()
        if target.hidden_states is None:  # no FULL graph
            return None
        outputs = TargetStates(target.hidden_states, target.aux_hidden_states)
        return outputs if all(len(each) >= self._widest_prefill() for each in outputs.used) else None

    def _widest_prefill(self) -> int:
        """Return the largest number of tokens of a FULL draft prefill graph, padding included."""
        return max((each.num_tokens for each in self._full_prefills()), default=0)

    def _find_phase_graphs(self) -> set[Any]:
        """Return the descriptors of the draft prefill graphs that can contain the whole draft phase."""
        enabled = self.options.enabled
        if not (
            self.decodes_follow_prefill
            and enabled(Behaviour.ONE_DRAFT_GRAPH)
            # Prefill metadata from the draft's own builders would share the buffers that the decodes refresh.
            and enabled(Behaviour.TARGET_METADATA_REUSE)
        ):
            return set()
        return {each for each in self._full_prefills() if each.uniform_token_count == self.num_speculative_steps + 1}

    def _full_prefills(self) -> list[Any]:
        """Return the descriptors of the FULL draft prefill graphs."""
        captured = self.prefill_cudagraph_manager._capture_descs.items()
        return [each for mode, some in captured if mode.name == "FULL" for each in some]

    def _decodes_in_graph_of(self, descriptor: Any) -> CapturedAttentionState | None:
        """Return dummy inputs of the draft decodes that a draft prefill graph contains; None if it has none."""
        if descriptor not in self._phase_graphs or self.num_speculative_steps == 1:
            return None
        of_decodes = dataclasses.replace(descriptor, num_tokens=descriptor.num_reqs, uniform_token_count=1)
        return self._dummy_inputs(
            self.decode_cudagraph_manager, of_decodes, self.input_buffers, self.attn_groups, step=1
        )

    def _capture_decodes(self, manager: Any, make_inputs: Callable[[Any], CapturedAttentionState]) -> None:
        manager.capture_fresh(
            self.loop.decode_all if self.refreshes_in_graph else self.loop.decode,
            make_inputs,
            "Capturing draft decode CUDA graphs",
            lambda descriptor: {"num_draft_tokens": self.num_speculative_steps},
        )

    def _dummy_inputs(
        self, manager: Any, descriptor: Any, input_buffers: Any, attn_groups: Any, step: int
    ) -> CapturedAttentionState:
        self.loop.reset_for_capture(step)
        num_tokens = descriptor.num_tokens
        num_reqs = descriptor.num_reqs or min(num_tokens, self.max_num_reqs)
        full = descriptor.cg_mode.name == "FULL"
        unbuilt = full and manager is self.decode_cudagraph_manager and self.needs_no_builder
        attn_metadata, slot_mappings = self.prepare_capture(
            manager,
            descriptor,
            num_reqs,
            num_tokens,
            input_buffers,
            # Empty groups skip the builders, which would prepare for a graph of their own; FlashInfer's allocates
            # memory for each size.
            [[] for _ in attn_groups] if unbuilt else attn_groups,
        )
        if unbuilt:
            attn_metadata = self.decode_metadata(num_reqs)
        across_dp = None
        if self.dp_size > 1:
            across_dp = torch.full((self.dp_size,), num_tokens, dtype=torch.int32)
        return CapturedAttentionState(num_reqs, num_tokens, attn_metadata, slot_mappings, across_dp)

    def decode_metadata(self, num_reqs: int) -> Any:
        """Return the attention metadata of draft decodes where `needs_no_builder` holds."""
        raise NotImplementedError

    def prepare_capture(
        self, manager: Any, descriptor: Any, num_reqs: int, num_tokens: int, input_buffers: Any, attn_groups: Any
    ) -> tuple[Any, Any]:
        """Return dummy attention metadata and slot mappings, built with the given builders and buffers."""
        raise NotImplementedError
