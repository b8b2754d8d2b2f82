"""Workers on a GPU that do not load the plugin: the engine says so and ends."""

from __future__ import annotations

import pytest
from support import engine

from vllm_eagle_mrv2.plugin import register


def test_workers_without_the_plugin(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    register()  # here, and nowhere else
    monkeypatch.setenv("VLLM_PLUGINS", "lora")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    with pytest.raises(RuntimeError), engine("eagle_mrv2", distributed_executor_backend="mp"):
        pass
    log = "".join(capfd.readouterr())
    assert "EagleMRV2Error: method=eagle_mrv2 was asked for, but the worker of rank 0 drafts with vllm.v1." in log
    assert "VLLM_PLUGINS=lora keeps the plugin out of its process" in log
