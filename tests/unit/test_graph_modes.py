"""Which graphs a draft has, given what was asked for, what the target got, and what the draft's backends support."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from vllm_eagle_mrv2.batch.queue import BatchQueue
from vllm_eagle_mrv2.config.behaviours import Behaviour
from vllm_eagle_mrv2.config.options import Options
from vllm_eagle_mrv2.drafting.loop import GraphRun

pytest.importorskip("vllm.config.compilation")

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm_eagle_mrv2.releases.common import StockAdapter

NONE, PIECEWISE, FULL, BOTH = (
    CUDAGraphMode.NONE,
    CUDAGraphMode.PIECEWISE,
    CUDAGraphMode.FULL,
    CUDAGraphMode.FULL_AND_PIECEWISE,
)
DECODE_ONLY = CUDAGraphMode.FULL_DECODE_ONLY
SINGLE_TOKEN = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


@pytest.fixture(autouse=True)
def _memory_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "its own")


class Manager:
    """A graph manager that keeps its mode."""

    def __init__(self, vllm_config: Any, device: Any, mode: Any, decode_query_len: int) -> None:
        self.mode, self.pool = mode, "the target's"


class Descriptor(NamedTuple):
    """Of a draft prefill's graph."""

    cg_mode: Any
    uniform_token_count: int


class Stock:
    """What a stock speculator does with the target's groups: builders look at the mode of the configuration."""

    def set_attn(self, *supports: Any) -> None:
        adapter: Any = self
        adapter.seen = adapter.vllm_config.compilation_config.cudagraph_mode
        adapter.sized = adapter.in_decode_sizes
        adapter.attn_groups = [
            [SimpleNamespace(kv_cache_spec=None, get_metadata_builder=lambda i, each=each: self._builder(each))]
            for each in supports
        ]

    @staticmethod
    def _builder(support: Any) -> Any:
        return SimpleNamespace(get_cudagraph_support=lambda vllm_config, kv_cache_spec: support)


class Release(StockAdapter, Stock):
    prefill_manager_class = decode_manager_class = Manager  # type: ignore[assignment]
    in_decode_sizes = False
    refreshes_in_graph = True

    def __init__(self, asked: Any, disable: set[Behaviour], enforce_eager: bool, dp_size: int) -> None:
        self.dp_size = dp_size
        self.options = Options(disable=frozenset(disable))
        self.settings: Any = SimpleNamespace(enforce_eager=enforce_eager)
        self.vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=asked))
        self.num_speculative_steps, self.device = 3, None  # type: ignore[assignment]
        self._asked_mode, self._target_mode, self.filters_drafts = asked, None, False
        self.block_tables = SimpleNamespace(num_kv_cache_groups=2, cp_size=1)
        self._phase_graphs, self._phase_runs = set(), {}

    def _take_limit(self) -> None: ...

    @contextmanager
    def _decode_capture_sizes(self) -> Iterator[None]:
        self.in_decode_sizes = True
        yield
        self.in_decode_sizes = False


def modes(
    asked: Any,
    target: Any,
    *supports: Any,
    disable: Behaviour | None = None,
    enforce_eager: bool = False,
    dp_size: int = 1,
    builders_first: bool = True,
) -> tuple[Any, Any]:
    """Graph modes of draft prefill and of draft decode."""
    adapter = Release(asked, set() if disable is None else {disable}, enforce_eager, dp_size)
    config = adapter.vllm_config.compilation_config
    config.cudagraph_mode = target
    if builders_first:
        adapter.set_attn(*supports)
    adapter.init_cudagraph_manager(target)
    if not builders_first:
        adapter.set_attn(*supports)
    assert config.cudagraph_mode is target
    as_stock = disable is Behaviour.DRAFT_GRAPHS_BY_SUPPORT or enforce_eager or dp_size > 1
    assert adapter.seen is (target if as_stock else asked)
    assert adapter.sized, "a builder prepares for the sizes that its graphs will have"
    return adapter.prefill_cudagraph_manager.mode, adapter.decode_cudagraph_manager.mode


@pytest.mark.parametrize(
    ("changed", "needed"),
    [
        ({}, False),
        ({"kernel_block_size": 16}, True),
        ({"use_trtllm_decode_attention": True}, True),
        ({"cp_size": 2}, True),
    ],
    ids=str,
)
def test_layers_of_ours_have_graphs_without_builders(changed: dict[str, Any], needed: bool) -> None:
    """FlashInfer's builder has none for a draft decode that it must plan; of what our kernel cannot do, it is asked."""
    adapter = Release(BOTH, set(), enforce_eager=False, dp_size=1)
    adapter.vllm_config.parallel_config = SimpleNamespace()
    adapter._attends_by_ours, adapter.block_tables.cp_size = True, changed.get("cp_size", 1)
    builder = SimpleNamespace(
        get_cudagraph_support=lambda vllm_config, kv_cache_spec: AttentionCGSupport.NEVER, **changed
    )

    def set_attn(self: Stock) -> None:
        group = SimpleNamespace(kv_cache_spec=None, get_metadata_builder=lambda i: builder, **changed)
        adapter.attn_groups = [[group]]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stock, "set_attn", set_attn)
        adapter.set_attn()
    adapter.init_cudagraph_manager(NONE)
    assert adapter.needs_no_builder is not needed
    assert (adapter.decode_cudagraph_manager.mode is NONE) is needed


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (BOTH, {"the target's"}),
        (PIECEWISE, {"the target's"}),
        (NONE, {"its own"}),  # the target has no graphs that would keep the pool
    ],
)
def test_whose_memory_the_graphs_take(target: Any, expected: set[str]) -> None:
    adapter = Release(BOTH, set(), enforce_eager=False, dp_size=1)
    adapter.set_attn(SINGLE_TOKEN)
    adapter.init_cudagraph_manager(target)
    assert adapter.decode_cudagraph_manager.mode is DECODE_ONLY
    assert {adapter.prefill_cudagraph_manager.pool, adapter.decode_cudagraph_manager.pool} == expected


