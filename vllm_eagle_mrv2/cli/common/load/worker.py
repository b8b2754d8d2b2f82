"""An engine under load in its own process (`engine_process`): takes a `Job`, then gives a `LoadRound` a `Load`."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import sys
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from vllm_eagle_mrv2.cli.common.draft_counters import Counters, counted_since, read_counters
from vllm_eagle_mrv2.cli.common.engine_process import serve
from vllm_eagle_mrv2.cli.common.load.balance import Served, iterations, seconds_per_prompt_token
from vllm_eagle_mrv2.cli.common.load.types import Load, LoadRound, Request
from vllm_eagle_mrv2.cli.common.types import Job
from vllm_eagle_mrv2.cli.common.worker import Worker, engine_arguments, percentile, started
from vllm_eagle_mrv2.telemetry.counters import hold, read_counts

_SETTLING = 4
"""Outputs of a request after which its drafts are as many as are asked for: when the number changes, one iteration or
two have been scheduled with the old one, and the next verifies what those drafted."""


class Clock:
    """Counts the seconds in which the engine was not paused."""

    def __init__(self) -> None:
        self._counted = 0.0
        self._running_since: float | None = time.perf_counter()

    def now(self) -> float:
        """Seconds so far."""
        return self._counted + (0.0 if self._running_since is None else time.perf_counter() - self._running_since)

    def pause(self, at: float) -> None:
        """Stand still at a time that has just passed."""
        self._counted, self._running_since = at, None

    def resume(self) -> None:
        """Go on."""
        if self._running_since is None:
            self._running_since = time.perf_counter()


def read_seconds_by_length() -> list[float]:
    """Seconds of iterations by number of drafts, over all ranks; none where an engine does not choose it."""
    ranks = [counts.seconds_by_length for _, counts in read_counts()]
    return [sum(seconds) for seconds in zip(*ranks, strict=True)]


def requests_waiting() -> int:
    """Requests that vLLM has and does not run now, as it shows them in /metrics."""
    from prometheus_client import REGISTRY

    shown = (metric for metric in REGISTRY.collect() if metric.name == "vllm:num_requests_waiting")
    return sum(int(sample.value) for metric in shown for sample in metric.samples)


class Counted(NamedTuple):
    """What vLLM's counters and ours show at a time."""

    drafts: Counters
    seconds_by_length: list[float]

    @classmethod
    def now(cls) -> Counted:
        """Read them."""
        return cls(read_counters(), read_seconds_by_length())

    def since(self) -> dict[str, Any]:
        """The figures of a `LoadRound` that follow from what was counted since."""
        counted, earlier = counted_since(self.drafts), self.seconds_by_length
        drafts = counted["num_drafts"]
        return {
            "accepted_length": 1 + counted["num_accepted_tokens"] / drafts if drafts else 1.0,
            "drafted_length": counted["num_draft_tokens"] / drafts if drafts else 0.0,
            "seconds_by_length": [now - then for then, now in zip(earlier, read_seconds_by_length(), strict=False)],
        }


