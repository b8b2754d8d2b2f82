"""All draft decodes in one pass, and in one graph, on a CPU.

Its backend is given the refresh that it lacks, and a graph is the pass itself, run again on what was captured.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import Acceptance, engine, greedy, has_cuda, held_out_prompts, runner_of, speculator_of

from vllm_eagle_mrv2.config.behaviours import Behaviour
from vllm_eagle_mrv2.drafting.loop import ForwardInputs
from vllm_eagle_mrv2.releases import installed_release, installed_version
from vllm_eagle_mrv2.telemetry.counters import read_counts
from vllm_eagle_mrv2.telemetry.start_line import Facts

from .fake_graphs import SIZES, Draw

fused = pytest.importorskip("vllm_eagle_mrv2.releases.fused", exc_type=ImportError)
pytestmark = pytest.mark.skipif(has_cuda(), reason="tests/gpu captures graphs")

K = 4
TOKENS = 16
PROMPTS = held_out_prompts(5)
STOCK_SCHEDULE = installed_release().supplier(Behaviour.DYNAMIC_DRAFT_LENGTH, installed_version()) == "stock"


@pytest.fixture(autouse=True)
def backend_that_refreshes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As FlashAttention's: tensors that the metadata refers to are persistent, the schedule is made anew."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder as Builder

    def refresh(self: Any, metadata: Any) -> None:
        metadata.scheduler_metadata = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=metadata.seq_lens.shape[0],
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            seq_lens=metadata.seq_lens,
            dtype=self.dtype,
            query_start_loc=metadata.query_start_loc,
            causal=metadata.causal,
            sliding_window_size=self.window_size,
            isa=self.isa,
            enable_kv_split=False,
            dynamic_causal=None,
            kv_cache_dtype=self.kv_cache_dtype,
        )

    monkeypatch.setattr(Builder, "supports_draft_decode_metadata_update", True)
    monkeypatch.setattr(Builder, "update_draft_decode_metadata", refresh)


@pytest.fixture
def complete_refresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below 0.32 only some backends are known to need no build by the host before a replay."""
    from vllm_eagle_mrv2.releases import autoregressive

    builder = "vllm.v1.attention.backends.cpu_attn.CPUAttentionMetadataBuilder"
    monkeypatch.setattr(autoregressive, "_REFRESH_IS_COMPLETE", {builder})


@pytest.fixture(scope="module")
def by_steps() -> list[float]:
    """Acceptance by position where the host builds the metadata of every step."""
    with engine("eagle_mrv2", k=K) as llm:
        assert not speculator_of(llm).drafter.adapter.refreshes_in_graph
        acceptance = Acceptance(llm)
        greedy(llm, PROMPTS, TOKENS)
        return acceptance.by_position


@pytest.fixture
def draft_phase_graphs(monkeypatch: pytest.MonkeyPatch, draft_decode_graphs: Draw) -> Draw:
    """Captures draft prefills as well; returns the descriptors of the prefill graphs replayed from then on.

    This backend makes new metadata for each batch, so a replayed prefill is given that of the batch; what follows it in
    the graph runs on what was captured.
    """
    from vllm.config.compilation import CUDAGraphMode

    replayed: list[Any] = []

    def draw(llm: Any) -> list[Any]:
        speculator = speculator_of(llm)
        draft_decode_graphs(llm)
        compilation = speculator.vllm_config.compilation_config
        sizes = [size * (K + 1) for size in SIZES]
        compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = [*SIZES, *sizes], sizes[-1]
        speculator.init_cudagraph_manager(CUDAGraphMode.FULL_DECODE_ONLY)
        # Where a target's graphs would leave what the draft starts from.
        rows, layers = (
            torch.zeros(sizes[-1], speculator.hidden_size),
            3 * (speculator.drafter.settings.family == "eagle3"),
        )
        outputs = SimpleNamespace(hidden_states=rows, aux_hidden_states=[rows.clone() for _ in range(layers)])
        speculator.drafter.graphs.target_graphs = lambda: outputs
        loop, propose = speculator.drafter.loop, speculator.drafter.loop.propose
        given: dict[Any, dict[str, Any]] = {}
        batches: list[Any] = []
        capture_fresh = speculator.prefill_cudagraph_manager.capture_fresh

        def capturing(forward: Any, make_inputs: Any, label: str, arguments: Any) -> None:
            def kept(descriptor: Any) -> dict[str, Any]:
                given[descriptor] = arguments(descriptor)
                return given[descriptor]

            capture_fresh(forward, make_inputs, label, kept)

        def proposing(batch: Any) -> Any:
            batches[:] = [batch]
            return propose(batch)

        def replaying(graph: Any) -> None:
            [batch] = batches
            replayed.append(graph)
            metadata = (batch.attn_metadata, batch.slot_mappings)
            inputs = ForwardInputs(graph.num_reqs, batch.num_tokens, *metadata, None, CUDAGraphMode.NONE)
            loop.phase(inputs, **given[graph])

        monkeypatch.setattr(speculator.prefill_cudagraph_manager, "capture_fresh", capturing)
        monkeypatch.setattr(loop, "propose", proposing)
        monkeypatch.setattr(speculator.prefill_cudagraph_manager, "run_fullgraph", replaying)
        with torch.inference_mode():
            speculator.capture()
        replayed.clear()
        return replayed

    return draw


