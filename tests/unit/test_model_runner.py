"""What is taken from the target's runner, on parts made for it."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version

pytest.importorskip("vllm.v1.worker.gpu.model_runner")


from vllm_eagle_mrv2 import releases
from vllm_eagle_mrv2.patches import model_runner
from vllm_eagle_mrv2.telemetry.counters import DRAFT_LENGTH, EAGER, DraftCounter

from .stock import drafter_on, stock_speculator


def speculator(*, k: int = 3, graphs: bool = True) -> Any:
    """A speculator of ours that counts its captures."""
    stock = stock_speculator(
        num_speculative_steps=k, decode_cudagraph_manager=SimpleNamespace(needs_capture=lambda: graphs), captures=0
    )

    def capture() -> None:
        stock.captures += 1

    stock.capture, stock.drafter = capture, drafter_on(stock)
    return stock


class Runner:
    """A runner whose target may have nothing to capture."""

    speculative_config: Any

    def __init__(self, speculator: Any, *, target_graphs: bool) -> None:
        self.speculator = speculator
        self.sampler = SimpleNamespace(sampling_states="states")
        self.req_states = SimpleNamespace(max_seq_len="lengths", sessions="none")
        self.input_buffers, self.attn_groups = "buffers", "groups"
        self.cudagraph_manager = SimpleNamespace(needs_capture=lambda: target_graphs)
        self.kv_connector = SimpleNamespace(reset_capture_state=lambda: setattr(self, "reset", True))
        self.reset = False
        self.use_aux_hidden_state_outputs = True
        with torch.inference_mode():  # as vLLM's runner may make them
            self.block_tables = SimpleNamespace(sizes=torch.tensor([7]), count=1)

    def post_kv_cache_wake_up(self) -> None:
        self.block_tables.sizes = torch.tensor([16])

    def initialize_kv_cache(self, config: Any) -> str:
        return f"result of {config}"

    def load_model(self) -> bool:
        self.model_memory_usage = 100
        return self.use_aux_hidden_state_outputs

    def capture_model(self) -> int:
        if self.cudagraph_manager.needs_capture():
            self.speculator.capture()
            return 100
        return 0


class Requests:
    """States of requests in slots, as the runner keeps them."""

    def __init__(self) -> None:
        self.req_id_to_index = {"other": 1}
        self.max_seq_len = "lengths"

    def add_request(self, req_id: str, prompt_len: int) -> None:
        self.req_id_to_index[req_id] = 2


@pytest.mark.parametrize(
    ("release", "placed"), [("0.24.0", False), ("0.25.0", True), ("0.30.0", True), ("0.31.0", False)]
)
def test_a_new_request_has_placeholders_for_drafts(release: str, placed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token 0, which fills the place of its drafts, is accepted as often as the target samples it."""
    monkeypatch.setattr(releases, "installed_version", lambda: Version(release))
    with torch.inference_mode():
        left = torch.randn(3, 2, 5)
    requests, logits = Requests(), left.clone()
    model_runner.draft_placeholders(requests, logits)
    replaced = vars(requests).get("add_request")
    model_runner.draft_placeholders(requests, logits)  # the KV cache is made twice
    assert vars(requests).get("add_request") is replaced
    requests.add_request("new", prompt_len=1)
    assert torch.equal(logits[:2], left[:2]), "those of others stay"
    assert torch.equal(logits[2].softmax(-1), torch.eye(5)[:1].expand(2, 5)) is placed
    greedy = Requests()
    model_runner.draft_placeholders(greedy, None)
    greedy.add_request("new", prompt_len=1)
    assert greedy.req_id_to_index["new"] == 2


@pytest.fixture(autouse=True)
def patches(monkeypatch: pytest.MonkeyPatch) -> None:
    wrappers = {
        "load_model": model_runner.without_unread_states,
        "initialize_kv_cache": model_runner.states_handed_over,
        "capture_model": model_runner.draft_captured,
        "post_kv_cache_wake_up": model_runner.tables_in_place,
    }
    for name, wrapper in wrappers.items():
        monkeypatch.setattr(Runner, name, wrapper(getattr(Runner, name)))
    monkeypatch.setattr(torch.cuda, "mem_get_info", iter([(500, 0), (430, 0)]).__next__)


def test_the_runners_requests_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(model_runner, "draft_placeholders", lambda *these: given.extend(these))
    monkeypatch.setattr(model_runner, "mark_sessions", lambda *these: given.extend(these))
    runner = Runner(speculator(), target_graphs=True)
    runner.speculator.draft_logits = "logits"
    monkeypatch.setattr(runner.speculator.drafter, "announce", lambda: None)
    runner.initialize_kv_cache("config")
    assert given == [runner.req_states, "logits", runner.req_states]


