"""The number of draft tokens: what is learned of acceptance and of time, and which number a made-up engine gets."""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol

import pytest

from vllm_eagle_mrv2.draft_length.acceptance import Acceptance
from vllm_eagle_mrv2.draft_length.chooser import DraftLength, Trial, group_of, requests_of
from vllm_eagle_mrv2.draft_length.durations import Durations, Prefills, typical
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


def durations_of(seconds: dict[int, float]) -> Durations:
    durations = Durations()
    durations.seconds = dict(seconds)
    return durations


@pytest.mark.parametrize(
    ("seconds", "shift"),
    [(0.012, 0.0002), (0.009, -0.0001), (0.5, 0.0003), (0.0, -0.0003)],
    ids=["slower", "faster", "a hiccup", "no time"],
)
def test_an_iteration_shifts_all_times(seconds: float, shift: float) -> None:
    durations = durations_of({0: 0.006, 3: 0.010})
    durations.follow(3, seconds, share=0.1)
    assert durations.seconds == pytest.approx({0: 0.006 + shift, 3: 0.010 + shift})


def test_no_time_becomes_negative() -> None:
    durations = durations_of({0: 0.0001, 3: 0.010})
    durations.follow(3, 0.0, share=1.0)
    assert 0 < durations.seconds[0] < 1e-5


def test_the_first_trial_replaces_what_was_guessed() -> None:
    durations = Durations()
    durations.guess(0, 0.5, error=1.0)
    durations.set(0, 0.01, 0.001, now=7.0)
    assert durations.tried == {0: 7.0}
    assert durations.seconds[0] == pytest.approx(0.01, rel=1e-3)
    durations.guess(0, 0.5, error=1.0)  # is known better by now
    assert durations.seconds[0] == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize(
    ("error", "later", "expected"),
    [(0.001, 0.0, 0.015), (0.010, 0.0, 0.010), (0.0001, 0.0, 0.020), (0.001, 1000.0, 0.020)],
    ids=["as precise", "a vague one", "a precise one", "the other is old"],
)
def test_trials_count_by_their_errors(error: float, later: float, expected: float) -> None:
    durations = Durations()
    durations.set(2, 0.010, 0.001, now=1.0)
    durations.set(2, 0.020, error, now=1.0 + later)
    assert durations.seconds[2] == pytest.approx(expected, abs=2e-4)
    assert durations.tried[2] == 1.0 + later
    assert 0 < durations.error[2] < error


def test_trials_alike_become_more_precise() -> None:
    durations = Durations()
    for _ in range(4):
        durations.set(1, 0.01, 0.002, now=1.0)
    assert durations.error[1] == pytest.approx(0.001)


def test_an_outlier_does_not_count() -> None:
    assert typical([1.0] * 7 + [100.0]) == pytest.approx((1.0, 1e-3))
    mean, error = typical([0.9, 1.0, 1.1, 1.0, 0.95, 1.05, 50.0, 0.001])
    assert mean == pytest.approx(1.0)
    assert error < 0.1


@pytest.mark.parametrize("samples", [8, 40])
def test_the_error_of_a_mean_is_how_far_it_strays(samples: int) -> None:
    rng = random.Random(1)
    found = [typical([rng.gauss(10, 1) for _ in range(samples)]) for _ in range(500)]
    strayed = (sum((mean - 10) ** 2 for mean, _ in found) / len(found)) ** 0.5
    assert sum(error for _, error in found) / len(found) == pytest.approx(strayed, rel=0.35)


# What prefills add

KNEE, PER_TOKEN = 300, 2e-5


def prefills_of(every: int = 4, noise: float = 0.0) -> Prefills:
    """Learned from iterations that decode 24 tokens, some of them with prefills, and make 10."""
    prefills, rng = Prefills(), random.Random(2)
    for number in range(4000):
        prefilled = 0 if number % every else rng.randint(400, 2000)
        seconds = 0.006 + PER_TOKEN * max(24 + prefilled - KNEE, 0)
        prefills.add((9, 3), 24, prefilled, 10.0, seconds * (1 + rng.gauss(0, noise)))
    return prefills


