"""Our metrics in the registry that vLLM's /metrics serves, where an engine asked for eagle_mrv2, and nowhere else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from weakref import WeakSet

import pytest

pytest.importorskip("vllm.v1.metrics.prometheus")

from prometheus_client import CollectorRegistry, generate_latest
from vllm.v1.metrics import prometheus

import vllm_eagle_mrv2
from vllm_eagle_mrv2 import counters, metrics
from vllm_eagle_mrv2.counters import DraftCounter
from vllm_eagle_mrv2.method import Request
from vllm_eagle_mrv2.options import Options
from vllm_eagle_mrv2.plugin import register

register()

CONFIG = SimpleNamespace(
    model_config=SimpleNamespace(served_model_name="demo"), speculative_config=SimpleNamespace(num_speculative_tokens=3)
)


@pytest.fixture(autouse=True)
def _front_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process that has no engine yet."""
    monkeypatch.setenv(counters.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(prometheus, "REGISTRY", CollectorRegistry(auto_describe=True))
    monkeypatch.setattr(metrics, "_shown_by", WeakSet())
    monkeypatch.setattr(metrics, "_info", {})


def ours(registry: CollectorRegistry) -> set[str]:
    """Our samples in what /metrics answers."""
    return {line for line in generate_latest(registry).decode().splitlines() if line.startswith("vllm_eagle_mrv2")}


@pytest.mark.parametrize("several_api_servers", [False, True])
def test_what_is_shown(several_api_servers: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if several_api_servers:  # vLLM then makes a registry for each call
        (tmp_path / "of prometheus").mkdir()
        monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "of prometheus"))
        monkeypatch.setenv(counters.FOLDER_VARIABLE, str(tmp_path / "of ours"))
        (tmp_path / "of ours").mkdir()
    counter = DraftCounter.of_rank(0)
    assert not ours(prometheus.get_prometheus_registry()), "a stock server's"
    metrics.offer(CONFIG, Request("eagle3", Options()))
    registry = prometheus.get_prometheus_registry()
    assert (prometheus.get_prometheus_registry() is registry) is not several_api_servers
    counter.count(counters.FUSED, 3)
    counter.count(counters.FUSED, 2)
    labels = 'engine="0",model_name="demo"'
    counts = {path: float(2 * (path == "fused")) for path in counters.PATHS}
    assert ours(registry) == {
        'vllm_eagle_mrv2_info{family="eagle3",model_name="demo",num_speculative_tokens="3",'
        f'version="{vllm_eagle_mrv2.__version__}",vllm="{metrics._info["vllm"]}"}} 1.0',
        *(f'vllm_eagle_mrv2_draft_phases_total{{{labels},path="{path}"}} {count}' for path, count in counts.items()),
        f"vllm_eagle_mrv2_draft_length{{{labels}}} 2.0",
    }


def test_the_router_asks_for_our_registry() -> None:
    """Where it took vLLM's function before the plugin was loaded, too."""
    router = "vllm.entrypoints.serve.instrumentator.metrics"
    server = (
        f"import {router} as router; from vllm_eagle_mrv2.plugin import register; register();"
        "print(hasattr(router.get_prometheus_registry, '_eagle_mrv2_original'))"
    )
    answer = subprocess.run([sys.executable, "-c", server], check=True, capture_output=True, text=True).stdout
    assert answer.splitlines()[-1] == "True"
