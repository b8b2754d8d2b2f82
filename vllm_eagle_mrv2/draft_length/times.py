"""What an iteration takes, by number of draft tokens, and what prefills add."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]

_JITTER, _LEAST_JITTER, _JITTER_FOLLOWS = (0.03**2, 0.3**2), 1e-6, 0.05
"""Variance of iterations as a share of their time squared: before any is known, at least, and an iteration's weight."""
_OUTLIER = 3.0
"""Standard deviations beyond which an iteration counts less."""
_SLOWER, _FASTER = 8, 4
"""So many of those are a change: slower ones of a number in a row, or faster ones of any numbers."""
_FORGETS = 1 / 200
"""How much of the count of faster ones another iteration takes away; a slower outlier takes all."""
_LEFT = 0.1
"""What is left of an estimated time at least: none becomes negative."""
_WORKLOAD = 200
"""Iterations that tell how many prefills there are."""
_SHARE_AT_MOST = 0.98
"""Share of iterations with prefills that still tells how many more there would be."""


class Extra(NamedTuple):
    """What an iteration has beyond decodes that a CUDA graph holds; of several, shares of them and mean tokens."""

    prefills: float = 0.0
    large: float = 0.0  # more tokens than the CUDA graphs, with prefills or by its decodes alone
    tokens: float = 0.0  # prefilled


class Iteration(NamedTuple):
    """What an iteration did, and how long it took."""

    decodes: int  # requests
    length: int  # drafts that each of them verified
    extra: Extra
    seconds: float


class Shares(NamedTuple):
    """How far times may be off, as shares of the time of an iteration."""

    alike: float  # all plain times
    drafts: float  # the one with the most drafts, and those with fewer by as much less
    own: float  # each plain time by itself
    extra: float  # what else adds to them, as a share of `_EXTRA`


_DRAFT = 0.03
"""Share of an iteration that a draft takes before any has been timed."""
_MAY_TAKE = Extra(0.5, 0.5, 1 / 2000)
_EXTRA = np.array([_MAY_TAKE.prefills, *_MAY_TAKE, *_MAY_TAKE])
"""Shares of an iteration that it may take: of the iteration before, its own, and of the one after it."""
_AT_FIRST = Shares(1.0, 0.5, 0.1, 1.0)
"""After the first iteration."""
_BY_GRAPHS, _DIFFERENCES = Shares(0.3, 0.0, 0.03, 1.0), 0.5
"""After the graphs were timed; and how far their differences may be off, as a share of them."""
_NEXT_GROUP = Shares(0.1, 0.1, 0.03, 0.1)
"""In the next group of decodes, as far as the times differ from this one's."""
_A_SECOND = Shares(0.03, 0.02, 0.02, 0.02)
"""A second later."""
_CHANGED, _CHANGED_OWN = Shares(0.6, 0.4, 0.0, 0.0), 0.4
"""After a change, of how far an iteration was off; and its own number's time."""
_NONE = Extra()
_TOKENS = [-1 - len(_NONE), -1]
"""Places of the times of a prefilled token: of the iteration itself and of the one after it."""


class Workload:
    """How many prefills come with the tokens that are made: they end requests, and others follow."""

    def __init__(self) -> None:
        self._made, self._prefilled = np.zeros((2, _WORKLOAD))  # tokens of the latest iterations
        self._iterations = 0

    def add(self, made: float, prefilled: int) -> None:
        """Learn from an iteration that makes and prefills so many tokens."""
        place = self._iterations % _WORKLOAD
        self._made[place], self._prefilled[place] = made, prefilled
        self._iterations += 1

    def extra(self, made: Vector, free: Vector) -> Vector:
        """Return what is expected of kinds of iterations, once one is known.

        Args:
            made: the tokens that they make, [kinds].
            free: how many they may prefill before they are large; negative where they are so without, [kinds].

        Returns:
            `Extra` of each, [kinds, 3].
        """
        more = made / self._made[: self._iterations].mean()
        prefilled = self._prefilled[: self._iterations, None, None]
        shares = (prefilled > np.stack([np.zeros_like(free), free])).mean(0)
        some, large = 1.0 - (1.0 - np.minimum(shares, _SHARE_AT_MOST)) ** more
        return np.stack([some, np.where(free < 0, 1.0, large), more * prefilled.mean()], axis=1)


