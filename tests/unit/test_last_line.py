"""A refusal is the last line of a command of vLLM's, and an exception of a program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REFUSED = """
import asyncio
from vllm_eagle_mrv2.errors import EagleMRV2Error
from vllm_eagle_mrv2.plugin import register

async def main():
    register()
    register()
    raise {error}

asyncio.run(main())
"""


def run(place: Path, error: str) -> tuple[int, str]:
    """Exit status and stderr of a program."""
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(REFUSED.format(error=error))
    command = [sys.executable, *(["-m", "vllm.serve"] if place.parent.name == "vllm" else [str(place)])]
    # Not a test's own path, on which the real vLLM might come first.
    environment = {"PYTHONPATH": f"{place.parents[1]}:{':'.join(sys.path)}"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize("place", ["bin/vllm", "vllm/serve.py"], ids=["vllm ...", "python -m vllm..."])
def test_a_refusal_stands_alone(place: str, tmp_path: Path) -> None:
    if place.endswith(".py"):
        (tmp_path / "vllm").mkdir()
        (tmp_path / "vllm" / "__init__.py").touch()
    assert run(tmp_path / place, 'EagleMRV2Error("this cannot be.")') == (1, "error: this cannot be.\n")
    status, printed = run(tmp_path / place, 'ValueError("that neither.")')
    assert status == 1
    assert printed.startswith("Traceback")
    assert printed.endswith("ValueError: that neither.\n")


@pytest.mark.parametrize("place", ["bin/program", "bin/vllm_of_mine"])
def test_a_program_gets_the_exception(place: str, tmp_path: Path) -> None:
    status, printed = run(tmp_path / place, 'EagleMRV2Error("this cannot be.")')
    assert status == 1
    assert printed.startswith("Traceback")