class LoadEngine:
    """A live engine that serves requests as a server does."""

    def __init__(self, job: Job) -> None:
        """Start the engine."""
        self._loop = asyncio.new_event_loop()
        self._prompts, self._ignore_eos = job.prompts, job.ignore_eos
        self._engine: Any = self._loop.run_until_complete(self._start(job))
        self._clock = Clock()
        self._numbers = itertools.count()
        self._waiting: asyncio.Queue[tuple[Load, Request]] = asyncio.Queue()
        self._clients: list[asyncio.Task[None]] = []
        self._served: list[Served] = []
        self._held: int | None = None
        self.started = started()
        atexit.register(self.end)

    @staticmethod
    async def _start(job: Job) -> Any:
        import vllm

        return vllm.AsyncLLMEngine.from_engine_args(vllm.AsyncEngineArgs(**engine_arguments(job)))

    def end(self) -> None:
        """End the requests in flight and the engine, whose tasks would otherwise outlive their loop and say so."""
        if self._loop.is_closed():
            return
        self._loop.run_until_complete(self._drop())
        self._engine.shutdown()
        self._loop.run_until_complete(asyncio.sleep(0))  # for the task that shutdown has cancelled
        self._loop.close()

    def measure(self, load: Load) -> LoadRound:
        """Serve the requests of a load."""
        hold(load.draft_length)
        return self._loop.run_until_complete(
            self._open_loop(load) if load.concurrency is None else self._closed_loop(load)
        )

    async def _closed_loop(self, load: Load) -> LoadRound:
        """Send each request as soon as another one ends; pause the engine when all are sent.

        Between rounds the requests in flight stay where they are, so all of a round counts, from when they have as many
        drafts as the round asks for.
        """
        begin = 0
        if load.fills:
            await self._drop()
            self._clients = [asyncio.create_task(self._client()) for _ in range(load.concurrency or 0)]
            begin = len(self._clients) + 1
        before_change = [] if load.draft_length == self._held else [(one, len(one.outputs)) for one in self._served]
        self._held = load.draft_length
        await self._resume()
        await self._send(load, load.requests[:begin])
        sending = asyncio.create_task(self._send(load, load.requests[begin:]))
        while not sending.done() and any(
            not one.ended and len(one.outputs) < outputs + _SETTLING for one, outputs in before_change
        ):
            await asyncio.sleep(0.001)
        began, before = self._clock.now(), Counted.now()
        await sending
        waiting = requests_waiting()
        await self._engine.pause_generation(mode="keep", clear_cache=False)
        self._clock.pause(max(one.outputs[-1][0] for one in self._served if one.outputs))
        return self._read(began, self._clock.now(), before).model_copy(update={"waiting": waiting})

    async def _open_loop(self, load: Load) -> LoadRound:
        """Send each request when it arrives; what counts is the time in which they do."""
        await self._drop()
        await self._resume()
        start, before = self._clock.now(), Counted.now()

        async def arrive(request: Request) -> None:
            await asyncio.sleep(request.arrives - (self._clock.now() - start))
            await self._generate(load, request)

        await asyncio.gather(*(arrive(request) for request in load.requests))
        return self._read(self._served[1].sent, self._served[-1].sent, before)

    async def _client(self) -> None:
        """Serve one request after the other, whenever there is one."""
        while True:
            load, request = await self._waiting.get()
            self._waiting.task_done()
            await self._generate(load, request)

    async def _send(self, load: Load, requests: Iterable[Request]) -> None:
        """Return as soon as all requests are sent, or raise what keeps a client from it."""
        for request in requests:
            self._waiting.put_nowait((load, request))
        sent = asyncio.create_task(self._waiting.join())
        await asyncio.wait([sent, *self._clients], return_when=asyncio.FIRST_COMPLETED)
        for client in self._clients:
            if client.done():
                client.result()

    async def _resume(self) -> None:
        self._clock.resume()
        await self._engine.resume_generation()

    async def _drop(self) -> None:
        """Abort the requests in flight."""
        for client in self._clients:
            client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)
        self._clients, self._served = [], []

    def _read(self, begins: float, ends: float, before: Counted) -> LoadRound:
        """The figures of a round; requests that have ended are forgotten."""
        served, self._served = self._served, [one for one in self._served if not one.ended]
        return read_round(served, begins, ends, **before.since())

    async def _generate(self, load: Load, request: Request) -> None:
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
        one = Served(self._clock.now())
        self._served.append(one)
        given = prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        async for output in self._engine.generate(given, params, str(next(self._numbers))):
            one.prompt_tokens = len(output.prompt_token_ids or ())
            new = len(output.outputs[0].token_ids)
            if new:
                one.outputs.append((self._clock.now(), new))
        one.ended = True


def read_round(served: Sequence[Served], begins: float, ends: float, **counted: Any) -> LoadRound:
    """The figures of what came while the load was steady; 0 where nothing came.

    Args:
        served: all requests that were in flight then.
        begins: seconds.
        ends: seconds.
        counted: other figures, of the whole round.
    """
    steady = [(at, new) for one in served for at, new in one.outputs if begins < at <= ends]
    gaps = [now - then for one in served for (then, _), (now, _) in pairwise(one.outputs) if begins < now <= ends]
    firsts = [one.outputs[0][0] - one.sent for one in served if one.outputs and begins < one.outputs[0][0] <= ends]
    ended = [one for one in served if one.ended and len(one.outputs) > 1 and begins < one.outputs[-1][0] <= ends]
    seen = iterations(served, begins, ends)
    return LoadRound(
        seconds=ends - begins,
        num_tokens=sum(new for _, new in steady),
        ttft_p50_ms=percentile(firsts, 50) * 1e3,
        ttft_p99_ms=percentile(firsts, 99) * 1e3,
        tpot_p50_ms=percentile([time_per_output_token(one) for one in ended], 50) * 1e3,
        gap_p99_ms=percentile(gaps, 99) * 1e3,
        prompt_tokens=sum(one.prompt_tokens for one in seen),
        seconds_per_prompt_token=seconds_per_prompt_token(seen),
        **counted,
    )


def time_per_output_token(one: Served) -> float:
    """Seconds per token after the first output of a request."""
    (first, _), (last, _) = one.outputs[0], one.outputs[-1]
    return (last - first) / sum(new for _, new in one.outputs[1:])


if __name__ == "__main__":
    sys.exit(serve(Worker(LoadEngine, Load).answer))
