"""Which graphs a draft has, given what was asked for, what the target got, and what the draft's backends support."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch

from vllm_eagle_mrv2.config.behaviours import Behaviour
from vllm_eagle_mrv2.config.options import Options
from vllm_eagle_mrv2.draft_length.notes import GraphTime
from vllm_eagle_mrv2.drafting import graphs, loop
from vllm_eagle_mrv2.drafting.capture import AskedGraphs, GraphManagers
from vllm_eagle_mrv2.drafting.drafter import Drafter
from vllm_eagle_mrv2.drafting.loop import GraphRun
from vllm_eagle_mrv2.drafting.phase_graphs import PhaseGraphs

from .stock import K, drafter_on, stock_speculator

pytest.importorskip("vllm.config.compilation")

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport

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
    """A graph manager that keeps its mode, and the sizes that it would capture."""

    def __init__(self, vllm_config: Any, device: Any, mode: Any, decode_query_len: int) -> None:
        self.mode, self.pool = mode, "the target's"
        self.sizes = vllm_config.compilation_config.cudagraph_capture_sizes


class Descriptor(NamedTuple):
    """Of a draft prefill's graph."""

    cg_mode: Any
    uniform_token_count: int
    num_tokens: int = 8


def drafter_for(
    asked: Any = BOTH, *, disable: set[Behaviour] | None = None, enforce_eager: bool = False, **how: Any
) -> Drafter:
    """A drafter whose builders are not there yet."""
    options = Options(disable=frozenset(disable or ()))
    stock = stock_speculator(**{"attn_groups": None, **how})
    drafter = drafter_on(stock, options=options, asked=AskedGraphs(asked, None, None), enforce_eager=enforce_eager)
    adapter: Any = drafter.adapter
    adapter.managers = GraphManagers(*[cast(Any, Manager)] * 2)
    return drafter


def take_builders(drafter: Drafter, *builders: Any, **of_group: Any) -> tuple[Any, Any]:
    """Make the draft's builders as vLLM does; returns the mode and the sizes that they see."""
    compilation = drafter.stock.vllm_config.compilation_config
    with drafter.taking_attention(None):
        drafter.stock.attn_groups = [
            [SimpleNamespace(kv_cache_spec=None, get_metadata_builder=lambda index=0, each=each: each, **of_group)]
            for each in builders
        ]
        return compilation.cudagraph_mode, compilation.cudagraph_capture_sizes


def builder(support: Any, **attributes: Any) -> Any:
    return SimpleNamespace(get_cudagraph_support=lambda vllm_config, kv_cache_spec: support, **attributes)


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
    drafter = drafter_for(
        asked, disable=set() if disable is None else {disable}, enforce_eager=enforce_eager, dp_size=dp_size
    )
    config = drafter.stock.vllm_config.compilation_config
    config.cudagraph_mode = target

    @contextmanager
    def decode_capture_sizes() -> Iterator[None]:
        config.cudagraph_capture_sizes = "of the decodes"
        yield
        config.cudagraph_capture_sizes = None

    drafter.adapter.decode_capture_sizes = decode_capture_sizes  # type: ignore[method-assign]
    if not builders_first:
        drafter.graphs.make_managers(target)
    seen = take_builders(drafter, *map(builder, supports))
    if builders_first:
        drafter.graphs.make_managers(target)
    assert config.cudagraph_mode is target
    as_stock = disable is Behaviour.DRAFT_GRAPHS_BY_SUPPORT or enforce_eager or dp_size > 1
    # A builder prepares for the sizes that its graphs will have.
    assert seen == (target if as_stock else asked, "of the decodes")
    prefill, decode = drafter.stock.prefill_cudagraph_manager, drafter.stock.decode_cudagraph_manager
    assert (prefill.sizes, decode.sizes) == (None, "of the decodes")
    return prefill.mode, decode.mode


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
    drafter = drafter_for()
    drafter.attends_by_ours, drafter.stock.block_tables.cp_size = True, changed.get("cp_size", 1)
    take_builders(drafter, builder(AttentionCGSupport.NEVER, **changed), **changed)
    drafter.graphs.make_managers(NONE)
    assert drafter.adapter.needs_no_builder is not needed
    assert (drafter.stock.decode_cudagraph_manager.mode is NONE) is needed


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (BOTH, {"the target's"}),
        (PIECEWISE, {"the target's"}),
        (NONE, {"its own"}),  # the target has no graphs that would keep the pool
    ],
)
def test_whose_memory_the_graphs_take(target: Any, expected: set[str]) -> None:
    drafter = drafter_for()
    take_builders(drafter, builder(SINGLE_TOKEN))
    drafter.graphs.make_managers(target)
    prefill, decode = drafter.stock.prefill_cudagraph_manager, drafter.stock.decode_cudagraph_manager
    assert decode.mode is DECODE_ONLY
    assert {prefill.pool, decode.pool} == expected


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
    graph: Any = Descriptor(FULL, num_tokens)
    manager = SimpleNamespace(_capture_descs={FULL: [graph], PIECEWISE: [graph]})
    drafter = drafter_for(disable=disable, num_speculative_steps=1, prefill_cudagraph_manager=manager)
    drafter.adapter.refreshes_in_graph = True
    assert drafter.graphs.find_phase_graphs() == ({graph} if whole else set())
    drafter.loop.phase_graphs = PhaseGraphs(drafter.adapter, {graph})
    assert drafter.graphs._decodes_in_graph_of(graph) is None


