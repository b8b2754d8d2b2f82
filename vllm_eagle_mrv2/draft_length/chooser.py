"""Chooses the number of draft tokens that makes the most tokens a second.

An iteration with K drafts a request makes 1 + a1 + a1 a2 + ... tokens a request, where ai is the share of drafts
accepted at position i, and takes a time that depends on the number of decodes and on K.  Both are learned from the
running engine, the times with their errors.  A number that might pay more than the one in force is tried, between
iterations of that; the time that trials lose is kept below a share of all time.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vllm_eagle_mrv2.draft_length.acceptance import Acceptance
from vllm_eagle_mrv2.draft_length.notes import GraphTime
from vllm_eagle_mrv2.draft_length.times import Extra, Iteration, Times, Vector, Workload
from vllm_eagle_mrv2.telemetry import counters
from vllm_eagle_mrv2.telemetry.counters import DraftCounter

logger = logging.getLogger("vllm.eagle_mrv2")

_FIRST = 3
"""The number of draft tokens before anything is known."""
_FEWEST, _LONGEST_S = 6, 0.5
"""A trial takes so many iterations at least, and so long at most unless these take longer."""
_GIVEN_UP = 200
"""Iterations after which a trial ends without enough of them, as requests come and go."""
_SHARE_OF_TRIALS = 0.002
"""Share of all time that trials may lose."""
_SAVED_S = 0.5
"""Seconds that trials may lose at once, or the fewest iterations of a trial where these take longer: at the start, and
after a quiet time."""
_OWED_S = 10.0 * _SHARE_OF_TRIALS
"""Seconds by which trials may have lost more than that: a bad surprise holds the next one back for ten at most."""
_WORTH = 1.01
"""A number must be expected to make so many times the tokens a second of the one in force."""
_UNSURE = 0.5
"""To come into force, it must do so with iterations slower than expected by so many standard errors."""
_HOPE = 0.7
"""To be tried, it must do so with iterations faster than expected by so many standard errors."""
_LEAST = 0.1
"""Share of the expected time below which that hope does not go."""
_BLIND_S, _SHARE_WHILE_BLIND = 3.0, 0.005
"""After so long without drafts, what is accepted may be another share, and the fewest drafts are tried; and the share
of the time since the last drafts that this may lose."""
_EVERY = 7
"""Iterations between two comparisons."""
_NEAR = 2
"""Groups of decodes that are as far apart may be those of an iteration and of the choice for its drafts."""
_BETWEEN_S = 0.02
"""Seconds from the tokens of an iteration to the schedule of the next that count; in further ones the engine rested."""
_LONGEST_ITERATION_S = 2.0
"""Seconds after which an iteration was none: something was compiled, or the machine was busy."""
_KNOWN = 0.1
"""An iteration's expected time is known where its standard error is a smaller share of it."""


@dataclass
class Trial:
    """Iterations with another number of draft tokens than the one in force."""

    group: int
    length: int
    taken: int = 0  # iterations with this number
    seconds: float = 0.0
    iterations: int = 0  # all since its begin

    def lost(self, gain: Gain) -> float:
        """The seconds that it has lost, given what the number makes."""
        return max(self.seconds - self.taken * gain.seconds * gain.mean, 0.0)


class Made(NamedTuple):
    """The tokens of an iteration."""

    tokens: int
    expected: float


class Gain(NamedTuple):
    """What a number of draft tokens makes, as a multiple of what the one in force makes."""

    mean: float
    error: float  # standard error of the ratio of their times, as a share
    seconds: float  # of an iteration with the number

    @property
    def sure(self) -> float:
        """What is fairly sure."""
        return self.mean / (1.0 + _UNSURE * self.error)

    @property
    def hoped(self) -> float:
        """What may be."""
        return self.mean / max(1.0 - _HOPE * self.error, _LEAST)

    @property
    def loses(self) -> float:
        """The seconds that the fewest iterations of a trial are expected to lose."""
        return (1.0 - self.mean) * self.seconds * _FEWEST

    @property
    def pays(self) -> bool:
        """Whether the number should come into force."""
        return self.sure > _WORTH

    @property
    def may_pay(self) -> bool:
        """Whether the number is worth a trial."""
        return self.hoped > _WORTH


