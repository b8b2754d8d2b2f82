"""The scripts of ci/, tools/ and benchmarks/, for the tests; importing them needs no vLLM."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

CHECKOUT = Path(__file__).resolve().parents[1]
CI, BENCHMARKS = CHECKOUT / "ci", CHECKOUT / "benchmarks"


def script(name: str) -> ModuleType:
    """A script, imported."""
    with pytest.MonkeyPatch.context() as patch:
        for folder in (CI, CHECKOUT / "tools", BENCHMARKS):
            patch.syspath_prepend(folder)
        return importlib.import_module(name)