@pytest.fixture
def phases() -> Any:
    """A draft that may get graphs of whole phases, for one and two requests, and notes what it dispatches."""
    drafter = drafter_for(prefill_cudagraph_manager=SimpleNamespace(graphs={}))
    adapter, graphs, dispatched = drafter.adapter, drafter.stock.prefill_cudagraph_manager.graphs, []

    def dispatch_prefill(batch: Any, num_tokens: int, num_tokens_padded: int, *, uniform: bool = True) -> GraphRun:
        dispatched.append(batch.num_reqs)
        return GraphRun(None, batch.num_reqs, batch.num_reqs in graphs)  # type: ignore[arg-type]

    def captured() -> None:
        drafter.loop.phase_graphs = PhaseGraphs(adapter, {1, 2})  # type: ignore[arg-type]
        graphs.update({1: "graph", 2: "graph"})

    def graph_of(num_reqs: int, query_len: int = K + 1, eager: bool = False, drafts: int = K) -> Any:
        size = {"num_reqs": num_reqs, "num_tokens": 5 * num_reqs, "num_tokens_padded": 5 * num_reqs}
        run = drafter.loop.phase_graphs.run_for(
            SimpleNamespace(**size, query_len=query_len, eager=eager, num_draft_tokens=drafts)  # type: ignore[arg-type]
        )
        return run and run.descriptor

    adapter.query_len = lambda batch, num_tokens: batch.query_len  # type: ignore[attr-defined, method-assign]
    adapter.dispatch_prefill = dispatch_prefill  # type: ignore[method-assign]
    return SimpleNamespace(captured=captured, graph_of=graph_of, dispatched=dispatched, graphs=graphs)


def test_the_graph_of_a_batch_is_looked_up_once(phases: Any) -> None:
    assert phases.graph_of(1) is None
    phases.captured()
    assert [phases.graph_of(number) for number in (1, 2, 1, 2, 3)] == [1, 2, 1, 2, None]
    assert phases.graph_of(1, query_len=3) is phases.graph_of(1, eager=True) is phases.graph_of(1, drafts=2) is None
    assert phases.dispatched == [1, 2, 3]
    assert phases.graph_of(1, query_len=3, drafts=2) == 1
    assert phases.dispatched == [1, 2, 3, 1]


