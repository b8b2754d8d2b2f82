"""Imports between the packages go one way, those within functions too; what only a type checker reads may differ."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import vllm_eagle_mrv2

pytestmark = pytest.mark.any_release

PACKAGE = Path(vllm_eagle_mrv2.__file__).parent
LAYERS = (
    *("", "errors", "classes", "config", "batch", "kernels", "draft_model", "telemetry", "draft_length"),
    *("drafting", "releases", "patches", "plugin", "cli"),
)
"""Packages and modules, from the lowest; the first is ``vllm_eagle_mrv2`` itself."""


def imported(node: ast.AST) -> Iterator[str]:
    """The names that a module, or a part of it, imports at run time."""
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "relative"
        yield from (f"{node.module}.{name.name}" for name in node.names)
    elif isinstance(node, ast.Import):
        yield from (name.name for name in node.names)
    elif not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
        for part in ast.iter_child_nodes(node):
            yield from imported(part)


def test_a_module_imports_from_its_own_layer_or_lower_ones() -> None:
    upward = []
    for file in PACKAGE.rglob("*.py"):
        own = LAYERS.index(file.relative_to(PACKAGE).with_suffix("").parts[0].removeprefix("__init__"))
        names = [name for name in imported(ast.parse(file.read_text())) if name.startswith(f"{PACKAGE.name}.")]
        upward += [f"{file.relative_to(PACKAGE)}: {name}" for name in names if name.split(".")[1] in LAYERS[own + 1 :]]
    assert upward == []


def test_commands_share_through_the_common_folder() -> None:
    found = []
    for file in (PACKAGE / "cli").glob("*/**/*.py"):
        rooms = ("common", file.relative_to(PACKAGE).parts[1])
        parts = [name.split(".") for name in imported(ast.parse(file.read_text()))]
        found += [f"{file.name}: {one}" for one in parts if one[:2] == [PACKAGE.name, "cli"] and one[2] not in rooms]
    assert found == []


@pytest.mark.parametrize(
    ("module", "left_out"),
    [("engine_args", "releases"), ("worker_check", "drafting")],
    ids=["front-end", "engine core"],
)
def test_what_every_engine_imports_leaves_the_rest_out(module: str, left_out: str) -> None:
    """These wrappers are imported for engines with stock's method, too."""
    code = f"import sys, vllm_eagle_mrv2.patches.{module}; print('vllm_eagle_mrv2.{left_out}' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "False\n"
