"""The adapters of 0.28 to 0.33, on parts made for them: what a CPU, without graphs and with one rank, does not run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version

from vllm_eagle_mrv2.config.options import Options
from vllm_eagle_mrv2.draft_model import linear  # noqa: F401  (defines the ops)
from vllm_eagle_mrv2.draft_model.last_row import row_read
from vllm_eagle_mrv2.drafting.loop import GraphRun

if not hasattr(pytest.importorskip("vllm.v1.worker.utils"), "get_uniform_decode_token_count"):
    pytest.skip("vLLM 0.28 is the first with a refresh that a graph can hold", allow_module_level=True)

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from vllm_eagle_mrv2.patches import draft_tokens
from vllm_eagle_mrv2.patches.wrap import wrap
from vllm_eagle_mrv2.releases import autoregressive, draft_lengths, fused, installed_version
from vllm_eagle_mrv2.releases.autoregressive import AutoRegressiveAdapter
from vllm_eagle_mrv2.releases.fused import DecodeEagleCudaGraphManager, DraftBatchDescriptor, FusedAdapter

K = 4
MAX_NUM_REQS = 8
SCHEDULE = [(1, 2, 4), (3, 5, 2), (6, 8, 0)]


def descriptor(num_reqs: int, mode: Any = CUDAGraphMode.FULL) -> Any:
    return BatchExecutionDescriptor(cg_mode=mode, num_tokens=num_reqs, num_reqs=num_reqs, uniform_token_count=1)


# Graphs for several numbers of draft tokens


def manager_of(*descriptors: Any) -> DecodeEagleCudaGraphManager:
    manager = object.__new__(DecodeEagleCudaGraphManager)
    manager._capture_descs = {CUDAGraphMode.FULL: list(descriptors)}
    manager.graphs = {}
    return manager


def capture(manager: DecodeEagleCudaGraphManager) -> None:
    manager.graphs = {each: object() for each in manager._capture_descs[CUDAGraphMode.FULL]}


def test_one_graph_for_each_number_of_draft_tokens() -> None:
    manager = manager_of(descriptor(8), descriptor(4))
    manager.specialize([4, 2])
    wanted = [(8, 4), (8, 2), (4, 4), (4, 2)]
    assert [(d.num_reqs, d.num_draft_tokens) for d in manager._capture_descs[CUDAGraphMode.FULL]] == wanted
    # vLLM may drop the graphs and capture again, with the same manager.
    manager.specialize([4, 2])
    assert [(d.num_reqs, d.num_draft_tokens) for d in manager._capture_descs[CUDAGraphMode.FULL]] == wanted


def test_the_graph_that_drafts_as_many() -> None:
    manager = manager_of(descriptor(8), descriptor(4))
    manager.specialize([4, 2])
    capture(manager)
    chosen = manager.for_draft_length(descriptor(4), 2)
    assert chosen == DraftBatchDescriptor(**vars(descriptor(4)), num_draft_tokens=2)
    assert chosen in manager.graphs


def test_without_such_a_graph_the_batch_runs_eagerly() -> None:
    manager = manager_of(descriptor(4))
    manager.specialize([4, 2])
    capture(manager)
    assert manager.for_draft_length(descriptor(4), 3) == descriptor(4, CUDAGraphMode.NONE)


@pytest.mark.parametrize("num_draft_tokens", [2, K])
def test_graphs_for_one_number_serve_every_batch(num_draft_tokens: int) -> None:
    """As where a graph holds one step, or where K is constant."""
    manager = manager_of(descriptor(4))
    capture(manager)
    assert manager.for_draft_length(descriptor(4), num_draft_tokens) == descriptor(4)


def test_a_batch_without_a_graph_stays_as_it_is() -> None:
    eager = descriptor(4, CUDAGraphMode.NONE)
    assert manager_of().for_draft_length(eager, 2) is eager


# Speculators, without a model


class Loop:
    """A draft loop that writes down the batches it is given."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.config = SimpleNamespace()
        self.decode_all, self.decode = object(), object()
        self.buffers = SimpleNamespace(
            idx_mapping=torch.arange(MAX_NUM_REQS),
            query_start_loc=torch.arange(MAX_NUM_REQS + 1, dtype=torch.int32),
            positions=torch.zeros(MAX_NUM_REQS, dtype=torch.int64),
            draft_tokens=torch.arange(MAX_NUM_REQS * K).view(MAX_NUM_REQS, K),
        )

    def propose(self, batch: Any) -> torch.Tensor:
        self.batches.append(batch)
        drafts: torch.Tensor = self.buffers.draft_tokens[: batch.num_reqs]
        return drafts