class DraftLength:
    """The number of draft tokens of an engine.

    Args:
        lengths: the numbers to choose from, ascending; the first is 0, the last the maximum.
        captured: the most tokens of an iteration that a CUDA graph holds.
        clock: returns seconds.
        counter: counts what was expected beside what came; its `HELD` cell may hold a number.
        graph_times: what the graphs of iterations take, for some numbers of requests and each of ``lengths``.
    """

    def __init__(
        self,
        lengths: tuple[int, ...],
        captured: int,
        clock: Callable[[], float] = time.monotonic,
        counter: DraftCounter | None = None,
        graph_times: Iterable[GraphTime] = (),
    ) -> None:
        self.lengths = lengths
        self.acceptance = Acceptance(lengths[-1])
        self._captured = captured
        self.length = max(length for length in lengths if length <= _FIRST)
        """The number that the latest iteration drafts."""
        self._clock = clock
        self._cells = (counter or DraftCounter()).cells
        self._in_force: dict[int, int] = {}  # by group
        self._times = dict(_by_graphs(lengths, graph_times))
        self._workload = Workload()
        self._extra = Extra()  # of the iteration before
        self._waits: tuple[Iteration, Extra, Made] | None = None  # that one, what was before it, its tokens
        self._trial: Trial | None = None
        self._may_lose = _SAVED_S
        self._scheduled = self._last = clock()  # when an iteration was scheduled, and when the tokens of one arrived
        self._drafted = self._last  # when those of one with drafts did
        self._verified = self.length  # by the iteration before
        self._iterations = 0
        self._group: int | None = None  # of the latest choice

    def choose(self, requests: int) -> int:
        """Choose how many tokens the coming iteration drafts for each request.

        Args:
            requests: that will verify these drafts.
        """
        self._scheduled = self._clock()
        held = self._cells[counters.HELD] - 1
        if held in self.lengths:
            self.length = held
            return held
        group = self._group = group_of(requests)
        if group not in self._in_force:
            known = self._in_force
            self._in_force[group] = known[_nearest(group, known)] if known else self.length
        trial = self._trial
        if trial is not None and abs(trial.group - group) > 1:
            self._pay(trial, self._gains(trial.group)[trial.length])
            trial = None
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
        extra = Extra(prefilled > 0, decodes * (1 + length) + prefilled > self._captured, prefilled)
        if self._waits is not None:
            self._take(*self._waits, extra)
        before, self._extra, self._waits = self._extra, extra, None
        changed, self._verified = length != self._verified, length
        timed = 0.0 < seconds <= _LONGEST_ITERATION_S
        if not decodes or length not in self.lengths or not timed:
            return
        self._count(counters.BY_LENGTH.start + self.lengths.index(length), 1e6 * seconds)
        if self._cells[counters.HELD]:
            return
        iteration = Iteration(decodes, length, extra, seconds)
        made = Made(
            decodes + sum(max(kept, 0) * requests for (_, kept), requests in outcomes),
            decodes * self.acceptance.tokens(length),
        )
        if self.acceptance.add(outcomes, seconds):
            self._drafted = now
        self._workload.add(made.expected, prefilled)
        self._may_lose = min(self._may_lose + _SHARE_OF_TRIALS * seconds, max(_SAVED_S, _FEWEST * seconds))
        if not changed:  # the change to another number takes time of its own
            self._waits = iteration, before, made
        self._iterations += 1
        if self._iterations % _EVERY == 0 and self._trial is None and self._times:
            self._look_for_better(decodes)

    def _look_for_better(self, decodes: int) -> None:
        """Put a better number in force for as many requests as were chosen for last, or try one.

        Args:
            decodes: of the latest iteration.
        """
        group = self._group
        if group is None or abs(group - group_of(decodes)) > _NEAR:
            return
        gains = self._gains(group)
        if not self._compare(group, gains):
            self._begin_trial(group, gains)

    def _count(self, cell: int, number: float) -> None:
        self._cells[cell] += round(number)

    def _expected(self, group: int, times: Times) -> tuple[Vector, Vector]:
        """Return, by number of drafts, what iterations are expected to make and what they consist of.

        Args:
            group: of decodes.
            times: of theirs.

        Returns:
            Tokens, [numbers]; and parts, as of `Times`, [numbers, times].
        """
        requests, lengths = requests_of(group), np.array(self.lengths)
        tokens = requests * np.array([self.acceptance.tokens(length) for length in self.lengths])
        extras = self._workload.extra(tokens, self._captured - requests * (1 + lengths))
        parts = [
            times.parts(length, one, one, one)
            for length, one in zip(self.lengths, map(Extra._make, extras), strict=True)
        ]
        return tokens, np.array(parts)

    def _gains(self, group: int) -> dict[int, Gain]:
        times, in_force = self._times_of(group), self.lengths.index(self._in_force[group])
        tokens, parts = self._expected(group, times)
        seconds = np.maximum(times.seconds(parts), times.plain)
        rates, shares = tokens / seconds, parts / seconds[:, None]
        columns = (one.tolist() for one in (rates / rates[in_force], times.error(shares - shares[in_force]), seconds))
        return {length: Gain(*one) for length, *one in zip(self.lengths, *columns, strict=True)}

    def _take(self, iteration: Iteration, before: Extra, made: Made, after: Extra) -> None:
        """Take over the time of an iteration."""
        group = group_of(iteration.decodes)
        if group not in self._times:
            self._times[group] = self._times_of(group) if self._times else Times.guess(self.lengths, iteration)
        expected, error = self._times[group].learn(iteration, before, after)
        if error < _KNOWN * expected:
            self._count(counters.MICROSECONDS, 1e6 * iteration.seconds)
            self._count(counters.EXPECTED_MICROSECONDS, 1e6 * expected)
            self._count(counters.TOKENS, made.tokens)
            self._count(counters.EXPECTED_MILLITOKENS, 1e3 * made.expected)
        trial = self._trial
        if trial is not None and abs(trial.group - group) <= _NEAR:
            trial.iterations += 1
            if iteration.length == trial.length:
                trial.taken += 1
                trial.seconds += iteration.seconds
            self._end(trial)

    def _times_of(self, group: int) -> Times:
        """Return what is known of a number of decodes, or expected of it by the nearest known one."""
        if group in self._times:
            return self._times[group]
        nearest = _nearest(group, self._times)
        return self._times[nearest].nearby(abs(group - nearest), requests_of(group) - requests_of(nearest))

    def _begin_trial(self, group: int, gains: dict[int, Gain]) -> None:
        """Try another number, if one may pay and the time that it may lose is there; or one draft, after long none."""
        may_lose = max(self._may_lose, 0.0)
        due = [length for length, gain in gains.items() if gain.may_pay and gain.loses <= may_lose]
        blind, fewest = self._last - self._drafted, self.lengths[1]
        if not due and blind > _BLIND_S and gains[fewest].loses <= _SHARE_WHILE_BLIND * blind:
            due = [fewest]
        if due:
            self._trial = Trial(group, max(due, key=lambda one: gains[one].hoped))

    def _end(self, trial: Trial) -> None:
        """End a trial once it is long enough, and compare."""
        enough = trial.taken >= _FEWEST
        if not enough and trial.iterations < _GIVEN_UP:
            return
        gains = self._gains(trial.group)
        gain = gains[trial.length]
        affordable = trial.seconds < _LONGEST_S and trial.lost(gain) < self._may_lose
        if enough and affordable and gain.may_pay and not gain.pays:
            return
        self._pay(trial, gain)
        if enough:
            self._compare(trial.group, gains)

    def _pay(self, trial: Trial, gain: Gain) -> None:
        """End a trial, and count what it lost."""
        self._trial = None
        self._may_lose = max(self._may_lose - trial.lost(gain), -_OWED_S)

    def _compare(self, group: int, gains: dict[int, Gain]) -> bool:
        """Put the best number in force; return whether it is another one."""
        best = max(gains, key=lambda one: gains[one].sure)
        if not gains[best].pays:
            return False
        in_force, self._in_force[group] = self._in_force[group], best
        self._cells[counters.CHANGES] += 1
        logger.debug(
            "eagle_mrv2 drafts %d tokens instead of %d for about %d requests", best, in_force, requests_of(group)
        )
        return True


def _by_graphs(lengths: tuple[int, ...], graph_times: Iterable[GraphTime]) -> Iterator[tuple[int, Times]]:
    """Groups of numbers of decodes with what is expected of them, where the graphs of all lengths were timed."""
    seconds = {(one.requests, one.length): one.seconds for one in graph_times}
    for requests in sorted({requests for requests, _ in seconds}):
        if all((requests, length) in seconds for length in lengths):
            plain = np.array([seconds[requests, length] for length in lengths])
            yield group_of(requests), Times.of_graphs(lengths, plain)


def group_of(requests: int) -> int:
    """Return the number of a group of similar numbers of decodes; a group's largest is 1.4 times its smallest."""
    return round(2 * math.log2(max(requests, 1)))


def requests_of(group: int) -> int:
    """Return the number of decodes in the middle of a group."""
    return round(2 ** (group / 2))


def _nearest(group: int, known: Collection[int]) -> int:
    return min(known, key=lambda other: abs(other - group))