def test_graphs_that_were_dropped_are_not_replayed(phases: Any) -> None:
    phases.captured()
    assert phases.graph_of(1) == 1
    phases.graphs.clear()
    assert phases.graph_of(1) is None


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
        ({"last": 8, "width": 3}, {}, None),  # the draft is handed other states (DeepSeek V4)
        ({"last": 8, "width": 3, "aux": [8, 8]}, {}, "aux"),
        (None, {}, None),  # no runner of this kind
    ],
    ids=str,
)
def test_graphs_begin_with_what_the_target_left(target: Any, changed: dict[str, Any], wanted: str | None) -> None:
    descs = {FULL: [SimpleNamespace(num_tokens=8), SimpleNamespace(num_tokens=4)]}
    descs[PIECEWISE] = [SimpleNamespace(num_tokens=512)]
    drafter = drafter_for(
        disable=changed.get("disable"),
        parallel={"pipeline_parallel_size": changed.get("stages", 1)},
        prefill_cudagraph_manager=SimpleNamespace(_capture_descs=descs),
    )
    width = drafter.loop.buffers.hidden_states.shape[1]
    if target is not None:
        last = None if target["last"] is None else torch.zeros(target["last"], target.get("width", width))
        graphs = SimpleNamespace(
            hidden_states=last, aux_hidden_states=[torch.zeros(n, width) for n in target.get("aux", ())]
        )
        drafter.graphs.target_graphs = lambda: graphs
    found = drafter.graphs._find_target_outputs()
    assert (found is not None) is (wanted is not None)
    if found is not None:
        expected = [graphs.hidden_states] if wanted == "last" else graphs.aux_hidden_states
        assert [each.data_ptr() for each in found.used] == [each.data_ptr() for each in expected]


def test_captures_find_no_batch_and_leave_none() -> None:
    """A warm-up takes the next entry: one of a batch long gone would send it to memory that is others' by now."""
    graphs = [Descriptor(FULL, 2), Descriptor(FULL, 1)]
    fill_inputs: list[Any] = []

    def capture_fresh(phase: Any, make_inputs: Any, title: str, held: Any) -> None:
        assert not queue.entries.any()
        assert not queue.taken
        assert drafter.adapter.capturing
        fill_inputs.extend(held(graph)["fills_inputs"] for graph in graphs)
        queue.taken += 1

    manager = SimpleNamespace(_capture_descs={FULL: graphs}, use_breakable_cg=False, capture_fresh=capture_fresh)
    drafter = drafter_for(
        num_speculative_steps=1,
        prefill_cudagraph_manager=manager,
        target_input_buffers=None,
        target_attn_groups=None,
    )
    drafter.adapter.refreshes_in_graph = True
    queue = drafter.loop.queue
    queue.entries.fill_(7)
    queue.taken += 1
    drafter.loop.phase_graphs = before = PhaseGraphs(drafter.adapter)
    drafter.graphs.capture()
    assert drafter.loop.phase_graphs is not before, "it knows graphs that were captured before"
    assert fill_inputs == [True, False]
    assert not queue.taken
    whole: Any = drafter.loop.phase_graphs.descriptors
    assert whole == {graphs[0]}
    assert not drafter.adapter.capturing


