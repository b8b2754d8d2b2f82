"""The engine tests run a real vLLM, on whatever device this machine has."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import engine, greedy

from .fake_graphs import draft_decode_graphs  # noqa: F401 - a fixture

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="module")
def plain(request: pytest.FixtureRequest) -> list[list[int]]:
    """``TOKENS`` tokens after each of a module's ``PROMPTS``, greedily and without speculation."""
    with engine(None) as llm:
        return greedy(llm, request.module.PROMPTS, request.module.TOKENS)
