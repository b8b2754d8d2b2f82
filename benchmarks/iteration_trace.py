"""Writes the iterations that an engine chooses its number of draft tokens by, for benchmarks/draft_lengths.py --trace.

A line has what ``DraftLength.learn`` is given, and its clock: microseconds since the tokens of the iteration before
came, decodes, drafts that each of them verified, prefilled tokens, drafts that the latest batch was given, the number
that is held (-1: none), and how many requests had so many drafts accepted, as ``2:5 3:11``.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Collection
from typing import TextIO

from vllm_eagle_mrv2.draft_length.chooser import DraftLength
from vllm_eagle_mrv2.telemetry import counters

VARIABLE = "EAGLE_MRV2_TRACE"
"""The file, for the engine core's process."""
COLUMNS = "microseconds,decodes,length,prefilled,chosen,held,accepted"


@functools.cache
def _file() -> TextIO:
    """Opened by the process that has iterations to write."""
    file = open(os.environ[VARIABLE], "w", buffering=1)  # noqa: SIM115
    file.write(f"{COLUMNS}\n")
    return file


@functools.cache
def install() -> None:
    """Have this process write its iterations from now on, if a file is named; once, also where a fork asks again."""
    if VARIABLE not in os.environ:
        return
    original, last = DraftLength.learn, [0.0]

    def learn(
        self: DraftLength, decodes: int, length: int, prefilled: int, outcomes: Collection[tuple[tuple[int, int], int]]
    ) -> None:
        now = self._clock()
        accepted = " ".join(f"{kept}:{requests}" for (_, kept), requests in outcomes)
        held = self._cells[counters.HELD] - 1
        _file().write(f"{1e6 * (now - last[0]):.0f},{decodes},{length},{prefilled},{self.length},{held},{accepted}\n")
        last[0] = now
        original(self, decodes, length, prefilled, outcomes)

    DraftLength.learn = learn  # type: ignore[method-assign]
