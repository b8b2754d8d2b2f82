"""Kernels that Triton's interpreter runs here, through its compiler."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.any_release, pytest.mark.slow]

pytest.importorskip("triton")

TESTS = Path(__file__).parents[1]
KERNELS = Path(__file__).parents[2] / "vllm_eagle_mrv2" / "kernels"


def test_kernels_compile_for_nvidia_gpus(tmp_path: Path) -> None:
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(TESTS / "unit"), *sys.path]),
    }
    run = subprocess.run(
        [sys.executable, str(TESTS / "every_kernel.py"), "compile"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr
    *compiled, last = run.stdout.splitlines()
    assert last == "every kernel done"
    launched = {
        name for file in KERNELS.glob("*.py") for name in re.findall(r"launch\((\w+_kernel),", file.read_text())
    }
    assert {line.split()[0] for line in compiled} == launched
