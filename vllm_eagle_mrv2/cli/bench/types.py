"""The job and the result of a bench engine, and the comparison of two engines' rounds."""

from __future__ import annotations

import statistics
from typing import Literal, get_args

from pydantic import BaseModel, computed_field

from vllm_eagle_mrv2.cli.common.report import first_difference

Side = Literal["against", "eagle_mrv2"]
SIDES: tuple[Side, ...] = get_args(Side)
MEDIANS = ("iteration_ms", "tokens_per_second", "itl_p50_ms", "itl_p99_ms", "ttft_p50_ms", "ttft_p99_ms")


class Batch(BaseModel):
    """One generation to measure.  The worker answers with a `Round`."""

    size: int
    max_tokens: int


class Round(BaseModel):
    """One measured generation of a batch; its counters cover this generation only."""

    seconds: float
    iterations: int
    """Engine iterations (verify and draft) that yielded tokens; prefill chunks without a token count as time only."""
    token_ids: list[list[int]]
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: list[int]
    itl_p50_ms: float
    itl_p99_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float

    @computed_field  # type: ignore[prop-decorator]
    @property
    def num_tokens(self) -> int:
        """Generated tokens, over all requests."""
        return sum(map(len, self.token_ids))

    @computed_field  # type: ignore[prop-decorator]
    @property
    def iteration_ms(self) -> float:
        """Milliseconds per engine iteration, averaged over the whole generation."""
        return self.seconds / self.iterations * 1e3

    @computed_field  # type: ignore[prop-decorator]
    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second, over all requests."""
        return self.num_tokens / self.seconds


class Figures(BaseModel):
    """One side of a row: medians over its rounds, and the acceptance over all its drafts."""

    iteration_ms: float
    tokens_per_second: float
    itl_p50_ms: float
    itl_p99_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    acceptance: list[float]
    """For each draft position, the share of drafts that were accepted up to it."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def acceptance_length(self) -> float:
        """Tokens that one iteration of a request yields, including the target's own."""
        return 1 + sum(self.acceptance)


class Row(BaseModel):
    """The rounds of one K and batch size, in pairs of neighbouring rounds."""

    k: int
    batch: int
    names: tuple[str, str]
    """The names of the two sides, first the one to compare against."""
    against: list[Round]
    eagle_mrv2: list[Round]

    @property
    def refusals(self) -> list[str]:
        """Why there is no ratio: the differences in the first pair of rounds that did not do the same work."""
        for number, pair in enumerate(zip(self.against, self.eagle_mrv2, strict=True), start=1):
            found = [f"round {number}: {one}" for one in _differences(*pair, self.names)]
            if found:
                return found + [
                    f"the tokens of {name} differ between its own rounds too: its arithmetic is not repeatable"
                    for name, rounds in zip(self.names, (self.against, self.eagle_mrv2), strict=True)
                    if any(taken.token_ids != rounds[0].token_ids for taken in rounds)
                ]
        return []

    @property
    def quartiles(self) -> tuple[float, float, float] | None:
        """Quartiles and median of the ratios against / eagle_mrv2 over the pairs; None if the ratio is refused."""
        if self.refusals:
            return None
        pairs = zip(self.against, self.eagle_mrv2, strict=True)
        ratios = [theirs.iteration_ms / mine.iteration_ms for theirs, mine in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")  # never outside the measured range
        return low, middle, high

    def figures(self, side: Side) -> Figures:
        """The figures of all rounds of one side."""
        rounds: list[Round] = getattr(self, side)
        drafts = sum(taken.num_drafts for taken in rounds)
        positions = zip(*(taken.num_accepted_tokens_per_pos for taken in rounds), strict=False)
        return Figures(
            **{metric: statistics.median(getattr(taken, metric) for taken in rounds) for metric in MEDIANS},
            acceptance=[sum(accepted) / drafts for accepted in positions] if drafts else [],
        )


def _differences(against: Round, ours: Round, names: tuple[str, str]) -> list[str]:
    """The differences in the work of two rounds; empty if both did the same work."""
    found = []
    tokens = first_difference(against.token_ids, ours.token_ids)
    if tokens:
        found.append(f"greedy tokens {tokens}")
    counted = {
        "tokens": (against.num_tokens, ours.num_tokens),
        "engine iterations": (against.iterations, ours.iterations),
        "drafts": (against.num_drafts, ours.num_drafts),
        "draft tokens": (against.num_draft_tokens, ours.num_draft_tokens),
    }
    for what, (theirs, mine) in counted.items():
        if theirs != mine:
            found.append(f"{theirs} {what} with {names[0]}, {mine} with {names[1]}")
    if not (against.num_drafts or ours.num_drafts):
        found.append("nothing was drafted")
    return found