class Tables:
    """Block tables that write down what slots they are asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, list[int], int]] = []
        self.slot_mappings = torch.zeros(1, MAX_NUM_REQS, dtype=torch.int64)
        self.gathered = 0

    def compute_slot_mappings(
        self, idx_mapping: torch.Tensor, query_start_loc: torch.Tensor, positions: torch.Tensor, num_tokens: int
    ) -> torch.Tensor:
        self.asked.append((len(idx_mapping), query_start_loc.tolist(), num_tokens))
        return self.slot_mappings[:, :num_tokens]

    def gather_block_tables(self, idx_mapping: torch.Tensor, num_reqs_padded: int) -> None:
        self.gathered = num_reqs_padded


def speculator(base: type[FusedAdapter], *, schedule: Any = None, **attributes: Any) -> Any:
    """An adapter without the stock speculator behind it."""

    class Bare(base):  # type: ignore[misc, valid-type]
        dp_sync_argument = "dp_sync"

        def __init__(self) -> None:
            self.num_speculative_steps = K
            self.max_num_reqs = MAX_NUM_REQS
            self.speculative_config = SimpleNamespace(
                num_speculative_tokens=K, num_speculative_tokens_per_batch_size=schedule
            )
            self.options = attributes.pop("options", Options())
            self.dp_size, self.dp_rank = attributes.pop("dp_size", 1), 0
            self.loop, self.block_tables = Loop(), Tables()
            self.attn_groups: Any = []
            self.filters_drafts = False
            for name, value in attributes.items():
                setattr(self, name, value)

    adapter = Bare()
    # What `StockAdapter.__init__` needs a whole vLLM for has been given above.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused.StockAdapter, "__init__", lambda self, vllm_config, device: None)
        base.__init__(adapter, None, torch.device("cpu"))
    return adapter


def batch_of(num_reqs: int = 3, **changes: Any) -> Any:
    fields = {
        "num_reqs": num_reqs,
        "num_draft_tokens": K,
        "dummy_run": False,
        "eager": False,
        "dp_sync": None,
        "seq_lens_cpu_upper_bound": torch.full((MAX_NUM_REQS,), 9, dtype=torch.int32),
        "source": SimpleNamespace(
            num_scheduled_tokens=torch.full((num_reqs,), K + 1).numpy(),
            idx_mapping=torch.arange(num_reqs),
            # The first two releases ask whether there is a prefill, the others whether there is none.
            has_prefill=False,
            decode_graph_eligible=True,
        ),
    }
    return SimpleNamespace(**{**fields, **changes})


def input_batch(num_reqs: int) -> Any:
    fields = ("input_ids", "positions", "query_start_loc", "seq_lens", "seq_lens_cpu_upper_bound", "idx_mapping")
    return SimpleNamespace(
        num_reqs=num_reqs, num_tokens=num_reqs, num_tokens_after_padding=num_reqs, **dict.fromkeys(fields)
    )


def propose(adapter: Any, batch: Any, **how: Any) -> torch.Tensor:
    hidden = torch.zeros(batch.num_reqs, 2)
    drafts: torch.Tensor = adapter._propose(batch, None, None, hidden, None, *[None] * 6, **how)
    return drafts


# How many tokens are drafted


@pytest.mark.parametrize(("num_reqs", "drafted"), [(1, 4), (2, 4), (3, 2), (5, 2), (6, 0), (8, 0)])
def test_the_batch_size_decides_how_many_are_drafted(num_reqs: int, drafted: int) -> None:
    adapter = speculator(AutoRegressiveAdapter, schedule=SCHEDULE)
    batch = input_batch(num_reqs)
    drafts = propose(adapter, batch)
    assert adapter.loop.batches[0].num_draft_tokens == drafted
    # What the runner of these releases stores is as wide as K, whatever was drafted.
    assert drafts.shape == (num_reqs, K)
    # What it tells the scheduler of is not.
    assert getattr(batch, draft_tokens._DRAFTED) == drafted


@pytest.mark.parametrize(
    ("what", "how"),
    [
        ("no schedule", {}),
        ("several ranks", {"schedule": SCHEDULE, "dp_size": 2}),
    ],
)
def test_all_are_drafted(what: str, how: dict[str, Any]) -> None:
    adapter = speculator(AutoRegressiveAdapter, **how)
    batch = input_batch(6)
    propose(adapter, batch)
    assert adapter.loop.batches[0].num_draft_tokens == K
    assert not hasattr(batch, draft_tokens._DRAFTED)


def test_a_dummy_run_drafts_all() -> None:
    adapter = speculator(AutoRegressiveAdapter, schedule=SCHEDULE)
    propose(adapter, input_batch(6), dummy_run=True)
    assert adapter.loop.batches[0].num_draft_tokens == K


def test_lengths_are_the_schedulers() -> None:
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    # A gap, an end before the largest batch, and more tokens than K.
    config = SimpleNamespace(num_speculative_tokens=3, num_speculative_tokens_per_batch_size=[(1, 2, 5), (4, 5, 1)])
    lengths = draft_lengths.lengths_by_batch_size(config, MAX_NUM_REQS)
    assert lengths == build_dynamic_sd_schedule_lookup(
        config.num_speculative_tokens_per_batch_size, MAX_NUM_REQS, config.num_speculative_tokens
    )
    assert lengths is not None
    assert lengths[1:] == [3, 3, 3, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(("refreshes", "lengths"), [(True, [4, 2]), (False, [])])
def test_graphs_are_captured_for_every_length_of_the_schedule(refreshes: bool, lengths: list[int]) -> None:
    adapter = speculator(AutoRegressiveAdapter, schedule=SCHEDULE, use_fused_multi_step_decode=refreshes)
    specialized: list[int] = []
    captured: list[Any] = []
    manager = SimpleNamespace(
        specialize=specialized.extend, capture_fresh=lambda forward, *rest: captured.extend([forward, rest[-1]])
    )
    adapter._capture_decodes(manager, lambda descriptor: None)
    assert specialized == lengths
    forward, arguments = captured
    assert forward is (adapter.loop.decode_all if refreshes else adapter.loop.decode)
    # One step serves every K; a graph of all steps serves its own.
    assert arguments(descriptor(4)) == {"num_draft_tokens": K}
    specialized_descriptor = DraftBatchDescriptor(**vars(descriptor(4)), num_draft_tokens=2)
    assert arguments(specialized_descriptor) == {"num_draft_tokens": 2}


def test_the_runner_reports_what_was_drafted() -> None:
    class Handler:
        def __init__(self) -> None:
            self.widths: list[int] = []

        def set_draft_tokens(self, input_batch: Any, draft_tokens: torch.Tensor) -> None:
            self.widths.append(draft_tokens.shape[1])

    wrap(Handler, "set_draft_tokens", draft_tokens.drafted_columns_only)
    handler = Handler()
    for drafted in (2, 0, K, None):
        batch = input_batch(3)
        if drafted is not None:
            draft_tokens.mark_drafted(batch, drafted)
        handler.set_draft_tokens(batch, torch.zeros(3, K))
    assert handler.widths == [2, 0, K, K]


# The manager of draft decodes, under a schedule


@pytest.fixture
def make_manager(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    rank = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: rank)
    monkeypatch.setattr(cudagraph_utils, "current_platform", SimpleNamespace(get_global_graph_pool=lambda: None))
    config = SimpleNamespace(
        num_speculative_tokens_per_batch_size=[(1, 4, K), (5, 8, K - 1)],
        num_speculative_tokens=K,
        uses_dynamic_speculative_decoding=lambda: config.num_speculative_tokens_per_batch_size is not None,
    )
    vllm_config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=MAX_NUM_REQS),
        parallel_config=SimpleNamespace(data_parallel_size=1, tensor_parallel_size=1),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[1, 2, 4, 8, 16], max_cudagraph_capture_size=16),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        speculative_config=config,
        num_speculative_tokens=K,
    )

    def make(hide: bool, decode_query_len: int = 1) -> Any:
        adapter = speculator(AutoRegressiveAdapter, speculative_config=config)
        with adapter._decode_capture_sizes() if hide else nullcontext():
            return DecodeEagleCudaGraphManager(
                vllm_config,
                torch.device("cpu"),
                CUDAGraphMode.FULL_DECODE_ONLY,
                decode_query_len=decode_query_len,
            )

    make.config = config  # type: ignore[attr-defined]
    return make


def test_a_schedule_leaves_the_draft_decodes_one_token_a_request(make_manager: Any) -> None:
    manager = make_manager(hide=True)
    captured = manager._capture_descs[CUDAGraphMode.FULL]
    assert [(d.num_tokens, d.num_reqs, d.uniform_token_count) for d in captured] == [(n, n, 1) for n in (8, 4, 2, 1)]
    # Everybody else sees the schedule.
    assert make_manager.config.num_speculative_tokens_per_batch_size is not None


@pytest.mark.skipif(installed_version() >= Version("0.32"), reason="from 0.32 on vLLM's manager knows better")
def test_the_stock_manager_divides_by_zero(make_manager: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        make_manager(hide=False)


# Data parallelism


@dataclasses.dataclass
class Agreement:
    num_tokens_across_dp: Any
    num_reqs: int = MAX_NUM_REQS


@pytest.mark.parametrize("argument", [None, "dp_sync", "dp_sync_state"])
def test_what_the_ranks_agreed_on_is_handed_on(argument: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    returned = torch.tensor([4, 4]) if argument is None else Agreement(torch.tensor([4, 4]))

    def dispatch(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        asked.append(kwargs)
        return descriptor(4), returned

    monkeypatch.setattr(fused, "dispatch_cg_and_sync_dp", dispatch)
    adapter = speculator(FusedAdapter, dp_size=2, prefill_cudagraph_manager=None)
    adapter.dp_sync_argument = argument
    run = adapter.dispatch_prefill(batch_of(dp_sync="of the target"), 3 * (K + 1), 16)
    assert asked[0].get(argument) == (None if argument is None else "of the target")
    assert asked[0]["uniform_token_count"] == K + 1
    assert run.num_tokens_across_dp.tolist() == [4, 4]
    assert run.full


def test_a_prefill_is_no_uniform_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        fused,
        "dispatch_cg_and_sync_dp",
        lambda *args, uniform_token_count, **kwargs: asked.append(uniform_token_count) or (descriptor(4), None),
    )
    adapter = speculator(FusedAdapter, prefill_cudagraph_manager=None)
    batch = batch_of()
    batch.source.has_prefill, batch.source.decode_graph_eligible = True, False
    assert adapter.dispatch_prefill(batch, 3 * (K + 1), 16).num_tokens_across_dp is None
    assert asked == [None]


def test_the_decodes_reuse_the_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a collective of their own, from 0.30 on."""
    monkeypatch.setattr(autoregressive, "_KNOWS_DECODE_DP_SYNC", True)
    adapter = speculator(AutoRegressiveAdapter, dp_size=2)
    adapter._build_uniform_batch_dp_sync = lambda sync, num_reqs, num_query_per_req: ((sync, num_reqs), 7)
    assert adapter.decode_dp_sync(batch_of(dp_sync="agreed")) == (("agreed", 3), 7)
    assert adapter.decode_dp_sync(batch_of()) == (None, 3)
    monkeypatch.setattr(autoregressive, "_KNOWS_DECODE_DP_SYNC", False)
    assert adapter.decode_dp_sync(batch_of(dp_sync="agreed")) == (None, 3)


