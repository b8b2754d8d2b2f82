"""Engines whose workers drop the plugin: none drafts with stock's speculator in silence."""

from __future__ import annotations

import pytest
from support import engine

from vllm_eagle_mrv2.errors import EagleMRV2Error
from vllm_eagle_mrv2.plugin import register

CAUSE = "VLLM_PLUGINS=lora keeps the plugin out of its process; have VLLM_PLUGINS name eagle_mrv2 there, or unset it."


@pytest.fixture(autouse=True)
def _processes_without_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """This one has loaded it; those that are started from now on do not."""
    register()
    monkeypatch.setenv("VLLM_PLUGINS", "lora")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def test_a_worker_of_its_own() -> None:
    with pytest.raises(EagleMRV2Error) as refused, engine("eagle_mrv2", distributed_executor_backend="mp"):
        pass
    message = str(refused.value)
    assert message.startswith("method=eagle_mrv2 was asked for, but the worker of rank 0 drafts with vllm.v1.")
    assert message.endswith(CAUSE)


def test_an_engine_core_of_its_own(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """The worker is in the process of the core, which does not load the plugin either."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with pytest.raises(RuntimeError, match="See root cause above"), engine("eagle_mrv2"):
        pass
    log = "".join(capfd.readouterr())
    assert "EagleMRV2Error: method=eagle_mrv2 was asked for, but the worker of rank 0 drafts with vllm.v1." in log
    assert CAUSE in log
