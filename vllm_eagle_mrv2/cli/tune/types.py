"""What an engine does with each number of draft tokens, and the schedule that follows from it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from pydantic import BaseModel

from vllm_eagle_mrv2.cli.common.load.types import LoadRound, throughput, waited

AUTO: Literal["auto"] = "auto"
Setting = int | Literal["auto"]
"""A number of draft tokens that is held, or `AUTO` where the engine chooses it."""
KEPT = 0.995
"""A schedule keeps the number of fewer requests where it makes this share of the most tokens a second."""


class TuneRow(BaseModel):
    """The rounds of every setting with so many requests in flight."""

    concurrency: int
    rounds: dict[Setting, list[LoadRound]]
    """All serve the same loads in the same order: `AUTO` all of them, a number that fell behind the first alone."""

    @property
    def speeds(self) -> dict[Setting, float]:
        """Tokens a second of each setting; with fewer loads, what it would make of all if it keeps pace with `AUTO`."""
        auto = self.rounds[AUTO]

        def share_of_all(loads: int) -> float:
            return throughput(auto) / (throughput(auto[:loads]) or 1.0)

        return {
            setting: throughput(rounds) * (share_of_all(len(rounds)) if len(rounds) < len(auto) else 1.0)
            for setting, rounds in self.rounds.items()
        }

    @property
    def best(self) -> int:
        """The number of draft tokens that makes the most tokens a second, of those with all rounds."""
        numbers = [setting for setting in self.rounds if isinstance(setting, int)]
        most = max(len(self.rounds[number]) for number in numbers)
        speeds = self.speeds
        return max((one for one in numbers if len(self.rounds[one]) == most), key=speeds.__getitem__)

    @property
    def auto_of_best(self) -> float:
        """The share of the best number's tokens a second that the engine's own choice makes."""
        return self.speeds[AUTO] / self.speeds[self.best]

    @property
    def auto_of_none(self) -> float:
        """How many times as many tokens a second the engine's own choice makes as no drafts."""
        return self.speeds[AUTO] / self.speeds[0]

    @property
    def waited(self) -> str | None:
        """What is wrong if requests were not all in flight."""
        return waited(itertools.chain.from_iterable(self.rounds.values()), self.concurrency)

    @property
    def measured(self) -> bool:
        """Whether the load was steady for long enough in every round."""
        return all(one.tokens_per_second for rounds in self.rounds.values() for one in rounds)


class Range(NamedTuple):
    """An inclusive range of batch sizes and its number of draft tokens, as in vLLM's setting."""

    first: int
    last: int
    length: int


def schedule_of(rows: Sequence[TuneRow], most_requests: int) -> list[Range]:
    """The best number of draft tokens by batch size, with ranges that meet midway between those measured.

    Args:
        rows: by ascending concurrency.
        most_requests: the largest batch size.
    """
    ends = [round(math.sqrt(row.concurrency * after.concurrency)) for row, after in pairwise(rows)]
    ranges: list[Range] = []
    for row, end in zip(rows, [*ends, most_requests], strict=True):
        if ranges and row.speeds[ranges[-1].length] >= KEPT * row.speeds[row.best]:
            ranges[-1] = ranges[-1]._replace(last=end)
        else:
            ranges.append(Range(ranges[-1].last + 1 if ranges else 1, end, row.best))
    return ranges
