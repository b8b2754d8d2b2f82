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
from vllm_eagle_mrv2.draft_length import notes
from vllm_eagle_mrv2.drafting.graphs import DraftGraphs
from vllm_eagle_mrv2.drafting.loop import ForwardInputs, GraphRun

from .stock import ASKED, MAX_NUM_REQS, K, drafter_on, stock_speculator

if not hasattr(pytest.importorskip("vllm.v1.worker.utils"), "get_uniform_decode_token_count"):
    pytest.skip("vLLM 0.28 is the first with a refresh that a graph can hold", allow_module_level=True)

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from vllm_eagle_mrv2.kernels.slots import look_up_slots_reference
from vllm_eagle_mrv2.patches import draft_tokens
from vllm_eagle_mrv2.patches.wrap import wrap
from vllm_eagle_mrv2.releases import autoregressive, fused, installed_version, schedule
from vllm_eagle_mrv2.releases.fused import FusedAdapter
from vllm_eagle_mrv2.releases.v0_28 import adapter as v0_28
from vllm_eagle_mrv2.releases.v0_29 import adapter as v0_29
from vllm_eagle_mrv2.releases.v0_32 import adapter as v0_32

SCHEDULE = [(1, 2, 4), (3, 5, 2), (6, 8, 0)]


def descriptor(num_reqs: int, mode: Any = CUDAGraphMode.FULL) -> Any:
    return BatchExecutionDescriptor(cg_mode=mode, num_tokens=num_reqs, num_reqs=num_reqs, uniform_token_count=1)


# The manager of draft decodes, for several numbers of draft tokens


@pytest.fixture
def make_manager(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    rank = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: rank)
    monkeypatch.setattr(cudagraph_utils, "current_platform", SimpleNamespace(get_global_graph_pool=lambda: None))
    stock = stock_speculator(schedule=[(1, 4, K), (5, 8, K - 1)])
    draft, vllm_config = stock.speculative_config, stock.vllm_config
    draft.uses_dynamic_speculative_decoding = lambda: draft.num_speculative_tokens_per_batch_size is not None
    vllm_config.num_speculative_tokens = K
    vllm_config.scheduler_config = SimpleNamespace(max_num_seqs=MAX_NUM_REQS)
    vllm_config.parallel_config.data_parallel_size = 1
    vllm_config.cache_config.use_kda_recoverssm = False
    adapter = v0_29.Adapter(stock, Options(), ASKED)

    def make(sizes: tuple[int, ...] = (4, 8), *, hidden: bool = True) -> Any:
        compilation = vllm_config.compilation_config
        compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = list(sizes), max(sizes)
        with adapter.decode_capture_sizes() if hidden else nullcontext():
            mode = CUDAGraphMode.FULL_DECODE_ONLY
            managers: Any = adapter.managers
            manager = managers.decode(vllm_config, stock.device, mode, decode_query_len=1)
        # Everybody else sees the schedule.
        assert draft.num_speculative_tokens_per_batch_size is not None
        return manager

    return make


def captured_by(manager: Any) -> dict[int, Any]:
    """Capture the descriptors of a manager; return them by number of requests."""
    descriptors = manager._capture_descs[CUDAGraphMode.FULL]
    manager.graphs = {each: object() for each in descriptors}
    return {each.num_reqs: each for each in descriptors}


def test_a_schedule_leaves_the_draft_decodes_one_token_a_request(make_manager: Any) -> None:
    captured = make_manager((1, 2, 4, 8, 16))._capture_descs[CUDAGraphMode.FULL]
    assert [(d.num_tokens, d.num_reqs, d.uniform_token_count) for d in captured] == [(n, n, 1) for n in (8, 4, 2, 1)]


