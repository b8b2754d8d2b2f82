"""The GPU tests need an NVIDIA GPU and a stock vLLM that runs on it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import has_cuda

HERE = Path(__file__).parent
OWN_PROCESS = "EAGLE_MRV2_TEST_IN_ITS_OWN_PROCESS"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.timeout(1800))
            if not has_cuda():
                item.add_marker(skip)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is marked ``own_process`` by a pytest of its own."""
    if pyfuncitem.get_closest_marker("own_process") is None or OWN_PROCESS in os.environ:
        return None
    test = f"{pyfuncitem.path}::{pyfuncitem.name}"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", test],
        env=os.environ | {OWN_PROCESS: "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    print(run.stdout)
    assert run.returncode == 0, f"{test} failed in its own process"
    return True
