"""No kernel of a short run reads or writes out of bounds, in replayed graphs and beside padded rows."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("short_run.py")


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
def test_memcheck_is_clean() -> None:
    found = 9
    run = subprocess.run(
        [
            *("compute-sanitizer", "--tool", "memcheck", "--target-processes", "all"),
            *("--error-exitcode", str(found), sys.executable, str(SCRIPT)),
        ],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(SCRIPT.parent.parent), os.environ.get("PYTHONPATH", "")])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    report = [line for line in run.stdout.splitlines() if "=========" in line]
    assert run.returncode == 0, "\n".join(report[:40] or run.stdout.splitlines()[-40:])
    assert "short run done" in run.stdout
    assert any("ERROR SUMMARY: 0 errors" in line for line in report)
