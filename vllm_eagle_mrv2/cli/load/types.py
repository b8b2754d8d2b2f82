"""The load that an engine gets, and the comparison of the rounds of several engines.

A round is measured while its load is steady.  In a closed loop the engine is filled once.  Between rounds, while others
have their turn, it pauses with its requests in flight.  In an open loop a round lasts from the second request to the
last.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple

from pydantic import BaseModel, computed_field

Metric = Literal["tokens_per_second", "tpot_p50_ms"]
FIGURES = ("tokens_per_second", "tpot_p50_ms", "ttft_p50_ms", "ttft_p99_ms", "gap_p99_ms", "accepted_length")
AGREEMENT = 0.02
"""By how much two engines of the same kind may differ if a row is to have a verdict."""


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


def throughput(rounds: Sequence[LoadRound]) -> float:
    """Tokens per second over several rounds; 0 without any.

    Rounds differ in their requests, and where one ends moves by an iteration; over all of them both even out.
    """
    seconds = sum(one.seconds + one.owed_s for one in rounds)
    return sum(one.num_tokens for one in rounds) / seconds if seconds else 0.0


class Gain(NamedTuple):
    """How many times better an engine is: over all rounds, and in the worst and the best of them; 0 without any."""

    overall: float
    lowest: float
    highest: float

    def __str__(self) -> str:
        return f"{self.overall:.3f} ({self.lowest:.3f}-{self.highest:.3f})"


class LoadRow(BaseModel):
    """The rounds of all engines at one K and level of load, the first engine's to compare against, ours last."""

    k: int
    level: Level
    names: tuple[str, ...]
    rounds: list[list[LoadRound]]
    """By engine."""

    def figures(self, engine: int) -> dict[str, float]:
        """The figures of an engine: tokens per second over all rounds, the medians of the others."""
        rounds = self.rounds[engine]
        medians = {name: statistics.median(getattr(one, name) for one in rounds) for name in FIGURES}
        return medians | {"tokens_per_second": throughput(rounds)}

    @property
    def decisive(self) -> Metric:
        """The metric that shows a difference: at a given rate all engines generate the same tokens a second."""
        return "tpot_p50_ms" if self.level.rate is not None else "tokens_per_second"

    def gain(self, engine: int) -> Gain:
        """How many times better than the first an engine is in the decisive metric; above 1 it is better."""
        pairs = list(zip(self.rounds[0], self.rounds[engine], strict=True))
        pairs = [pair for pair in pairs if all(getattr(one, self.decisive) for one in pair)]
        if not pairs:
            return Gain(0.0, 0.0, 0.0)
        ratios = [self._ratio([theirs], [mine]) for theirs, mine in pairs]
        return Gain(self._ratio(*zip(*pairs, strict=True)), min(ratios), max(ratios))

    def _ratio(self, theirs: Sequence[LoadRound], mine: Sequence[LoadRound]) -> float:
        if self.decisive == "tokens_per_second":
            return throughput(mine) / throughput(theirs)
        return sum(one.tpot_p50_ms for one in theirs) / sum(one.tpot_p50_ms for one in mine)

    @property
    def measured(self) -> bool:
        """Whether the load was steady for long enough in every round."""
        return all(getattr(one, self.decisive) for rounds in self.rounds for one in rounds)

    @property
    def noise(self) -> float | None:
        """By how much the control differs from the first engine, which is of the same kind; None without a control."""
        return abs(self.gain(1).overall - 1) if self.names[1] == f"{self.names[0]} again" else None

    @property
    def verdict(self) -> str:
        """What the row shows, in a few words."""
        if not self.measured:
            return "none: a round was too short, raise --requests or --output-tokens"
        if self.noise is None:
            return "no control"
        if self.noise > AGREEMENT:
            return f"none: two engines with {self.names[0]} differ by {self.noise:.1%}"
        gain = self.gain(-1).overall - 1
        if abs(gain) <= self.noise:
            return "no difference"
        return f"{abs(gain):.1%} {'better' if gain > 0 else 'worse'}"

    @property
    def decided(self) -> bool:
        """Whether every round was measured, and two engines of the same kind agree well enough for a verdict."""
        return self.measured and (self.noise is None or self.noise <= AGREEMENT)