@pytest.mark.skipif(installed_version() >= Version("0.32"), reason="from 0.32 on vLLM's manager knows better")
def test_the_stock_manager_divides_by_zero(make_manager: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        make_manager(hidden=False)


def test_one_graph_for_each_number_of_draft_tokens(make_manager: Any) -> None:
    manager = make_manager()
    wanted = [(8, 4), (8, 2), (4, 4), (4, 2)]
    for _ in range(2):  # vLLM may drop the graphs and capture again, with the same manager
        manager.specialize([4, 2])
        captured = manager._capture_descs[CUDAGraphMode.FULL]
        assert [(each.num_reqs, each.num_draft_tokens) for each in captured] == wanted


def test_the_graph_that_drafts_as_many(make_manager: Any) -> None:
    manager = make_manager()
    plain = captured_by(manager)[4]
    manager.specialize([4, 2])
    captured_by(manager)
    chosen = manager.of_draft_length(plain, 2)
    assert vars(chosen) == {**vars(plain), "num_draft_tokens": 2}
    assert chosen in manager.graphs
    assert manager.of_draft_length(plain, 3) is None


@pytest.mark.parametrize(("found", "mode"), [("found", CUDAGraphMode.FULL), (None, CUDAGraphMode.NONE)])
def test_a_batch_without_its_graph_runs_eagerly(found: str | None, mode: Any) -> None:
    special = found and descriptor(4, CUDAGraphMode.FULL)
    manager = SimpleNamespace(of_draft_length=lambda plain, length: special)
    adapter = adapter_on(v0_32.Adapter, decode_cudagraph_manager=manager)
    run = adapter.of_draft_length(adapter.graph_run(manager, descriptor(4), "across"), 2)
    assert (run.descriptor.cg_mode, run.full, run.num_tokens_across_dp) == (mode, found is not None, "across")
    eager = adapter.graph_run(manager, descriptor(4, CUDAGraphMode.NONE), None)
    assert adapter.of_draft_length(eager, 2) is eager


@pytest.mark.parametrize("num_draft_tokens", [2, K])
def test_graphs_for_one_number_serve_every_batch(num_draft_tokens: int, make_manager: Any) -> None:
    """As where a graph holds one step, or where K is constant."""
    manager = make_manager()
    plain = captured_by(manager)[4]
    assert manager.of_draft_length(plain, num_draft_tokens) is plain


# Adapters, without a model


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


def adapter_on(adapter_class: type[FusedAdapter], **how: Any) -> Any:
    """An adapter on a stand-in for vLLM's speculator."""
    return adapter_class(stock_speculator(**{"block_tables": Tables(), **how}), Options(), ASKED)


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
        num_reqs=num_reqs,
        num_tokens=num_reqs,
        num_tokens_after_padding=num_reqs,
        num_draft_tokens=num_reqs,  # to verify
        **dict.fromkeys(fields),
    )


def read(adapter: FusedAdapter, batch: Any, **how: Any) -> Any:
    unread: list[Any] = [None] * 6
    return adapter.read(batch, None, None, torch.zeros(batch.num_reqs, 2), None, *unread, **how)


def inputs_of(num_reqs: int, attn_metadata: Any = None) -> ForwardInputs:
    mode: Any = None
    return ForwardInputs(num_reqs, num_reqs, attn_metadata, None, None, mode)


# How many tokens are drafted


@pytest.mark.parametrize(("num_reqs", "drafted"), [(1, 4), (2, 4), (3, 2), (5, 2), (6, 0), (8, 0)])
def test_the_batch_size_decides_how_many_are_drafted(num_reqs: int, drafted: int) -> None:
    adapter = adapter_on(v0_29.Adapter, schedule=SCHEDULE)
    batch = input_batch(num_reqs)
    assert read(adapter, batch).num_draft_tokens == drafted
    # What the scheduler is told of.
    assert notes.drafted(batch) == drafted


@pytest.mark.parametrize(
    ("what", "how"),
    [
        ("no schedule", {}),
        ("several ranks", {"schedule": SCHEDULE, "dp_size": 2}),
    ],
)
def test_all_are_drafted(what: str, how: dict[str, Any]) -> None:
    batch = input_batch(6)
    assert read(adapter_on(v0_29.Adapter, **how), batch).num_draft_tokens == K
    assert notes.drafted(batch) is None


def test_a_dummy_run_drafts_all() -> None:
    adapter = adapter_on(v0_29.Adapter, schedule=SCHEDULE)
    assert read(adapter, input_batch(6), dummy_run=True).num_draft_tokens == K


