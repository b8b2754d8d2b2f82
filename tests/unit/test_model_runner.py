"""What is taken from the target's runner, on parts made for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.v1.worker.gpu.model_runner")

from vllm_eagle_mrv2.releases.common import StockAdapter

from vllm_eagle_mrv2.patches import model_runner
from vllm_eagle_mrv2.telemetry.counters import EAGER, PATHS, DraftCounter


class Speculator(StockAdapter):
    """A speculator that counts its captures."""

    def __init__(self, *, k: int = 3, graphs: bool = True) -> None:
        self.captures = self.announced = 0
        self.num_speculative_steps = k
        self.decode_cudagraph_manager = SimpleNamespace(needs_capture=lambda: graphs)

    def announce(self) -> None:
        """All is known: the target's graph manager, the last of it, too."""
        assert self.target_graphs is not None
        self.announced += 1

    def capture(self) -> None:
        self.captures += 1
        self.graph_scratch = None


class TakesInputs(model_runner.TakesTargetInputs, Speculator):
    """As below 0.26."""


class Runner:
    """A runner whose target may have nothing to capture."""

    speculative_config: Any

    def __init__(self, speculator: Any, *, target_graphs: bool) -> None:
        self.speculator = speculator
        self.sampler = SimpleNamespace(sampling_states="states")
        self.req_states = SimpleNamespace(max_seq_len="lengths")
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
        return self.use_aux_hidden_state_outputs

    def capture_model(self) -> int:
        if self.cudagraph_manager.needs_capture():
            self.speculator.capture()
            return 100
        return 0


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
    monkeypatch.setattr(model_runner.torch.cuda, "mem_get_info", iter([(500, 0), (430, 0)]).__next__)


@pytest.mark.parametrize("speculator", [Speculator(), TakesInputs()], ids=["0.26", "0.20"])
def test_what_is_handed_over(speculator: Any) -> None:
    assert Runner(speculator, target_graphs=True).initialize_kv_cache("config") == "result of config"
    assert speculator.sampling_states == "states"
    assert speculator.req_states.max_seq_len == "lengths"
    assert speculator.announced == 1
    if isinstance(speculator, TakesInputs):
        assert (speculator.target_input_buffers, speculator.target_attn_groups) == ("buffers", "groups")


def test_made_up_requests_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM warms its kernels up with some that are no dummy runs."""
    speculator, counter = Speculator(), DraftCounter([0] * (len(PATHS) + 1))
    speculator.loop = SimpleNamespace(counter=counter)  # type: ignore[assignment]
    warm_up = model_runner.warm_up_forgotten(lambda runner, execute: counter.count(EAGER, 3))
    warm_up(Runner(speculator, target_graphs=True), "execute")
    assert not any(counter._slots)


def test_a_draft_whose_target_has_no_graphs() -> None:
    speculator = Speculator()
    runner = Runner(speculator, target_graphs=False)
    assert runner.capture_model() == 70
    assert speculator.captures == 1
    assert runner.reset


def test_graphs_keep_their_scratch_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock's workspace is replaced when an eager pass needs a larger one."""
    from vllm.v1.worker import workspace

    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    manager = workspace.WorkspaceManager(torch.device("cpu"))
    (used_by_graphs,) = manager.get_simultaneous(((64,), torch.uint8))
    monkeypatch.setattr(workspace, "_manager", manager)
    speculator = Speculator()
    Runner(speculator, target_graphs=False).capture_model()
    manager.get_simultaneous(((4096,), torch.uint8))
    (kept,) = speculator.graph_scratch
    assert kept.untyped_storage().data_ptr() == used_by_graphs.untyped_storage().data_ptr()


@pytest.mark.parametrize("ours", [True, False])
def test_graphs_find_the_block_tables_after_a_sleep(ours: bool) -> None:
    """Captured slot mappings are computed from these very tensors."""
    runner = Runner(Speculator() if ours else SimpleNamespace(), target_graphs=True)
    captured = runner.block_tables.sizes
    runner.post_kv_cache_wake_up()
    assert runner.block_tables.sizes.tolist() == [16]
    assert (runner.block_tables.sizes is captured) is ours


@pytest.mark.parametrize(
    ("speculator", "target_graphs", "captures", "size"),
    [
        (Speculator(), True, 1, 100),
        (Speculator(graphs=False), False, 0, 0),
        (Speculator(k=1), False, 0, 0),
    ],
    ids=["the target's own capture", "none supported", "no decodes"],
)
def test_nothing_more_to_capture(speculator: Any, target_graphs: bool, captures: int, size: int) -> None:
    assert Runner(speculator, target_graphs=target_graphs).capture_model() == size
    assert speculator.captures == captures


@pytest.mark.parametrize(
    ("eagle_config", "returned"),
    [(None, True), ({"use_aux_hidden_state": True}, True), ({"use_aux_hidden_state": False}, False)],
    ids=str,
)
@pytest.mark.parametrize("ours", [True, False])
def test_auxiliary_states_that_the_draft_does_not_take(ours: bool, eagle_config: Any, returned: bool) -> None:
    """The target is spared to return them before it is told which."""
    runner = Runner(Speculator() if ours else SimpleNamespace(), target_graphs=True)
    draft = SimpleNamespace(hf_config=SimpleNamespace(eagle_config=eagle_config))
    runner.speculative_config = SimpleNamespace(method="eagle3", draft_model_config=draft)
    assert runner.load_model() is (returned or not ours)


def test_other_speculators_are_left_alone() -> None:
    others = SimpleNamespace(capture=lambda: None)
    runner = Runner(others, target_graphs=False)
    runner.initialize_kv_cache("config")
    assert runner.capture_model() == 0
    assert not hasattr(others, "sampling_states")