# Metadata of the draft decodes


def builder(module: str, name: str, **attributes: Any) -> Any:
    return type(name, (), {"__module__": f"vllm.v1.attention.backends.{module}", **attributes})()


COMPLETE = [
    ("flash_attn", "FlashAttentionMetadataBuilder"),
    ("triton_attn", "TritonAttentionMetadataBuilder"),
    ("mla.triton_mla", "TritonMLAMetadataBuilder"),
]


def groups_of(*builders: Any) -> Any:
    return [[SimpleNamespace(get_metadata_builder=lambda each=each: each) for each in builders]]


def test_which_refreshes_are_complete() -> None:
    ours = [builder(*each) for each in COMPLETE]
    assert autoregressive.refresh_is_complete(groups_of(*ours))
    # Validity of tokens and their requests are left to the host below 0.32.
    sparse = builder("mla.sparse_swa", "DeepseekSparseSWAMetadataBuilder")
    assert not autoregressive.refresh_is_complete(groups_of(*ours, sparse))
    # What derives from one of them may keep more.
    derived = type("Derived", (type(ours[0]),), {"__module__": "somewhere"})()
    assert not autoregressive.refresh_is_complete(groups_of(derived))
    assert not autoregressive.refresh_is_complete(groups_of(builder(*COMPLETE[1], rswa_window=128)))


