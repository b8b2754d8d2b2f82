"""What an iteration takes, by number of draft tokens, and what prefills add."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]

_JITTER, _LEAST_JITTER, _JITTER_FOLLOWS = (0.03**2, 0.3**2), 1e-6, 0.05
"""Variance of iterations as a share of their time squared: before any is known, at least, and an iteration's weight."""
_OUTLIER, _STREAK = 3.0, 8
"""Standard deviations beyond which an iteration counts less; so many of a number on one side in a row are a change."""
_LEFT = 0.1
"""What is left of an estimated time at least: none becomes negative."""
_WORKLOAD_FOLLOWS = 0.01
"""Weight of an iteration in what is known of prefills."""
_SHARE_AT_MOST = 0.98
"""Share of iterations with prefills that still tells how many more there would be."""


class Prefills(NamedTuple):
    """What an iteration prefills; of the average of some iterations, shares of them and mean tokens."""

    any: float = 0.0
    large: float = 0.0  # with them it has more tokens than the CUDA graphs
    tokens: float = 0.0


class Iteration(NamedTuple):
    """What an iteration did, and how long it took."""

    decodes: int  # requests
    length: int  # drafts that each of them verified
    prefills: Prefills
    seconds: float


class Shares(NamedTuple):
    """How far times may be off, as shares of the time of an iteration."""

    alike: float  # all plain times
    drafts: float  # the one with the most drafts, and those with fewer by as much less
    own: float  # each plain time by itself
    prefills: float  # what prefills add, as a share of `_PREFILLS`


_DRAFT = 0.03
"""Share of an iteration that a draft takes before any has been timed."""
_MAY_TAKE = Prefills(0.5, 0.5, 1 / 2000)
_PREFILLS = np.array([_MAY_TAKE.any, *_MAY_TAKE, *_MAY_TAKE])
"""Shares of an iteration that prefills may take: of the iteration before, its own, and of the one after it."""
_AT_FIRST = Shares(1.0, 0.5, 0.1, 1.0)
"""After the first iteration."""
_NEXT_GROUP = Shares(0.1, 0.1, 0.03, 0.1)
"""In the next group of decodes, as far as the times differ from this one's."""
_A_SECOND = Shares(0.03, 0.02, 0.02, 0.02)
"""A second later."""
_CHANGED, _CHANGED_OWN = Shares(0.6, 0.4, 0.0, 0.0), 0.4
"""After a change, of how far an iteration was off; and its own number's time."""
_NONE = Prefills()
_TOKENS = [-4, -1]
"""Places of the times of a prefilled token: of the iteration itself and of the one after it."""


class Workload:
    """How many prefills come with the tokens that are made: they end requests, and others follow."""

    def __init__(self) -> None:
        self._made, self._prefills = 0.0, Prefills()  # means of an iteration

    def add(self, made: float, prefills: Prefills) -> None:
        """Learn from an iteration that makes so many tokens."""
        weight = _WORKLOAD_FOLLOWS if self._made else 1.0
        self._made += weight * (made - self._made)
        self._prefills = Prefills(
            *(mean + weight * (new - mean) for mean, new in zip(self._prefills, prefills, strict=True))
        )

    def prefills(self, made: float) -> Prefills:
        """Return what is expected of iterations that make so many tokens."""
        more, known = made / self._made if self._made else 0.0, self._prefills
        some, large = (1.0 - (1.0 - min(share, _SHARE_AT_MOST)) ** more for share in known[:2])
        return Prefills(some, large, more * known.tokens)


