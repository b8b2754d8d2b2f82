"""None of our kernels reads or writes out of bounds, and none races."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_sanitizer_finds_nothing(tool: str) -> None:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS / "unit"), os.environ.get("PYTHONPATH", "")]),
        # Every tensor an allocation of its own, so that what lies behind it is nobody's.
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    }
    command = ["compute-sanitizer", "--tool", tool, "--target-processes", "all", "--error-exitcode", "9"]
    run = subprocess.run(
        [*command, sys.executable, str(TESTS / "every_kernel.py")],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    report = [line for line in run.stdout.splitlines() if "=========" in line]
    assert run.returncode == 0, "\n".join(report[:40] or run.stdout.splitlines()[-40:])
    assert "every kernel done" in run.stdout
    summary = "ERROR SUMMARY: 0 errors" if tool == "memcheck" else "RACECHECK SUMMARY: 0 hazards"
    assert any(summary in line for line in report)