def test_the_builders_known_to_be_complete_exist() -> None:
    """A renamed one would silently cost a build before every replay."""
    from pathlib import Path

    import vllm

    for module, name in COMPLETE:
        source = Path(vllm.__file__).parent / "v1/attention/backends" / (module.replace(".", "/") + ".py")
        assert f"class {name}(" in source.read_text()
        assert f"vllm.v1.attention.backends.{module}.{name}" in autoregressive._REFRESH_IS_COMPLETE


@pytest.mark.parametrize(("incomplete", "builds"), [(True, 1), (False, 0)])
def test_the_host_builds_before_a_replay_where_it_must(
    incomplete: bool, builds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = GraphRun(descriptor(8), CUDAGraphMode.FULL, True, 8)
    monkeypatch.setattr(FusedAdapter, "dispatch_decode", lambda self, batch: run)
    adapter = speculator(AutoRegressiveAdapter, use_fused_multi_step_decode=True)
    adapter._rebuild_before_replay = incomplete
    built: list[Any] = []
    monkeypatch.setattr(
        adapter, "uniform_metadata", lambda *args, **kwargs: built.append((args, kwargs)), raising=False
    )
    batch = batch_of()
    assert adapter.dispatch_decode(batch) is run
    adapter.prepare_fused_replay(batch, run)
    assert built == [((batch, run), {"step": 1})] * builds
    # Slots before metadata, of the live rows, padded for the graph.
    assert adapter.block_tables.asked == [(3, [0, 1, 2, 3], 8)] * builds


@pytest.mark.parametrize("by_descriptor", [True, False], ids=["0.30 and 0.31", "0.28 and 0.29"])
def test_metadata_describes_what_runs(by_descriptor: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoregressive, "_BUILDS_BY_DESCRIPTOR", by_descriptor)
    adapter = speculator(AutoRegressiveAdapter)
    built: dict[str, Any] = {}
    name = "_build_uniform_attn_metadata" if by_descriptor else "_build_draft_attn_metadata"
    setattr(adapter, name, lambda **kwargs: built.update(kwargs))
    batch, run = batch_of(), GraphRun(descriptor(8), CUDAGraphMode.FULL, True, 8)
    adapter.uniform_metadata(batch, run, step=2)
    assert built.pop("seq_lens_cpu_upper_bound") is batch.seq_lens_cpu_upper_bound
    rows = {"batch_desc": run.descriptor, "num_query_per_req": 1}
    padded = {"num_reqs_padded": 8, "num_tokens_padded": 8}
    assert built == {"num_reqs": 3, "step": 2, **(rows if by_descriptor else padded)}


@pytest.mark.parametrize("needed", [True, False], ids=["below 0.31", "from 0.31 on"])
@pytest.mark.parametrize("dummy_run", [True, False])
def test_idle_rows_get_no_slots(needed: bool, dummy_run: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their request state is -1, which the kernel below 0.31 would take for a row of the block table."""
    monkeypatch.setattr(autoregressive, "_SLOTS_FOR_IDLE_ROWS", needed)
    monkeypatch.setattr(FusedAdapter, "dispatch_decode", lambda self, batch: SimpleNamespace(full=False))
    adapter = speculator(AutoRegressiveAdapter)
    adapter.dispatch_decode(batch_of(dummy_run=dummy_run))
    adapter.compute_slot_mappings(3, 8)
    (asked,) = adapter.block_tables.asked
    assert asked == (3, [0] * 4 if needed and dummy_run else [0, 1, 2, 3], 8)


def test_the_release_tells_whether_idle_rows_get_slots() -> None:
    """Read off the kernel: from 0.31 on it asks whether a row names a request."""
    import inspect

    from vllm.v1.worker.gpu import block_table

    kernel = block_table._compute_slot_mappings_kernel
    source = inspect.getsource(getattr(kernel, "fn", kernel))
    asks = "req_state_idx >= 0" in source
    assert asks != autoregressive._SLOTS_FOR_IDLE_ROWS


def test_every_group_is_refreshed() -> None:
    adapter = speculator(FusedAdapter)
    order: list[Any] = []
    adapter.attn_groups = [
        [SimpleNamespace(update_draft_decode_metadata=lambda metadata, name=name: order.append((name, metadata)))]
        for name in "ab"
    ]
    assert adapter.refresh_decode_metadata(4, 4, "metadata") == "metadata"
    assert order == [("a", "metadata"), ("b", "metadata")]


def test_the_limit_may_shrink_before_the_kv_cache_is_made() -> None:
    @dataclasses.dataclass(frozen=True)
    class Config:
        max_model_len: int

    class Stock:
        def set_attn(self, *args: Any) -> None:
            assert args == ("state", "tables")

    class Release(FusedAdapter, Stock):
        dp_sync_argument = None

        def __init__(self) -> None:
            self.vllm_config = SimpleNamespace(
                model_config=SimpleNamespace(max_model_len=640), compilation_config=SimpleNamespace(cudagraph_mode=None)
            )
            self.options, self._asked_mode, self._target_mode, self.filters_drafts = Options(), None, None, False
            self.loop: Any = SimpleNamespace(config=Config(4096))
            self.settings: Any = SimpleNamespace(enforce_eager=False)
            self.block_tables = SimpleNamespace(num_kv_cache_groups=1, cp_size=2)
            self.dp_size = 1

    adapter = Release()
    adapter.set_attn("state", "tables")
    assert adapter.slot_table is None, "context parallelism, where a rank has a part of the slots"
    assert adapter.loop.config == Config(640)


# Prefill context parallelism


class Shards:
    """A manager of prefill context parallelism whose rank has a shard of the next batch, or not."""

    def __init__(self, shard: Any) -> None:
        self._shard = shard
        self.draft_prefill_batch: Any = None

    def prepare_draft_prefill(self, batch: Any, input_ids: torch.Tensor) -> None:
        self.draft_prefill_batch = self._shard

    def restore_draft_prefill(self, *hidden: Any) -> tuple[Any, ...]:
        if self.draft_prefill_batch is None:
            return hidden
        self.draft_prefill_batch = None
        return tuple(f"whole {each}" for each in hidden)


@pytest.mark.parametrize("sharded", [True, False])
def test_a_prefill_runs_over_the_ranks_shard(sharded: bool) -> None:
    shard = SimpleNamespace(num_tokens=5, num_tokens_after_padding=8) if sharded else None
    adapter = speculator(FusedAdapter, pcp_manager=Shards(shard))
    adapter.loop.buffers.input_ids = torch.zeros(16, dtype=torch.int32)
    adapter._run_model = lambda *args: ("head", "next")
    batch = batch_of(num_tokens=10, num_tokens_padded=16)
    assert adapter.begin_prefill(batch) == ((5, 8) if sharded else (10, 16))
    whole = ("whole head", "whole next") if sharded else ("head", "next")
    assert adapter.run_draft_model(8, None, None, None, None) == whole
    # The decodes are of whole batches.
    assert adapter.run_draft_model(3, None, None, None, None) == ("head", "next")
    adapter.begin_decode(batch)
    assert adapter.block_tables.gathered == 3


@pytest.mark.parametrize("dummy_run", [True, False])
def test_a_dummy_batch_shrinks_to_the_requests_of_the_ranks(dummy_run: bool) -> None:
    """From 0.33 on the ranks agree on requests before padding, and a dummy batch may have more."""
    v0_32 = pytest.importorskip("vllm_eagle_mrv2.releases.v0_32.speculator", exc_type=ImportError)
    adapter = speculator(v0_32._Adapter)
    batch = batch_of(dummy_run=dummy_run, dp_sync=Agreement(None, num_reqs=2))
    adapter.begin_decode(batch)
    assert batch.num_reqs == (2 if dummy_run else 3)
    idle = batch_of(dummy_run=dummy_run)
    adapter.begin_decode(idle)
    assert idle.num_reqs == 3


@pytest.mark.parametrize(
    ("num_reqs", "mode", "alone"),
    [(1, "FULL", True), (1, "NONE", True), (1, "PIECEWISE", False), (2, "FULL", False), (0, "NONE", False)],
)
def test_the_last_row_of_a_lone_request_counts_alone(num_reqs: int, mode: str, alone: bool) -> None:
    """Not in a PIECEWISE graph, which any number of requests may replay."""
    adapter = speculator(FusedAdapter)
    adapter._one_row_is_enough = True
    adapter.loop.buffers.last_token_indices = torch.tensor([1, 0])
    rows, weight = torch.randn(3, 8), torch.randn(4, 8)
    with adapter.while_prefilling(num_reqs, SimpleNamespace(name=mode)):
        product = torch.ops.vllm_eagle_mrv2.linear(rows, weight, None, True)
        assert (row_read() is not None) is alone
    torch.testing.assert_close(product[1], weight @ rows[1])
    assert row_read() is None
