"""The draft loop on an adapter made for it: what it asks for, in which order, and which tokens come out."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from vllm_eagle_mrv2.batch.buffers import DraftBatch, DraftBuffers, SlotTable, TargetStates
from vllm_eagle_mrv2.config.behaviours import Behaviour
from vllm_eagle_mrv2.config.options import Options
from vllm_eagle_mrv2.drafting import loop as loop_module
from vllm_eagle_mrv2.drafting.defects import loop_class
from vllm_eagle_mrv2.drafting.loop import DraftLoop, ForwardInputs, GraphRun, LoopConfig
from vllm_eagle_mrv2.telemetry.counters import FOLDER_VARIABLE, PATHS, DraftCounter, read_counts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PRIME = 101  # tokens and hidden states of the toy model are residues
MAX_LEN = 64  # max_model_len
MAX_NUM_REQS = 6
MAX_NUM_TOKENS = 48

pytestmark = [
    pytest.mark.skipif(
        DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="no GPU, and Triton is not interpreted"
    ),
    pytest.mark.any_release,
]


def toy_model(token: Any, position: Any, state: Any) -> tuple[Any, Any]:
    """The draft model, on numbers or on tensors: the state for the head, and the one for the next step."""
    for_head = (31 * token + 7 * position + 3 * state + 1) % PRIME
    return for_head, (5 * for_head + 2) % PRIME


def toy_sampler(for_head: Any, position: Any) -> Any:
    return (for_head + 13 * position) % PRIME


@dataclass
class Row:
    """One request of a batch."""

    tokens: list[int]
    start: int  # position of the first token
    rejected: int = 0
    following: int = 9  # the sampled token, or the next one of a prompt
    sampled: bool = True

    @property
    def kept(self) -> int:
        return len(self.tokens) - self.rejected

    @property
    def length(self) -> int:
        """The sequence's length in the target's batch, rejected tokens included."""
        return self.start + len(self.tokens)


ROWS = [
    Row([3, 4, 5, 6], start=10, rejected=2, following=50),
    Row([11, 12, 13, 14, 15], start=0, following=51, sampled=False),
    Row([21], start=30, following=52),
    Row([22, 23], start=MAX_LEN - 3, following=53),
]


def target_state(row: int, token: int) -> int:
    return (17 * row + 29 * token + 4) % PRIME


def expected_drafts(rows: list[Row], num_draft_tokens: int, sample_offset: int) -> list[list[int]]:
    """What the loop computes, unrolled for one request after the other."""
    drafts = []
    for number, row in enumerate(rows):
        position, token = row.start + row.kept - 1, row.following
        sample_position = position + sample_offset
        for_head, state = toy_model(token, position, target_state(number, row.kept - 1))
        token = toy_sampler(for_head, sample_position)
        drafted = [token]
        for _ in range(num_draft_tokens - 1):
            position, sample_position = min(position + 1, MAX_LEN - 1), sample_position + 1
            for_head, state = toy_model(token, position, state)
            token = toy_sampler(for_head, sample_position)
            drafted.append(token)
        drafts.append(drafted)
    return drafts


def batch_of(rows: list[Row], num_draft_tokens: int, **changes: Any) -> DraftBatch:
    def ints(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    lengths = [len(row.tokens) for row in rows]
    states = [MAX_NUM_REQS - 1 - number for number in range(len(rows))]  # batch row -> request state
    last_sampled, next_prefill = [PRIME] * MAX_NUM_REQS, [PRIME] * MAX_NUM_REQS
    for row, state in zip(rows, states, strict=True):
        (last_sampled if row.sampled else next_prefill)[state] = row.following
    hidden = [target_state(number, token) for number, length in enumerate(lengths) for token in range(length)]
    batch = DraftBatch(
        num_reqs=len(rows),
        num_tokens=sum(lengths),
        num_tokens_padded=sum(lengths) + 3,
        num_draft_tokens=num_draft_tokens,
        input_ids=ints([token for row in rows for token in row.tokens] + [0] * 3),
        positions=ints([row.start + i for row in rows for i in range(len(row.tokens))] + [0] * 3, torch.int64),
        query_start_loc=ints([sum(lengths[:number]) for number in range(len(rows) + 1)]),
        seq_lens=ints([row.length for row in rows]),
        # An upper bound, in a buffer that goes on after the batch with what an earlier one left.
        seq_lens_cpu_upper_bound=torch.tensor([row.length for row in rows] + [MAX_LEN], dtype=torch.int32),
        idx_mapping=ints(states),
        target_states=TargetStates(ints([*hidden, *[0] * 3], torch.int64).float()[:, None].repeat(1, 2)),
        num_sampled=ints([int(row.sampled) for row in rows]),
        num_rejected=ints([row.rejected for row in rows]),
        last_sampled=ints(last_sampled, torch.int64),
        next_prefill_tokens=ints(next_prefill),
        temperature=torch.zeros(MAX_NUM_REQS, device=DEVICE),
        seeds=torch.zeros(MAX_NUM_REQS, dtype=torch.int64, device=DEVICE),
        attn_metadata="the target's metadata",
        slot_mappings="the target's slots",
    )
    return replace(batch, **changes)


def make_buffers(num_draft_tokens: int) -> DraftBuffers:
    """Buffers that an earlier batch has used."""

    def used(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.full(shape, 1, dtype=dtype, device=DEVICE)

    return DraftBuffers(
        input_ids=used(MAX_NUM_TOKENS, dtype=torch.int32),
        positions=used(MAX_NUM_TOKENS),
        query_start_loc=used(MAX_NUM_REQS + 1, dtype=torch.int32),
        seq_lens=used(MAX_NUM_REQS, dtype=torch.int32),
        idx_mapping=used(MAX_NUM_REQS, dtype=torch.int32),
        temperature=used(MAX_NUM_REQS, dtype=torch.float32),
        seeds=used(MAX_NUM_REQS),
        hidden_states=used(MAX_NUM_TOKENS, 2, dtype=torch.float32),
        last_token_indices=used(MAX_NUM_REQS),
        sample_positions=used(MAX_NUM_REQS),
        draft_tokens=used(MAX_NUM_REQS, num_draft_tokens),
        draft_step=used(MAX_NUM_REQS),
        num_rejected=used(MAX_NUM_REQS, dtype=torch.int32),
        live_reqs=used(dtype=torch.int32),
        top_k=used(MAX_NUM_REQS, dtype=torch.int32),
        top_p=used(MAX_NUM_REQS, dtype=torch.float32),
    )


class Mode(Enum):
    """Of CUDA graphs."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2