@pytest.mark.parametrize("builders_first", [True, False], ids=["0.26", "0.20"])
@pytest.mark.parametrize("target", [PIECEWISE, NONE])
def test_a_backend_with_graphs_for_one_token(target: Any, builders_first: bool) -> None:
    """The verification of K + 1 tokens has no full graph, or none at all (FlashInfer on Hopper)."""
    assert modes(BOTH, target, SINGLE_TOKEN, builders_first=builders_first) == (target, DECODE_ONLY)


@pytest.mark.parametrize("target", [PIECEWISE, NONE])
def test_as_stock_has_it(target: Any) -> None:
    off = Behaviour.DRAFT_GRAPHS_BY_SUPPORT
    assert modes(BOTH, target, SINGLE_TOKEN, disable=off) == (target, NONE)


@pytest.mark.parametrize(
    ("asked", "target", "supports", "wanted"),
    [
        (BOTH, BOTH, [AttentionCGSupport.ALWAYS], (BOTH, DECODE_ONLY)),
        (FULL, DECODE_ONLY, [AttentionCGSupport.UNIFORM_BATCH], (DECODE_ONLY, DECODE_ONLY)),
        # Nobody asked for full graphs.
        (PIECEWISE, PIECEWISE, [AttentionCGSupport.ALWAYS], (PIECEWISE, NONE)),
        (NONE, NONE, [AttentionCGSupport.ALWAYS], (NONE, NONE)),
        # A group of the draft supports none.
        (BOTH, PIECEWISE, [SINGLE_TOKEN, AttentionCGSupport.NEVER], (PIECEWISE, NONE)),
    ],
)
def test_other_modes(asked: Any, target: Any, supports: list[Any], wanted: tuple[Any, Any]) -> None:
    assert modes(asked, target, *supports) == wanted


def test_an_eager_draft_has_none() -> None:
    assert modes(BOTH, PIECEWISE, SINGLE_TOKEN, enforce_eager=True) == (NONE, NONE)


def test_data_parallel_ranks_have_what_stock_has() -> None:
    """A rank without a graph makes the others run eagerly, at sizes of which a builder would keep buffers."""
    assert modes(BOTH, PIECEWISE, SINGLE_TOKEN, dp_size=2) == (PIECEWISE, NONE)


@pytest.mark.parametrize(
    ("num_tokens", "disable", "whole"),
    [(2, set(), True), (1, set(), False), (2, {Behaviour.ONE_DRAFT_GRAPH}, False)],
    ids=["of the batch", "of another length", "off"],
)
def test_the_prefill_is_the_whole_phase_of_one_draft_token(
    num_tokens: int, disable: set[Behaviour], whole: bool
) -> None:
    adapter: Any = Release(BOTH, disable, enforce_eager=False, dp_size=1)
    adapter.num_speculative_steps = 1
    adapter.vllm_config.parallel_config = SimpleNamespace(enable_eplb=False)
    graph = Descriptor(FULL, num_tokens)
    adapter.prefill_cudagraph_manager = SimpleNamespace(_capture_descs={FULL: [graph]})
    adapter._phase_graphs = adapter._find_phase_graphs()
    assert adapter._decodes_in_graph_of(graph) is None
    assert adapter.holds_draft_phase(SimpleNamespace(full=True, descriptor=graph)) is whole


class Dispatching(Release):
    """Has graphs of whole draft phases for one and two requests, and notes what it dispatches."""

    def __init__(self) -> None:
        super().__init__(BOTH, set(), enforce_eager=False, dp_size=1)
        self.dispatched: list[int] = []
        self.prefill_cudagraph_manager = SimpleNamespace(graphs={})  # type: ignore[assignment]

    def graphs_captured(self) -> None:
        self._phase_graphs = {1, 2}
        self.prefill_cudagraph_manager.graphs = dict.fromkeys(self._phase_graphs)  # type: ignore[attr-defined]

    def query_len(self, batch: Any, num_tokens: int) -> int | None:
        return int(batch.query_len)

    def dispatch_prefill(self, batch: Any, num_tokens: int, num_tokens_padded: int) -> GraphRun:
        self.dispatched.append(batch.num_reqs)
        full = batch.num_reqs in self.prefill_cudagraph_manager.graphs  # type: ignore[attr-defined]
        return GraphRun(batch.num_reqs, None, full, num_tokens_padded)

    def graph_of(self, num_reqs: int, query_len: int = 4, eager: bool = False) -> Any:
        size = {"num_reqs": num_reqs, "num_tokens": 4 * num_reqs, "num_tokens_padded": 4 * num_reqs}
        run = self.phase_run(SimpleNamespace(**size, query_len=query_len, eager=eager))  # type: ignore[arg-type]
        return run and run.descriptor


