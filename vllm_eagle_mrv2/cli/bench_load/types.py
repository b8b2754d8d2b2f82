"""The comparison of several engines under the same load."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple

from pydantic import BaseModel

from vllm_eagle_mrv2.cli.common.load.types import Level, LoadRound, throughput, waited

Metric = Literal["tokens_per_second", "tpot_p50_ms"]
FIGURES = ("tokens_per_second", "tpot_p50_ms", "ttft_p50_ms", "ttft_p99_ms", "gap_p99_ms", "accepted_length")
AGREEMENT = 0.02
"""By how much two engines of the same kind may differ if a row is to have a verdict, and what a difference must exceed.

One control says too little of how far equal engines are apart for a finer bound.
"""


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
        if not (pairs := self._pairs(engine)):
            return Gain(0.0, 0.0, 0.0)
        ratios = self._ratios(engine)
        return Gain(self._ratio(*zip(*pairs, strict=True)), min(ratios), max(ratios))

    def _pairs(self, engine: int) -> list[tuple[LoadRound, LoadRound]]:
        """The rounds of the first engine and of another, where both have the decisive metric."""
        pairs = zip(self.rounds[0], self.rounds[engine], strict=True)
        return [pair for pair in pairs if all(getattr(one, self.decisive) for one in pair)]

    def _ratios(self, engine: int) -> list[float]:
        return [self._ratio([theirs], [mine]) for theirs, mine in self._pairs(engine)]

    def _ratio(self, theirs: Sequence[LoadRound], mine: Sequence[LoadRound]) -> float:
        if self.decisive == "tokens_per_second":
            return throughput(mine) / throughput(theirs)
        return sum(one.tpot_p50_ms for one in theirs) / sum(one.tpot_p50_ms for one in mine)

    @property
    def measured(self) -> bool:
        """Whether the load was steady for long enough in every round."""
        return all(getattr(one, self.decisive) for rounds in self.rounds for one in rounds)

    @property
    def _waited(self) -> str | None:
        return waited(itertools.chain.from_iterable(self.rounds), self.level.concurrency)

    @property
    def noise(self) -> float | None:
        """By how much the control differs from the first engine, which is of the same kind; None without a control."""
        return abs(self.gain(1).overall - 1) if self.names[1] == f"{self.names[0]} again" else None

    @property
    def verdict(self) -> str:
        """What the row shows, in a few words."""
        if not self.measured:
            return "none: a round was too short, raise --requests or --output-tokens"
        if self._waited is not None:
            return f"none: {self._waited}"
        if self.noise is None:
            return "no control"
        if self.noise > AGREEMENT:
            return f"none: two engines with {self.names[0]} differ by {self.noise:.1%}"
        gain, ratios = self.gain(-1).overall - 1, self._ratios(-1)
        error = statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else math.inf
        if abs(gain) <= max(AGREEMENT, 2 * error):
            return "no difference"
        return f"{abs(gain):.1%} {'better' if gain > 0 else 'worse'}"

    @property
    def decided(self) -> bool:
        """Whether every round was measured with all requests in flight, and two engines of the same kind agree."""
        return self.measured and self._waited is None and (self.noise is None or self.noise <= AGREEMENT)