class Times:
    """Seconds of iterations with about the same number of decodes.

    An iteration takes the plain time of its number of draft tokens.  Prefills add some time at all, and some for each
    token; more tokens than the CUDA graphs hold add some, too.  With asynchronous scheduling that time is not only in
    their own iteration: the one before waits for the launch, and the one after makes up for a part of that.  A Kalman
    filter estimates all of these times together, with their errors: what shifts the time of one number shifts that of
    the others as far as they move alike.

    The state x, in seconds, is the plain time of each number, then seven further times: of a prefill in the iteration
    before, of the `Extra` of the iteration itself, and of the `Extra` of the one after it.  An iteration takes
    z = h·x + noise, where h counts its `parts`.  With the covariance P of x and the noise's variance r, an iteration
    moves x by g (z - h·x) and P by -g (P h)ᵀ, with the gain g = P h / (hᵀ P h + r).
    """

    def __init__(self, lengths: Sequence[int], mean: Vector, covariance: Vector) -> None:
        self._place = {length: place for place, length in enumerate(lengths)}
        self._mean, self._covariance = mean, covariance  # of the plain times by length, and of prefills
        self._numbers = len(lengths)
        plain, drafts, extra = np.zeros((3, len(mean)))
        plain[: self._numbers], drafts[: self._numbers] = 1.0, np.array(lengths) / lengths[-1]
        extra[self._numbers :] = _EXTRA
        self._modes = np.array([np.outer(plain, plain), np.outer(drafts, drafts), np.diag(plain), np.diag(extra**2)])
        self._drift = self._spread(_A_SECOND)
        self._jitter = list(_JITTER)  # of iterations without and with prefills
        # Outliers.  Stalls are slower ones.  Faster ones are rare, and a change even where other numbers come between,
        # whose iterations tell little as long as their time is hardly known.
        self._slower, self._faster = dict.fromkeys(lengths, 0), 0.0

    @classmethod
    def guess(cls, lengths: Sequence[int], iteration: Iteration) -> Times:
        """Expect times from the first iteration."""
        plain = np.maximum(1.0 + _DRAFT * (np.array(lengths) - iteration.length), _LEFT)
        mean = np.concatenate([plain, _EXTRA / len(_EXTRA)])
        times = cls(lengths, iteration.seconds * mean, np.zeros((len(mean), len(mean))))
        times._covariance = iteration.seconds**2 * times._spread(_AT_FIRST)
        return times

    @classmethod
    def of_graphs(cls, lengths: Sequence[int], seconds: Vector) -> Times:
        """Expect times from those of the CUDA graphs alone, [numbers].

        What is around the graphs takes time, too, and where the host takes longer than they do, their differences count
        for less.
        """
        mean = np.concatenate([seconds, seconds[0] * _EXTRA / len(_EXTRA)])
        times = cls(lengths, mean, np.zeros((len(mean), len(mean))))
        differences = np.zeros(len(mean))
        differences[: len(seconds)] = _DIFFERENCES * (seconds - seconds[0])
        times._covariance = seconds[0] ** 2 * times._spread(_BY_GRAPHS) + np.outer(differences, differences)
        return times

    def nearby(self, groups: int, further: int) -> Times:
        """Expect times of another number of decodes.

        Args:
            groups: how far it is away.
            further: decodes that are more, or less where negative.
        """
        tokens = np.zeros(len(self._mean))
        tokens[: self._numbers] = 1.0 + np.array(lengths := list(self._place))
        # Decodes may cost as much as prefills, or nothing.
        grown = 0.5 * self._mean[_TOKENS].sum() * further * tokens
        spread = np.outer(grown, grown) + self.plain[0] ** 2 * groups * self._spread(_NEXT_GROUP)
        times = Times(lengths, self._mean, self._covariance + spread)
        times._move(grown)
        times._jitter = list(self._jitter)
        return times

    @property
    def plain(self) -> Vector:
        """The seconds of iterations without prefills around them, by number of drafts."""
        return self._mean[: self._numbers]

    def _spread(self, shares: Shares) -> Vector:
        """Return the covariance of times that may be off by shares of a second."""
        spread: Vector = np.tensordot(np.square(shares), self._modes, 1)
        return spread

    def _move(self, by: Vector) -> None:
        """Add to the estimates; plain times stay positive."""
        least = _LEFT * self.plain
        self._mean = self._mean + by
        np.maximum(self.plain, least, out=self.plain)

    def parts(self, length: int, before: Extra = _NONE, own: Extra = _NONE, after: Extra = _NONE) -> Vector:
        """Return what an iteration consists of: how often each of the estimated times is in it.

        Args:
            length: its number of drafts.
            before: prefills of the iteration before it.
            own: its own.
            after: those of the iteration after it.
        """
        parts = np.zeros(len(self._mean))
        parts[self._place[length]] = 1.0
        parts[self._numbers :] = before.prefills, *own, *after
        return parts

    def seconds(self, parts: Vector) -> Any:
        """Return how long iterations of these parts take, one iteration a row."""
        return parts @ self._mean

    def error(self, parts: Vector) -> Any:
        """Return the standard errors of `seconds`; of a difference of parts, that of the difference."""
        return np.sqrt(np.maximum(((parts @ self._covariance) * parts).sum(-1), 0.0))

    def learn(self, iteration: Iteration, before: Extra, after: Extra) -> tuple[float, float]:
        """Learn from an iteration.

        Args:
            iteration: the iteration.
            before: prefills of the iteration before it.
            after: those of the iteration after it.

        Returns:
            The seconds that were expected of it, and their standard error.
        """
        length, seconds = iteration.length, iteration.seconds
        parts = self.parts(length, before, iteration.extra, after)
        self._covariance += self.plain[0] ** 2 * seconds * self._drift
        expected, error = float(self.seconds(parts)), float(self.error(parts))
        off, unsure, scale = seconds - expected, error**2, max(expected, self.plain[self._place[length]]) ** 2
        kind = int(before.prefills or iteration.extra.prefills or after.prefills)
        noise = self._jitter[kind] * scale
        most = _OUTLIER**2 * (unsure + noise)
        found = max((min(off**2, most) - unsure) / scale, _LEAST_JITTER)
        self._jitter[kind] += _JITTER_FOLLOWS * noise / (unsure + noise) * (found - self._jitter[kind])
        if off**2 > most:
            noise = off**2 / _OUTLIER**2
            self._doubt(length, off)
        else:
            self._slower[length] = 0
            self._faster *= 1.0 - _FORGETS
        spread = self._covariance @ parts
        gain = spread / (float(parts @ spread) + noise)
        self._move(gain * off)
        self._covariance -= gain[:, None] * spread
        return expected, error

    def _doubt(self, length: int, off: float) -> None:
        """Count an outlier; after a change, times may be far off."""
        slower, faster = (self._slower[length] + 1, 0.0) if off > 0 else (0, self._faster + 1.0)
        changed = slower == _SLOWER or round(faster) == _FASTER
        self._slower[length], self._faster = (0, 0.0) if changed else (slower, faster)
        if changed:
            self._covariance += off**2 * self._spread(_CHANGED)
            self._covariance[self._place[length], self._place[length]] += (_CHANGED_OWN * off) ** 2