@pytest.mark.parametrize("takes_inputs", [False, True], ids=["0.26", "0.20"])
def test_what_is_handed_over(takes_inputs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = speculator()
    drafter, runner = ours.drafter, Runner(ours, target_graphs=True)
    announced: list[Any] = []
    bounded: list[Any] = []
    monkeypatch.setattr(model_runner, "split_decodes_alone", bounded.append)
    # All is known by then: the target's graph manager, the last of it, too.
    monkeypatch.setattr(drafter, "announce", lambda: announced.append(drafter.graphs.target_graphs()))
    monkeypatch.setattr(drafter.adapter, "takes_target_inputs", takes_inputs)
    assert runner.initialize_kv_cache("config") == "result of config"
    assert drafter.adapter.sampling_states == "states"
    assert drafter.adapter.req_states.max_seq_len == "lengths"
    assert announced == [runner.cudagraph_manager]
    assert bounded == [runner]
    handed = (getattr(ours, "target_input_buffers", None), getattr(ours, "target_attn_groups", None))
    assert handed == (("buffers", "groups") if takes_inputs else (None, None))
    # Elastic scaling replaces it.
    runner.cudagraph_manager = SimpleNamespace()
    assert drafter.graphs.target_graphs() is runner.cudagraph_manager


@pytest.mark.parametrize(("release", "more"), [("0.26.0", 2 * 8 * 4), ("0.27.0", 0)])
def test_texts_count_as_memory_of_the_model(release: str, more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM below 0.27 does not count what is allocated before the model is loaded."""
    releases.installed_release()  # is looked at once
    monkeypatch.setattr(releases, "installed_version", lambda: Version(release))
    monkeypatch.setattr(model_runner, "takes_auxiliary_states", lambda config: True)
    for looks_up in (False, True):
        runner = Runner(speculator(), target_graphs=True)
        runner.speculative_config = None
        if looks_up:
            runner.speculator.drafter.look_up_in(torch.zeros(2, 8, dtype=torch.int32), torch.zeros(2))
        assert runner.load_model()
        assert runner.model_memory_usage == 100 + (more if looks_up else 0)


def test_a_pending_compilation_does_not_keep_an_engine() -> None:
    """It holds the kernel of the draft's head."""
    stock = stock_speculator()
    adapter = drafter_on(stock).adapter
    kept, gone = adapter.few_rows, weakref.ref(adapter)
    del adapter, stock
    gc.collect()
    assert kept is not None
    assert gone() is None


def test_made_up_requests_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM warms its kernels up with some that are no dummy runs."""
    ours = speculator()
    counter = ours.drafter.loop.counter = DraftCounter()

    def warmup_kernels(runner: Any, execute: str) -> None:
        counter.cells[EAGER], counter.cells[DRAFT_LENGTH] = 1, 3

    model_runner.warm_up_forgotten(warmup_kernels)(Runner(ours, target_graphs=True), "execute")
    assert not any(counter.cells)


def test_a_draft_whose_target_has_no_graphs() -> None:
    ours = speculator()
    runner = Runner(ours, target_graphs=False)
    assert runner.capture_model() == 70
    assert ours.captures == 1
    assert runner.reset


def test_graphs_keep_their_scratch_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock's workspace is replaced when an eager pass needs a larger one."""
    from vllm.v1.worker import workspace

    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    manager = workspace.WorkspaceManager(torch.device("cpu"))
    (used_by_graphs,) = manager.get_simultaneous(((64,), torch.uint8))
    monkeypatch.setattr(workspace, "_manager", manager)
    ours = speculator()
    Runner(ours, target_graphs=False).capture_model()
    manager.get_simultaneous(((4096,), torch.uint8))
    (kept,) = ours.drafter.graphs.scratch
    assert kept.untyped_storage().data_ptr() == used_by_graphs.untyped_storage().data_ptr()


@pytest.mark.parametrize("ours", [True, False])
def test_graphs_find_the_block_tables_after_a_sleep(ours: bool) -> None:
    """Captured slot mappings are computed from these very tensors."""
    runner = Runner(speculator() if ours else SimpleNamespace(), target_graphs=True)
    captured = runner.block_tables.sizes
    runner.post_kv_cache_wake_up()
    assert runner.block_tables.sizes.tolist() == [16]
    assert (runner.block_tables.sizes is captured) is ours


@pytest.mark.parametrize(
    ("how", "target_graphs", "captures", "size"),
    [({}, True, 1, 100), ({"graphs": False}, False, 0, 0), ({"k": 1}, False, 0, 0)],
    ids=["the target's own capture", "none supported", "no decodes"],
)
def test_nothing_more_to_capture(how: dict[str, Any], target_graphs: bool, captures: int, size: int) -> None:
    ours = speculator(**how)
    assert Runner(ours, target_graphs=target_graphs).capture_model() == size
    assert ours.captures == captures


@pytest.mark.parametrize(
    ("eagle_config", "returned"),
    [(None, True), ({"use_aux_hidden_state": True}, True), ({"use_aux_hidden_state": False}, False)],
    ids=str,
)
@pytest.mark.parametrize("ours", [True, False])
def test_auxiliary_states_that_the_draft_does_not_take(ours: bool, eagle_config: Any, returned: bool) -> None:
    """The target is spared to return them before it is told which."""
    runner = Runner(speculator() if ours else SimpleNamespace(), target_graphs=True)
    draft = SimpleNamespace(hf_config=SimpleNamespace(eagle_config=eagle_config))
    runner.speculative_config = SimpleNamespace(method="eagle3", draft_model_config=draft)
    assert runner.load_model() is (returned or not ours)


def test_other_speculators_are_left_alone() -> None:
    others = SimpleNamespace(capture=lambda: None)
    runner = Runner(others, target_graphs=False)
    runner.initialize_kv_cache("config")
    assert runner.capture_model() == 0
    assert vars(others).keys() == {"capture"}
