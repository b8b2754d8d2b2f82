"""Our metrics in the registry that vLLM's /metrics serves, where an engine asked for eagle_mrv2, and nowhere else."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm.v1.metrics.prometheus")

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from vllm.v1.metrics import prometheus

import vllm_eagle_mrv2
from vllm_eagle_mrv2.config.method import Settings, mark
from vllm_eagle_mrv2.config.options import Options
from vllm_eagle_mrv2.patches.metrics import offer
from vllm_eagle_mrv2.telemetry import counters, metrics
from vllm_eagle_mrv2.telemetry.counters import DraftCounter

CONFIG = SimpleNamespace(
    model_config=SimpleNamespace(served_model_name="demo"), speculative_config=SimpleNamespace(num_speculative_tokens=3)
)


@pytest.fixture(autouse=True)
def _front_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process that has no engine yet."""
    monkeypatch.setenv(counters.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(prometheus, "REGISTRY", CollectorRegistry(auto_describe=True))
    monkeypatch.setattr(metrics, "REGISTRY", prometheus.REGISTRY)
    stock = getattr(MultiProcessCollector.collect, "_eagle_mrv2_original", MultiProcessCollector.collect)
    monkeypatch.setattr(MultiProcessCollector, "collect", stock)
    monkeypatch.setattr(metrics, "_info", {})
    monkeypatch.setattr(metrics, "_lengths", [])
    metrics._show.cache_clear()


def ours(registry: CollectorRegistry) -> set[str]:
    """Our samples in what /metrics answers, each there once."""
    lines = [line for line in generate_latest(registry).decode().splitlines() if line.startswith("vllm_eagle_mrv2")]
    assert len(set(lines)) == len(lines)
    return set(lines)


def of_a_choice(changes: float, seconds: tuple[float, float], tokens: tuple[float, float]) -> set[str]:
    """The samples of a chosen number of draft tokens; seconds and tokens as measured and as expected."""
    samples = {f'vllm_eagle_mrv2_draft_length_changes_total{{engine="0",model_name="demo"}} {changes}'}
    for what, measured, expected in (("seconds", *seconds), ("tokens", *tokens)):
        for kind, value in (("measured", measured), ("expected", expected)):
            labels = f'engine="0",kind="{kind}",model_name="demo"'
            samples.add(f"vllm_eagle_mrv2_iteration_{what}_total{{{labels}}} {value}")
    return samples


@pytest.mark.parametrize("several_api_servers", [False, True])
def test_what_is_shown(several_api_servers: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if several_api_servers:  # each request then has a registry of its own
        monkeypatch.setenv(counters.FOLDER_VARIABLE, str(tmp_path / "of ours"))
        monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "of prometheus"))
        for name in ("of ours", "of prometheus"):
            (tmp_path / name).mkdir()
    counter = DraftCounter.of_rank(0)
    assert not ours(prometheus.get_prometheus_registry()), "a stock server's"
    offer(CONFIG, Settings("eagle", Options()))
    offer(CONFIG, Settings("eagle3", Options()))  # another engine
    counter.cells[counters.FUSED] += 2
    counter.cells[counters.DRAFT_LENGTH] = 2
    labels = 'engine="0",model_name="demo"'
    counts = {path: float(2 * (path == "fused")) for path in counters.PATHS}
    assert ours(prometheus.get_prometheus_registry()) == {
        'vllm_eagle_mrv2_info{draft_length="constant",family="eagle3",model_name="demo",num_speculative_tokens="3",'
        f'version="{vllm_eagle_mrv2.__version__}",vllm="{metrics._info["vllm"]}"}} 1.0',
        *(f'vllm_eagle_mrv2_draft_phases_total{{{labels},path="{path}"}} {count}' for path, count in counts.items()),
        f"vllm_eagle_mrv2_draft_length{{{labels}}} 2.0",
        *of_a_choice(changes=0.0, seconds=(0.0, 0.0), tokens=(0.0, 0.0)),
    }


def test_a_chosen_number_is_shown_beside_what_was_expected() -> None:
    """Replicas of a dense model choose, too: in the front-end their configuration has the number of them."""
    draft, settings = SimpleNamespace(num_speculative_tokens=3), Settings("eagle", Options(draft_length="auto"))
    mark(draft, settings)
    config = SimpleNamespace(
        model_config=SimpleNamespace(served_model_name="demo", is_moe=False, is_hybrid=False),
        speculative_config=draft,
        kv_transfer_config=None,
        parallel_config=SimpleNamespace(data_parallel_size=2, pipeline_parallel_size=1, tensor_parallel_size=1),
    )
    offer(config, settings)
    cells = DraftCounter.of_rank(0).cells
    cells[counters.CHANGES], cells[counters.TOKENS], cells[counters.EXPECTED_MILLITOKENS] = 4, 9, 8500
    cells[counters.MICROSECONDS], cells[counters.EXPECTED_MICROSECONDS] = 1_500_000, 1_250_000
    cells[counters.BY_LENGTH.start + 3] = 1_500_000
    shown = ours(prometheus.get_prometheus_registry())
    assert {line for line in shown if "draft_length_seconds_total" in line} == {
        f'vllm_eagle_mrv2_draft_length_seconds_total{{draft_length="{length}",engine="0",model_name="demo"}} {seconds}'
        for length, seconds in ((0, 0.0), (1, 0.0), (2, 0.0), (3, 1.5))
    }
    assert shown > of_a_choice(changes=4.0, seconds=(1.5, 1.25), tokens=(9.0, 8.5))
    assert any(line.startswith('vllm_eagle_mrv2_info{draft_length="auto"') for line in shown)
    assert not [line for line in shown if "phases_total" in line or "draft_length{" in line], "its worker is elsewhere"
    cells[counters.ONE_GRAPH] = 1
    assert 'vllm_eagle_mrv2_draft_length{engine="0",model_name="demo"} 0.0' in ours(
        prometheus.get_prometheus_registry()
    )
