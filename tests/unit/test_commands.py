"""The folders of the commands."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import vllm_eagle_mrv2.cli

pytestmark = pytest.mark.any_release

COMMANDS = Path(vllm_eagle_mrv2.cli.__file__).parent


@pytest.mark.parametrize("file", sorted(COMMANDS.glob("*/**/*.py")), ids=lambda file: str(file.relative_to(COMMANDS)))
def test_commands_share_through_the_common_folder(file: Path) -> None:
    own = file.relative_to(COMMANDS).parts[0]
    imported = [node.module for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
    rooms = {module.split(".")[2] for module in imported if module and module.startswith("vllm_eagle_mrv2.cli.")}
    assert rooms <= {own, "common"}