class Graph(NamedTuple):
    """Descriptor of a toy's graph."""

    name: str
    num_tokens: int
    cg_mode: Mode


def inputs_of(num_reqs: int = len(ROWS), mode: Any = Mode.NONE) -> ForwardInputs:
    return ForwardInputs(num_reqs, num_reqs, "metadata", "slots", None, mode)


@dataclass
class ToyAdapter:
    """A `ReleaseAdapter` that writes down what it is asked for; its graphs are passes over padded batches."""

    refreshes_in_graph: bool = False
    full_graphs: bool = False
    piecewise_prefills: bool = False
    fused_in_graphs_only: bool = False  # decodes that run outside a graph go by steps
    one_graph: bool = False  # the graph of a draft prefill goes on with the decodes
    one_state: bool = False  # the head and the next step get the same hidden states
    max_seq_len: int = -1
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    lengths_at_builds: list[list[int]] = field(default_factory=list)
    positions_at_builds: list[list[int]] = field(default_factory=list)
    sampled: list[tuple[int, bool]] = field(default_factory=list)  # draft_step, whether its logits are kept
    inputs: list[ForwardInputs] = field(default_factory=list)  # of each forward pass
    rows_read: list[list[int] | None] = field(default_factory=list)  # the only ones of each forward pass
    combined: list[str] = field(default_factory=list)
    in_replay: bool = False
    captured_for: int = field(init=False)  # draft tokens of the batches that its graphs are for
    loop: DraftLoop = field(init=False)

    @property
    def hooks(self) -> ToyAdapter:
        return self

    @property
    def attention_inputs(self) -> list[tuple[Any, Any]]:
        """Metadata and slots of each forward pass."""
        return [(each.attn_metadata, each.slot_mappings) for each in self.inputs]

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]

    def limit_lengths(self, max_seq_len: int) -> None:
        self.max_seq_len = max_seq_len

    def decodes_fused(self, run: GraphRun) -> bool:
        graph: Any = run.descriptor
        assert graph.name == "decode graph"
        return self.refreshes_in_graph and (run.full or not self.fused_in_graphs_only)

    def run_for(self, batch: DraftBatch) -> GraphRun | None:
        """As `PhaseGraphs`."""
        return self._run("phase graph", batch.num_tokens_padded) if self else None

    def __bool__(self) -> bool:
        return self.one_graph and self.full_graphs

    def _run(self, name: str, num_tokens: int) -> GraphRun:
        mode = Mode.FULL if self.full_graphs else Mode.NONE
        manager: Any = self
        graph: Any = Graph(name, num_tokens, mode)
        return GraphRun(manager, graph, self.full_graphs, f"across DP, {name}")

    def combine(self, states: TargetStates, num_tokens: int) -> torch.Tensor:
        self.combined.append("in replay" if self.in_replay else "eager")
        combined: torch.Tensor = sum(states.aux) if states.aux else states.last  # type: ignore[assignment]
        return combined[:num_tokens]

    def begin_prefill(self, batch: DraftBatch) -> tuple[int, int]:
        self.calls.append(("begin_prefill",))
        return batch.num_tokens, batch.num_tokens_padded

    def dispatch_prefill(
        self, batch: DraftBatch, num_tokens: int, num_tokens_padded: int, *, uniform: bool
    ) -> GraphRun:
        assert uniform != bool(self.loop.phase_graphs), "a graph for uniform batches contains the whole phase"
        self.calls.append(("dispatch_prefill", num_tokens, num_tokens_padded))
        run = self._run("prefill graph", num_tokens_padded)
        if not self.piecewise_prefills:
            return run
        graph: Any = run.descriptor
        return replace(run, descriptor=graph._replace(cg_mode=Mode.PIECEWISE))

    def dispatch_decode(self, batch: DraftBatch) -> GraphRun:
        self.calls.append(("dispatch_decode",))
        return self._run("decode graph", batch.num_reqs)

    def on_prefill_begin(self, num_reqs: int) -> None:
        self.calls.append(("on_prefill_begin", num_reqs))

    def on_prefill_end(self, num_reqs: int) -> None:
        self.calls.append(("on_prefill_end", num_reqs))

    def on_multi_step_decode_begin(self, num_reqs: int) -> None:
        self.calls.append(("on_multi_step_decode_begin", num_reqs))

    def on_multi_step_decode_end(self, num_reqs: int) -> None:
        self.calls.append(("on_multi_step_decode_end", num_reqs))

    def before_forward(self, num_tokens: int) -> None:
        if not self.in_replay:
            self.calls.append(("before_forward", num_tokens))

    def run_draft_model(self, inputs: ForwardInputs) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.append(("forward", "in replay" if self.in_replay else "eager"))
        self.inputs.append(inputs)
        read = self.loop.rows_read.now()
        self.rows_read.append(None if read is None else read.tolist())
        buffers, rows = self.loop.buffers, inputs.num_tokens
        tokens, positions = buffers.input_ids[:rows, None], buffers.positions[:rows, None]
        for_head, for_next_step = toy_model(tokens, positions, buffers.hidden_states[:rows])
        return for_head, for_head if self.one_state else for_next_step

    def sample(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self._sample(hidden_states, stored=True)

    def sample_unstored(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self._sample(hidden_states, stored=False)

    def _sample(self, hidden_states: torch.Tensor, stored: bool) -> torch.Tensor:
        buffers = self.loop.buffers
        self.sampled.append((int(buffers.draft_step[0]), stored))
        drafts: torch.Tensor = toy_sampler(hidden_states[:, 0].long(), buffers.sample_positions[: len(hidden_states)])
        return drafts

    def rebuild_prefill_metadata(self, batch: DraftBatch, run: GraphRun) -> tuple[Any, Any]:
        self.calls.append(("rebuild_prefill_metadata",))
        return "the draft's metadata", "the draft's slots"

    def begin_decode(self, batch: DraftBatch) -> None:
        self.calls.append(("begin_decode",))

    def build_decode_metadata(self, batch: DraftBatch, run: GraphRun, step: int) -> tuple[Any, Any]:
        self.calls.append(("build_decode_metadata", step))
        self._look(batch.num_reqs)
        return f"metadata {step}", f"slots {step}"

    def map_decode_slots(self, num_reqs: int, num_tokens: int) -> None:
        self.calls.append(("map_decode_slots",))

    def refresh_decode_metadata(self, inputs: ForwardInputs) -> Any:
        self.calls.append(("refresh_decode_metadata",))
        self._look(len(ROWS))
        return f"refreshed {len(self.named('refresh_decode_metadata'))}"

    def _look(self, num_reqs: int) -> None:
        self.lengths_at_builds.append(self.loop.buffers.seq_lens[:num_reqs].tolist())
        self.positions_at_builds.append(self.loop.buffers.positions[:num_reqs].tolist())

    def prepare_fused_replay(self, batch: DraftBatch, run: GraphRun) -> None:
        self.calls.append(("prepare_fused_replay",))

    def run_fullgraph(self, graph: Graph) -> None:
        self.calls.append(("replay", graph.name))
        self.in_replay = True
        loop, rows = self.loop, MAX_NUM_REQS
        full: Any = Mode.FULL
        decodes = ForwardInputs(rows, rows, "captured metadata", None, None, full)
        if graph.name == "decode graph":
            (loop.decode_all if self.refreshes_in_graph else loop.decode)(decodes, self.captured_for)
        else:
            prefill = ForwardInputs(rows, MAX_NUM_TOKENS, None, None, None, full)
            whole: dict[str, Any] = {"fills_inputs": True, "decodes": decodes} if self.one_graph else {}
            loop.phase(prefill, num_draft_tokens=self.captured_for, states=loop.target_outputs, **whole)
        self.in_replay = False


def loop_on(
    adapter: ToyAdapter, num_draft_tokens: int = 4, *, disable: Behaviour | None = None, sample_offset: int = 0
) -> DraftLoop:
    options = Options(disable=frozenset() if disable is None else frozenset({disable}))
    config = LoopConfig(MAX_LEN, sample_offset, filters=False)
    adapter.captured_for = num_draft_tokens
    loop = adapter.loop = loop_class(options)(adapter, config, make_buffers(num_draft_tokens))  # type: ignore[arg-type]
    loop.phase_graphs = adapter  # type: ignore[assignment]
    return loop


# The tokens


@pytest.mark.parametrize("sample_offset", [0, 1])
@pytest.mark.parametrize("full_graphs", [False, True], ids=["eager", "replay"])
@pytest.mark.parametrize("refreshes", [False, True], ids=["by steps", "fused"])
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 4], ids="K={}".format)
def test_drafts(num_draft_tokens: int, refreshes: bool, full_graphs: bool, sample_offset: int) -> None:
    loop = loop_on(ToyAdapter(refreshes, full_graphs), num_draft_tokens, sample_offset=sample_offset)
    for rows in (ROWS, ROWS[::-1][:2]):  # buffers of the first batch must not show in the second
        drafts = loop.propose(batch_of(rows, num_draft_tokens))
        assert drafts.tolist() == expected_drafts(rows, num_draft_tokens, sample_offset)


