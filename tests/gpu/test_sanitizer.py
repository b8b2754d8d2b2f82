"""No kernel reads or writes out of bounds, in replayed graphs and beside padded rows, and none of ours races."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TESTS = HERE.parent


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
@pytest.mark.parametrize(
    ("tool", "script", "done"),
    [
        ("memcheck", HERE / "short_run.py", "short run done"),
        ("memcheck", TESTS / "every_kernel.py", "every kernel done"),
        ("racecheck", TESTS / "every_kernel.py", "every kernel done"),
    ],
    ids=["an engine's memory", "the kernels' memory", "the kernels' races"],
)
def test_the_sanitizer_finds_nothing(tool: str, script: Path, done: str) -> None:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS / "unit"), os.environ.get("PYTHONPATH", "")])
    }
    if script.parent == TESTS:
        # Every tensor an allocation of its own, so that what lies behind it is nobody's; graphs cannot be captured so.
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    command = ["compute-sanitizer", "--tool", tool, "--target-processes", "all", "--error-exitcode", "9"]
    run = subprocess.run(
        [*command, sys.executable, str(script)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    report = [line for line in run.stdout.splitlines() if "=========" in line]
    assert run.returncode == 0, "\n".join(report[:40] or run.stdout.splitlines()[-40:])
    assert done in run.stdout
    summary = "ERROR SUMMARY: 0 errors" if tool == "memcheck" else "RACECHECK SUMMARY: 0 hazards"
    assert any(summary in line for line in report)