def test_the_graph_of_a_batch_is_looked_up_once() -> None:
    adapter = Dispatching()
    assert adapter.graph_of(1) is None
    adapter.graphs_captured()
    assert [adapter.graph_of(number) for number in (1, 2, 1, 2, 3)] == [1, 2, 1, 2, None]
    assert adapter.graph_of(1, query_len=3) is adapter.graph_of(1, eager=True) is None
    assert adapter.dispatched == [1, 2, 3]


def test_graphs_that_were_dropped_are_not_replayed() -> None:
    adapter = Dispatching()
    adapter.graphs_captured()
    assert adapter.graph_of(1) == 1
    adapter.prefill_cudagraph_manager.graphs.clear()  # type: ignore[attr-defined]
    assert adapter.graph_of(1) is None


@pytest.mark.parametrize(
    ("target", "changed", "wanted"),
    [
        ({"last": 8}, {}, "last"),
        ({"last": 8, "aux": [8, 8]}, {}, "aux"),
        ({"last": 4, "aux": [8, 8]}, {}, "aux"),  # a draft reads one or the other
        ({"last": None}, {}, None),  # no FULL graph
        ({"last": 4}, {}, None),  # graphs of larger batches are the draft's alone
        ({"last": 8}, {"disable": {Behaviour.ONE_DRAFT_GRAPH}}, None),
        ({"last": 8}, {"stages": 2}, None),
        (None, {}, None),  # no runner of this kind
    ],
    ids=str,
)
def test_graphs_begin_with_what_the_target_left(target: Any, changed: dict[str, Any], wanted: str | None) -> None:
    adapter = Release(BOTH, changed.get("disable", set()), enforce_eager=False, dp_size=1)
    adapter.vllm_config.parallel_config = SimpleNamespace(pipeline_parallel_size=changed.get("stages", 1))
    descs = {FULL: [SimpleNamespace(num_tokens=8), SimpleNamespace(num_tokens=4)]}
    descs[PIECEWISE] = [SimpleNamespace(num_tokens=512)]
    adapter.prefill_cudagraph_manager = SimpleNamespace(_capture_descs=descs)  # type: ignore[assignment]
    if target is not None:
        last = None if target["last"] is None else torch.zeros(target["last"], 2)
        graphs = SimpleNamespace(
            hidden_states=last, aux_hidden_states=[torch.zeros(n, 2) for n in target.get("aux", ())]
        )
        adapter.target_graphs = lambda: graphs
    found = adapter._find_target_outputs()
    assert (found is not None) is (wanted is not None)
    if found is not None:
        expected = [graphs.hidden_states] if wanted == "last" else graphs.aux_hidden_states
        assert [each.data_ptr() for each in found.used] == [each.data_ptr() for each in expected]


def test_captures_find_no_batch_and_leave_none() -> None:
    """A warm-up takes the next slot: one of a batch long gone would send it to memory that is others' by now."""
    adapter: Any = Release(BOTH, set(), enforce_eager=False, dp_size=1)
    adapter.num_speculative_steps, adapter.max_num_reqs, adapter.device = 1, 4, torch.device("cpu")
    adapter.vllm_config.parallel_config = SimpleNamespace(enable_eplb=False, pipeline_parallel_size=1)
    adapter.target_input_buffers = adapter.target_attn_groups = None
    adapter.on_prefill_begin = adapter.on_prefill_end = lambda num_reqs: None
    queue = BatchQueue(adapter.device, filters=False)
    adapter.loop = SimpleNamespace(queue=queue, phase=None)
    graphs = [Descriptor(FULL, 2), Descriptor(FULL, 1)]
    bring_inputs = []

    def capture_fresh(phase: Any, make_inputs: Any, title: str, held: Any) -> None:
        assert not queue.slots.any()
        assert not queue.taken
        bring_inputs.extend(held(graph)["inputs"] for graph in graphs)
        queue.taken += 1

    adapter.prefill_cudagraph_manager = SimpleNamespace(
        _capture_descs={FULL: graphs}, use_breakable_cg=False, capture_fresh=capture_fresh
    )
    adapter.decode_cudagraph_manager = None
    queue.slots.fill_(7)
    queue.taken += 1
    adapter._phase_runs[1, 2] = "of a graph that was captured before"
    adapter.capture()
    assert not adapter._phase_runs
    assert bring_inputs == [True, False]
    assert not queue.taken
