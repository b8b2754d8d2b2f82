"""What an iteration takes, by number of draft tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

_CLIP = 0.3
"""By which share one iteration may differ from the expected time and still count in full."""
_VAGUE = 0.03
"""Share of its time that a number may stray before it has to be tried."""
_DRIFT = 0.003
"""By which share the times of two numbers drift apart in a second."""
_MANY = 256
"""Prefilled tokens with which the products bound an iteration, not the reading of weights."""
_SHARE = 0.03
"""Weight of one iteration in a running mean."""


class Durations:
    """Seconds of an iteration with about the same number of decodes and no prefill, by number of draft tokens.

    What changes over time, longer sequences or the clock of the GPU, changes all of them alike.  So every iteration
    with the number in force shifts the times of all numbers; a trial of another number sets that number's alone.
    """

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}
        """Expected seconds by number of draft tokens."""
        self.error: dict[int, float] = {}
        """Their standard errors, beside that of all of them alike."""
        self.tried: dict[int, float] = {}
        """When each number was last tried at this number of decodes."""

    def follow(self, length: int, seconds: float, share: float) -> None:
        """Shift the times of all numbers by a share of how far an iteration with the number in force was off."""
        expected = self.seconds[length]
        off = max(-_CLIP, min(_CLIP, seconds / expected - 1.0)) * expected
        self.seconds = {one: max(known + share * off, 1e-6) for one, known in self.seconds.items()}

    def guess(self, length: int, seconds: float, error: float) -> None:
        """Expect a time of a number that is to be tried, unless it is known better."""
        error = max(error, 2 * _VAGUE * seconds)
        if length not in self.tried and error < self.error.get(length, math.inf):
            self.seconds[length], self.error[length] = max(seconds, 1e-6), error

    def known(self, length: int) -> bool:
        """Whether the time of a number is known well enough to choose it."""
        return length in self.tried or self.error.get(length, math.inf) < _VAGUE * self.seconds.get(length, 0.0)

    def set(self, length: int, seconds: float, error: float, now: float) -> None:
        """Take over the result of a trial, by the errors of this and of what was known before."""
        if length in self.seconds:
            drifted = self.error[length] + _DRIFT * self.seconds[length] * (now - self.tried.get(length, now))
            weight = drifted**2 / (drifted**2 + error**2)
            seconds = self.seconds[length] + weight * (seconds - self.seconds[length])
            error = math.sqrt(weight) * error
        self.seconds[length], self.error[length], self.tried[length] = seconds, error, now


class Prefills:
    """What prefills add to iterations, learned from iterations that differ by their prefills.

    Up to a number of tokens, the knee, reading the weights bounds an iteration, and further tokens cost nothing; beyond
    it each token costs the same.
    """

    def __init__(self) -> None:
        self.per_token = 0.0
        """Seconds of a token beyond the knee."""
        self.knee = float(_MANY)
        self.per_made = 0.0
        """Tokens prefilled for each token made."""
        self._size = 1.0  # tokens of an iteration's prefills, where there are some
        self._means: dict[tuple[int, int], tuple[float, float]] = {}  # of tokens beyond the knee and seconds, by kind
        self._many: dict[tuple[int, int], tuple[float, float]] = {}  # of tokens and seconds, with many prefilled
        self._products = self._squares = 0.0

    def add(self, kind: tuple[int, int], decoded: int, prefilled: int, made: float, seconds: float) -> None:
        """Learn from an iteration.

        Args:
            kind: iterations of the same kind differ by their prefills only.
            decoded: tokens of decodes, drafts included.
            prefilled: other tokens.
            made: tokens that the iteration made.
            seconds: the iteration's.
        """
        self.per_made += 0.3 * _SHARE * (prefilled / max(made, 1.0) - self.per_made)
        if prefilled:
            self._size += _SHARE * (prefilled - self._size)
        tokens = max(float(decoded + prefilled), self.knee)
        off, off_seconds = _follow(self._means, kind, tokens, seconds)
        self._products += _SHARE * (off * off_seconds - self._products)
        self._squares += _SHARE * (off * off - self._squares)
        if self._squares > 1.0:
            self.per_token = max(self._products / self._squares, 0.0)
        if prefilled >= _MANY:
            _follow(self._many, kind, float(decoded + prefilled), seconds)
        elif not prefilled and kind in self._many and self.per_token > 0:
            mean_tokens, mean_seconds = self._many[kind]
            knee = mean_tokens - (mean_seconds - seconds) / self.per_token
            if knee > decoded:
                self.knee += _SHARE * (min(knee, 4.0 * _MANY) - self.knee)

    def seconds(self, decoded: int, further: float) -> float:
        """Return what further tokens add to an iteration that decodes so many; less than none is taken away."""
        return self.per_token * (max(decoded + further, self.knee) - max(decoded, self.knee))

    def expected(self, decoded: int, made: float) -> float:
        """Return what prefills add on average to iterations that decode and make so many tokens."""
        each = self.per_made * made
        share = min(each / self._size, 1.0)
        return share * self.seconds(decoded, each / share) if share else 0.0


def _follow(
    means: dict[tuple[int, int], tuple[float, float]], kind: tuple[int, int], tokens: float, seconds: float
) -> tuple[float, float]:
    """Move the running means of a kind; return how far an iteration was off them."""
    mean_tokens, mean_seconds = means.get(kind, (tokens, seconds))
    off_tokens, off_seconds = tokens - mean_tokens, seconds - mean_seconds
    means[kind] = mean_tokens + _SHARE * off_tokens, mean_seconds + _SHARE * off_seconds
    return off_tokens, off_seconds


def typical(samples: Sequence[float]) -> tuple[float, float]:
    """Return the mean of the middle half of some samples, and its standard error."""
    ordered = sorted(samples)
    cut = len(ordered) // 4
    middle = ordered[cut : len(ordered) - cut]
    mean = sum(middle) / len(middle)
    spread = math.sqrt(sum((one - mean) ** 2 for one in middle) / len(middle))
    # The middle half of a normal distribution has 0.38 of its spread, and its mean strays by 1.1 / sqrt(n) of that.
    return mean, max(1.1 * spread / 0.38 / math.sqrt(len(samples)), 1e-3 * mean)
