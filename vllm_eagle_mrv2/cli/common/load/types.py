"""The load that an engine gets, and what it did with it.

A round is measured while its load is steady.  In a closed loop the engine is filled once.  Between rounds, while others
have their turn, it pauses with its requests in flight.  In an open loop a round lasts from the second request to the
last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pydantic import BaseModel, computed_field

_WAIT = 0.1
"""Share of the requests in flight that may wait: one has just been sent, and prefills take turns."""


class Request(BaseModel):
    """One request of a load."""

    prompt: int
    """Number of the prompt, counted over the job's prompts again and again."""
    max_tokens: int
    seed: int
    """Seed of its sampling, and of synthetic acceptance: all engines accept the same."""
    arrives: float
    """Seconds after the start, in an open loop."""


class Load(BaseModel):
    """A round to measure.  The worker answers with a `LoadRound`."""

    requests: list[Request]
    concurrency: int | None
    """Requests in flight, in a closed loop; None in an open loop."""
    temperature: float
    top_p: float
    fills: bool = True
    """Whether a closed loop begins with an empty engine: the first requests, one more than are in flight, fill it and
    do not count.  Otherwise those of the round before are still in flight."""
    draft_length: int | None = None
    """Draft tokens to hold (`telemetry.counters.hold`), where they are chosen at run time; None leaves the choice."""


class Level(NamedTuple):
    """How much load: requests in flight (closed loop) or requests a second (open loop)."""

    concurrency: int | None = None
    rate: float | None = None

    def __str__(self) -> str:
        return f"{self.rate:g}/s" if self.rate is not None else f"{self.concurrency} in flight"


class LoadRound(BaseModel):
    """What one engine did with a load while it was steady."""

    seconds: float
    num_tokens: int
    """Generated tokens, over all requests."""
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    """Time per output token after the first: the median over requests."""
    gap_p99_ms: float
    """Time between successive outputs of a request."""
    accepted_length: float
    """Tokens that one verification of a request yields, including the target's own; over the whole round."""
    drafted_length: float = 0.0
    """Drafts that one verification of a request verifies, 0 where nothing was drafted; over the whole round."""
    seconds_by_length: list[float] = []
    """Seconds of its iterations by number of drafts, for each number that the engine chooses from."""
    waiting: int = 0
    """Requests that vLLM did not run at the end of the round."""
    prompt_tokens: int = 0
    """Of the requests whose first output came in the round."""
    seconds_per_prompt_token: float = 0.0
    """By how much each of them lengthened the round."""
    owed_s: float = 0.0
    """Seconds by which the round would have been longer with as many prompts as its outputs call for (`balance`)."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second, over all requests, with as many prompts as they call for."""
        return throughput([self])


def waited(rounds: Iterable[LoadRound], concurrency: int | None) -> str | None:
    """What is wrong with a closed loop whose requests are not all in flight, with the remedy; None if nothing is."""
    most = max((one.waiting for one in rounds), default=0)
    if concurrency is None or most <= max(1, _WAIT * concurrency):
        return None
    return (
        f"{most} of {concurrency} requests waited, mostly for room in the KV cache: raise --gpu-memory-utilization, or "
        "lower --concurrency"
    )


def throughput(rounds: Sequence[LoadRound]) -> float:
    """Tokens per second over several rounds; 0 without any.

    Rounds differ in their requests, and where one ends moves by an iteration; over all of them both even out.
    """
    seconds = sum(one.seconds + one.owed_s for one in rounds)
    return sum(one.num_tokens for one in rounds) / seconds if seconds else 0.0
