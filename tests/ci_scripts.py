"""The scripts of ci/, for the tests; importing them needs no vLLM."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

CI = Path(__file__).resolve().parents[1] / "ci"


def ci_module(name: str) -> ModuleType:
    """A script, imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(CI)
        return importlib.import_module(name)
