"""An engine under load in its own process (`cli.engine_process`): takes a `Job`, then gives a `LoadRound` a `Load`."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from vllm_eagle_mrv2.cli.bench.types import Job
from vllm_eagle_mrv2.cli.bench.worker import Worker, engine_arguments, percentile, started
from vllm_eagle_mrv2.cli.draft_counters import counted_since, read_counters
from vllm_eagle_mrv2.cli.engine_process import serve
from vllm_eagle_mrv2.cli.load.types import Load, LoadRound, Request
from vllm_eagle_mrv2.telemetry.counters import hold


@dataclass
class Served:
    """When a request was sent, and its outputs: (time in seconds, new tokens)."""

    sent: float
    outputs: list[tuple[float, int]] = field(default_factory=list)


class LoadEngine:
    """A live engine that serves requests as a server does."""

    def __init__(self, job: Job) -> None:
        """Start the engine."""
        import vllm

        self._loop = asyncio.new_event_loop()
        self._prompts, self._ignore_eos = job.prompts, job.ignore_eos
        arguments = vllm.AsyncEngineArgs(**engine_arguments(job))
        self._engine: Any = self._loop.run_until_complete(self._start(arguments))
        self._rounds = 0
        self.started = started()

    @staticmethod
    async def _start(arguments: Any) -> Any:
        import vllm

        return vllm.AsyncLLMEngine.from_engine_args(arguments)

    def measure(self, load: Load) -> LoadRound:
        """Serve all requests of a load."""
        self._rounds += 1
        hold(load.draft_length)
        before = read_counters()
        served = self._loop.run_until_complete(self._serve(load))
        counted = counted_since(before)
        drafts = counted["num_drafts"]
        return read_round(
            served,
            in_flight=load.concurrency or 1,
            accepted_length=1 + counted["num_accepted_tokens"] / drafts if drafts else 1.0,
            drafted_length=counted["num_draft_tokens"] / drafts if drafts else 0.0,
        )

    async def _serve(self, load: Load) -> list[Served]:
        served: list[Served] = []
        waiting = iter(load.requests)

        async def closed_loop() -> None:
            for request in waiting:
                await self._generate(load, request, served)

        async def open_loop(request: Request, began: float) -> None:
            await asyncio.sleep(request.arrives - (time.perf_counter() - began))
            await self._generate(load, request, served)

        if load.concurrency is not None:
            await asyncio.gather(*(closed_loop() for _ in range(load.concurrency)))
        else:
            began = time.perf_counter()
            await asyncio.gather(*(open_loop(request, began) for request in load.requests))
        return served

    async def _generate(self, load: Load, request: Request, served: list[Served]) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=load.temperature,
            top_p=load.top_p,
            seed=request.seed,
            max_tokens=request.max_tokens,
            ignore_eos=self._ignore_eos,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = self._prompts[request.prompt % len(self._prompts)]
        one = Served(time.perf_counter())
        served.append(one)
        given = prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        async for output in self._engine.generate(given, params, f"{self._rounds}-{len(served)}"):
            new = len(output.outputs[0].token_ids)
            if new:
                one.outputs.append((time.perf_counter(), new))


def read_round(served: Sequence[Served], in_flight: int, accepted_length: float, drafted_length: float) -> LoadRound:
    """The figures of a round while the load was steady; 0 where that was too short to have any.

    Args:
        served: all requests, in the order in which they were sent.
        in_flight: how many of them were sent before the first one ended; those only fill the engine.
        accepted_length: of the whole round.
        drafted_length: likewise.
    """
    begins, ends = served[in_flight].sent, served[-1].sent
    steady = [(at, new) for one in served for at, new in one.outputs if begins < at <= ends]
    gaps = [now - then for one in served for (then, _), (now, _) in pairwise(one.outputs) if begins < now <= ends]
    firsts = [one.outputs[0][0] - one.sent for one in served[in_flight:] if one.outputs]
    ended = [one for one in served if len(one.outputs) > 1 and begins < one.outputs[-1][0] <= ends]
    return LoadRound(
        seconds=ends - begins,
        num_tokens=sum(new for _, new in steady),
        ttft_p50_ms=percentile(firsts, 50) * 1e3,
        ttft_p99_ms=percentile(firsts, 99) * 1e3,
        tpot_p50_ms=percentile([time_per_output_token(one) for one in ended], 50) * 1e3,
        gap_p99_ms=percentile(gaps, 99) * 1e3,
        accepted_length=accepted_length,
        drafted_length=drafted_length,
    )


def time_per_output_token(one: Served) -> float:
    """Seconds per token after the first output of a request."""
    (first, _), (last, _) = one.outputs[0], one.outputs[-1]
    return (last - first) / sum(new for _, new in one.outputs[1:])


if __name__ == "__main__":
    sys.exit(serve(Worker(LoadEngine, Load).answer))
