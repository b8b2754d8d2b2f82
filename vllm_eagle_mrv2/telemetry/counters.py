"""Numbers that the processes of an engine share: what workers and scheduler count, for the front-end to show.

Drafting happens in worker processes, and the statistics that vLLM sends to the front-end cannot be extended.  The
front-end therefore names a folder in shared memory in an environment variable, which its children inherit.  The worker
that counts for a data-parallel rank maps a file in this folder, and counting adds to an integer in it; so does the
rank's scheduler, where it chooses the number of draft tokens.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import tempfile
from collections.abc import Iterator
from multiprocessing.util import Finalize
from pathlib import Path
from typing import NamedTuple

from vllm_eagle_mrv2.config.draft_lengths import LENGTHS

FOLDER_VARIABLE = "EAGLE_MRV2_COUNTERS"

PATHS = {
    "one_graph": "one graph held the whole phase",
    "fused": "one graph held all draft decodes",
    "by_steps": "each draft decode was the replay of a graph",
    "eager": "the draft decodes ran outside of graphs",
    "prefill_only": "there were no draft decodes: one token was drafted, or none",
}
"""Path of a draft phase -> its description."""

ONE_GRAPH, FUSED, BY_STEPS, EAGER, PREFILL_ONLY = range(len(PATHS))  # plain integers: an enum takes twice as long

DRAFT_LENGTH, CHANGES, MICROSECONDS, EXPECTED_MICROSECONDS, TOKENS, EXPECTED_MILLITOKENS, HELD = range(
    len(PATHS), len(PATHS) + 7
)
"""Cells after those of the paths.  HELD is 0, or 1 + the number of draft tokens that `hold` asked for."""
BY_LENGTH = slice(HELD + 1, HELD + 1 + len(LENGTHS) + 1)
"""Cells for the microseconds of iterations by number of drafts, for each number to choose from."""

_FORMAT = struct.Struct(f"={BY_LENGTH.stop}q")

_folder: tempfile.TemporaryDirectory[str] | None = None  # removed when the process that made it ends


class Counts(NamedTuple):
    """The counts of one data-parallel rank."""

    phases: dict[str, int]  # by path
    draft_length: int  # draft tokens per request in the latest batch
    changes: int  # of the number in force, where it is chosen
    seconds: float  # of iterations with a chosen number
    expected_seconds: float
    tokens: int  # that these iterations made
    expected_tokens: float
    seconds_by_length: tuple[float, ...]  # of iterations, by place among the numbers to choose from


class DraftCounter:
    """What a data-parallel rank counts.

    Args:
        cells: the numbers to count in; with None the counts are private to the process.

    Attributes:
        cells: the number of phases by path, and at `DRAFT_LENGTH` the draft tokens per request in the latest batch;
            those after it belong to the scheduler.
    """

    def __init__(self, cells: list[int] | memoryview[int] | None = None) -> None:
        self.shared = cells is not None
        """Whether a front-end can read the counts."""
        self.cells = [0] * BY_LENGTH.stop if cells is None else cells

    @classmethod
    def of_rank(cls, rank: int) -> DraftCounter:
        """The counter of a data-parallel rank, shared if a front-end on this machine has made the folder."""
        with contextlib.suppress(OSError), (_shared() / str(rank)).open("a+b") as file:
            os.posix_fallocate(file.fileno(), 0, _FORMAT.size)  # a write to a file with holes could find no room
            return cls(memoryview(mmap.mmap(file.fileno(), _FORMAT.size)).cast("q"))
        return cls()

    def clear(self) -> None:
        """Reset all counts to zero."""
        for cell in range(len(self.cells)):
            self.cells[cell] = 0


def share_folder() -> None:
    """Make the folder, unless this process or one of its ancestors has made it."""
    global _folder
    if _shared().is_dir():
        return
    memory = "/dev/shm"  # writes there do not wait for a disk
    with contextlib.suppress(OSError):  # workers then log that nobody reads their counts
        _folder = tempfile.TemporaryDirectory(prefix="eagle_mrv2-", dir=memory if os.access(memory, os.W_OK) else None)
        os.environ[FOLDER_VARIABLE] = _folder.name
        Finalize(None, _folder.cleanup, exitpriority=0)  # a child that was forked ends without `atexit`


def read_counts() -> Iterator[tuple[int, Counts]]:
    """(rank, counts) of each data-parallel rank that counts on this machine."""
    for file in sorted(_shared().glob("*"), key=lambda file: int(file.name)):
        read = file.read_bytes()
        if len(read) == _FORMAT.size:  # otherwise it is being created
            cells = _FORMAT.unpack(read)
            counts = Counts(
                phases=dict(zip(PATHS, cells, strict=False)),
                draft_length=cells[DRAFT_LENGTH],
                changes=cells[CHANGES],
                seconds=cells[MICROSECONDS] / 1e6,
                expected_seconds=cells[EXPECTED_MICROSECONDS] / 1e6,
                tokens=cells[TOKENS],
                expected_tokens=cells[EXPECTED_MILLITOKENS] / 1e3,
                seconds_by_length=tuple(microseconds / 1e6 for microseconds in cells[BY_LENGTH]),
            )
            yield int(file.name), counts


def hold(length: int | None) -> None:
    """Have all engines of this front-end draft so many tokens (``draft_length: auto``), or choose again with None."""
    for rank, _ in read_counts():
        DraftCounter.of_rank(rank).cells[HELD] = 0 if length is None else 1 + length


def _shared() -> Path:
    return Path(os.environ.get(FOLDER_VARIABLE) or os.devnull)
