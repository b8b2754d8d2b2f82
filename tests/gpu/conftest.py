"""The GPU tests need an NVIDIA GPU and a stock vLLM that runs on it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import has_cuda

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.timeout(1800))
            if not has_cuda():
                item.add_marker(skip)