class Times:
    """Seconds of iterations with about the same number of decodes.

    An iteration takes the plain time of its number of draft tokens.  Prefills add to that: some time at all, more where
    no CUDA graph is large enough, and some for each token.  With asynchronous scheduling they do so not only in their
    own iteration: the one before waits for their launch, and the one after makes up for a part of that.  A Kalman
    filter estimates all of these times together, with their errors: what shifts the time of one number shifts that of
    the others as far as they move alike.
    """

    def __init__(self, lengths: Sequence[int], mean: Vector, covariance: Vector) -> None:
        self._place = {length: place for place, length in enumerate(lengths)}
        self._mean, self._covariance = mean, covariance  # of the plain times by length, and of prefills
        self._numbers = len(lengths)
        plain, drafts, prefills = np.zeros((3, len(mean)))
        plain[: self._numbers], drafts[: self._numbers] = 1.0, np.array(lengths) / lengths[-1]
        prefills[self._numbers :] = _PREFILLS
        self._modes = np.array([np.outer(plain, plain), np.outer(drafts, drafts), np.diag(plain), np.diag(prefills**2)])
        self._drift = self._spread(_A_SECOND)
        self._jitter = list(_JITTER)  # of iterations without and with prefills
        self._streaks = dict.fromkeys(lengths, 0)  # outliers in a row; negative where they took less than expected

    @classmethod
    def guess(cls, lengths: Sequence[int], iteration: Iteration) -> Times:
        """Expect times from the first iteration."""
        plain = np.maximum(1.0 + _DRAFT * (np.array(lengths) - iteration.length), _LEFT)
        mean = np.concatenate([plain, _PREFILLS / len(_PREFILLS)])
        times = cls(lengths, iteration.seconds * mean, np.zeros((len(mean), len(mean))))
        times._covariance = iteration.seconds**2 * times._spread(_AT_FIRST)
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

    def parts(self, length: int, before: Prefills = _NONE, own: Prefills = _NONE, after: Prefills = _NONE) -> Vector:
        """Return what an iteration consists of: how often each of the estimated times is in it.

        Args:
            length: its number of drafts.
            before: prefills of the iteration before it.
            own: its own.
            after: those of the iteration after it.
        """
        parts = np.zeros(len(self._mean))
        parts[self._place[length]] = 1.0
        parts[self._numbers :] = before.any, *own, *after
        return parts

    def seconds(self, parts: Vector) -> Any:
        """Return how long iterations of these parts take, one iteration a row."""
        return parts @ self._mean

    def error(self, parts: Vector) -> Any:
        """Return the standard errors of `seconds`; of a difference of parts, that of the difference."""
        return np.sqrt(np.maximum(((parts @ self._covariance) * parts).sum(-1), 0.0))

    def learn(self, iteration: Iteration, before: Prefills, after: Prefills) -> tuple[float, float]:
        """Learn from an iteration.

        Args:
            iteration: the iteration.
            before: prefills of the iteration before it.
            after: those of the iteration after it.

        Returns:
            The seconds that were expected of it, and their standard error.
        """
        length, seconds = iteration.length, iteration.seconds
        parts = self.parts(length, before, iteration.prefills, after)
        self._covariance += self.plain[0] ** 2 * seconds * self._drift
        expected, error = float(self.seconds(parts)), float(self.error(parts))
        off, unsure, scale = seconds - expected, error**2, max(expected, self.plain[self._place[length]]) ** 2
        kind = int(before.any or iteration.prefills.any or after.any)
        noise = self._jitter[kind] * scale
        most = _OUTLIER**2 * (unsure + noise)
        found = max((min(off**2, most) - unsure) / scale, _LEAST_JITTER)
        self._jitter[kind] += _JITTER_FOLLOWS * noise / (unsure + noise) * (found - self._jitter[kind])
        if off**2 > most:
            noise = off**2 / _OUTLIER**2
            self._doubt(length, off)
        else:
            self._streaks[length] = 0
        spread = self._covariance @ parts
        gain = spread / (float(parts @ spread) + noise)
        self._move(gain * off)
        self._covariance -= gain[:, None] * spread
        return expected, error

    def _doubt(self, length: int, off: float) -> None:
        """Count an outlier; so many in a row are a change, after which times may be far off."""
        streak, side = self._streaks[length], 1 if off > 0 else -1
        self._streaks[length] = side + (streak if streak * side > 0 else 0)
        if abs(self._streaks[length]) == _STREAK:
            self._streaks[length] = 0
            self._covariance += off**2 * self._spread(_CHANGED)
            self._covariance[self._place[length], self._place[length]] += (_CHANGED_OWN * off) ** 2
