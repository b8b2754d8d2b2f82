"""The number of draft tokens: what is learned of acceptance and of time, and which number a made-up engine gets."""

from __future__ import annotations

import bisect
import functools
import itertools
import lzma
import random
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import pytest

from vllm_eagle_mrv2.cli.common.load.traffic import USUAL_PROMPTS
from vllm_eagle_mrv2.draft_length.acceptance import Acceptance
from vllm_eagle_mrv2.draft_length.chooser import DraftLength, Gain, Trial, group_of, requests_of
from vllm_eagle_mrv2.draft_length.notes import GraphTime
from vllm_eagle_mrv2.draft_length.times import Extra, Iteration, Times, Workload
from vllm_eagle_mrv2.telemetry import counters
from vllm_eagle_mrv2.telemetry.counters import DraftCounter

LENGTHS = (0, 1, 2, 3, 5)

# What is accepted


def test_of_an_unknown_draft_most_is_expected() -> None:
    assert [Acceptance(2).tokens(length) for length in range(3)] == pytest.approx([1, 1.7, 2.19])


def test_a_draft_counts_where_those_before_it_are_accepted() -> None:
    acceptance = Acceptance(3)
    acceptance.add([((3, 1), 200), ((3, 3), 600), ((1, 0), 200)], seconds=9.0)
    # All drafts that come in a second and a half are remembered, so nothing is left of what was expected.
    assert shares_of(acceptance, 3) == pytest.approx([0.8, 0.75, 1.0])


def shares_of(acceptance: Acceptance, most: int) -> list[float]:
    """The share of drafts that counts as accepted at each position."""
    tokens = [acceptance.tokens(length) for length in range(most + 1)]
    made = [after - before for before, after in itertools.pairwise(tokens)]
    return [made[0], *(after / before for before, after in itertools.pairwise(made))]


def test_positions_that_nobody_drafts_follow_the_last_one() -> None:
    """By the odds of its drafts; and return with it."""
    acceptance = Acceptance(4)
    acceptance.add([((4, 0), 5000), ((4, 1), 2500), ((4, 2), 1500), ((4, 3), 500), ((4, 4), 500)], seconds=9.0)
    assert shares_of(acceptance, 4) == pytest.approx([0.5, 0.5, 0.4, 0.5])
    acceptance.add([((2, 0), 1000), ((2, 1), 1800), ((2, 2), 7200)], seconds=9.0)
    assert shares_of(acceptance, 4) == pytest.approx([0.9, 0.8, 4 * 2 / (4 * 2 + 3), 0.8]), "4 times the odds"
    acceptance.add([((2, 0), 5000), ((2, 1), 2500), ((2, 2), 2500)], seconds=9.0)
    assert shares_of(acceptance, 4) == pytest.approx([0.5, 0.5, 0.4, 0.5])


def test_a_rejected_draft_is_no_outcome_of_those_after_it() -> None:
    acceptance = Acceptance(3)
    acceptance.add([((3, 0), 300), ((3, 2), 200), ((3, 3), 500)], seconds=9.0)
    acceptance.add([((3, 0), 300), ((3, 1), 1)], seconds=9.0)
    assert acceptance._verified == pytest.approx([301, 200, 700])
    assert acceptance._accepted[0] == 1


def test_positions_that_are_seldom_reached_follow_the_one_before() -> None:
    """Once all first drafts are rejected, the second position has no outcomes any more."""
    acceptance = Acceptance(2)
    for _ in range(200):
        acceptance.add([((2, 0), 2), ((2, 1), 2), ((2, 2), 16)], seconds=0.01)
    assert shares_of(acceptance, 2) == pytest.approx([0.9, 8 / 9], abs=0.01)
    for _ in range(8):
        acceptance.add([((2, 0), 20)], seconds=0.1)
    first, second = shares_of(acceptance, 2)
    assert first < 0.6
    assert second < 0.85


def test_nothing_is_learned_of_a_request_without_drafts() -> None:
    acceptance = Acceptance(1)
    acceptance.add([((0, 0), 900), ((1, -1), 900)], seconds=9.0)  # of the second, nothing was sampled
    assert acceptance.tokens(1) == pytest.approx(1.7)


def accepted_after(seconds: float, requests: int = 400, iterations: int = 10) -> float:
    """The share of drafts that counts as accepted: all of them before, then none for so long."""
    acceptance = Acceptance(1)
    acceptance.add([((1, 1), 4000)], seconds=9.0)
    for _ in range(iterations):
        acceptance.add([((1, 0), requests)], seconds / iterations)
    return acceptance.tokens(1) - 1


