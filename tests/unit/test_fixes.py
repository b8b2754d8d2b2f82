"""The table of fixes: every release has its answer, and what is said to be mended has its test."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.version import Version
from scripts import script

from vllm_eagle_mrv2.cli.doctor.recorded import recorded

fixes = script("fixes")
TESTS = Path(__file__).parents[1]
RELEASES = [Version(release) for release in recorded()]


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    return script("readme_tables")


@pytest.mark.parametrize("fix", fixes.FIXES, ids=lambda fix: fix.symptom[:40])
def test_what_is_mended_has_a_test_and_what_stays_a_reason(fix: Any) -> None:
    states = {fix.state(release) for release in RELEASES}
    if "eagle_mrv2" in states:
        file, _, name = fix.test.partition("::")
        defined = ast.walk(ast.parse((TESTS / file).read_text()))
        assert name in {node.name for node in defined if isinstance(node, ast.FunctionDef)}
    assert bool(fix.why) == ("not possible" in states)


def test_states() -> None:
    fix = fixes.Fix(symptom="", stock=">=0.30", supplied=">=0.25,<0.30", absent="<0.22", why="")
    states = {release: fix.state(Version(release)) for release in ("0.20.2", "0.23.0", "0.26.0", "0.33.0")}
    assert list(states.values()) == ["not applicable", "not possible", "eagle_mrv2", "stock"]


def test_the_page_is_up_to_date(tables: ModuleType) -> None:
    page = tables.DOCS / "fixes.md"
    assert tables.rewrite(page.read_text(encoding="utf-8"), tables.PAGES[page])[1] == [], "run tools/readme_tables.py"