@pytest.mark.parametrize(
    ("adapter", "num_draft_tokens", "path"),
    [
        ({"refreshes_in_graph": True, "full_graphs": True, "one_graph": True}, 4, "one_graph"),
        ({"refreshes_in_graph": True, "full_graphs": True}, 4, "fused"),
        ({"full_graphs": True}, 4, "by_steps"),
        ({}, 4, "eager"),
        ({"refreshes_in_graph": True}, 2, "eager"),
        ({"full_graphs": True}, 1, "prefill_only"),
        ({}, 0, "prefill_only"),
    ],
    ids=str,
)
def test_phases_are_counted_by_path(
    adapter: dict[str, Any], num_draft_tokens: int, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    loop = loop_on(ToyAdapter(**adapter), max(num_draft_tokens, 1))
    loop.counter = DraftCounter.of_rank(0)
    for changes in ({}, {"dummy_run": True}, {}):
        loop.propose(batch_of(ROWS, num_draft_tokens, **changes))
    ((_, counts),) = read_counts()
    assert counts.phases == {name: 2 * (name == path) for name in PATHS}
    assert counts.draft_length == num_draft_tokens


def with_aux(states: TargetStates) -> TargetStates:
    """The same, of three layers; another last layer that no draft may read."""
    parts = [states.last - 3, torch.ones_like(states.last), torch.full_like(states.last, 2)]
    return TargetStates(torch.full_like(states.last, 999), parts)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("full_graphs", [False, True], ids=["eager", "replay"])
@pytest.mark.parametrize("one_graph", [False, True], ids=["prefill alone", "whole phase"])
def test_states_of_the_target(one_graph: bool, full_graphs: bool, layers: int) -> None:
    """Graphs take them where the target's graphs leave them; those of a target without a graph are brought there."""
    adapter = ToyAdapter(refreshes_in_graph=True, full_graphs=full_graphs, one_graph=one_graph)
    loop = loop_on(adapter)
    outputs = TargetStates(torch.full((MAX_NUM_TOKENS, 2), 77.0, device=DEVICE))
    outputs = loop.target_outputs = outputs if layers == 1 else with_aux(outputs)
    for rows in (ROWS, ROWS[::-1][:2]):
        for by_a_graph in (False, True):
            batch = batch_of(rows, 4)
            if layers == 3:
                batch.target_states = with_aux(batch.target_states)
            if by_a_graph:
                for output, left in zip(outputs.used, batch.target_states.used, strict=True):
                    output[: len(left)] = left
                batch.target_states = outputs
            assert loop.propose(batch).tolist() == expected_drafts(rows, 4, 0)
    assert set(adapter.combined) == {"in replay" if full_graphs else "eager"}


def test_drafts_are_a_view_of_the_persistent_buffer() -> None:
    loop = loop_on(ToyAdapter())
    assert loop.propose(batch_of(ROWS, 4)).data_ptr() == loop.buffers.draft_tokens.data_ptr()


def test_only_the_last_rows_of_a_prefill_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decodes after it read all of theirs."""
    monkeypatch.setattr(loop_module, "_WORTH_PICKING", 0)
    adapter = ToyAdapter()
    loop = loop_on(adapter)
    loop.weights_of_read_rows = 1
    for rows in (ROWS[:1], ROWS[:2]):
        assert loop.propose(batch_of(rows, 3))[:, :3].tolist() == expected_drafts(rows, 3, 0)
    assert adapter.rows_read == [[1], None, None, [1, 8], None, None]  # of the tokens that were kept


@pytest.mark.parametrize(
    ("num_reqs", "tokens_each", "mode", "weights", "picks"),
    [
        (1, 1, Mode.FULL, 1, True),
        (1, 1, Mode.NONE, 1, True),
        (1, 1, Mode.PIECEWISE, 1, False),
        (1, 1, Mode.NONE, 0, False),
        (2, 4, Mode.NONE, 1, False),
        (2, 4, Mode.NONE, 10, True),
        (2, 4, Mode.FULL, 10, True),
        (2, 4, Mode.PIECEWISE, 10, False),
        (2, 1, Mode.NONE, 1000, False),
    ],
)
def test_when_rows_are_picked(
    num_reqs: int, tokens_each: int, mode: Mode, weights: int, picks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in a PIECEWISE graph, which any number of requests may replay, and several only where it saves enough."""
    monkeypatch.setattr(loop_module, "_WORTH_PICKING", 50)
    loop = loop_on(ToyAdapter())
    loop.weights_of_read_rows = weights
    with loop._reading(inputs_of(num_reqs, mode)._replace(num_tokens=num_reqs * tokens_each), drafts=True):
        assert (loop.rows_read.now() is not None) is picks
    assert loop.rows_read.now() is None


@pytest.mark.parametrize(
    ("weights", "drafts", "mode", "read"),
    [
        (9, 3, Mode.PIECEWISE, None),
        (10, 3, Mode.NONE, [1, 8]),
        (7, 0, Mode.PIECEWISE, None),
        (8, 0, Mode.NONE, []),
    ],
)
def test_a_prefill_leaves_its_graph_where_that_computes_much_for_nothing(
    weights: int, drafts: int, mode: Mode, read: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 12 tokens, padding included, two are read, or none."""
    monkeypatch.setattr(loop_module, "_WORTH_PICKING", 0)
    monkeypatch.setattr(loop_module, "_WORTH_LAUNCHING", 95)
    adapter = ToyAdapter(piecewise_prefills=True)
    loop = loop_on(adapter)
    loop.weights_of_read_rows = weights
    drafted = loop.propose(batch_of(ROWS[:2], drafts))[:, :drafts]
    assert drafted.tolist() == [row[:drafts] for row in expected_drafts(ROWS[:2], drafts, 0)]
    prefill: Any = adapter.inputs[0]
    assert (prefill.num_tokens, prefill.mode, adapter.rows_read[0]) == (12, mode, read)


@pytest.mark.parametrize(
    ("mode", "weights", "read"),
    [(Mode.FULL, 1, []), (Mode.NONE, 1, []), (Mode.PIECEWISE, 1, None), (Mode.NONE, 0, None)],
)
def test_no_row_is_read_where_nothing_is_drafted(mode: Mode, weights: int, read: list[int] | None) -> None:
    adapter = ToyAdapter()
    loop = loop_on(adapter)
    loop.weights_of_read_rows = weights
    loop.prefill(inputs_of(2, mode), drafts=False)
    assert adapter.rows_read == [read]


def test_a_model_with_one_hidden_state_for_both() -> None:
    adapter = ToyAdapter(one_state=True)
    loop_on(adapter).propose(batch_of(ROWS, 4))
    # The toy of one state, unrolled for the first request.
    row, drafted = ROWS[0], []
    token, position, state = row.following, row.start + row.kept - 1, target_state(0, row.kept - 1)
    for _ in range(4):
        state, _ = toy_model(token, position, state)
        token = toy_sampler(state, position)
        drafted.append(token)
        position += 1
    assert adapter.loop.buffers.draft_tokens[0].tolist() == drafted


@pytest.mark.parametrize("refreshes", [False, True], ids=["by steps", "fused"])
@pytest.mark.parametrize("asked", [0, 1, 2])
def test_fewer_tokens_than_configured(asked: int, refreshes: bool) -> None:
    adapter = ToyAdapter(refreshes)
    drafts = loop_on(adapter, 4).propose(batch_of(ROWS, asked))
    assert drafts[:, :asked].tolist() == [drafted[:asked] for drafted in expected_drafts(ROWS, 4, 0)]
    assert (drafts[:, asked:] == 1).all()  # as an earlier batch left them
    assert len(adapter.named("forward")) == max(asked, 1)
    assert len(adapter.sampled) == asked


def test_a_batch_that_erases_its_drafts() -> None:
    """The model runner of 0.32 reads K columns of a batch that drafts nothing."""
    loop = loop_on(ToyAdapter(), 4)
    assert (loop.propose(batch_of(ROWS, 0, erases=True)) == -1).all()
    assert (loop.buffers.draft_tokens[len(ROWS) :] == 1).all()


# What the adapter is asked for


def test_the_order_of_an_eager_run() -> None:
    adapter = ToyAdapter()
    loop_on(adapter, 3).propose(batch_of(ROWS, 3, mm_inputs="images"))
    forward = ("forward", "eager")
    assert adapter.calls == [
        ("begin_prefill",),
        ("dispatch_prefill", 12, 15),
        ("before_forward", 12),
        ("on_prefill_begin", 4),
        forward,
        ("on_prefill_end", 4),
        ("begin_decode",),
        ("dispatch_decode",),
        ("on_multi_step_decode_begin", 4),
        ("build_decode_metadata", 1),
        ("before_forward", 4),
        forward,
        ("build_decode_metadata", 2),
        ("before_forward", 4),
        forward,
        ("on_multi_step_decode_end", 4),
    ]
    graphs = ["prefill graph", "decode graph", "decode graph"]
    assert [each.num_tokens_across_dp for each in adapter.inputs] == [f"across DP, {graph}" for graph in graphs]
    assert [each.mm_inputs for each in adapter.inputs] == ["images", None, None]


@pytest.mark.parametrize("full_graphs", [False, True], ids=["eager", "replay"])
@pytest.mark.parametrize(
    ("disable", "steps"), [(None, [1, 2, 3]), (Behaviour.DECODE_METADATA_REBUILD, [1])], ids=["on", "off"]
)
def test_metadata_is_built_for_every_step(disable: Behaviour | None, steps: list[int], full_graphs: bool) -> None:
    adapter = ToyAdapter(full_graphs=full_graphs)
    loop_on(adapter, 4, disable=disable).propose(batch_of(ROWS, 4))
    assert [step for (step,) in adapter.named("build_decode_metadata")] == steps
    if not full_graphs:
        decodes = [(f"metadata {step}", f"slots {step}") for step in (steps * 3)[:3]]
        assert adapter.attention_inputs[1:] == decodes


@pytest.mark.parametrize("full_graphs", [False, True], ids=["eager", "replay"])
@pytest.mark.parametrize("refreshes", [False, True], ids=["by steps", "fused"])
def test_metadata_describes_the_step_that_it_is_for(refreshes: bool, full_graphs: bool) -> None:
    adapter = ToyAdapter(refreshes, full_graphs)
    loop_on(adapter, 4).propose(batch_of(ROWS, 4))
    after = [(row.start + row.kept, row.length - row.rejected) for row in ROWS]  # next position, length
    positions = [[min(next_one + step, MAX_LEN - 1) for next_one, _ in after] for step in range(3)]
    lengths = [[min(length + step, MAX_LEN) for _, length in after] for step in range(1, 4)]
    if refreshes and not full_graphs:
        # A fused run builds once and then refreshes before every step, the first one too.
        positions, lengths = [positions[0], *positions], [lengths[0], *lengths]
    assert adapter.positions_at_builds == positions
    assert adapter.lengths_at_builds == lengths


@pytest.mark.parametrize(
    ("disable", "refreshed"),
    [(None, [1, 2, 3]), (Behaviour.DECODE_METADATA_REBUILD, [1, 1, 1])],
    ids=["on", "off"],
)
def test_a_fused_run_refreshes_on_the_device(disable: Behaviour | None, refreshed: list[int]) -> None:
    adapter = ToyAdapter(refreshes_in_graph=True)
    loop_on(adapter, 4, disable=disable).propose(batch_of(ROWS, 4))
    assert adapter.named("build_decode_metadata") == [(1,)]
    assert len(adapter.named("refresh_decode_metadata")) == refreshed[-1]
    assert adapter.attention_inputs[1:] == [(f"refreshed {number}", "slots 1") for number in refreshed]


def table_of_slots(stale: int) -> SlotTable:
    """Blocks of one token."""
    blocks = torch.arange(MAX_NUM_REQS * MAX_LEN, dtype=torch.int32, device=DEVICE).view(MAX_NUM_REQS, MAX_LEN)
    return SlotTable(blocks, torch.full((MAX_NUM_REQS,), stale, device=DEVICE), 1)


@pytest.mark.parametrize("disable", [None, Behaviour.DECODE_METADATA_REBUILD], ids=["on", "off"])
def test_one_graph_maps_no_slots_between_its_passes(disable: Behaviour | None) -> None:
    """A draft prefill leaves the slots of the first decode, and of none behind the batch's requests."""
    adapter = ToyAdapter(refreshes_in_graph=True, full_graphs=True, one_graph=True)
    loop = loop_on(adapter, 2, disable=disable)
    table = loop.slot_table = table_of_slots(7)
    for rows in (ROWS, ROWS[::-1][:2]):
        assert loop.propose(batch_of(rows, 2)).tolist() == expected_drafts(rows, 2, 0)
        assert len(adapter.named("map_decode_slots")) == (2 if disable and rows is not ROWS else bool(disable))
        if not disable:
            requests, positions = loop.buffers.idx_mapping[: len(rows)], loop.buffers.positions[: len(rows)]
            behind = [-1] * (MAX_NUM_REQS - len(rows))
            assert table.slots.tolist() == (requests * MAX_LEN + positions).tolist() + behind


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("disable", [None, Behaviour.DECODE_METADATA_REBUILD], ids=["on", "off"])
def test_slots_are_looked_up_a_step_ahead(disable: Behaviour | None, ahead: bool) -> None:
    adapter, table = ToyAdapter(refreshes_in_graph=True), table_of_slots(-1)
    loop = loop_on(adapter, 4, disable=disable)
    loop.slot_table = table if ahead else None
    assert loop.propose(batch_of(ROWS, 4)).tolist() == expected_drafts(ROWS, 4, 0)
    assert len(adapter.named("map_decode_slots")) == (1 if ahead or disable else 3)
    if ahead and not disable:
        requests, positions = loop.buffers.idx_mapping[: len(ROWS)], loop.buffers.positions[: len(ROWS)]
        assert table.slots.tolist()[: len(ROWS)] == (requests * MAX_LEN + positions).tolist()
        assert (table.slots[len(ROWS) :] == -1).all()
    elif ahead:
        assert (table.slots == -1).all()


def test_full_graphs_are_replayed_step_by_step() -> None:
    adapter = ToyAdapter(full_graphs=True)
    loop_on(adapter, 4).propose(batch_of(ROWS, 4))
    assert adapter.named("replay") == [("prefill graph",), *[("decode graph",)] * 3]
    assert adapter.named("forward") == [("in replay",)] * 4
    assert adapter.named("prepare_fused_replay") == []


def test_a_full_fused_graph_is_replayed_once() -> None:
    adapter = ToyAdapter(refreshes_in_graph=True, full_graphs=True)
    loop_on(adapter, 4).propose(batch_of(ROWS, 4))
    assert adapter.named("replay") == [("prefill graph",), ("decode graph",)]
    assert adapter.calls.index(("prepare_fused_replay",)) == adapter.calls.index(("replay", "decode graph")) - 1
    assert adapter.named("build_decode_metadata") == []
    assert adapter.named("forward") == [("in replay",)] * 4


@pytest.mark.parametrize("sample_offset", [0, 1])
@pytest.mark.parametrize("num_draft_tokens", [2, 4], ids="K={}".format)
def test_one_graph_drafts_what_two_draft(num_draft_tokens: int, sample_offset: int) -> None:
    adapter = ToyAdapter(refreshes_in_graph=True, full_graphs=True, one_graph=True)
    loop = loop_on(adapter, num_draft_tokens, sample_offset=sample_offset)
    for rows in (ROWS, ROWS[::-1][:2]):  # the graph is told of the second batch by its buffers alone
        drafts = loop.propose(batch_of(rows, num_draft_tokens))
        assert drafts.tolist() == expected_drafts(rows, num_draft_tokens, sample_offset)
        buffers = loop.buffers
        assert buffers.query_start_loc.tolist() == [min(row, len(rows)) for row in range(MAX_NUM_REQS + 1)]
        assert not buffers.seq_lens[len(rows) :].any()
        assert (buffers.idx_mapping[len(rows) :] == -1).all()


def test_one_graph_is_replayed_once_and_asks_nothing_else() -> None:
    adapter = ToyAdapter(refreshes_in_graph=True, full_graphs=True, one_graph=True)
    loop_on(adapter, 4).propose(batch_of(ROWS, 4))
    assert adapter.calls[0] == ("replay", "phase graph")
    assert len(adapter.named("replay")) == 1
    assert adapter.named("forward") == [("in replay",)] * 4
    assert adapter.named("dispatch_decode") == adapter.named("before_forward") == []
    # In the graph; a model that shares what the prefill found must see them in this order.
    hooks = [call[0] for call in adapter.calls if call[0].startswith("on_")]
    assert hooks == ["on_prefill_end", "on_multi_step_decode_begin", "on_multi_step_decode_end", "on_prefill_begin"]


@pytest.mark.parametrize("num_draft_tokens", [2, 3, 6], ids="K={}".format)
@pytest.mark.parametrize("capturing", [False, True], ids=["warm-up", "capture"])
def test_a_warm_up_runs_each_kind_of_decode_once(
    capturing: bool, num_draft_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = ToyAdapter(refreshes_in_graph=True)
    loop = loop_on(adapter, num_draft_tokens)
    loop.warms_up = True
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    loop.decode_all(inputs_of(), num_draft_tokens)
    decodes = num_draft_tokens - 1
    assert len(adapter.named("forward")) == (decodes if capturing else min(decodes, 2))


def test_one_graph_of_a_dummy_run_touches_no_request() -> None:
    adapter = ToyAdapter(refreshes_in_graph=True, full_graphs=True, one_graph=True)
    loop = loop_on(adapter, 4)
    loop.propose(batch_of(ROWS, 4, dummy_run=True))
    assert not loop.buffers.seq_lens.any()
    assert not loop.buffers.query_start_loc.any()
    assert (loop.buffers.idx_mapping == -1).all()


def test_decodes_that_are_fused_in_graphs_only() -> None:
    """Outside a graph such an adapter builds metadata for every step, and refreshes none."""
    adapter = ToyAdapter(refreshes_in_graph=True, fused_in_graphs_only=True)
    drafts = loop_on(adapter, 4).propose(batch_of(ROWS, 4))
    assert drafts.tolist() == expected_drafts(ROWS, 4, 0)
    assert adapter.named("build_decode_metadata") == [(1,), (2,), (3,)]
    assert adapter.named("refresh_decode_metadata") == []
    assert adapter.attention_inputs[1:] == [(f"metadata {step}", f"slots {step}") for step in (1, 2, 3)]

    adapter = ToyAdapter(refreshes_in_graph=True, fused_in_graphs_only=True, full_graphs=True)
    drafts = loop_on(adapter, 4).propose(batch_of(ROWS, 4))
    assert drafts.tolist() == expected_drafts(ROWS, 4, 0)
    assert adapter.named("replay") == [("prefill graph",), ("decode graph",)]
    assert len(adapter.named("prepare_fused_replay")) == 1
    assert adapter.named("build_decode_metadata") == []


@pytest.mark.parametrize("refreshes", [False, True], ids=["by steps", "fused"])
def test_one_token_needs_no_decode(refreshes: bool) -> None:
    adapter = ToyAdapter(refreshes)
    loop_on(adapter, 1).propose(batch_of(ROWS, 1))
    assert adapter.calls[-1] == ("on_prefill_end", len(ROWS))


# The behaviours


@pytest.mark.parametrize("asked", [2, 4])
@pytest.mark.parametrize("disable", [None, Behaviour.ACTUAL_MAX_SEQ_LEN], ids=["on", "off"])
def test_the_longest_sequence_is_that_of_the_batch(disable: Behaviour | None, asked: int) -> None:
    adapter = ToyAdapter()
    loop = loop_on(adapter, 4, disable=disable)
    loop.propose(batch_of([Row([1], start=62), Row([1, 2], start=38)], 4))  # reaches past the model's limit
    assert adapter.max_seq_len == MAX_LEN
    loop.propose(batch_of([Row([1, 2], start=38), Row([1], start=3)], asked))
    assert adapter.max_seq_len == (40 + asked if disable is None else MAX_LEN)


@pytest.mark.parametrize("refreshes", [False, True], ids=["by steps", "fused"])
@pytest.mark.parametrize("full_graphs", [False, True], ids=["eager", "replay"])
@pytest.mark.parametrize("disable", [None, Behaviour.DRAFT_LOGITS_IN_REPLAY], ids=["on", "off"])
def test_logits_are_kept_at_every_step(disable: Behaviour | None, full_graphs: bool, refreshes: bool) -> None:
    adapter = ToyAdapter(refreshes, full_graphs)
    loop = loop_on(adapter, 4, disable=disable)
    loop.propose(batch_of(ROWS, 4))
    kept = disable is None
    assert adapter.sampled == [(0, True), (1, kept), (2, kept), (3, kept)]
    assert loop.sample == adapter.sample


@pytest.mark.parametrize("disable", [None, Behaviour.TARGET_METADATA_REUSE], ids=["on", "off"])
def test_draft_prefill_reads_the_targets_metadata(disable: Behaviour | None) -> None:
    adapter = ToyAdapter()
    loop_on(adapter, disable=disable).propose(batch_of(ROWS, 4))
    whose = "the target's" if disable is None else "the draft's"
    assert adapter.attention_inputs[0] == (f"{whose} metadata", f"{whose} slots")
    assert len(adapter.named("rebuild_prefill_metadata")) == (disable is not None)


@pytest.mark.parametrize("disable", [None, Behaviour.FULL_DECODE_ONLY], ids=["on", "off"])
def test_last_token_indices_of_padded_rows(disable: Behaviour | None) -> None:
    loop = loop_on(ToyAdapter(), disable=disable)
    loop.buffers.last_token_indices.fill_(40)
    loop.propose(batch_of(ROWS, 4))
    assert loop.buffers.last_token_indices[len(ROWS) :].tolist() == [0 if disable is None else 40] * 2


def test_request_states_of_padded_rows() -> None:
    loop = loop_on(ToyAdapter())
    loop.buffers.idx_mapping.fill_(5)
    loop.propose(batch_of(ROWS, 4))
    assert loop.buffers.idx_mapping[len(ROWS) :].tolist() == [-1] * 2


@pytest.mark.parametrize("refreshes", [False, True], ids=["by steps", "fused"])
@pytest.mark.parametrize("disable", [None, Behaviour.TARGET_METADATA_REUSE], ids=["reuse", "rebuild"])
def test_a_dummy_run_without_attention_builds_nothing(disable: Behaviour | None, refreshes: bool) -> None:
    adapter = ToyAdapter(refreshes)
    batch = batch_of(ROWS, 4, dummy_run=True, skip_attn=True, attn_metadata=None, slot_mappings=None)
    loop_on(adapter, disable=disable).propose(batch)
    assert adapter.attention_inputs == [(None, None)] * 4
    assert not {"build_decode_metadata", "refresh_decode_metadata", "rebuild_prefill_metadata"} & {
        call[0] for call in adapter.calls
    }
    assert (adapter.loop.buffers.idx_mapping == -1).all()


@pytest.mark.parametrize("step", [0, 1])
def test_reset_for_capture(step: int) -> None:
    loop = loop_on(ToyAdapter())
    loop.propose(batch_of(ROWS, 4, dummy_run=True))
    loop.reset_for_capture(step)
    buffers = loop.buffers
    assert buffers.draft_step.tolist() == [step] * MAX_NUM_REQS
    for buffer in (buffers.last_token_indices, buffers.idx_mapping, buffers.sample_positions):
        assert not buffer.any()