@pytest.mark.parametrize("asked", [None, 0, 2])
def test_later_releases_tell_how_many_are_drafted(asked: int | None) -> None:
    """The model runner of 0.32 and later reads all K columns, of a batch without drafts too."""
    adapter = adapter_on(v0_32.Adapter, schedule=SCHEDULE, dp_size=2)
    batch = input_batch(6)
    found = read(adapter, batch, dp_sync_state="agreed", num_speculative_tokens=asked)
    assert found.num_draft_tokens == (K if asked is None else asked)
    assert found.erases is (asked == 0)
    assert found.dp_sync == "agreed"
    assert notes.drafted(batch) is None


def test_lengths_are_the_schedulers() -> None:
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    # A gap, an end before the largest batch, and more tokens than K.
    config = SimpleNamespace(num_speculative_tokens=3, num_speculative_tokens_per_batch_size=[(1, 2, 5), (4, 5, 1)])
    lengths = schedule.lengths_by_batch_size(config, MAX_NUM_REQS)
    assert lengths == build_dynamic_sd_schedule_lookup(
        config.num_speculative_tokens_per_batch_size, MAX_NUM_REQS, config.num_speculative_tokens
    )
    assert lengths is not None
    assert lengths[1:] == [3, 3, 3, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(("refreshes", "lengths"), [(True, [4, 2]), (False, [])])
def test_graphs_are_captured_for_every_length_of_the_schedule(refreshes: bool, lengths: list[int]) -> None:
    specialized: list[int] = []
    captured: list[Any] = []
    manager = SimpleNamespace(
        specialize=specialized.extend, capture_fresh=lambda forward, *rest: captured.extend([forward, rest[-1]])
    )
    adapter = adapter_on(v0_29.Adapter, schedule=SCHEDULE, use_fused_multi_step_decode=refreshes)
    adapter.take_attention(by_ours=False)
    adapter.stock.decode_cudagraph_manager = manager
    loop: Any = SimpleNamespace(decode_all=object(), decode=object())
    DraftGraphs(adapter, loop)._capture_decodes()
    assert specialized == lengths
    forward, arguments = captured
    assert forward is (loop.decode_all if refreshes else loop.decode)
    # One step serves every K; a graph of all steps serves its own.
    assert arguments(descriptor(4)) == {"num_draft_tokens": K}
    assert arguments(SimpleNamespace(num_draft_tokens=2)) == {"num_draft_tokens": 2}


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
            notes.mark_drafted(batch, drafted)
        handler.set_draft_tokens(batch, torch.zeros(3, K))
    assert handler.widths == [2, 0, K, K]


# Data parallelism


@dataclasses.dataclass
class Agreement:
    num_tokens_across_dp: Any
    num_reqs: int = MAX_NUM_REQS


@pytest.fixture
def dispatch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's dispatch: what it was asked, and what it answers."""
    found = SimpleNamespace(asked=[], answer=(descriptor(4), None))

    def dispatch_cg_and_sync_dp(*args: Any, **kwargs: Any) -> Any:
        found.asked.append(kwargs)
        return found.answer

    monkeypatch.setattr(fused, "dispatch_cg_and_sync_dp", dispatch_cg_and_sync_dp)
    return found


@pytest.mark.parametrize(
    ("adapter_class", "argument"),
    [(v0_28.Adapter, None), (v0_29.Adapter, "dp_sync"), (v0_32.Adapter, "dp_sync_state")],
    ids=lambda each: getattr(each, "__module__", None),
)
def test_what_the_ranks_agreed_on_is_handed_on(adapter_class: Any, argument: str | None, dispatch: Any) -> None:
    agreed = torch.tensor([4, 4])
    dispatch.answer = (descriptor(4), agreed if argument is None else Agreement(agreed))
    manager: Any = "manager"
    adapter = adapter_on(adapter_class, dp_size=2, prefill_cudagraph_manager=manager)
    run = adapter.dispatch_prefill(batch_of(dp_sync="of the target"), 3 * (K + 1), 16)
    (asked,) = dispatch.asked
    known = {name: value for name, value in asked.items() if name.startswith("dp_sync")}
    assert known == ({} if argument is None else {argument: "of the target"})
    assert asked["uniform_token_count"] == K + 1
    assert run == GraphRun(manager, descriptor(4), True, agreed)


def test_a_prefill_is_no_uniform_batch(dispatch: Any) -> None:
    adapter = adapter_on(v0_29.Adapter, prefill_cudagraph_manager=None)
    batch = batch_of()
    batch.source.has_prefill, batch.source.decode_graph_eligible = True, False
    assert adapter.dispatch_prefill(batch, 3 * (K + 1), 16).num_tokens_across_dp is None
    assert [asked["uniform_token_count"] for asked in dispatch.asked] == [None]


def test_the_decodes_reuse_the_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a collective of their own, from 0.30 on."""
    monkeypatch.setattr(autoregressive, "_KNOWS_DECODE_DP_SYNC", True)
    adapter = adapter_on(v0_29.Adapter, dp_size=2)
    adapter.stock._build_uniform_batch_dp_sync = lambda sync, num_reqs, num_query_per_req: ((sync, num_reqs), 7)
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
    return [[SimpleNamespace(get_metadata_builder=lambda index=0, each=each: each) for each in builders]]


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


@pytest.mark.parametrize("refreshed", [True, False])
def test_the_host_builds_before_a_replay_where_it_must(refreshed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = groups_of(
        builder(*COMPLETE[0]) if refreshed else builder("mla.sparse_swa", "DeepseekSparseSWAMetadataBuilder")
    )
    adapter = adapter_on(v0_29.Adapter, use_fused_multi_step_decode=True, attn_groups=groups)
    adapter.take_attention(by_ours=False)
    assert adapter.refreshes_in_graph
    built: list[Any] = []
    monkeypatch.setattr(adapter, "build_by_builders", lambda *args, **kwargs: built.append((args, kwargs)))
    manager: Any = None
    batch, run = batch_of(), GraphRun(manager, descriptor(8), True)
    adapter.prepare_fused_replay(batch, run)
    builds = 0 if refreshed else 1
    assert built == [((batch, run), {"step": 1})] * builds
    # Slots before metadata, of the live rows, padded for the graph.
    assert adapter.stock.block_tables.asked == [(3, [0, 1, 2, 3], 8)] * builds
    # One graph of the whole phase would leave the host no time to.
    assert adapter.decodes_follow_prefill is refreshed


@pytest.mark.parametrize("kernel_block_size", [None, 16])
def test_decodes_do_not_follow_where_tables_must_be_written(kernel_block_size: int | None) -> None:
    """A backend with smaller blocks than the cache has tables of its own, written before the draft decodes."""
    groups = groups_of(builder(*COMPLETE[0]))
    groups[0][0].kernel_block_size = kernel_block_size
    adapter = adapter_on(v0_32.Adapter, supports_decode_metadata_update=True, attn_groups=groups)
    adapter.take_attention(by_ours=False)
    assert adapter.refreshes_in_graph
    assert adapter.decodes_follow_prefill is (kernel_block_size is None)


@pytest.mark.parametrize(
    ("kernel_blocks", "slots"),
    [
        (None, [1280, 1410, 1159]),  # the table has the cache's blocks of 128 tokens, 10 and 9
        ([64], [640, 1154, 583]),  # and from 0.22 to 0.31 those of a backend, here of half the size
    ],
)
def test_slots_are_counted_in_the_blocks_of_the_table(kernel_blocks: list[int] | None, slots: list[int]) -> None:
    tables: Any = Tables()
    tables.block_sizes_tensor = torch.tensor([128], dtype=torch.int32)
    if kernel_blocks is not None:
        tables.kernel_block_sizes = kernel_blocks
    tables.block_tables = [SimpleNamespace(gpu=torch.tensor([[10, 11, 18, 19], [9, 9, 9, 9]], dtype=torch.int32))]
    tables.slot_mappings = torch.zeros(1, 3, dtype=torch.int64)
    tables.num_kv_cache_groups = tables.cp_size = 1
    table = adapter_on(v0_29.Adapter, block_tables=tables).slot_table()
    found: Any = SimpleNamespace(positions=torch.tensor([0, 130, 7]), idx_mapping=torch.tensor([0, 0, 1]))
    look_up_slots_reference(table, found, [0, 1, 2])
    assert table.slots.tolist() == slots


@pytest.mark.parametrize("by_descriptor", [True, False], ids=["0.30 and 0.31", "0.28 and 0.29"])
def test_metadata_describes_what_runs(by_descriptor: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoregressive, "_BUILDS_BY_DESCRIPTOR", by_descriptor)
    adapter = adapter_on(v0_29.Adapter)
    built: dict[str, Any] = {}
    name = "_build_uniform_attn_metadata" if by_descriptor else "_build_draft_attn_metadata"
    setattr(adapter.stock, name, lambda **kwargs: built.update(kwargs))
    manager: Any = None
    batch, run = batch_of(), GraphRun(manager, descriptor(8), True)
    adapter.build_by_builders(batch, run, step=2)
    assert built.pop("seq_lens_cpu_upper_bound") is batch.seq_lens_cpu_upper_bound
    rows = {"batch_desc": run.descriptor, "num_query_per_req": 1}
    padded = {"num_reqs_padded": 8, "num_tokens_padded": 8}
    assert built == {"num_reqs": 3, "step": 2, **(rows if by_descriptor else padded)}


@pytest.mark.parametrize("needed", [True, False], ids=["below 0.31", "from 0.31 on"])
@pytest.mark.parametrize("dummy_run", [True, False])
def test_idle_rows_get_no_slots(needed: bool, dummy_run: bool, dispatch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their request state is -1, which the kernel below 0.31 would take for a row of the block table."""
    monkeypatch.setattr(autoregressive, "_SLOTS_FOR_IDLE_ROWS", needed)
    dispatch.answer = (descriptor(3, CUDAGraphMode.NONE), None)
    adapter = adapter_on(v0_29.Adapter, decode_cudagraph_manager=None)
    adapter.dispatch_decode(batch_of(dummy_run=dummy_run))
    adapter.map_decode_slots(3, 8)
    (asked,) = adapter.stock.block_tables.asked
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
    order: list[Any] = []
    adapter = adapter_on(v0_29.Adapter)
    adapter.stock.attn_groups = [
        [SimpleNamespace(update_draft_decode_metadata=lambda metadata, name=name: order.append((name, metadata)))]
        for name in "ab"
    ]
    assert adapter.refresh_decode_metadata(inputs_of(4, "metadata")) == "metadata"
    assert order == [("a", "metadata"), ("b", "metadata")]


def test_the_limit_may_shrink_before_the_kv_cache_is_made() -> None:
    stock = stock_speculator(
        block_tables=SimpleNamespace(num_kv_cache_groups=1, cp_size=2), supports_decode_metadata_update=False
    )
    drafter = drafter_on(stock, v0_32.Adapter)
    stock.vllm_config.model_config.max_model_len = 40
    with drafter.taking_attention("caches"):
        assert drafter.loop.config.max_model_len == stock.max_model_len == 40
    assert drafter.loop.slot_table is None, "context parallelism, where a rank has a part of the slots"


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
    adapter = adapter_on(FusedAdapter, pcp_manager=Shards(shard), _run_model=lambda *args: ("head", "next"))
    batch = batch_of(num_tokens=10, num_tokens_padded=16)
    assert adapter.begin_prefill(batch) == ((5, 8) if sharded else (10, 16))
    whole = ("whole head", "whole next") if sharded else ("head", "next")
    assert adapter.run_draft_model(inputs_of(8)) == whole
    # The decodes are of whole batches.
    assert adapter.run_draft_model(inputs_of(3)) == ("head", "next")
    adapter.begin_decode(batch)
    assert adapter.stock.block_tables.gathered == 3


@pytest.mark.parametrize("dummy_run", [True, False])
def test_a_dummy_batch_shrinks_to_the_requests_of_the_ranks(dummy_run: bool) -> None:
    """From 0.33 on the ranks agree on requests before padding, and a dummy batch may have more."""
    adapter = adapter_on(v0_32.Adapter)
    batch = batch_of(dummy_run=dummy_run, dp_sync=Agreement(None, num_reqs=2))
    adapter.begin_decode(batch)
    assert batch.num_reqs == (2 if dummy_run else 3)
    idle = batch_of(dummy_run=dummy_run)
    adapter.begin_decode(idle)
    assert idle.num_reqs == 3
