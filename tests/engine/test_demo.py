"""``vllm-eagle-mrv2 demo`` as a user starts it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from vllm_eagle_mrv2.cli.demo.report import FamilyReport, print_reports
from vllm_eagle_mrv2.cli.demo.types import Measurement

pytestmark = pytest.mark.engine

COMMAND = str(Path(sys.executable).with_name("vllm-eagle-mrv2"))
TIMEOUT_SECONDS = 400


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, "demo", "--json", *arguments], capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
    )


@pytest.fixture(scope="module")
def finished() -> subprocess.CompletedProcess[str]:
    return demo("--num-prompts", "2", "--max-tokens", "16", "--num-speculative-tokens", "2")


def test_passes(finished: subprocess.CompletedProcess[str]) -> None:
    assert finished.returncode == 0, finished.stderr
    report = json.loads(finished.stdout)
    assert report["passed"]
    assert report["outputs_match_stock"]
    assert report["outputs_match_baseline"]
    assert report["stock_outputs_match_baseline"]


def test_names_the_classes_that_ran(finished: subprocess.CompletedProcess[str]) -> None:
    report = json.loads(finished.stdout)
    assert report["family"] == "eagle"
    assert report["vllm_version"]
    assert report["device"] in ("cpu", "cuda")
    assert "EagleMRV2" in report["speculator_class"]
    managers = [name.rpartition(".")[2] for name in report["graph_manager_classes"]]
    assert managers == ["PrefillEagleCudaGraphManager", "DecodeEagleCudaGraphManager"]
    assert report["stock"]["speculator_class"].startswith("vllm.")


@pytest.mark.parametrize("run", ["stock", "eagle_mrv2"])
def test_reports_the_counters_of_both_runs(finished: subprocess.CompletedProcess[str], run: str) -> None:
    counters = json.loads(finished.stdout)[run]
    drafts, accepted = counters["num_drafts"], counters["num_accepted_tokens"]
    assert drafts > 0
    assert counters["num_draft_tokens"] <= 2 * drafts
    assert counters["mean_acceptance_length"] == pytest.approx(1 + accepted / drafts)
    assert len(counters["per_position_acceptance"]) == 2
    assert sum(counters["per_position_acceptance"]) == pytest.approx(accepted / drafts)
    assert counters["tokens_per_second"] > 0


def test_prints_the_texts(finished: subprocess.CompletedProcess[str]) -> None:
    outputs = json.loads(finished.stdout)["outputs"]
    assert len(outputs) == 2
    assert all(output["prompt"] and output["text"] for output in outputs)


def test_fails_in_one_line(tmp_path: Path) -> None:
    failed = demo("--model", str(tmp_path), "--draft", str(tmp_path), "--num-prompts", "1")
    assert failed.returncode == 1
    assert "the engine with no speculation failed" in json.loads(failed.stdout)["error"]
    assert len(failed.stderr.splitlines()) == 1


def test_refuses_a_target_without_its_head() -> None:
    refused = demo("--model", "somewhere")
    assert refused.returncode == 2
    assert "--draft" in refused.stderr


def measured(tokens: list[int], ours: bool = False, drafts: int = 1, device: str = "cuda") -> Measurement:
    return Measurement(
        vllm_version="0",
        device=device,
        device_name=device.upper(),
        token_ids=[tokens],
        texts=[""],
        seconds=1.0,
        iterations=1,
        num_drafts=drafts,
        is_eagle_mrv2=ours,
    )


@pytest.mark.parametrize(
    ("dtype", "baseline", "stock", "ours", "passed"),
    [
        ("float32", [1, 2], [1, 2], measured([1, 2], ours=True), True),
        ("float32", [1, 2], [1, 3], measured([1, 3], ours=True), False),
        ("bfloat16", [1, 2], [1, 3], measured([1, 3], ours=True), True),
        ("bfloat16", [1, 2], [1, 3], measured([1, 2], ours=True), True),
        ("bfloat16", [1, 2], [1, 3], measured([1, 4], ours=True), False),
        ("float32", [1, 2], [1, 2], measured([1, 2], ours=False), False),
        ("float32", [1, 2], [1, 2], measured([1, 2], ours=True, drafts=0), False),
    ],
)
def test_passes_only_for_right_tokens_that_we_drafted(
    dtype: str, baseline: list[int], stock: list[int], ours: Measurement, passed: bool
) -> None:
    report = FamilyReport("eagle", dtype, 1, 2, ["prompt"], measured(baseline), measured(stock), ours)
    assert report.passed is passed


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_times_on_a_cpu_are_said_to_mean_nothing(device: str) -> None:
    ours = measured([1, 2], ours=True, device=device)
    console = Console(file=io.StringIO(), record=True, width=200)
    report = FamilyReport("eagle", "float32", 1, 2, ["prompt"], measured([1, 2]), measured([1, 2]), ours)
    print_reports([report], console)
    assert ("On a CPU these times mean nothing" in console.export_text()) is (device == "cpu")
