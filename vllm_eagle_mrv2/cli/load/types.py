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

Metric = Literal["tokens_per_second", "tpot_p50_ms", "ttft_p50_ms", "gap_p99_ms"]
MEDIANS = ("tokens_per_second", "tpot_p50_ms", "ttft_p50_ms", "ttft_p99_ms", "gap_p99_ms", "accepted_length")
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

    @computed_field  # type: ignore[prop-decorator]
    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second, over all requests."""
        return self.num_tokens / self.seconds if self.seconds else 0.0


class Spread(NamedTuple):
    """The median, the lowest and the highest of several values; 0 without values."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values)) if values else cls(0.0, 0.0, 0.0)

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.lowest:.3f}-{self.highest:.3f})"


class LoadRow(BaseModel):
    """The rounds of all engines at one K and level of load, the first engine's to compare against, ours last."""

    k: int
    level: Level
    names: tuple[str, ...]
    rounds: list[list[LoadRound]]
    """By engine."""

    def medians(self, engine: int) -> dict[str, float]:
        """The figures of an engine."""
        return {name: statistics.median(getattr(one, name) for one in self.rounds[engine]) for name in MEDIANS}

    @property
    def decisive(self) -> Metric:
        """The metric that shows a difference: at a given rate all engines generate the same tokens a second."""
        return "tpot_p50_ms" if self.level.rate is not None else "tokens_per_second"

    def gain(self, engine: int, metric: Metric | None = None) -> Spread:
        """How many times better an engine is than the first, over neighbouring rounds; above 1 it is better."""
        metric = metric or self.decisive
        figures = ([getattr(one, metric) for one in self.rounds[place]] for place in (0, engine))
        ratios = [mine / theirs for theirs, mine in zip(*figures, strict=True) if theirs and mine]
        return Spread.of(ratios if metric == "tokens_per_second" else [1 / ratio for ratio in ratios])

    @property
    def measured(self) -> bool:
        """Whether the load was steady for long enough in every round."""
        return all(getattr(one, self.decisive) for rounds in self.rounds for one in rounds)

    @property
    def noise(self) -> float | None:
        """By how much the control differs from the first engine, which is of the same kind; None without a control."""
        return abs(self.gain(1).median - 1) if self.names[1] == f"{self.names[0]} again" else None

    @property
    def verdict(self) -> str:
        """What the row shows, in a few words."""
        if not self.measured:
            return "none: a round was too short, raise --requests or --output-tokens"
        if self.noise is None:
            return "no control"
        if self.noise > AGREEMENT:
            return f"none: two engines with {self.names[0]} differ by {self.noise:.1%}"
        gain = self.gain(-1).median - 1
        if abs(gain) <= self.noise:
            return "no difference"
        return f"{abs(gain):.1%} {'better' if gain > 0 else 'worse'}"

    @property
    def decided(self) -> bool:
        """Whether every round was measured, and two engines of the same kind agree well enough for a verdict."""
        return self.measured and (self.noise is None or self.noise <= AGREEMENT)
