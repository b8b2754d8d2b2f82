"""A level-2 sleep on a worker like that of vLLM up to 0.26, which drops what lies in the weights' memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.v1.worker.gpu_worker")


from vllm_eagle_mrv2.patches import sleep

from .stock import drafter_on, stock_speculator

TABLE = [1.0, 2.0, 3.0]


class Model(torch.nn.Module):
    """A weight and a buffer, the latter as inference tensor, as vLLM may load it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        with torch.inference_mode():
            self.register_buffer("table", torch.tensor(TABLE), persistent=False)


def speculator() -> Any:
    stock = stock_speculator(model=Model())
    stock.drafter = drafter_on(stock)
    return stock


class Worker:
    """Sleeps as stock's does, with NaN for the memory that comes back."""

    def __init__(self, speculator: Any) -> None:
        self.model_runner = SimpleNamespace(model=Model(), speculator=speculator)
        self.saved: dict[str, torch.Tensor] = {}

    def _models(self) -> list[Model]:
        return [self.model_runner.model, self.model_runner.speculator.model]

    def sleep(self, level: int = 1) -> None:
        if level != 2:
            return
        self.saved = {name: buffer.clone() for name, buffer in self.model_runner.model.named_buffers()}
        with torch.inference_mode():
            for model in self._models():
                for tensor in (*model.parameters(), *model.buffers()):
                    tensor.fill_(float("nan"))

    def wake_up(self, tags: list[str] | None = None) -> None:
        with torch.inference_mode():
            for name, buffer in self.saved.items():
                self.model_runner.model.get_buffer(name).copy_(buffer)
        self.saved = {}


@pytest.fixture(autouse=True)
def patches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, wrapper in (("sleep", sleep.buffers_saved), ("wake_up", sleep.buffers_restored)):
        monkeypatch.setattr(Worker, name, wrapper(getattr(Worker, name)))


def tables(worker: Worker) -> list[list[float]]:
    return [model.get_buffer("table").tolist() for model in worker._models()]


@pytest.mark.parametrize("tags", [[None], [["weights"], ["kv_cache"]], [["kv_cache"], ["weights"]]])
def test_buffers_come_back(tags: list[list[str] | None]) -> None:
    worker = Worker(speculator())
    for _ in range(2):
        worker.sleep(level=2)
        for some in tags:
            worker.wake_up(tags=some)
        assert tables(worker) == [TABLE, TABLE]
        assert worker.model_runner.speculator.model.weight.isnan().all()  # weights are the trainer's
        assert not worker.model_runner.speculator.drafter.saved_buffers


def test_asleep_memory_is_not_written() -> None:
    """What is mapped again with the weights cannot be written before."""
    worker = Worker(speculator())
    worker.sleep(2)
    worker.wake_up(["kv_cache"])
    assert torch.tensor(tables(worker)[1]).isnan().all()


def test_a_level_1_sleep_keeps_nothing() -> None:
    worker = Worker(speculator())
    worker.sleep()
    assert not worker.model_runner.speculator.drafter.saved_buffers
    worker.wake_up()
    assert tables(worker) == [TABLE, TABLE]


def test_other_speculators_are_left_alone() -> None:
    worker = Worker(SimpleNamespace(model=Model()))
    worker.sleep(2)
    worker.wake_up()
    assert torch.tensor(tables(worker)[1]).isnan().all()
    del worker.model_runner.speculator  # Model Runner V1 has none
    worker.wake_up()
