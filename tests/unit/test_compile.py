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


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A line for each variant: the kernel's name, its shared memory in bytes, and its constants."""
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
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
    *lines, last = run.stdout.splitlines()
    assert last == "every kernel done"
    return lines


def test_kernels_compile_for_nvidia_gpus(compiled: list[str]) -> None:
    launched = {
        name for file in KERNELS.glob("*.py") for name in re.findall(r"launch\((\w+_kernel),", file.read_text())
    }
    assert {line.split()[0] for line in compiled} == launched


def test_attention_reads_a_tile_while_it_multiplies_another(compiled: list[str]) -> None:
    """Triton holds one tile only if its keys and values wait for a load of the same iteration."""
    attention = [line for line in compiled if line.startswith("_single_token_attention_kernel")]
    assert attention
    for line in attention:
        constants = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", line)}
        tile = 2 * constants["TILE"] * constants["WIDTH"] * 2  # keys and values in 16 bit
        assert constants["shared"] >= 2 * tile, line
