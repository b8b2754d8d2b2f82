"""How many tokens an iteration is expected to make."""

from __future__ import annotations

import math
from collections.abc import Iterable

_PRIOR = 0.7
"""Share of drafts accepted at a position of which nothing is known."""
_MEMORY_S = 1.5
"""For as long as this, drafts of a position are remembered at the rate at which they come."""
_FEWEST = 200
"""Drafts of a position that are remembered, however old they are."""
_EXTREME = 0.01
"""A smaller or larger share than this counts as this much where positions follow one another."""


class Acceptance:
    """The share of drafts that are accepted at each position where the drafts before them are, with forgetting.

    Another text is easier or harder to draft at every position.  So a position follows the one before it, by its
    log-odds, as far as it has fewer outcomes of its own: in full where nobody drafts it.

    Args:
        most: the largest number of draft tokens.
    """

    def __init__(self, most: int) -> None:
        self._verified = [1.0] * most
        self._accepted = [_PRIOR] * most

    def add(self, outcomes: Iterable[tuple[tuple[int, int], int]], seconds: float) -> bool:
        """Count the outcomes of an iteration.

        Args:
            outcomes: ((drafts of a request, how many of them were accepted), number of such requests).
            seconds: since the iteration before.

        Returns:
            Whether there were drafts.
        """
        verified, accepted = [0] * len(self._verified), [0] * len(self._verified)
        drafted = 0
        for (drafts, kept), requests in outcomes:
            drafted = max(drafted, drafts)
            for position in range(min(drafts, kept + 1)):
                verified[position] += requests
                accepted[position] += requests if position < kept else 0
        if not drafted:
            return False
        shift = 0.0  # of the log-odds of a position
        for position, new in enumerate(verified):
            before = self._log_odds(position)
            if shift:
                share = 1.0 / (1.0 + math.exp(-before - shift))
                self._accepted[position] = share * self._verified[position]
            if new:
                most = max(new * _MEMORY_S / max(seconds, 1e-6), _FEWEST)
                keep = min(max(most - new, 0.0) / self._verified[position], 1.0)
                self._verified[position] = self._verified[position] * keep + new
                self._accepted[position] = self._accepted[position] * keep + accepted[position]
            shift = self._log_odds(position) - before
            if position + 1 < drafted:
                shift *= 1.0 - self._share(position)  # the next position has outcomes where this one's are accepted
        return True

    def _share(self, position: int) -> float:
        return self._accepted[position] / self._verified[position]

    def _log_odds(self, position: int) -> float:
        share = min(max(self._share(position), _EXTREME), 1.0 - _EXTREME)
        return math.log(share / (1.0 - share))

    def tokens(self, length: int) -> float:
        """Return the tokens that an iteration is expected to make for each request with so many drafts."""
        tokens = reached = 1.0
        for position in range(length):
            reached *= self._share(position)
            tokens += reached
        return tokens
