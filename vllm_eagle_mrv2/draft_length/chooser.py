"""Chooses the number of draft tokens that makes the most tokens a second.

An iteration with K drafts a request makes 1 + a1 + a1 a2 + ... tokens a request, where ai is the share of drafts
accepted at position i, and takes a time that depends on the number of decodes and on K.  Both are learned from the
running engine.  The number in force is compared with another one in short trials between its own iterations, so that
what changes for both does not count; the time that trials lose is kept below a share of all time.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_eagle_mrv2.draft_length.acceptance import Acceptance
from vllm_eagle_mrv2.draft_length.durations import Durations, Prefills, typical
from vllm_eagle_mrv2.telemetry import counters
from vllm_eagle_mrv2.telemetry.counters import DraftCounter

logger = logging.getLogger("vllm.eagle_mrv2")

_FIRST = 3
"""The number of draft tokens before anything is known."""
_FEWEST, _LONGEST_S, _PRECISION = 6, 0.5, 0.005
"""A trial ends after so many iterations, when it has taken so long or its mean is so precise."""
_GIVEN_UP = 200
"""Iterations after which a trial ends without enough of them, as requests come and go."""
_SHARE_OF_TRIALS = 0.002
"""Share of all time that trials may lose, beside the first trial of each promising number."""
_SAVED_S = 0.5
"""Seconds that trials may lose at once after a quiet time."""
_OWED_S = 10.0 * _SHARE_OF_TRIALS
"""Seconds by which trials may have lost more than that: a bad surprise holds the next one back for ten at most."""
_REST_S = 2.0
"""Seconds between two trials of a number that is as good as the one in force; of a worse one, longer."""
_HOPELESS = 0.15
"""A number that is expected to make so much less than the one in force has no first trial at once, but for the next."""
_WORTH_CHANGING = 1.01
_UNSURE = 0.5
"""Weight of the standard error of a number that would be put in force."""
_A_DRAFT = 0.03
"""Share of an iteration that a draft is expected to take before any has been tried."""
_APART = 0.015
"""By which share the times of two numbers differ more or less in the next group."""
_EVERY = 8
"""Iterations between two comparisons."""
_BETWEEN_S = 0.02
"""Seconds from the tokens of an iteration to the schedule of the next that count; in further ones the engine rested."""
_LONGEST_ITERATION_S = 2.0
"""Seconds after which an iteration was none: something was compiled, or the machine was busy."""
_FOLLOW = 0.05
"""Weight of an iteration with the number in force."""


class Iteration(NamedTuple):
    """What an iteration did, and how long it took."""

    decoded: int  # tokens of decodes, drafts included
    prefilled: int  # other tokens
    seconds: float


@dataclass
class Trial:
    """Iterations with another number of draft tokens than the one in force."""

    group: int
    length: int
    taken: list[Iteration] = field(default_factory=list)
    iterations: int = 0


class DraftLength:
    """The number of draft tokens of an engine.

    Args:
        lengths: the numbers to choose from, ascending; the last is the maximum.
        clock: returns seconds.
        counter: counts what was expected beside what came; its `HELD` slot may hold a number.
    """

    def __init__(
        self,
        lengths: tuple[int, ...],
        clock: Callable[[], float] = time.monotonic,
        counter: DraftCounter | None = None,
    ) -> None:
        self.lengths = lengths
        self.acceptance = Acceptance(lengths[-1])
        self.length = max(length for length in lengths if length <= _FIRST)
        """The number that the latest iteration drafts."""
        self._clock = clock
        self._slots = (counter or DraftCounter()).slots
        self._durations: dict[int, Durations] = {}
        self._in_force: dict[int, int] = {}
        self._prefills = Prefills()
        self._draft: float | None = None  # seconds of a draft, beside verifying it
        self._trial: Trial | None = None
        self._may_lose = 0.0
        self._scheduled = self._last = clock()  # when an iteration was scheduled, and when the tokens of one arrived
        self._iterations = 0
        self._group = 0

    def choose(self, requests: int) -> int:
        """Choose how many tokens the coming iteration drafts for each request.

        Args:
            requests: that will verify these drafts.
        """
        self._scheduled = self._clock()
        held = self._slots[counters.HELD] - 1
        if held in self.lengths:
            self.length = held
            return held
        group = self._group = group_of(requests)
        if group not in self._in_force:
            self._enter(group)
        trial = self._trial
        if trial is not None and abs(trial.group - group) > 1:
            trial = self._trial = None
        self.length = self._in_force[group] if trial is None else trial.length
        return self.length

    def learn(
        self,
        decodes: int,
        length: int,
        prefilled: int,
        outcomes: Collection[tuple[tuple[int, int], int]],
    ) -> None:
        """Learn from an iteration whose tokens have arrived, unless the number is held.

        Args:
            decodes: requests that had a draft verified, or none to verify.
            length: the number of drafts that each of them verified.
            prefilled: tokens of other requests.
            outcomes: ((drafts of a request, how many of them were accepted), number of such requests).
        """
        now = self._clock()
        seconds = now - max(self._last, self._scheduled - _BETWEEN_S)
        self._last = now
        if self._slots[counters.HELD] or not decodes or length not in self.lengths or seconds > _LONGEST_ITERATION_S:
            return
        iteration = Iteration(decodes * (1 + length), prefilled, seconds)
        self._count(decodes, length, iteration, outcomes)
        self.acceptance.add(outcomes, seconds)
        self._may_lose = min(self._may_lose + _SHARE_OF_TRIALS * seconds, _SAVED_S)
        group = group_of(decodes)
        in_force = self._in_force.get(group)
        if in_force is None:
            return
        made = decodes * self.acceptance.tokens(length)
        self._prefills.add((group, length), *iteration[:2], made, seconds)
        self._take(group, length, iteration, now)
        self._iterations += 1
        if self._iterations % _EVERY == 0 and self._trial is None and group == self._group:
            self._compare(group)
            self._begin_trial(group, now)

    def _count(
        self, decodes: int, length: int, iteration: Iteration, outcomes: Iterable[tuple[tuple[int, int], int]]
    ) -> None:
        """Count what was expected of an iteration beside what came."""
        group, slots = group_of(decodes), self._slots
        if group not in self._durations or not self._durations[group].known(length):
            return
        expected = self._durations[group].seconds[length] + self._beyond_plain(group, length, iteration)
        slots[counters.MICROSECONDS] += round(1e6 * iteration.seconds)
        slots[counters.EXPECTED_MICROSECONDS] += round(1e6 * expected)
        slots[counters.TOKENS] += decodes + sum(max(kept, 0) * requests for (_, kept), requests in outcomes)
        slots[counters.EXPECTED_MILLITOKENS] += round(1e3 * decodes * self.acceptance.tokens(length))

    def rate(self, group: int, length: int) -> float:
        """Return the tokens a second that a number of drafts is expected to make; 0 if unknown."""
        seconds = self._durations[group].seconds.get(length)
        return 0.0 if seconds is None else self._rate(group, length, seconds)

    def _rate(self, group: int, length: int, seconds: float) -> float:
        made = self._made(group, length)
        return made / (seconds + self._prefills.expected(requests_of(group) * (1 + length), made))

    def _made(self, group: int, length: int) -> float:
        return requests_of(group) * self.acceptance.tokens(length)

    def _enter(self, group: int) -> None:
        """Begin with what is known of the nearest number of decodes."""
        nearest = min(self._in_force, key=lambda other: abs(other - group), default=None)
        durations = self._durations[group] = Durations()
        self._in_force[group] = self.length if nearest is None else self._in_force[nearest]
        if nearest is None:
            return
        known, further = self._durations[nearest], requests_of(group) - requests_of(nearest)
        for length, seconds in known.seconds.items():
            tokens = requests_of(nearest) * (1 + length)
            more = self._prefills.seconds(tokens, further * (1 + length))
            durations.seconds[length] = max(seconds + more, 0.1 * seconds)
            durations.error[length] = math.hypot(known.error[length], _APART * abs(group - nearest) * seconds)

    def _guess(self, group: int) -> None:
        """Expect times of what has not been tried: by the tokens to verify, and by what a draft took elsewhere."""
        durations, in_force, requests = self._durations[group], self._in_force[group], requests_of(group)
        base = durations.seconds[in_force]
        draft, unsure = (_A_DRAFT * base, 1.0) if self._draft is None else (self._draft, 0.5)
        for length in self.lengths:
            more = length - in_force
            verifying = self._prefills.seconds(requests * (1 + in_force), requests * more)
            error = 0.2 * abs(verifying) + unsure * draft * abs(more)
            durations.guess(length, base + verifying + draft * more, error)

    def _learn_draft(self, group: int, length: int, seconds: float) -> None:
        """Learn what a draft takes from the trial of a number."""
        in_force, requests = self._in_force[group], requests_of(group)
        if length != in_force:
            more = length - in_force
            verifying = self._prefills.seconds(requests * (1 + in_force), requests * more)
            draft = max((seconds - self._durations[group].seconds[in_force] - verifying) / more, 0.0)
            self._draft = draft if self._draft is None else self._draft + 0.3 * (draft - self._draft)

    def _take(self, group: int, length: int, iteration: Iteration, now: float) -> None:
        """Take over the seconds of an iteration."""
        durations, in_force, trial = self._durations[group], self._in_force[group], self._trial
        if trial is not None and abs(trial.group - group) <= 1:
            trial.iterations += 1
            if length == trial.length:
                trial.taken.append(iteration)
            self._end(trial, now)
        if length == in_force:
            if durations.known(length):
                durations.follow(length, self._plain(group, length, iteration), _FOLLOW)
            elif self._trial is None:
                self._trial = Trial(group, length)

    def _plain(self, group: int, length: int, iteration: Iteration) -> float:
        """Return the seconds of an iteration as if it had no prefills, and as many decodes as the middle of a group."""
        return max(iteration.seconds - self._beyond_plain(group, length, iteration), 0.1 * iteration.seconds)

    def _beyond_plain(self, group: int, length: int, iteration: Iteration) -> float:
        """Return the seconds that an iteration takes beyond those of one without prefills, of the middle of a group."""
        decoded = requests_of(group) * (1 + length)
        return self._prefills.seconds(decoded, iteration.decoded + iteration.prefilled - decoded)

    def _end(self, trial: Trial, now: float) -> None:
        """End a trial once it is long enough, and compare."""
        taken = trial.taken[1:]  # the first changed from one number to another
        if len(taken) < _FEWEST:
            if trial.iterations >= _GIVEN_UP:
                self._trial = None
            return
        group, length = trial.group, trial.length
        mean, error = typical([self._plain(group, length, one) for one in taken])
        whole = sum(one.seconds for one in taken)
        if whole < _LONGEST_S and error > _PRECISION * whole / len(taken):
            return
        self._trial = None
        self._learn_draft(group, length, mean)
        durations = self._durations[group]
        first = not durations.known(length)
        durations.set(length, mean, error, now)
        in_force = self._in_force[group]
        if durations.known(in_force):
            self._guess(group)
            worse = 1.0 - self.rate(group, length) / self.rate(group, in_force)
            if not first:
                self._may_lose = max(self._may_lose - whole * max(worse, 0.0), -_OWED_S)
            self._compare(group)

    def _compare(self, group: int) -> None:
        """Put the best number in force."""
        in_force = self._in_force[group]
        known = filter(self._durations[group].known, self.lengths)
        best = max(known, key=lambda one: self.rate(group, one), default=None)
        if best is None or best == in_force:
            return
        unsure = _UNSURE * self._durations[group].error[best] * self.rate(group, best) / self._made(group, best)
        if self.rate(group, best) < (_WORTH_CHANGING + unsure) * self.rate(group, in_force):
            return
        self._in_force[group] = best
        self._slots[counters.CHANGES] += 1
        logger.debug(
            "eagle_mrv2 drafts %d tokens instead of %d for about %d requests", best, in_force, requests_of(group)
        )

    def _begin_trial(self, group: int, now: float) -> None:
        """Try another number, if one is due and the time that it may lose is there."""
        durations, in_force = self._durations[group], self._in_force[group]
        if not durations.known(in_force):
            return
        rate, seconds = self.rate(group, in_force), durations.seconds[in_force]
        due: list[tuple[float, int, float]] = []
        for length in self.lengths:
            if length == in_force:
                continue
            worse = max(1.0 - self.rate(group, length) / rate, 0.0)
            next_to = abs(self.lengths.index(length) - self.lengths.index(in_force)) == 1
            if not durations.known(length) and (next_to or worse < _HOPELESS):
                self._trial = Trial(group, length)
                return
            rested = (now - durations.tried.get(length, 0.0)) / (_REST_S * (1.0 + worse / _PRECISION / 10))
            if rested > 1.0:
                due.append((rested, length, worse))
        if due:
            _, length, worse = max(due)
            if worse * min(_FEWEST * seconds, _LONGEST_S) <= max(self._may_lose, 0.0):
                self._trial = Trial(group, length)


def group_of(requests: int) -> int:
    """Return the number of a group of similar numbers of decodes; a group's largest is 1.4 times its smallest."""
    return round(2 * math.log2(max(requests, 1)))


def requests_of(group: int) -> int:
    """Return the number of decodes in the middle of a group."""
    return round(2 ** (group / 2))