@pytest.mark.parametrize(("noise", "precision"), [(0.0, 0.01), (0.03, 0.1)])
def test_slope_and_knee_are_recovered(noise: float, precision: float) -> None:
    prefills = prefills_of(noise=noise)
    assert prefills.per_token == pytest.approx(PER_TOKEN, rel=precision)
    assert prefills.knee == pytest.approx(KNEE, rel=precision)


def test_tokens_cost_beyond_the_knee_only() -> None:
    prefills = Prefills()
    prefills.knee, prefills.per_token = float(KNEE), PER_TOKEN
    assert prefills.seconds(24, KNEE - 24) == prefills.seconds(24, 0) == 0
    assert prefills.seconds(24, KNEE + 100 - 24) == pytest.approx(100 * PER_TOKEN)
    assert prefills.seconds(KNEE + 50, 100) == pytest.approx(100 * PER_TOKEN)
    assert prefills.seconds(KNEE + 100, -500) == pytest.approx(-100 * PER_TOKEN)


def test_short_prefills_tell_no_slope() -> None:
    prefills = Prefills()
    for prefilled in range(0, 256 - 24, 5):
        prefills.add((9, 3), 24, prefilled, 10.0, 0.006 + 0.001 * prefilled)
    assert (prefills.per_token, prefills.knee) == (0, 256)


def test_prefills_that_take_no_time_cost_nothing() -> None:
    prefills, rng = Prefills(), random.Random(3)
    for _ in range(50):
        tokens = rng.randint(400, 2000)
        prefills.add((9, 3), 24, tokens, 10.0, 0.01 - 1e-6 * tokens)
    assert prefills.per_token == 0


@pytest.mark.parametrize("every", [1, 4, 16])
def test_what_prefills_add_on_average(every: int) -> None:
    whole = sum(PER_TOKEN * (24 + tokens - KNEE) for tokens in range(400, 2001)) / 1601
    prefills = prefills_of(every)
    assert prefills.expected(24, 10.0) == pytest.approx(whole / every, rel=0.25)
    # Whoever makes more tokens starts more requests.
    assert prefills.expected(24, 5.0) < prefills.expected(24, 10.0)
    assert Prefills().expected(24, 10.0) == 0


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
}
"""Share of requests of which so many drafts are accepted."""
PROMPT_PER_TOKEN = 576 / 160


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


def iteration_seconds(decodes: int, drafts: int, prefilled: int) -> float:
    """Of a target of 8B parameters on a large GPU and its head, without noise."""
    tokens = decodes * (1 + drafts) + prefilled
    target = max(5e-3, 21e-6 * tokens) + 6e-4 + 12e-6 * decodes
    if not drafts:
        return target + 6e-5 + 3e-7 * tokens
    return target + max(3e-4, 1.1e-6 * tokens) + (drafts - 1) * (2.5e-4 + 1.5e-6 * decodes) + 1e-4


