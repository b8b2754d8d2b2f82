"""What the tests of the measuring commands share."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from rich.console import Console

from vllm_eagle_mrv2.cli.common.engines import Comparison, Engines
from vllm_eagle_mrv2.cli.common.report import Report
from vllm_eagle_mrv2.cli.common.subject import Subject
from vllm_eagle_mrv2.cli.common.types import Started

H200 = Started(vllm_version="0.32.0", device="cuda", device_name="H200")
CPU = Started(vllm_version="0.32.0", device="cpu", device_name="cpu")


def comparison(**changed: Any) -> Comparison:
    """Of two engines that nobody starts."""
    subject = Subject("a pair", "target", "head", "eagle3", ["text"], {"max_model_len": 512})
    return Comparison(**{"subject": subject, "worker": "a_worker", **changed})


class FakeProcess:
    """Answers every job with the same round, and notes what it was asked."""

    def __init__(self, name: str, asked: list[tuple[str, Any]], answer: BaseModel) -> None:
        self._name, self._asked, self._answer = name, asked, answer

    def ask(self, job: Any) -> Any:
        self._asked.append((self._name, job))
        return self._answer.model_dump()


def live(
    k: int, names: Sequence[str], answers: Sequence[BaseModel], asked: list[tuple[str, Any]], started: Started = H200
) -> Engines:
    """Engines that answer always the same."""
    processes: Any = {name: FakeProcess(name, asked, answer) for name, answer in zip(names, answers, strict=True)}
    return Engines(k, processes, started)


def shown(one: Report, width: int = 200, **console: Any) -> list[str]:
    """The lines that a report prints."""
    text = io.StringIO()
    one.print_on(Console(file=text, width=width, **console))
    return text.getvalue().splitlines()