@dataclass
class Slots:
    """What `recorded` saw at every refresh."""

    right: list[bool] = field(default_factory=list)
    """Of live rows: whether keys and values go where the position belongs."""
    padding: list[list[int]] = field(default_factory=list)
    """Of padded rows: their slots, and their request states."""


def recorded(speculator: Any) -> Slots:
    """The slots of every refresh from now on; filled as they come."""
    slots = Slots()
    loop, adapter, tables = speculator.drafter.loop, speculator.drafter.adapter, speculator.block_tables
    live = 0

    def begin(batch: Any, original: Any = adapter.begin_decode) -> None:
        nonlocal live
        original(batch)
        live = batch.num_reqs

    def refresh(inputs: Any) -> Any:
        refreshed = original(inputs)
        block_size = tables.block_sizes[0]
        for row in range(live):
            position = int(loop.buffers.positions[row])
            block = int(tables.input_block_tables[0][row, position // block_size])
            slots.right.append(int(tables.slot_mappings[0, row]) == block * block_size + position % block_size)
        slots.padding.append(tables.slot_mappings[0, live : inputs.num_tokens].tolist())
        slots.padding.append(loop.buffers.idx_mapping[live : inputs.num_reqs].tolist())
        return refreshed

    original = adapter.refresh_decode_metadata
    adapter.begin_decode, adapter.refresh_decode_metadata = begin, refresh
    return slots


def test_one_pass_without_graphs(plain: list[list[int]], by_steps: list[float]) -> None:
    with engine("eagle_mrv2", k=K) as llm:
        speculator = speculator_of(llm)
        assert speculator.drafter.adapter.refreshes_in_graph
        acceptance, slots = Acceptance(llm), recorded(speculator)
        assert greedy(llm, PROMPTS, TOKENS) == plain
        assert slots.right
        assert all(slots.right)
        assert acceptance.by_position == pytest.approx(by_steps, abs=0.03)


@pytest.mark.parametrize("how", ["complete", "rebuilt"])
def test_one_graph(
    how: str,
    plain: list[list[int]],
    by_steps: list[float],
    draft_decode_graphs: Draw,
    request: pytest.FixtureRequest,
) -> None:
    if how == "complete":
        request.getfixturevalue("complete_refresh")
    with engine("eagle_mrv2", k=K) as llm:
        speculator = speculator_of(llm)
        replayed = draft_decode_graphs(llm)
        built: list[int] = []
        adapter = speculator.drafter.adapter
        build = adapter.build_by_builders

        def building(batch: Any, run: Any, step: int) -> Any:
            built.append(step)
            return build(batch, run, step)

        adapter.build_by_builders = building
        acceptance, slots = Acceptance(llm), recorded(speculator)
        assert greedy(llm, PROMPTS, TOKENS) == plain
        assert slots.right
        assert all(slots.right)
        assert acceptance.by_position == pytest.approx(by_steps, abs=0.03)
        # Five requests in a graph of eight: three rows of padding, whose keys, values and logits go nowhere.
        assert {descriptor.num_reqs for descriptor in replayed} >= {8}
        assert [-1] * 3 in slots.padding
        assert all(set(rows) <= {-1} for rows in slots.padding)
        if STOCK_SCHEDULE or how == "complete":
            assert built == []
        else:
            assert built == [1] * len(replayed)


def test_one_graph_combines_the_states_of_several_layers(
    plain: list[list[int]], draft_phase_graphs: Draw, complete_refresh: None
) -> None:
    found = []
    for graphs in (False, True):
        with engine("eagle_mrv2", family="eagle3", k=K) as llm:
            if graphs:
                replayed, speculator = draft_phase_graphs(llm), speculator_of(llm)
                assert len(speculator.drafter.loop.target_outputs.used) == 3
            acceptance = Acceptance(llm)
            assert greedy(llm, PROMPTS, TOKENS) == plain
            found.append(acceptance.by_position)
    assert {descriptor.num_reqs for descriptor in replayed} >= {8}
    assert found[1] == pytest.approx(found[0], abs=0.03)


@pytest.mark.parametrize("disable", [[], ["one_draft_graph"]])
def test_one_graph_for_prefill_and_decodes(
    disable: list[str],
    plain: list[list[int]],
    by_steps: list[float],
    draft_phase_graphs: Draw,
    complete_refresh: None,
) -> None:
    with engine("eagle_mrv2", k=K, options={"disable": disable}) as llm:
        speculator = speculator_of(llm)
        replayed = draft_phase_graphs(llm)
        facts = Facts.of(speculator.drafter)
        assert (Behaviour.ONE_DRAFT_GRAPH in facts.active) is not bool(disable)
        assert facts.fused
        assert not list(facts.warnings())
        before = dict(read_counts())[0].phases
        dispatched: list[int] = []
        adapter = speculator.drafter.adapter
        dispatch, dispatch_prefill = adapter.dispatch_decode, adapter.dispatch_prefill
        prefills: list[tuple[int, int]] = []

        def dispatching(batch: Any) -> Any:
            dispatched.append(batch.num_tokens // batch.num_reqs)
            return dispatch(batch)

        def dispatching_prefill(batch: Any, *tokens: Any, **how: Any) -> Any:
            prefills.append((batch.num_reqs, batch.num_tokens))
            return dispatch_prefill(batch, *tokens, **how)

        adapter.dispatch_decode, adapter.dispatch_prefill = dispatching, dispatching_prefill
        acceptance = Acceptance(llm)
        assert greedy(llm, PROMPTS, TOKENS) == plain
        assert acceptance.by_position == pytest.approx(by_steps, abs=0.03)
        # Five requests in a graph of eight: three rows of padding.
        assert {descriptor.num_reqs for descriptor in replayed} >= {8}
        took = {path for path, count in dict(read_counts())[0].phases.items() if count > before[path]}
        assert took == ({"fused"} if disable else {"one_graph", "fused"})
        # Prompts go through a prefill alone, and then through draft decodes.
        assert dispatched
        assert (K + 1 in dispatched) is bool(disable)
        # Which graph is of a size is asked once.
        whole = [size for size in prefills if size[1] == size[0] * (K + 1)]
        assert (len(whole) == len(set(whole))) is not bool(disable)


def test_one_graph_keeps_the_logits_of_live_rows(draft_phase_graphs: Draw, complete_refresh: None) -> None:
    method = {"draft_sample_method": "probabilistic"}
    with engine("eagle_mrv2", k=K, speculative=method) as llm:
        speculator, unwritten = speculator_of(llm), 123.0
        replayed = draft_phase_graphs(llm)
        # As an earlier batch could have left it; greedy rows store nothing.
        speculator.drafter.loop.buffers.idx_mapping.fill_(0)
        speculator.temperature.fill_(0.8)
        speculator.draft_logits.fill_(unwritten)
        greedy(llm, PROMPTS[:3], 8, temperature=0.8, seed=3)
        assert {descriptor.num_reqs for descriptor in replayed} >= {4}
        written = (speculator.draft_logits != unwritten).any(dim=-1)
        assert int(written[:, 0].sum()) == 3
        assert bool((written == written[:, :1]).all())


def test_logits_of_padded_rows_go_nowhere(draft_decode_graphs: Draw) -> None:
    with engine("eagle_mrv2", k=K, speculative={"draft_sample_method": "probabilistic"}) as llm:
        speculator, unwritten = speculator_of(llm), 123.0
        replayed = draft_decode_graphs(llm)
        speculator.draft_logits.fill_(unwritten)
        greedy(llm, PROMPTS[:3], 8, temperature=0.8, seed=3)
        assert {descriptor.num_reqs for descriptor in replayed} >= {4}
        written = (speculator.draft_logits != unwritten).any(dim=-1)
        assert int(written[:, 0].sum()) == 3
        assert bool((written == written[:, :1]).all())


def test_a_graph_for_each_number_of_draft_tokens(plain: list[list[int]], draft_decode_graphs: Draw) -> None:
    schedule = {"num_speculative_tokens_per_batch_size": [(1, 2, K), (3, 8, 2)]}
    with engine("eagle_mrv2", k=K, speculative=schedule) as llm:
        replayed = draft_decode_graphs(llm)
        for prompts, wanted in ((PROMPTS, 2), (PROMPTS[:2], K)):
            replayed.clear()
            assert greedy(llm, prompts, TOKENS) == plain[: len(prompts)]
            drafted = {(descriptor.num_reqs > 2, descriptor.num_draft_tokens) for descriptor in replayed}
            assert (len(prompts) > 2, wanted) in drafted
            assert drafted <= {(True, 2), (False, K)}


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_a_dummy_run_touches_no_request(graphs: bool, draft_decode_graphs: Draw) -> None:
    from .test_dummy_runs import draft_state

    with engine("eagle_mrv2", k=K, speculative={"draft_sample_method": "probabilistic"}) as llm:
        speculator = speculator_of(llm)
        replayed = draft_decode_graphs(llm) if graphs else []
        greedy(llm, PROMPTS, 6)
        replayed.clear()
        before = draft_state(speculator)
        runner_of(llm)._dummy_run(4 * (K + 1), uniform_decode=True)
        assert len(replayed) == int(graphs)
        assert all(torch.equal(*pair) for pair in zip(before, draft_state(speculator), strict=True))