@dataclass
class Engine:
    """An engine that always has as many requests as ``load`` says; its clock is its own.

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
    prompts: tuple[int, int] = (128, 1024)
    now: float = 0.0
    made: list[tuple[float, int]] = field(default_factory=list)  # when, tokens
    verified: list[int] = field(default_factory=list)  # of each iteration

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._chooser: Chooser = (
            DraftLength(LENGTHS, lambda: self.now) if self.length is None else Constant(self.length)
        )
        self._drafts = self._chooser.choose(self.load(0.0))
        self._waiting = 0.0

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
        prefilled = self._prefill(made)
        hiccup = 0.5 * (self._rng.random() < 0.01)
        switch = 3e-4 * (self._drafts != verified)
        noise = 1 + self._rng.gauss(0, 0.03) + hiccup
        self.now += iteration_seconds(requests, verified, prefilled) * noise + switch
        self._chooser.learn(requests, verified, prefilled, outcomes.items())
        self.made.append((self.now, made))
        self.verified.append(verified)

    def _accepted(self, rates: tuple[float, ...], drafts: int) -> int:
        drawn = self._rng.random()
        return sum(drawn < rate for rate in rates[:drafts])

    def _prefill(self, made: int) -> int:
        """Return the tokens of the requests that follow those that ended."""
        self._waiting += made * PROMPT_PER_TOKEN
        prefilled = 0
        while self._waiting > 0:
            prompt = self._rng.randint(*self.prompts)
            if prefilled + prompt > 8192:
                break
            prefilled += prompt
            self._waiting -= prompt
        return prefilled


@functools.cache
def constant_speeds(requests: int, kind: str) -> dict[int, float]:
    """Tokens a second by constant number of drafts."""
    engines = {k: Engine(lambda now: requests, lambda now: RATES[kind], k, seed=1).run(12.0) for k in LENGTHS}
    return {length: engine.speed(0.5, 12.0) for length, engine in engines.items()}


def share_of_best(engine: Engine, begin: float, end: float, requests: int, kind: str) -> float:
    return engine.speed(begin, end) / max(constant_speeds(requests, kind).values())


def engine_of(load: Callable[[float], int], kind: Callable[[float], str], seed: int = 0) -> Engine:
    return Engine(load, lambda now: RATES[kind(now)], seed=seed)


@pytest.mark.parametrize("requests", [1, 16, 64, 256])
@pytest.mark.parametrize("kind", RATES)
def test_nearly_as_fast_as_the_best_number(kind: str, requests: int) -> None:
    engine = engine_of(lambda now: requests, lambda now: kind).run(25.0)
    assert share_of_best(engine, 10.0, 25.0, requests, kind) > 0.93
    no_drafts = constant_speeds(requests, kind)[0]
    assert engine.speed(1.0, 10.0) > 0.93 * no_drafts
    assert engine.speed(10.0, 25.0) > 0.93 * no_drafts


def steps_of_load(kind: str) -> list[float]:
    """Shares of the best number, from five seconds after each step."""
    engine = engine_of(lambda now: 256 if 10 <= now < 22 else 8, lambda now: kind).run(34.0)
    return [share_of_best(engine, end - 7, end, requests, kind) for end, requests in ((10, 8), (22, 256), (34, 8))]


def steps_of_acceptance() -> list[float]:
    engine = engine_of(lambda now: 8, lambda now: "high" if 10 <= now < 22 else "low").run(34.0)
    return [share_of_best(engine, end - 7, end, 8, kind) for end, kind in ((10, "low"), (22, "high"), (34, "low"))]


@pytest.mark.parametrize("kind", RATES)
def test_the_load_may_change(kind: str) -> None:
    assert min(steps_of_load(kind)) > 0.92


def test_what_is_accepted_may_change() -> None:
    assert min(steps_of_acceptance()) > 0.92


@pytest.mark.parametrize("seed", range(4))
def test_an_easier_text_soon_has_drafts_that_the_one_before_did_not_deserve(seed: int) -> None:
    engine = engine_of(lambda now: 16, lambda now: "low" if now < 15 else "high", seed).run(18.0)
    assert share_of_best(engine, 16.0, 18.0, 16, "high") > 0.95


@pytest.mark.parametrize(("kind", "requests"), [("high", 1), ("high", 16), ("low", 256)])
def test_these_limits_tell_a_number_that_never_changes(
    kind: str, requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DraftLength, "_compare", lambda self, group: None)
    engine = engine_of(lambda now: requests, lambda now: kind).run(25.0)
    assert share_of_best(engine, 10.0, 25.0, requests, kind) < 0.93


@pytest.mark.parametrize("steps", [lambda: steps_of_load("high"), lambda: steps_of_load("low"), steps_of_acceptance])
def test_the_steps_tell_a_number_that_never_changes(
    steps: Callable[[], list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DraftLength, "_compare", lambda self, group: None)
    assert min(steps()) < 0.92


def test_trials_take_little_time() -> None:
    """The best is 5 drafts by far, so that any other number is a trial."""
    engine = engine_of(lambda now: 16, lambda now: "high").run(25.0)
    settled = Counter(length for (when, _), length in zip(engine.made, engine.verified, strict=True) if when > 10)
    assert 0.9 < settled[5] / settled.total() < 1
    assert settled[0] < 0.01 * settled.total()


def share_of_best_constant(make: Callable[[int | None], Engine]) -> float:
    """Share of the best number, of engines that ``make`` makes for each number and for none."""
    chosen, *constant = [make(length).run(25.0).speed(10.0, 25.0) for length in (None, *LENGTHS)]
    return chosen / max(constant)


@pytest.mark.parametrize(("kind", "requests", "seed"), [("high", 16, 3), ("low", 64, 2)])
def test_prompts_may_be_of_one_length(kind: str, requests: int, seed: int) -> None:
    """As in most benchmarks."""

    def make(length: int | None) -> Engine:
        return Engine(lambda now: requests, lambda now: RATES[kind], length, seed, prompts=(512, 512))

    assert share_of_best_constant(make) > 0.93


def test_requests_may_come_and_go_between_two_groups() -> None:
    assert group_of(13) != group_of(14)

    def make(length: int | None) -> Engine:
        numbers = itertools.cycle([13, 13, 13, 13, 14, 14, 14, 14])
        return Engine(lambda now: next(numbers), lambda now: RATES["high"], length)

    assert share_of_best_constant(make) > 0.93


# The chooser, iteration by iteration


class Steps:
    """A chooser on a clock that stands still between iterations."""

    def __init__(self, lengths: tuple[int, ...] = LENGTHS) -> None:
        self.now = 100.0
        counter = DraftCounter()
        self.slots = counter.slots
        self.chooser = DraftLength(lengths, lambda: self.now, counter)

    @property
    def changes(self) -> int:
        return self.slots[counters.CHANGES]

    def step(self, decodes: int, length: int, seconds: float = 0.01, prefilled: int = 0, kept: int = 1) -> None:
        self.now += seconds
        self.chooser.learn(decodes, length, prefilled, [((length, min(kept, length)), decodes)])

    def run(self, decodes: int, iterations: int, seconds: Callable[[int], float] = lambda length: 0.01) -> None:
        """Iterations that verify what the one before has drafted."""
        length = self.chooser.length
        for _ in range(iterations):
            chosen = self.chooser.choose(decodes)
            self.step(decodes, length, seconds(length))
            length = chosen


@pytest.mark.parametrize(
    ("lengths", "first"), [(LENGTHS, 3), ((0, 1, 2, 3, 5, 7, 9), 3), ((0, 1, 2), 2), ((0, 1), 1), ((0, 1, 2, 4), 2)]
)
def test_the_first_number(lengths: tuple[int, ...], first: int) -> None:
    chooser = DraftLength(lengths)
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
    group = group_of(16)
    assert steps.chooser.rate(group, 1) == pytest.approx(16 * 2 / 0.011, rel=0.02)
    assert DraftLength.rate(steps.chooser, group, 4) == 0, "a number that is not among those to choose from"


def test_what_slows_all_down_changes_nothing() -> None:
    steps = Steps()
    steps.run(16, 400, lambda length: 0.01 + 0.001 * length)
    changes = steps.changes
    steps.run(16, 400, lambda length: 0.02 + 0.002 * length)
    assert steps.changes == changes
    assert steps.chooser.rate(group_of(16), 1) == pytest.approx(16 * 2 / 0.022, rel=0.02)


def test_tokens_start_requests_whose_prefills_take_time() -> None:
    steps = Steps()
    steps.run(16, 400, lambda length: 0.01 + 0.001 * length)
    prefills = steps.chooser._prefills = prefills_of()
    added = prefills.expected(16 * 2, 16 * 2.0)
    assert added > 0.001
    assert steps.chooser.rate(group_of(16), 1) == pytest.approx(16 * 2 / (0.011 + added), rel=0.02)


def known_to(chooser: DraftLength) -> tuple[float, list[float]]:
    """What a chooser knows of 16 requests and of one."""
    rates = [chooser.rate(group_of(requests), length) for requests in (16, 1) for length in LENGTHS]
    return chooser.acceptance.tokens(5), rates


@pytest.mark.parametrize(
    ("decodes", "length", "seconds"),
    [(16, 1, 2.5), (16, 4, 0.5), (0, 1, 0.5)],
    ids=["no iteration", "a number that is not among those to choose from", "prefills only"],
)
def test_what_teaches_nothing(decodes: int, length: int, seconds: float) -> None:
    steps = Steps()
    for requests in (16, 1):
        steps.run(requests, 400, lambda length: 0.01 + 0.001 * length)
    known = known_to(steps.chooser)
    for _ in range(20):
        steps.step(decodes, length, seconds, kept=0)
    assert known_to(steps.chooser) == known
    steps.step(16, 1, seconds=1.9, kept=0)
    assert known_to(steps.chooser) != known


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("pause", [0.2, 500.0])
def test_a_pause_is_not_timed(pause: float, ahead: int) -> None:
    """The engine schedules one iteration or two before the tokens of the first arrive."""
    steps = Steps()
    for requests in (1, 16):
        steps.run(requests, 400, lambda length: 0.01 + 0.001 * length)
    steps.slots[counters.MICROSECONDS] = 0
    steps.now += pause
    for _ in range(ahead):
        steps.chooser.choose(16)
    steps.step(16, 1, seconds=0.011)
    assert steps.slots[counters.MICROSECONDS] == 31_000


def test_work_of_the_host_between_two_iterations_is_timed() -> None:
    steps = Steps()
    steps.run(16, 400, lambda length: 0.01 + 0.001 * length)
    steps.slots[counters.MICROSECONDS] = 0
    steps.now += 0.004
    steps.chooser.choose(16)
    steps.step(16, 1, seconds=0.011)
    assert steps.slots[counters.MICROSECONDS] == 15_000


def test_an_unknown_number_of_decodes_begins_as_the_nearest() -> None:
    steps = Steps()
    steps.run(16, 400, lambda length: 0.01 + 0.001 * length)
    steps.run(128, 400, lambda length: 0.01 + 0.02 * length)
    chooser = steps.chooser
    assert [chooser.choose(requests) for requests in (16, 128, 11, 24, 100, 256, 1)] == [1, 0, 1, 1, 0, 0, 1]
    # With its times.
    assert chooser.rate(group_of(24), 1) == pytest.approx(24 * 2 / 0.011, rel=0.1)
    # They are no trials: each number is tried again.
    steps.run(24, 400, lambda length: 0.01 + 0.001 * (5 - length))
    assert chooser.choose(24) == 5


def test_times_of_more_decodes_contain_their_tokens() -> None:
    """Beyond the knee, as learned from prefills."""
    steps = Steps()
    steps.run(128, 400)
    prefills = steps.chooser._prefills
    prefills.per_token, prefills.knee = PER_TOKEN, float(KNEE)
    steps.chooser.choose(256)
    durations = steps.chooser._durations
    near, far = durations[group_of(128)].seconds, durations[group_of(256)].seconds
    assert far.keys() == near.keys() >= {1, 2, 3}
    added = {length: far[length] - near[length] for length in (1, 2, 3)}
    assert added == pytest.approx({1: PER_TOKEN * (512 - KNEE), 2: PER_TOKEN * 3 * 128, 3: PER_TOKEN * 4 * 128})


# Trials


def in_trial(requests: int = 16) -> tuple[Steps, Trial]:
    """A chooser with a number in force, 1, that has just begun to try another one."""
    steps = Steps()
    steps.run(requests, 400, lambda length: 0.01 + 0.001 * length)
    for _ in range(4000):
        if steps.chooser._trial is not None:
            break
        steps.step(requests, 1, 0.011)
    trial = steps.chooser._trial
    assert trial is not None
    assert not trial.taken
    assert steps.chooser.choose(requests) == trial.length != 1
    return steps, trial


def test_a_trial_ends_after_a_few_iterations_that_agree() -> None:
    steps, trial = in_trial()
    for iteration in range(7):
        assert steps.chooser._trial is trial, iteration
        steps.step(16, trial.length, 0.01 + 0.001 * trial.length)
    assert steps.chooser._trial is not trial


def test_a_trial_whose_iterations_disagree_is_longer() -> None:
    steps, trial = in_trial()
    seconds = random.Random(4)
    for _ in range(20):
        steps.step(16, trial.length, seconds.uniform(0.005, 0.02))
    assert steps.chooser._trial is trial
    for _ in range(60):  # half a second in all
        steps.step(16, trial.length, seconds.uniform(0.005, 0.02))
    assert steps.chooser._trial is not trial


def test_the_change_to_another_number_is_not_timed() -> None:
    steps, trial = in_trial()
    steps.step(16, trial.length, seconds=1.5)
    for _ in range(6):
        steps.step(16, trial.length, 0.011)
    assert steps.chooser._trial is not trial
    assert steps.chooser._durations[trial.group].seconds[trial.length] == pytest.approx(0.011, rel=0.3)


def test_a_trial_is_given_up_when_requests_come_and_go() -> None:
    """Its number is drafted, and hardly verified by as many requests."""
    steps, trial = in_trial()
    changes, tried = steps.changes, dict(steps.chooser._durations[trial.group].tried)
    for _ in range(199):
        steps.step(16, 1, 0.011)
    assert steps.chooser._trial is trial
    steps.step(16, 1, 0.011)
    assert steps.chooser._trial is not trial
    # As if it had not been.
    assert steps.changes == changes
    assert steps.chooser._durations[trial.group].tried == tried


def test_a_trial_ends_with_its_number_of_requests() -> None:
    steps, _ = in_trial()
    assert steps.chooser.choose(64) == 1
    assert steps.chooser.choose(16) == 1
    assert steps.chooser._trial is None


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
    assert 0 < tried[0] < tried[2] / 2
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
    assert 1.0 < tried_at - surprised_at < 20.0


def test_what_came_is_counted_beside_what_was_expected() -> None:
    steps = Steps()
    steps.run(16, 400, lambda length: 0.01 + 0.001 * length)
    before = list(steps.slots)
    assert steps.chooser.choose(16) == 1
    steps.step(16, 1, 0.0123)
    counted = [now - then for now, then in zip(steps.slots, before, strict=True)]
    assert counted[counters.MICROSECONDS] == 12_300
    assert counted[counters.EXPECTED_MICROSECONDS] == pytest.approx(11_000, rel=0.02)
    assert counted[counters.TOKENS] == 32
    assert counted[counters.EXPECTED_MILLITOKENS] == pytest.approx(32_000, rel=0.01)
    steps.step(16, 1, 0.0113, kept=-1)  # nothing was sampled
    assert steps.slots[counters.TOKENS] - before[counters.TOKENS] == 32 + 16


def test_what_nobody_expected_is_not_counted() -> None:
    steps = Steps()
    steps.step(16, 3)
    steps.chooser.choose(16)
    steps.step(16, 3)
    assert not any(steps.slots)


def test_a_number_may_be_held() -> None:
    """And nothing is learned meanwhile."""
    steps = Steps()
    steps.run(16, 400, lambda length: 0.01 + 0.001 * length)
    steps.slots[counters.HELD] = 1 + 5
    rates = {length: steps.chooser.rate(group_of(16), length) for length in LENGTHS}
    assert Counter(steps.chooser.choose(16) for _ in range(9)) == {5: 9}
    for _ in range(400):
        steps.step(16, 5, 0.001)
    assert {length: steps.chooser.rate(group_of(16), length) for length in LENGTHS} == rates
    steps.slots[counters.HELD] = 1 + 4  # has no graphs
    assert steps.chooser.choose(16) == 1
    steps.slots[counters.HELD] = 0
    assert steps.chooser.choose(16) == 1
    steps.step(16, 1, 0.001)
    assert steps.chooser.rate(group_of(16), 1) != rates[1]
