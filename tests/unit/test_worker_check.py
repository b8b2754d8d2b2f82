"""What a worker answers when it is asked what it drafts with, and who is asked; no engine is started."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_eagle_mrv2 import __version__, patches, releases
from vllm_eagle_mrv2.config.method import Settings, mark
from vllm_eagle_mrv2.config.options import Options
from vllm_eagle_mrv2.draft_length.notes import GraphTime, graph_times_of
from vllm_eagle_mrv2.drafting import drafter as drafting
from vllm_eagle_mrv2.errors import EagleMRV2Error
from vllm_eagle_mrv2.patches import sent_settings, worker_check
from vllm_eagle_mrv2.patches.wrap import wrap
from vllm_eagle_mrv2.plugin import register

REQUEST = Settings("eagle", Options())


class StockSpeculator:
    pass


def marked(thing: Any) -> Any:
    mark(thing, REQUEST)
    return thing


def worker(**runner: Any) -> SimpleNamespace:
    return SimpleNamespace(model_runner=SimpleNamespace(**runner))


OURS = worker(is_last_pp_rank=True, speculator=marked(StockSpeculator()))
STOCK = worker(is_last_pp_rank=True, speculator=StockSpeculator())
EARLIER_STAGE = worker(is_last_pp_rank=False, speculator=None)
RUNNER_V1 = worker(drafter=StockSpeculator())


@pytest.mark.parametrize("each", [OURS, EARLIER_STAGE])
def test_nothing_is_wrong(each: Any) -> None:
    assert worker_check.complaint(each) is None


@pytest.mark.parametrize(
    ("each", "drafter"),
    [
        (STOCK, f"{__name__}.StockSpeculator"),
        (RUNNER_V1, f"{__name__}.StockSpeculator"),
        (worker(is_last_pp_rank=True, speculator=None), "nothing"),
        (SimpleNamespace(), "nothing"),
    ],
)
@pytest.mark.parametrize(
    ("loaded", "plugins", "cause"),
    [
        (False, "lora", "VLLM_PLUGINS=lora keeps the plugin out of its process; have VLLM_PLUGINS name eagle_mrv2"),
        (False, None, "its process did not load the plugin; install vllm-eagle-mrv2 with pip"),
        (False, "eagle_mrv2", "its process did not load the plugin; install vllm-eagle-mrv2 with pip"),
        (True, None, "does not call vLLM's init_speculator; use vLLM's own worker classes"),
    ],
)
def test_another_drafter(
    each: Any, drafter: str, loaded: bool, plugins: str | None, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patches, "_installed", loaded)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if plugins is not None:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    with pytest.raises(EagleMRV2Error) as refused:
        worker_check.check([None, worker_check.complaint(each)])
    message = str(refused.value)
    assert message.startswith(f"method=eagle_mrv2 was asked for, but the worker of rank 1 drafts with {drafter}: ")
    assert cause in message
    assert "\n" not in message
    assert message.endswith(".")


class TestEngineCore:
    """A core with the methods of vLLM's, whose workers are those of the test."""

    @pytest.fixture
    def core(self) -> type[Any]:
        class EngineCore:
            def __init__(self, workers: list[Any]) -> None:
                self.calls: list[Any] = []
                self.workers = workers
                self.model_executor = SimpleNamespace(shutdown=lambda: self.calls.append("shutdown"))

            def collective_rpc(self, method: Callable[[Any], Any]) -> list[Any]:
                self.calls.append(method)
                sent = pickle.loads(pickle.dumps(method))  # by its name, as a worker finds it
                return [sent(each) for each in self.workers]

            def _initialize_kv_caches(self, config: Any) -> None:
                self.calls.append("caches")

        for _ in range(2):
            wrap(EngineCore, "_initialize_kv_caches", worker_check.workers_asked)
        return EngineCore

    def test_workers_are_asked_once_before_the_caches(self, core: Any) -> None:
        good, bad = core([EARLIER_STAGE, OURS]), core([EARLIER_STAGE, STOCK])
        config = SimpleNamespace(speculative_config=marked(SimpleNamespace(method="eagle")))
        good._initialize_kv_caches(config)
        assert good.calls == [worker_check.complaint, "caches"]
        with pytest.raises(EagleMRV2Error, match="the worker of rank 1 drafts with "):
            bad._initialize_kv_caches(config)
        assert bad.calls == [worker_check.complaint, "shutdown"]

    def test_workers_are_asked_what_their_graphs_take(self, core: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where the number of draft tokens is chosen, once the graphs are there."""
        monkeypatch.setattr(worker_check, "lengths_to_choose_from", lambda config: (0, 1))
        monkeypatch.setattr(patches, "apply", lambda *given: None)
        engine = core([OURS])
        config = SimpleNamespace(speculative_config=marked(SimpleNamespace(method="eagle")))
        drafter = SimpleNamespace(graphs=SimpleNamespace(times=lambda: [GraphTime(1, 0, 0.5)]))
        monkeypatch.setattr(drafting, "drafter_of", lambda speculator: drafter)
        engine._initialize_kv_caches(config)
        assert engine.calls == [worker_check.complaint, "caches", worker_check.graph_times]
        assert graph_times_of(config) == [GraphTime(1, 0, 0.5)]
        assert graph_times_of(SimpleNamespace()) == []

    @pytest.mark.parametrize("speculative_config", [None, SimpleNamespace(method="eagle")])
    def test_stocks_are_asked_nothing(self, speculative_config: Any, core: Any) -> None:
        stock = core([STOCK])
        stock._initialize_kv_caches(SimpleNamespace(speculative_config=speculative_config))
        assert stock.calls == ["caches"]


def test_vllms_engine_core_asks() -> None:
    pytest.importorskip("vllm")
    register()
    from vllm.v1.engine.core import EngineCore

    assert hasattr(EngineCore._initialize_kv_caches, "_eagle_mrv2_original")


@pytest.mark.parametrize("by_environment", [True, False], ids=["0.20", "later"])
def test_settings_choose_the_runner_where_they_arrive(by_environment: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that made the configuration may be another one (Ray Serve)."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")  # undone with what is set below
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    monkeypatch.setattr(releases, "release_for", lambda version: SimpleNamespace(v2_by_environment=by_environment))
    sent_settings.with_check()
    assert pickle.loads(pickle.dumps(REQUEST)) == REQUEST
    assert os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == ("01" if by_environment else None)


def test_settings_of_another_version_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks may draft otherwise."""
    sent_settings.with_check()
    sent = pickle.dumps(REQUEST)
    assert pickle.loads(sent) == REQUEST
    monkeypatch.setattr(sent_settings, "__version__", "99.0")
    with pytest.raises(
        EagleMRV2Error, match=f"has vllm-eagle-mrv2 99.0, and the engine is configured with {__version__}"
    ):
        pickle.loads(sent)


def test_a_process_that_a_request_arrives_in_asks() -> None:
    """Whether it loaded the plugin or not."""
    script = (
        "import pickle, sys, types; core = types.ModuleType('vllm.v1.engine.core'); sys.modules[core.__name__] = core; "
        "core.EngineCore = type('EngineCore', (), {'_initialize_kv_caches': lambda self, config: None}); "
        "pickle.loads(bytes.fromhex(sys.argv[1])); from vllm_eagle_mrv2 import patches; "
        "print(patches.installed(), hasattr(core.EngineCore._initialize_kv_caches, '_eagle_mrv2_original'))"
    )
    sent_settings.with_check()
    sent = pickle.dumps(REQUEST).hex()
    answer = subprocess.run([sys.executable, "-c", script, sent], capture_output=True, text=True, check=True)
    assert answer.stdout == "False True\n"