@pytest.mark.parametrize(("weights", "largest"), [(0, 64), (1, 40)])
def test_draft_prefills_that_leave_their_graph_are_not_captured(
    weights: int, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They leave it where more than so many rows are not read, and at most eight are."""
    monkeypatch.setattr(loop, "_WORTH_LAUNCHING", 32)
    sizes = range(64, 0, -8)
    descs: dict[Any, list[Any]] = {mode: [Descriptor(mode, 1, size) for size in sizes] for mode in (FULL, PIECEWISE)}
    left: dict[Any, list[int]] = {}

    def capture_fresh(*given: Any) -> None:
        left.update({mode: [each.num_tokens for each in some] for mode, some in descs.items()})

    manager = SimpleNamespace(_capture_descs=descs, use_breakable_cg=False, capture_fresh=capture_fresh)
    drafter = drafter_for(prefill_cudagraph_manager=manager, max_num_reqs=8)
    drafter.loop.weights_of_read_rows = weights
    drafter.graphs._capture_prefills()
    assert left == {FULL: list(sizes), PIECEWISE: list(range(largest, 0, -8))}


@pytest.mark.parametrize(
    ("uniform", "warmed_up"), [([1, 2, 1], [1]), ([2], []), ([], [])], ids=["with none", "without", "no graphs"]
)
def test_first_drafts_after_none_are_warmed_up(
    uniform: list[int], warmed_up: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the fewest requests, and outside a graph."""

    class Sized(NamedTuple):
        cg_mode: Any
        uniform_token_count: int
        num_tokens: int

    manager = SimpleNamespace(_capture_descs={}, use_breakable_cg=False)
    drafter = drafter_for(prefill_cudagraph_manager=manager)
    drafter.stock.prefill_cudagraph_manager.capture_fresh = lambda *given: None
    graphs, passes = drafter.graphs, []
    descriptors: Any = [Sized(FULL, tokens, 4 - place) for place, tokens in enumerate(uniform)]
    monkeypatch.setattr(graphs, "find_phase_graphs", lambda: set(descriptors))
    monkeypatch.setattr(graphs, "_find_target_outputs", lambda: None)
    monkeypatch.setattr(graphs, "_dummy_prefill", lambda descriptor: Inputs(descriptor.num_tokens - 1, FULL))
    monkeypatch.setattr(drafter.loop, "prefill", lambda inputs: passes.append(inputs))
    graphs._capture_prefills()
    assert passes == [Inputs(num_reqs, NONE) for num_reqs in warmed_up]
    assert not torch.is_inference_mode_enabled()


class Phase(NamedTuple):
    """A descriptor of uniform requests."""

    num_reqs: int
    uniform_token_count: int
    salt: int

    @property
    def num_tokens(self) -> int:
        return self.num_reqs * self.uniform_token_count


@pytest.mark.parametrize("salt", range(8))
def test_graphs_are_timed(salt: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For about 1, 4, 16, 64 and 256 requests with each number of drafts, where the target has such a graph as well.

    In the same order in every process, where vLLM's descriptors have other hashes.
    """
    known = [Phase(requests, tokens, salt) for requests in (1, 2, 4, 8, 24, 32) for tokens in (1, 4)]
    target = SimpleNamespace(graphs=dict.fromkeys(set(known) - {Phase(32, 4, salt)}))
    drafter = drafter_for(prefill_cudagraph_manager=SimpleNamespace(graphs=dict.fromkeys(known)))
    drafter.stock.vllm_config.model_config = target_model = SimpleNamespace(is_moe=False)
    own, steps = drafter.graphs, []
    assert own.times() == []
    own.target_graphs = lambda: target
    assert own.times() == []
    drafter.loop.phase_graphs = PhaseGraphs(drafter.adapter, set(known))  # type: ignore[arg-type]
    monkeypatch.setattr(own, "_dummy_prefill", lambda one: steps.append((one, own.adapter.capturing)))

    def seconds_of(of_target: Any, of_draft: Any, one: Any) -> float:
        assert (of_target, of_draft) == (target, drafter.stock.prefill_cudagraph_manager)
        steps.append(one)
        drafter.loop.queue.taken += 3  # as replays do
        return float(one.num_tokens)

    monkeypatch.setattr(graphs, "seconds_of", seconds_of)
    found = own.times()
    sizes = [(1, 1), (1, 4), (4, 1), (4, 4), (24, 1), (32, 1), (24, 4)]
    assert found == [GraphTime(requests, tokens - 1, requests * tokens) for requests, tokens in sizes]
    assert steps == list(
        itertools.chain.from_iterable(((Phase(*size, salt), True), Phase(*size, salt)) for size in sizes)
    )
    assert not own.adapter.capturing
    assert not drafter.loop.queue.taken
    target_model.is_moe = True
    assert own.times() == [], "dummy tokens take few experts or none"


class Inputs(NamedTuple):
    num_reqs: int
    mode: Any
