"""An engine under a load that changes, in its own process: the worker of benchmarks/draft_lengths.py.

It also takes the jobs of ``vllm_eagle_mrv2.cli.common.load.worker``.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import iteration_trace
from pydantic import BaseModel, RootModel

from vllm_eagle_mrv2.cli.common.engine_process import serve
from vllm_eagle_mrv2.cli.common.load.traffic import SETTLES_S, Traffic
from vllm_eagle_mrv2.cli.common.load.types import Level, Load, LoadRound, Request
from vllm_eagle_mrv2.cli.common.load.worker import Counted, LoadEngine, read_round
from vllm_eagle_mrv2.cli.common.worker import Worker
from vllm_eagle_mrv2.telemetry.counters import hold, read_counts

BIN_S = 0.5


class Phase(BaseModel):
    """So many requests in flight for so long."""

    concurrency: int
    seconds: float
    acceptance: list[float] | None = None
    """Share of drafts to accept at random up to each position from here on; None leaves it as it is."""


class Changes(BaseModel):
    """Phases to go through, from an empty engine."""

    phases: list[Phase]
    draft_length: int | None = None
    """Draft tokens to hold; None leaves the choice to the engine."""
    output_tokens: tuple[int, int] = (64, 256)


class Course(BaseModel):
    """What came of a phase: a figure for each `BIN_S`."""

    tokens_per_second: list[float]
    draft_length: list[int]
    """Drafts per request in the latest batch of the time."""
    settled: LoadRound
    """All from `SETTLES_S` after the phase's begin on."""


class Courses(BaseModel):
    """The courses of all phases."""

    phases: list[Course]


class Task(RootModel[Changes | Load]):
    """What the engine is asked for."""


iteration_trace.install()  # vLLM's worker imports this module, in the process of the engine core on one GPU


class AcceptanceRates:
    """What ``worker_extension_cls`` adds to vLLM's worker."""

    model_runner: Any

    def set_acceptance_rates(self, shares: list[float]) -> None:
        """Accept drafts at random from now on, these shares up to each position."""
        rates = self.model_runner.rejection_sampler.synthetic_conditional_rates
        conditional = [shares[0], *(share / before if before else 0.0 for before, share in pairwise(shares))]
        rates.copy_(rates.new_tensor(conditional[: len(rates)]))


class ChangingEngine(LoadEngine):
    """A live engine that serves as many requests as a phase says."""

    def measure(self, task: Task) -> LoadRound | Courses:  # type: ignore[override]
        """Go through the phases, or serve the requests of a load."""
        if isinstance(task.root, Load):
            return super().measure(task.root)
        hold(task.root.draft_length)
        self._held = task.root.draft_length
        return self._loop.run_until_complete(self._go_through(task.root))

    async def _go_through(self, changes: Changes) -> Courses:
        await self._drop()
        await self._resume()
        courses = []
        requests = self._requests(Traffic(changes.output_tokens))
        for phase in changes.phases:
            if phase.acceptance:
                await self._engine.collective_rpc("set_acceptance_rates", args=(phase.acceptance,))
            self._clients = [client for client in self._clients if not client.done()]
            self._clients += [
                asyncio.create_task(self._serve_while_wanted(client, requests))
                for client in range(len(self._clients), phase.concurrency)
            ]
            self._wanted = phase.concurrency
            courses.append(await self._course(phase.seconds))
        await self._drop()
        return Courses(phases=courses)

    @staticmethod
    def _requests(traffic: Traffic) -> Iterator[tuple[Load, Request]]:
        """Requests without end, always the same."""
        for number in itertools.count():
            load = traffic.load(Level(concurrency=1), number, fills=False)
            yield from ((load, request) for request in load.requests)

    async def _serve_while_wanted(self, client: int, requests: Iterator[tuple[Load, Request]]) -> None:
        """Serve one request after the other, while so many are to be in flight."""
        while client < self._wanted:
            await self._generate(*next(requests))

    async def _course(self, seconds: float) -> Course:
        begins, lengths, before = self._clock.now(), [], Counted.now()
        for number in range(1, round(seconds / BIN_S) + 1):
            await asyncio.sleep(begins + number * BIN_S - self._clock.now())
            for client in self._clients:
                if client.done():
                    client.result()
            lengths.append(max((counts.draft_length for _, counts in read_counts()), default=0))
            if number * BIN_S == SETTLES_S:
                before = Counted.now()
        tokens = [0] * len(lengths)
        for one in self._served:
            for at, new in one.outputs:
                if 0 <= (place := int((at - begins) / BIN_S)) < len(tokens):
                    tokens[place] += new
        settled = read_round(self._served, begins + min(SETTLES_S, seconds), begins + seconds, **before.since())
        return Course(tokens_per_second=[count / BIN_S for count in tokens], draft_length=lengths, settled=settled)


if __name__ == "__main__":
    sys.exit(serve(Worker(ChangingEngine, Task).answer))