def test_old_outcomes_fade_with_time() -> None:
    shares = [accepted_after(seconds) for seconds in (0.0, 0.5, 1.5, 3.0, 9.0)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == pytest.approx(0.5, abs=0.01), "as many new ones as old ones"
    assert shares[2] == pytest.approx(0.9**10), "a tenth of the memory each"
    assert shares[3] < 0.2
    assert shares[4] < 0.001


@pytest.mark.parametrize(("requests", "least"), [(1, 0.99), (20, 0.85)])
def test_a_few_outcomes_do_not_wipe_out_the_others(requests: int, least: float) -> None:
    assert accepted_after(60.0, requests, iterations=1) > least
    assert accepted_after(60.0, requests=200, iterations=1) == 0


def test_a_request_that_stays_of_many_soon_tells_its_share() -> None:
    """Of 256 requests a second and a half brings thousands of outcomes, of one a hundred or two."""
    acceptance = Acceptance(1)
    for _ in range(100):
        acceptance.add([((1, 1), 256)], seconds=0.03)
    for _ in range(250):
        acceptance.add([((1, 0), 1)], seconds=0.008)
    assert acceptance.tokens(1) - 1 < 0.35


# What an iteration takes

PLAIN = {0: 0.0075, 1: 0.0080, 2: 0.0084, 3: 0.0100, 5: 0.0140}
SOME, LARGE, PER_TOKEN = 0.010, 0.008, 1e-5
CAPTURED = 512
NONE = Extra()


def prefills_of(tokens: int, length: int = 3) -> Extra:
    """Prefills beside 16 decodes."""
    return Extra(1, 16 * (1 + length) + tokens > CAPTURED, tokens) if tokens else NONE


def learn(times: Times, length: int, seconds: float) -> None:
    """Learn from an iteration without prefills around it."""
    times.learn(Iteration(16, length, NONE, seconds), NONE, NONE)


def times_of(plain: dict[int, float], lengths: tuple[int, ...] = LENGTHS) -> Times:
    """Learned from many iterations without prefills."""
    times = Times.guess(lengths, Iteration(16, 3, NONE, 0.01))
    for _ in range(60):
        for length, seconds in plain.items():
            learn(times, length, seconds)
    return times


def plain_of(times: Times) -> dict[int, float]:
    return {length: float(times.seconds(times.parts(length))) for length in LENGTHS}


def error_of(times: Times, length: int, than: int | None = None) -> float:
    """The standard error of a plain time, or of what it is more than another one."""
    parts = times.parts(length)
    return float(times.error(parts if than is None else parts - times.parts(than)))


def seconds_of(length: int, before: Extra, own: Extra, after: Extra, asynchronous: bool) -> float:
    """What an iteration takes, given the prefills around it.

    If the engine is asynchronous, the iteration before prefills waits for their launch, and the one after them makes up
    for some of that.
    """
    found = after if asynchronous else own
    made_up = 0.3 * SOME * before.prefills if asynchronous else 0.0
    return PLAIN[length] + SOME * found.prefills + LARGE * found.large + PER_TOKEN * found.tokens - made_up


def learned(asynchronous: bool, every: float, noise: float = 0.01, iterations: int = 3000) -> Times:
    """Learned from iterations with 3 drafts, some with 5, of which a share has prefills."""
    rng = random.Random(2)
    prefills = [prefills_of(rng.randint(100, 3000) if rng.random() < every else 0) for _ in range(iterations + 2)]
    times: Times | None = None
    for number, (before, own, after) in enumerate(zip(prefills, prefills[1:], prefills[2:], strict=False)):
        length = 5 if number % 100 < 10 else 3
        seconds = seconds_of(length, before, own, after, asynchronous) * (1 + rng.gauss(0, noise))
        iteration = Iteration(16, length, own, seconds)
        times = times or Times.guess(LENGTHS, iteration)
        times.learn(iteration, before, after)
    assert times is not None
    return times


def test_each_number_is_learned() -> None:
    times = times_of(PLAIN)
    assert plain_of(times) == pytest.approx(PLAIN, rel=0.01)
    assert all(error_of(times, length) < 0.01 * seconds for length, seconds in PLAIN.items())


@pytest.mark.parametrize("every", [0.1, 0.5, 0.95])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_prefills_are_told_from_drafts(asynchronous: bool, every: float) -> None:
    """Wherever their time is found: in their own iteration, or in those around it."""
    times = learned(asynchronous, every)
    assert {length: plain_of(times)[length] for length in (3, 5)} == pytest.approx({3: 0.01, 5: 0.014}, rel=0.05)
    for tokens in [(300, 0, 0), (0, 300, 0), (0, 0, 300), (0, 0, 700), (0, 0, 2500), (2000, 2000, 2000)]:
        before, own, after = map(prefills_of, tokens)
        expected = seconds_of(3, before, own, after, asynchronous)
        assert times.seconds(times.parts(3, before, own, after)) == pytest.approx(expected, rel=0.07)


def test_a_number_that_was_not_tried_follows_the_others() -> None:
    """Its time, with an error that is larger the further it is away."""
    times = times_of({3: 0.020})
    assert plain_of(times)[2] == pytest.approx(0.020, rel=0.05)
    assert plain_of(times)[5] == pytest.approx(0.021, rel=0.05)
    assert error_of(times, 3) < 0.001 < error_of(times, 2) < error_of(times, 1) < error_of(times, 0)
    before = error_of(times, 5)
    for _ in range(20):
        learn(times, 2, 0.016)
    assert plain_of(times)[1] < 0.018
    assert plain_of(times)[5] > 0.0212
    assert error_of(times, 5) < before


def test_what_shifts_one_number_shifts_all() -> None:
    """Slowly: longer sequences, or the clock of the GPU."""
    times = times_of(PLAIN)
    for step in range(1000):
        learn(times, 3, PLAIN[3] + 1e-5 * step)
    assert plain_of(times)[3] == pytest.approx(0.02, rel=0.02)
    assert plain_of(times)[0] == pytest.approx(PLAIN[0] + 0.01, rel=0.25)


def test_what_prefills_add_may_change() -> None:
    """Slowly: longer prompts, or a busy host."""
    times, prefills = times_of(PLAIN), Extra(1, 0, 300)
    for step in range(3000):
        learn(times, 3, PLAIN[3])
        times.learn(Iteration(16, 3, prefills, PLAIN[3] + 0.01 + 1e-5 * max(step - 1500, 0)), NONE, NONE)
    assert times.seconds(times.parts(3, own=prefills)) == pytest.approx(PLAIN[3] + 0.025, rel=0.03)
    assert plain_of(times)[3] == pytest.approx(PLAIN[3], rel=0.03)


def test_what_was_not_timed_for_long_is_less_certain() -> None:
    times = times_of(PLAIN)
    errors = [error_of(times, 5, than=3)]
    for _ in range(3):
        for _ in range(100):
            learn(times, 3, PLAIN[3])
        errors.append(error_of(times, 5, than=3))
    assert errors == sorted(errors)
    assert errors[-1] > 1e-4


def test_a_stall_does_not_count_and_a_change_does() -> None:
    """A stall may have several iterations wait."""
    times = times_of(PLAIN)
    for _ in range(4):
        learn(times, 3, 0.05)
    assert plain_of(times)[3] == pytest.approx(PLAIN[3], rel=0.1)
    for _ in range(60):
        learn(times, 3, PLAIN[3])
    for _ in range(12):
        learn(times, 3, 0.014)
    assert plain_of(times)[3] == pytest.approx(0.014, rel=0.03)


def test_outliers_on_both_sides_are_no_change() -> None:
    times, changed = times_of(PLAIN), times_of(PLAIN)
    for number in range(24):
        learn(times, 3, 0.002 if number % 4 == 3 else 0.05)
        learn(changed, 3, 0.05)
    assert plain_of(times)[3] < 0.02 < 0.03 < plain_of(changed)[3]


def test_a_change_is_found_in_several_trials() -> None:
    """Of another number than the one in force, which is as before between them."""
    times = times_of(PLAIN)
    for _ in range(3):
        for _ in range(5):
            learn(times, 5, 0.028)
        for _ in range(20):
            learn(times, 3, PLAIN[3])
    assert plain_of(times)[5] == pytest.approx(0.028, rel=0.05)
    assert plain_of(times)[3] == pytest.approx(PLAIN[3], rel=0.02)
    assert abs(plain_of(times)[0] - PLAIN[0]) < 2 * error_of(times, 0, than=3), "it may have changed, too"


@pytest.mark.parametrize(("faster", "changed"), [(3, False), (4, True)])
def test_faster_iterations_are_a_change_with_others_between(faster: int, changed: bool) -> None:
    """Of a number that is tried just then, whose time was hardly known."""
    times = times_of(PLAIN)
    before = error_of(times, 0)
    for _ in range(faster):
        learn(times, 3, 0.3 * PLAIN[3])
        for _ in range(6):
            learn(times, 5, plain_of(times)[5])
    assert (error_of(times, 0) > 3 * before) is changed


def test_iterations_that_differ_tell_less() -> None:
    def error(noise: float) -> float:
        rng, times = random.Random(1), times_of(PLAIN)
        for _ in range(300):
            learn(times, 3, PLAIN[3] * (1 + rng.gauss(0, noise)))
        learn(times, 5, PLAIN[5])
        return error_of(times, 5, than=3)

    assert error(0.001) < error(0.03) < error(0.2)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("every", [0.0, 0.5])
def test_errors_are_how_far_estimates_stray(every: float, seed: int) -> None:
    rng = random.Random(seed)
    times = learned(True, every, noise=0.03, iterations=rng.randint(50, 150))
    off = [float(times.seconds(times.parts(length))) - PLAIN[length] for length in (3, 5)]
    errors = [error_of(times, length) for length in (3, 5)]
    assert all(abs(one) < 4 * error for one, error in zip(off, errors, strict=True))
    assert all(error < 0.3 * PLAIN[3] for error in errors)


def test_no_time_becomes_negative() -> None:
    times = times_of(PLAIN)
    for _ in range(50):
        learn(times, 3, 1e-6)
    assert min(plain_of(times).values()) > 0


def test_more_decodes_take_up_to_their_tokens() -> None:
    times = learned(True, 0.5)
    before, after = plain_of(times), plain_of(times.nearby(2, 100))
    errors = [error_of(times.nearby(*other), 3) for other in ((0, 0), (2, 0), (2, 100), (4, 300))]
    assert error_of(times, 3) == errors[0] < errors[1] < errors[2] < errors[3]
    for length in LENGTHS:
        assert after[length] - before[length] == pytest.approx(0.5 * PER_TOKEN * 100 * (1 + length), rel=0.1)
    assert min(plain_of(times.nearby(8, -10000)).values()) > 0


# Prefills


def extras(workload: Workload, made: list[float], free: list[int]) -> list[tuple[float, float, float]]:
    return [tuple(one) for one in workload.extra(np.array(made), np.array(free)).tolist()]


@pytest.mark.parametrize("every", [1, 4, 16])
def test_prefills_come_with_tokens(every: int) -> None:
    """Whoever makes more tokens starts more requests, in the same iteration or in further ones."""
    workload, rng = Workload(), random.Random(3)
    for _ in range(4000):
        workload.add(10.0, 1000 if rng.random() < 1 / every else 0)
    share = min(1 / every, 0.98)
    once, twice = extras(workload, [10.0, 20.0], [500, 500])
    assert once == pytest.approx((share, share, 1000 / every), rel=0.3)
    share = 1 - (1 - share) ** 2
    assert twice == pytest.approx((share, share, 2000 / every), rel=0.3)


def test_an_iteration_is_large_with_more_tokens_than_it_has_room_for() -> None:
    workload = Workload()
    for number in range(1000):
        workload.add(10.0, (0, 0, 100, 300)[number % 4])
    large = [one[1] for one in extras(workload, [10.0] * 6, [400, 300, 299, 99, 0, -1])]
    assert large == pytest.approx([0, 0, 0.25, 0.5, 0.5, 1])


def test_where_all_iterations_have_prefills_fewer_tokens_might_leave_some_without() -> None:
    workload = Workload()
    for _ in range(300):
        workload.add(10.0, 400)
    (some, large, tokens), _ = extras(workload, [5.0, 10.0], [300, 300])
    assert 0.8 < some == large < 0.9
    assert tokens == 200


def test_without_prefills_none_are_expected() -> None:
    workload = Workload()
    workload.add(10.0, 0)
    assert extras(workload, [5.0, 5.0], [0, -1]) == [(0, 0, 0), (0, 1, 0)]


def test_what_was_long_ago_is_forgotten() -> None:
    workload = Workload()
    for prefilled in [500] * 200 + [0] * 200:
        workload.add(10.0, prefilled)
    assert extras(workload, [10.0], [0]) == [(0, 0, 0)]


# Groups


def test_a_group_holds_similar_numbers_of_decodes() -> None:
    groups: dict[int, list[int]] = {}
    for requests in range(1, 2049):
        groups.setdefault(group_of(requests), []).append(requests)
    assert list(groups) == sorted(groups)
    for group, members in groups.items():
        assert members[0] <= requests_of(group) <= members[-1]
        assert members[-1] <= 1.42 * members[0]
    assert [requests_of(group) for group in groups][:8] == [1, 2, 3, 4, 6, 8, 11, 16]
    assert group_of(0) == group_of(1) == 0


# An engine


RATES = {
    "high": (0.85, 0.75, 0.65, 0.55, 0.45),
    "middle": (0.70, 0.50, 0.35, 0.25, 0.17),
    "low": (0.45, 0.20, 0.08, 0.03, 0.01),
    "hardly any": (0.10, 0.02, 0.01, 0.0, 0.0),
}
"""Share of requests of which so many drafts are accepted."""
OUTPUT_TOKENS, MOST_TOKENS = 160, 8192
"""Of a request, and of an iteration."""
ALIKE = 100
"""Iterations of which one is drawn."""


class Chooser(Protocol):
    def choose(self, requests: int) -> int: ...

    def learn(
        self, decodes: int, length: int, prefilled: int, outcomes: Collection[tuple[tuple[int, int], int]]
    ) -> None: ...


@dataclass
class Constant:
    """Chooses nothing."""

    length: int

    def choose(self, requests: int) -> int:
        return self.length

    def learn(
        self, decodes: int, length: int, prefilled: int, outcomes: Collection[tuple[tuple[int, int], int]]
    ) -> None:
        pass


ITERATIONS = Path(__file__).parents[2] / "benchmarks/results/h100-iterations.csv.xz"


class Measured(NamedTuple):
    """An iteration of an 8B model on an H100, with one to 256 requests in flight."""

    microseconds: int
    decodes: int
    length: int
    prefilled: int


@functools.cache
def measured() -> list[Measured]:
    with lzma.open(ITERATIONS, "rt") as lines:
        return [Measured(*map(int, line.split(","))) for line in itertools.islice(lines, 1, None)]


def alone() -> dict[tuple[int, int], float]:
    """Median seconds of the iterations with no prefills and no change around them, by decodes and drafts."""
    seconds: dict[tuple[int, int], list[float]] = {}
    for window in zip(*(measured()[first:] for first in range(4)), strict=False):
        one = window[2]
        if all((other.decodes, other.length, other.prefilled) == (one.decodes, one.length, 0) for other in window):
            seconds.setdefault((one.decodes, one.length), []).append(one.microseconds / 1e6)
    return {kind: statistics.median(those) for kind, those in seconds.items() if len(those) > 20}


PLAIN_MS = {
    1: (6.57, 6.87, 7.16, 7.44, 8.03),
    4: (6.72, 7.07, 7.41, 7.76, 8.35),
    16: (7.38, 7.74, 8.19, 8.51, 9.39),
    64: (8.87, 9.66, 10.8, 11.6, 14.9),
    128: (11.1, 12.8, 16.1, 18.7, 37.0),
}
"""Medians of `measured` without prefills around them, by requests, for each of `LENGTHS`."""


@functools.cache
def plain_seconds(requests: int, length: int) -> float:
    """Of an iteration without prefills around it."""
    milliseconds = [of[LENGTHS.index(length)] for of in PLAIN_MS.values()]
    return 1e-3 * float(np.interp(np.log(requests), np.log(list(PLAIN_MS)), milliseconds))


Around = tuple[bool, bool, bool, bool]
"""Whether no CUDA graph holds the decodes; and whether the iteration before, their own and the one after prefill."""


@functools.cache
def longer() -> dict[Around, list[tuple[int, float]]]:
    """Seconds that iterations took beyond the plain time, with the tokens of the iteration after each, ascending."""
    found: dict[Around, list[tuple[int, float]]] = {}
    for before, own, after in zip(measured(), measured()[1:], measured()[2:], strict=False):
        large = own.decodes * (1 + own.length) > CAPTURED
        known = 112 < own.decodes <= 128 if large else 0 < own.decodes <= 64  # no plain time of others is measured
        if known and own.length == before.length and own.length in LENGTHS:
            around = (large, bool(before.prefilled), bool(own.prefilled), bool(after.prefilled))
            seconds = own.microseconds / 1e6 - plain_seconds(own.decodes, own.length)
            found.setdefault(around, []).append((after.decodes * (1 + after.length) + after.prefilled, seconds))
    return {around: sorted(those) for around, those in found.items()}


@dataclass
class Engine:
    """An engine that always has as many requests as ``load`` says; its clock is its own.

    Its iterations take the plain time of their requests and drafts, and as much longer as a measured one with prefills
    in the same places and similarly many tokens after it, drawn at random.

    Args:
        load: requests by the time.
        rates: share of requests of which so many drafts are accepted, by the time.
        length: the number of drafts; None has it chosen.
        prompts: tokens of the shortest and the longest prompt.
    """

    load: Callable[[float], int]
    rates: Callable[[float], tuple[float, ...]]
    length: int | None = None
    seed: int = 0
    prompts: tuple[int, int] = USUAL_PROMPTS
    now: float = 0.0
    made: list[tuple[float, int]] = field(default_factory=list)  # when, tokens
    verified: list[int] = field(default_factory=list)  # of each iteration

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._chooser: Chooser = (
            DraftLength(LENGTHS, CAPTURED, lambda: self.now) if self.length is None else Constant(self.length)
        )
        self._drafts = self._chooser.choose(self.load(0.0))
        self._waiting: list[int] = []  # tokens of prompts
        self._prefilled = [0, 0]  # tokens of the iteration before and of the coming one

    def run(self, until: float) -> Engine:
        while self.now < until:
            self._iterate()
        return self

    def speed(self, begin: float, end: float) -> float:
        """Tokens a second."""
        return sum(tokens for when, tokens in self.made if begin <= when < end) / (end - begin)

    def _iterate(self) -> None:
        requests, rates, verified = self.load(self.now), self.rates(self.now), self._drafts
        self._drafts = self._chooser.choose(requests)
        outcomes = Counter((verified, self._accepted(rates, verified)) for _ in range(requests))
        made = sum((1 + kept) * number for (_, kept), number in outcomes.items())
        following = self._prefill(requests, made)
        self._prefilled.append(following)
        switch = 3e-4 * (self._drafts != verified)
        self.now += self._seconds(requests, verified, requests * (1 + self._drafts) + following) + switch
        self._chooser.learn(requests, verified, self._prefilled[1], outcomes.items())
        del self._prefilled[0]
        self.made.append((self.now, made))
        self.verified.append(verified)

    def _seconds(self, requests: int, verified: int, tokens: int) -> float:
        """Return what an iteration takes before one of so many tokens."""
        before, own, after = map(bool, self._prefilled)
        alike = longer()[requests * (1 + verified) > CAPTURED, before, own, after]
        if after:
            first = bisect.bisect(alike, (tokens,)) - ALIKE // 2
            first = max(min(first, len(alike) - ALIKE), 0)
            alike = alike[first : first + ALIKE]
        _, seconds = self._rng.choice(alike)
        plain = plain_seconds(requests, verified)
        return max(plain + seconds, 0.5 * plain)

    def _accepted(self, rates: tuple[float, ...], drafts: int) -> int:
        drawn = self._rng.random()
        return sum(drawn < rate for rate in rates[:drafts])

    def _prefill(self, requests: int, made: int) -> int:
        """Return the tokens of the requests that follow those that end."""
        ended = sum(self._rng.random() < made / requests / OUTPUT_TOKENS for _ in range(requests))
        self._waiting += [self._rng.randint(*self.prompts) for _ in range(ended)]
        prefilled = 0
        while self._waiting and prefilled + self._waiting[0] <= MOST_TOKENS:
            prefilled += self._waiting.pop(0)
        return prefilled


@functools.cache
def constant_speeds(requests: int, kind: str) -> dict[int, float]:
    """Tokens a second by constant number of drafts."""
    engines = {k: Engine(lambda now: requests, lambda now: RATES[kind], k, seed=1).run(60.0) for k in LENGTHS}
    return {length: engine.speed(1.0, 60.0) for length, engine in engines.items()}


def share_of_best(engine: Engine, begin: float, end: float, requests: int, kind: str) -> float:
    return share_of_best_of(constant_speeds(requests, kind), engine, begin, end)


def share_of_best_of(speeds: dict[int, float], engine: Engine, begin: float, end: float) -> float:
    """What the numbers that it drafted make, each as long as it was drafted, as a share of what the best one makes.

    That does not depend on how many prefills there happen to be.
    """
    made = seconds = 0.0
    for ((before, _), (after, _)), length in zip(itertools.pairwise(engine.made), engine.verified[1:], strict=True):
        if begin <= before < end:
            made += (after - before) * speeds[length]
            seconds += after - before
    return made / seconds / max(speeds.values())


def engine_of(load: Callable[[float], int], kind: Callable[[float], str], seed: int = 0) -> Engine:
    return Engine(load, lambda now: RATES[kind(now)], seed=seed)


@pytest.mark.parametrize("requests", [1, 4, 16, 64, 128])
@pytest.mark.parametrize("kind", RATES)
def test_nearly_as_fast_as_the_best_number(kind: str, requests: int) -> None:
    engine = engine_of(lambda now: requests, lambda now: kind).run(25.0)
    assert share_of_best(engine, 10.0, 25.0, requests, kind) > 0.94
    assert share_of_best(engine, 1.0, 10.0, requests, kind) > 0.9


def test_nothing_is_drafted_where_hardly_any_is_accepted() -> None:
    """Of many requests."""
    speeds = constant_speeds(128, "hardly any")
    assert max(speeds, key=lambda one: speeds[one]) == 0
    engine = engine_of(lambda now: 128, lambda now: "hardly any").run(20.0)
    assert Counter(engine.verified[-200:])[0] > 180


@dataclass
class Regime:
    """A load, a text and a machine that stay for a while."""

    requests: int
    share: float  # accepted at each position
    slowness: float

    def seconds(self, length: int) -> float:
        return self.slowness * (0.0065 + 2.5e-4 * length + 2e-5 * self.requests * (1 + length))

    def tokens(self, length: int) -> float:
        return self.requests * sum(self.share**position for position in range(length + 1))

    def rate(self, length: int) -> float:
        return self.tokens(length) / self.seconds(length)


def share_of_best_in_regimes(seed: int, regimes: int, iterations: int) -> list[float]:
    """Of engines whose load, text and speed change at random."""
    draw, noise = random.Random(seed), np.random.default_rng(seed)
    steps, shares = Steps(), []
    verified = steps.chooser.length
    for _ in range(regimes):
        one = Regime(draw.choice((8, 16, 64)), draw.choice((0.2, 0.4, 0.6, 0.8)), draw.choice((1, 1, 3)))
        made = seconds = 0.0
        for _ in range(iterations):
            chosen = steps.chooser.choose(one.requests)
            prefilled = draw.randint(1, 8000) if draw.random() < 0.1 else 0
            taken = one.seconds(verified) * (1 + 0.03 * noise.normal()) + 2e-3 * bool(prefilled) + 1e-5 * prefilled
            outcomes, left = [], one.requests
            for kept in range(verified):
                accepted = int(noise.binomial(left, one.share))
                outcomes.append(((verified, kept), left - accepted))
                left = accepted
            steps.now += taken
            steps.chooser.learn(one.requests, verified, prefilled, [*outcomes, ((verified, verified), left)])
            made += one.tokens(verified)
            seconds += one.seconds(verified)
            verified = chosen
        shares.append(made / seconds / max(map(one.rate, LENGTHS)))
    return shares


@pytest.mark.parametrize("seed", [7, 9])
def test_an_engine_may_become_faster(seed: int) -> None:
    """A number that is tried just then is not taken for the cause."""
    shares = share_of_best_in_regimes(seed, regimes=14, iterations=1000)[2:]
    assert min(shares) > 0.93, shares
    assert statistics.mean(shares) > 0.985


@pytest.mark.parametrize("kind", ["high", "middle"])
@pytest.mark.parametrize("seed", range(3))
def test_drafts_return_when_the_text_is_easier(kind: str, seed: int) -> None:
    """Where nothing was drafted, nothing tells that more would be accepted."""
    engine = engine_of(lambda now: 128, lambda now: "hardly any" if now < 20 else kind, seed).run(20.0)
    assert Counter(engine.verified[-100:])[0] > 80
    engine.run(32.0)
    assert share_of_best(engine, 26.0, 32.0, 128, kind) > 0.95


@pytest.mark.parametrize("requests", [64, 128])
def test_looking_for_easier_text_takes_little_time(requests: int) -> None:
    engine = Engine(lambda now: requests, lambda now: (0.0,) * 5).run(70.0)
    speeds = {length: Engine(engine.load, engine.rates, length).run(60.0).speed(1.0, 60.0) for length in LENGTHS}
    assert max(speeds, key=lambda one: speeds[one]) == 0
    assert share_of_best_of(speeds, engine, 10.0, 70.0) > 0.99
    assert Counter(engine.verified)[1] > 50


def steps_of_load(kind: str) -> list[float]:
    """Shares of the best number, from five seconds after each step."""
    engine = engine_of(lambda now: 128 if 10 <= now < 22 else 8, lambda now: kind).run(34.0)
    return [share_of_best(engine, end - 7, end, requests, kind) for end, requests in ((10, 8), (22, 128), (34, 8))]


def steps_of_acceptance() -> list[float]:
    engine = engine_of(lambda now: 8, lambda now: "high" if 10 <= now < 22 else "low").run(34.0)
    return [share_of_best(engine, end - 7, end, 8, kind) for end, kind in ((10, "low"), (22, "high"), (34, "low"))]


@pytest.mark.parametrize("kind", RATES)
def test_the_load_may_change(kind: str) -> None:
    assert min(steps_of_load(kind)) > 0.97


def test_what_is_accepted_may_change() -> None:
    assert min(steps_of_acceptance()) > 0.97


@pytest.mark.parametrize("seed", range(4))
def test_an_easier_text_soon_has_drafts_that_the_one_before_did_not_deserve(seed: int) -> None:
    engine = engine_of(lambda now: 16, lambda now: "low" if now < 15 else "high", seed).run(18.0)
    assert share_of_best(engine, 16.0, 18.0, 16, "high") > 0.97


def never_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no number tried, and none come into force."""
    monkeypatch.setattr(DraftLength, "_compare", lambda self, group, gains: False)
    monkeypatch.setattr(DraftLength, "_begin_trial", lambda self, group, gains: None)


@pytest.mark.parametrize(("kind", "requests"), [("high", 1), ("high", 4), ("hardly any", 128)])
def test_these_limits_tell_a_number_that_never_changes(
    kind: str, requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    never_changes(monkeypatch)
    engine = engine_of(lambda now: requests, lambda now: kind).run(25.0)
    assert share_of_best(engine, 10.0, 25.0, requests, kind) < 0.9


@pytest.mark.parametrize("steps", [lambda: steps_of_load("high"), lambda: steps_of_load("low"), steps_of_acceptance])
def test_the_steps_tell_a_number_that_never_changes(
    steps: Callable[[], list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    never_changes(monkeypatch)
    assert min(steps()) < 0.95


@pytest.mark.parametrize(("kind", "requests"), [("high", 16), ("middle", 64)])
def test_little_is_lost_once_it_has_settled(kind: str, requests: int) -> None:
    """Where one number is best by far, and where others come close."""
    engine = engine_of(lambda now: requests, lambda now: kind).run(40.0)
    assert share_of_best(engine, 10.0, 40.0, requests, kind) > 0.985


def share_of_best_constant(make: Callable[[int | None], Engine]) -> float:
    """Share of the best number, of engines that ``make`` makes for each number and for none."""
    speeds = {length: make(length).run(60.0).speed(1.0, 60.0) for length in LENGTHS}
    return share_of_best_of(speeds, make(None).run(25.0), 10.0, 25.0)


@pytest.mark.parametrize(("kind", "requests", "seed"), [("high", 16, 3), ("low", 64, 2)])
def test_prompts_may_be_of_one_length(kind: str, requests: int, seed: int) -> None:
    """As in most benchmarks."""

    def make(length: int | None) -> Engine:
        return Engine(lambda now: requests, lambda now: RATES[kind], length, seed, prompts=(512, 512))

    assert share_of_best_constant(make) > 0.97


def test_requests_may_come_and_go_between_two_groups() -> None:
    assert group_of(13) != group_of(14)

    def make(length: int | None) -> Engine:
        numbers = itertools.cycle([13, 13, 13, 13, 14, 14, 14, 14])
        return Engine(lambda now: next(numbers), lambda now: RATES["high"], length)

    assert share_of_best_constant(make) > 0.97


# A real engine's iterations


def test_times_of_a_real_engine_are_found() -> None:
    """Plain ones among prefills, stalls and requests that come and go; and what prefills add."""
    now, counter = 0.0, DraftCounter()
    chooser = DraftLength(LENGTHS, CAPTURED, lambda: now, counter)
    for one in measured():
        if one.decodes:
            chooser.choose(one.decodes)
        now += one.microseconds / 1e6
        chooser.learn(one.decodes, one.length, one.prefilled, [])
    found = {(decodes, length): plain_of(chooser._times[group_of(decodes)])[length] for decodes, length in alone()}
    assert {kind for kind in found if kind[0] in (1, 4, 16)} == set(itertools.product((1, 4, 16), LENGTHS))
    assert found == pytest.approx(alone(), rel=0.05)
    came, expected = (counter.cells[cell] / 1e6 for cell in (counters.MICROSECONDS, counters.EXPECTED_MICROSECONDS))
    assert came > 0.95 * now
    assert expected == pytest.approx(came, rel=0.05)


# The chooser, iteration by iteration


class Steps:
    """A chooser on a clock that stands still between iterations."""

    def __init__(self, lengths: tuple[int, ...] = LENGTHS, graph_times: Sequence[GraphTime] = ()) -> None:
        self.now = 100.0
        counter = DraftCounter()
        self.cells = counter.cells
        self.chooser = DraftLength(lengths, CAPTURED, lambda: self.now, counter, graph_times)

    @property
    def changes(self) -> int:
        return self.cells[counters.CHANGES]

    def step(self, decodes: int, length: int, seconds: float = 0.01, prefilled: int = 0, kept: int = 1) -> None:
        self.now += seconds
        self.chooser.learn(decodes, length, prefilled, [((length, min(kept, length)), decodes)])

    def run(
        self, decodes: int, iterations: int, seconds: Callable[[int], float] = lambda length: 0.01, kept: int = 1
    ) -> None:
        """Iterations that verify what the one before has drafted."""
        length = self.chooser.length
        for _ in range(iterations):
            chosen = self.chooser.choose(decodes)
            self.step(decodes, length, seconds(length), kept=kept)
            length = chosen

    def settle(self) -> None:
        """Have nothing wait for what the iteration after it prefills, and no seconds counted."""
        self.step(16, 1, 0.011)
        self.step(0, 1)
        self.cells[counters.MICROSECONDS] = 0

    def timed(self) -> int:
        """Microseconds counted since."""
        self.step(0, 1)
        return self.cells[counters.MICROSECONDS]


def rates(chooser: DraftLength, requests: int) -> dict[int, float]:
    """The tokens a second that each number is expected to make."""
    times = chooser._times[group_of(requests)]
    tokens, parts = chooser._expected(group_of(requests), times)
    seconds = times.seconds(parts)
    return dict(zip(chooser.lengths, (tokens / seconds).tolist(), strict=True))


@pytest.mark.parametrize(
    ("lengths", "first"), [(LENGTHS, 3), ((0, 1, 2, 3, 5, 7, 9), 3), ((0, 1, 2), 2), ((0, 1), 1), ((0, 1, 2, 4), 2)]
)
def test_the_first_number(lengths: tuple[int, ...], first: int) -> None:
    chooser = DraftLength(lengths, CAPTURED)
    assert chooser.length == chooser.choose(7) == first


def test_drafts_that_cost_too_much_are_not_made() -> None:
    steps = Steps()
    steps.run(16, 400, lambda length: 0.01 + 0.02 * length)
    assert steps.chooser.choose(16) == 0
    assert steps.changes >= 1


def test_the_number_that_pays_most() -> None:
    """Of each iteration's drafts the first is accepted, and drafts cost little."""
    steps = Steps()
    steps.run(16, 400, lambda length: 0.01 + 0.001 * length)
    assert Counter(steps.chooser.choose(16) for _ in range(9)) == {1: 9}
    assert rates(steps.chooser, 16)[1] == pytest.approx(16 * 2 / 0.011, rel=0.02)


def test_what_slows_all_down_changes_little() -> None:
    steps = Steps()
    steps.run(16, 400, lambda length: 0.01 + 0.001 * length)
    changes = steps.changes
    steps.run(16, 400, lambda length: 0.02 + 0.002 * length)
    assert steps.chooser.choose(16) == 1
    assert steps.changes <= changes + 2
    assert rates(steps.chooser, 16)[1] == pytest.approx(16 * 2 / 0.022, rel=0.02)


def test_tokens_start_requests_whose_prefills_take_time() -> None:
    """As long for each token made, whatever the number of drafts."""
    steps = Steps()
    steps.run(16, 400, lambda length: 0.01 + 0.001 * length)
    plain = rates(steps.chooser, 16)
    length = steps.chooser.length
    for number in range(2000):
        prefilled = 1000 if number % 8 == 0 else 0
        chosen = steps.chooser.choose(16)
        steps.step(16, length, 0.01 + 0.001 * length + 2e-5 * prefilled, prefilled)
        length = chosen
    assert steps.chooser.length == 1
    assert plain[1] == pytest.approx(16 * 2 / 0.011, rel=0.02)
    assert rates(steps.chooser, 16)[1] == pytest.approx(16 * 2 / (0.011 + 0.02 / 8), rel=0.05)


def test_prefills_beyond_the_cuda_graphs_take_longer() -> None:
    """By a step, and then no more."""
    steps, rng = Steps(), random.Random(5)
    for _ in range(300):
        prefilled = rng.choice([0, 100, 300, 440, 460, 1000, 3000])
        steps.step(16, 3, 0.02 if 16 * 4 + prefilled > CAPTURED else 0.014 if prefilled else 0.01, prefilled)
    times = steps.chooser._times[group_of(16)]
    found = [times.seconds(times.parts(3, own=prefills_of(tokens))) for tokens in (0, 100, 440, 460, 3000)]
    assert found == pytest.approx([0.01, 0.014, 0.014, 0.02, 0.02], rel=0.05)


def test_prefills_are_expected_to_take_time() -> None:
    """However unsure it is still what they add."""
    steps = Steps()
    steps.run(16, 400, lambda length: 0.01 + 0.001 * length)
    steps.step(16, 1, 0.011, prefilled=400)
    times = steps.chooser._times[group_of(16)]
    times._mean[len(LENGTHS) :] = -10.0
    gains = steps.chooser._gains(group_of(16))
    assert {length: gain.seconds for length, gain in gains.items()} == plain_of(times)


def known_to(chooser: DraftLength) -> tuple[float, list[float]]:
    """What a chooser knows of 16 requests and of one."""
    return chooser.acceptance.tokens(5), [rate for requests in (16, 1) for rate in rates(chooser, requests).values()]


@pytest.mark.parametrize(
    ("decodes", "length", "seconds"),
    [(16, 1, 2.5), (16, 1, 0.0), (16, 4, 0.5), (0, 1, 0.5)],
    ids=["no iteration", "no time", "a number that is not among those to choose from", "prefills only"],
)
def test_what_teaches_nothing(decodes: int, length: int, seconds: float) -> None:
    steps = Steps()
    for requests in (16, 1):
        steps.run(requests, 400, lambda length: 0.01 + 0.001 * length)
    steps.step(decodes, length, seconds, kept=0)  # ends the wait of the iteration before
    known = known_to(steps.chooser)
    for _ in range(20):
        steps.step(decodes, length, seconds, kept=0)
    assert known_to(steps.chooser) == known
    for _ in range(3):
        steps.step(16, 1, seconds=1.9, kept=0)
    assert known_to(steps.chooser) != known


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("pause", [0.2, 500.0])
def test_a_pause_is_not_timed(pause: float, ahead: int) -> None:
    """The engine schedules one iteration or two before the tokens of the first arrive."""
    steps = Steps()
    for requests in (1, 16):
        steps.run(requests, 400, lambda length: 0.01 + 0.001 * length)
    steps.settle()
    steps.now += pause
    for _ in range(ahead):
        steps.chooser.choose(16)
    steps.step(16, 1, seconds=0.011)
    assert steps.timed() == 31_000


def test_work_of_the_host_between_two_iterations_is_timed() -> None:
    steps = Steps()
    steps.run(16, 400, lambda length: 0.01 + 0.001 * length)
    steps.settle()
    steps.now += 0.004
    steps.chooser.choose(16)
    steps.step(16, 1, seconds=0.011)
    assert steps.timed() == 15_000


def test_an_unknown_number_of_decodes_begins_as_the_nearest() -> None:
    steps = Steps()
    steps.run(16, 400, lambda length: 0.01 + 0.001 * length, kept=5)
    steps.run(128, 400, lambda length: 0.02 + 0.01 * length**2, kept=5)
    chooser = steps.chooser
    assert [chooser.choose(requests) for requests in (16, 128, 11, 24, 100, 256, 1)] == [5, 1, 5, 5, 1, 1, 5]
    # With its times.
    for _ in range(3):
        steps.step(24, 5, 0.015)
    assert rates(chooser, 24)[5] == pytest.approx(24 * 6 / 0.015, rel=0.1)
    # With their errors, so that others are tried.
    steps.run(24, 600, lambda length: 0.01 + 0.001 * abs(2 - length))
    assert chooser.choose(24) == 2


def test_it_learns_of_numbers_of_decodes_for_which_it_did_not_choose() -> None:
    """Requests end between the choice and its iteration."""
    steps = Steps()
    for _ in range(20):
        steps.step(1, 3)
    assert steps.changes == 0
    assert steps.chooser.choose(1) == 3
    assert rates(steps.chooser, 1)[3] == pytest.approx(2 / 0.01, rel=0.05)


# Trials


def in_trial(requests: int = 16) -> tuple[Steps, Trial]:
    """A chooser with a number in force, 1, that has just begun to try another one."""
    steps = Steps()
    steps.run(requests, 400, lambda length: 0.01 + 0.0001 * length)
    for _ in range(4000):
        if steps.chooser._trial is not None:
            break
        steps.step(requests, 1, 0.0101)
    trial = steps.chooser._trial
    assert trial is not None
    assert not trial.taken
    assert steps.chooser.choose(requests) == trial.length != 1
    return steps, trial


def test_a_trial_ends_after_a_few_iterations_that_agree() -> None:
    steps, trial = in_trial()
    for iteration in range(7):  # the first changes the number, and the last waits for the one after it
        steps.step(16, trial.length, 0.01 + 0.0001 * trial.length)
        assert steps.chooser._trial is trial, iteration
    steps.step(16, trial.length, 0.01 + 0.0001 * trial.length)
    assert steps.chooser._trial is not trial


def iterations_of_a_trial(spread: float, seed: int) -> int:
    """How many a trial takes whose iterations differ by so much, of a number as good as the one in force."""
    steps, trial = in_trial()
    rng, acceptance = random.Random(seed), steps.chooser.acceptance
    as_good = 0.0101 * acceptance.tokens(trial.length) / acceptance.tokens(1)
    while steps.chooser._trial is trial:
        steps.step(16, trial.length, as_good * rng.uniform(1 - spread, 1 + spread))
    return trial.taken


def test_a_trial_whose_iterations_disagree_is_longer() -> None:
    """Half a second at most."""
    agreeing, disagreeing = ([iterations_of_a_trial(spread, seed) for seed in range(20)] for spread in (0.001, 0.3))
    assert max(agreeing) == min(agreeing) == 6
    assert 7 < sum(disagreeing) / 20 < max(disagreeing) <= 60


def test_the_change_to_another_number_is_not_timed() -> None:
    steps, trial = in_trial()
    before = rates(steps.chooser, 16)[trial.length]
    steps.step(16, trial.length, seconds=1.5)
    for _ in range(7):
        steps.step(16, trial.length, 0.0101)
    assert steps.chooser._trial is not trial
    assert rates(steps.chooser, 16)[trial.length] == pytest.approx(before, rel=0.05)


def test_a_trial_is_given_up_when_requests_come_and_go() -> None:
    """Its number is drafted, and hardly verified by as many requests."""
    steps, trial = in_trial()
    changes = steps.changes
    for _ in range(199):
        steps.step(16, 1, 0.0101)
    assert steps.chooser._trial is trial
    steps.step(16, 1, 0.0101)
    assert steps.chooser._trial is not trial
    assert steps.changes == changes


def test_a_trial_ends_with_its_number_of_requests() -> None:
    steps, _ = in_trial()
    assert steps.chooser.choose(64) == 1
    assert steps.chooser.choose(16) == 1
    assert steps.chooser._trial is None


def test_graph_times_are_known_from_the_beginning() -> None:
    """All but what is around the graphs; so the best number is soon in force without a trial."""
    timed = [GraphTime(n, k, 1e-3 * (5 + n / 64) * (1 + 0.02 * k)) for n in (1, 16) for k in LENGTHS]
    chooser = DraftLength(LENGTHS, CAPTURED, graph_times=[*timed, GraphTime(64, 0, 0.1)])
    assert set(chooser._times) == {group_of(1), group_of(16)}, "64 lacks numbers"
    steps = Steps(graph_times=timed)
    tried: list[bool] = []
    while steps.chooser.length != 5:
        tried.append(steps.chooser._trial is not None)
        length = steps.chooser.choose(4)
        steps.step(4, length, 1.3 * 5e-3 * (1 + 0.02 * length), kept=length)
        assert len(tried) < 20
    assert not any(tried)
    for one in LENGTHS:
        assert plain_of(steps.chooser._times[group_of(4)])[one] == pytest.approx(6.5e-3 * (1 + 0.02 * one), rel=0.05)


def test_the_first_number_in_force_is_no_trial() -> None:
    """Nothing is tried before an iteration has been timed."""
    steps = Steps()
    steps.chooser.choose(16)
    steps.step(16, 3)
    assert steps.chooser._trial is None
    assert steps.chooser.choose(16) == 3


def test_what_a_trial_loses_is_charged() -> None:
    steps, trial = in_trial()
    before = steps.chooser._may_lose
    while steps.chooser._trial is trial:
        steps.step(16, trial.length, 0.05)
    assert before - steps.chooser._may_lose == pytest.approx(0.04 * 6, abs=0.05)


@pytest.mark.parametrize("abandoned", ["with its requests", "as they come and go"])
def test_what_a_trial_without_an_end_loses_is_charged(abandoned: str) -> None:
    steps, trial = in_trial()
    before = steps.chooser._may_lose
    for _ in range(3):
        steps.step(16, trial.length, 0.05)
    if abandoned == "with its requests":
        steps.chooser.choose(64)
    else:
        for _ in range(200):
            steps.step(16, 1, 0.0101)
    assert steps.chooser._trial is not trial
    assert before - steps.chooser._may_lose > 0.02


def test_a_slow_engine_has_trials() -> None:
    """Six of its iterations take longer than trials may lose of a fast one."""
    steps = Steps((0, 1))
    steps.run(16, 100, lambda length: 0.6)
    assert steps.chooser.choose(16) == 1
    steps.run(16, 4000, lambda length: 0.6 if length else 0.2)
    assert steps.chooser.choose(16) == 0


def test_requests_that_end_at_once_are_compared_for() -> None:
    """The drafts of an iteration are chosen for the requests that it begins, too; many of them end with it."""
    steps = Steps()
    length = steps.chooser.length
    chosen: Counter[int] = Counter()
    for number in range(2000):
        following = steps.chooser.choose(32)
        steps.step(18, length, 0.01 + 0.005 * length, kept=0)
        length = following
        chosen[length] += number >= 300
    assert group_of(32) - group_of(18) == 2
    assert chosen[0] > 1600, "the others in trials, which end"
    assert chosen[1] > 6


@pytest.mark.parametrize(("may_lose", "tried"), [(-1.0, None), (0.005, None), (0.5, 2)])
def test_a_trial_waits_for_the_time_that_it_may_lose(may_lose: float, tried: int | None) -> None:
    """Six iterations that lose a tenth."""
    steps = Steps()
    steps.chooser._may_lose = may_lose
    steps.chooser._begin_trial(8, {0: Gain(0.5, 0.1, 0.01), 1: Gain(1.0, 0.0, 0.01), 2: Gain(0.9, 0.5, 0.01)})
    assert (steps.chooser._trial and steps.chooser._trial.length) == tried


@pytest.mark.parametrize(("blind", "tried"), [(2.9, None), (3.1, None), (11.9, None), (12.1, 1)])
def test_the_fewest_drafts_wait_for_the_time_that_they_may_lose(blind: float, tried: int | None) -> None:
    """Six iterations that lose half, after so many seconds without drafts; and three seconds at least."""
    gains = {0: Gain(1.0, 0.0, 0.02), 1: Gain(0.5, 0.0, 0.02), 2: Gain(0.49, 0.0, 0.02)}
    assert started_after(blind, gains) == tried
    gains[1] = Gain(0.99, 0.0, 0.02)
    assert started_after(blind, gains) == (None if blind < 3 else 1)


def started_after(seconds: float, gains: dict[int, Gain]) -> int | None:
    """What is tried after so many seconds without drafts."""
    steps = Steps()
    steps.step(16, 1)
    steps.step(16, 0, seconds)
    steps.chooser._begin_trial(8, gains)
    trial = steps.chooser._trial
    return None if trial is None else trial.length


def test_a_bad_number_is_seldom_tried_again() -> None:
    """One that loses half waits for the time that trials may lose; one as good does not."""
    tried: Counter[int] = Counter()
    steps = Steps((0, 1, 2))
    costs = {0: 0.01, 1: 0.01, 2: 0.0102}
    length = steps.chooser.length
    for _ in range(6000):  # a minute
        chosen = steps.chooser.choose(16)
        steps.step(16, length, costs[length])
        tried[length] += 1
        length = chosen
    assert steps.chooser.choose(16) == 1
    assert tried[2] > 100
    assert tried[0] * 0.01 / 2 < 0.002 * 60 + 0.1


def test_a_bad_surprise_does_not_end_trials() -> None:
    """A number that was as good takes fifty times as long; others are tried again all the same."""
    steps = Steps((0, 1, 2))
    costs = {0: 0.0052, 1: 0.01, 2: 0.0102}
    length = steps.chooser.length
    surprised_at, tried_at = 0.0, 0.0
    while steps.now < 200.0 and not tried_at:
        chosen = steps.chooser.choose(16)
        steps.step(16, length, costs[length])
        if surprised_at and length == 0:
            tried_at = steps.now
        if steps.now > 120.0 and length == 2:
            costs[2], surprised_at = 0.5, surprised_at or steps.now
        length = chosen
    assert surprised_at
    assert 1.0 < tried_at - surprised_at < 60.0


def test_what_came_is_counted_beside_what_was_expected() -> None:
    steps = Steps()
    steps.run(16, 400, lambda length: 0.01 + 0.001 * length)
    assert steps.chooser.choose(16) == 1
    steps.settle()
    before = list(steps.cells)
    steps.step(16, 1, 0.0123)
    assert steps.timed() == 12_300
    counted = [now - then for now, then in zip(steps.cells, before, strict=True)]
    assert counted[counters.EXPECTED_MICROSECONDS] == pytest.approx(11_000, rel=0.02)
    assert counted[counters.TOKENS] == 32
    assert counted[counters.EXPECTED_MILLITOKENS] == pytest.approx(32_000, rel=0.01)
    steps.step(16, 1, 0.0113, kept=-1)  # nothing was sampled
    steps.timed()
    assert steps.cells[counters.TOKENS] - before[counters.TOKENS] == 32 + 16


def test_tokens_and_seconds_are_counted_of_the_same_iterations() -> None:
    """Though the time of many is not known, as the number of requests jumps: here each token takes a millisecond."""
    steps, draw = Steps(), random.Random(0)
    for _ in range(300):
        requests = draw.randint(1, 60)
        length = steps.chooser.choose(requests)
        steps.step(requests, length, 1e-3 * requests * (1 + length), kept=length)
    assert steps.cells[counters.TOKENS] > 100
    assert steps.cells[counters.MICROSECONDS] == pytest.approx(1000 * steps.cells[counters.TOKENS], rel=1e-3)


def test_the_seconds_of_each_number_are_counted() -> None:
    """Also while one is held."""
    steps = Steps()
    for held, length in ((0, 3), (0, 5), (1 + 5, 5), (0, 4)):
        steps.cells[counters.HELD] = held
        steps.step(16, length, 0.02)
    steps.step(0, 3)
    assert list(steps.cells[counters.BY_LENGTH]) == [0, 0, 0, 20_000, 40_000, 0, 0]


def test_times_that_nobody_expected_are_not_counted() -> None:
    steps = Steps()
    for _ in range(2):  # the second waits for what the one after it prefills
        steps.chooser.choose(16)
        steps.step(16, 3)
    assert not steps.cells[counters.MICROSECONDS]
    assert not steps.cells[counters.EXPECTED_MICROSECONDS]
    steps.step(16, 3)
    assert steps.cells[counters.MICROSECONDS]


def test_a_number_may_be_held() -> None:
    """And nothing is learned meanwhile."""
    steps = Steps()
    steps.run(16, 400, lambda length: 0.01 + 0.001 * length)
    steps.cells[counters.HELD] = 1 + 5
    steps.step(0, 1)
    before = rates(steps.chooser, 16)
    assert Counter(steps.chooser.choose(16) for _ in range(9)) == {5: 9}
    for _ in range(400):
        steps.step(16, 5, 0.001)
    assert rates(steps.chooser, 16) == before
    steps.cells[counters.HELD] = 1 + 4  # has no graphs
    assert steps.chooser.choose(16) == 1
    steps.cells[counters.HELD] = 0
    assert steps.chooser.choose(16) == 1
    for _ in range(3):
        steps.step(16, 1, 0.005)
    assert rates(steps.chooser, 16) != before
