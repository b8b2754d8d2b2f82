"""Counts draft phases by the path that they took, where a worker chooses it, for the front-end to show in /metrics.

Drafting happens in worker processes, and what vLLM's own statistics carry to the front-end has no room for more.  So
the front-end names a folder in shared memory by an environment variable, which its children inherit.  The worker that
counts for a data-parallel rank maps a file there into its memory, and to count is to add to an integer.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FOLDER_VARIABLE = "EAGLE_MRV2_COUNTERS"

PATHS = {
    "one_graph": "one graph held the whole phase",
    "fused": "one graph held all draft decodes",
    "by_steps": "each draft decode was the replay of a graph",
    "eager": "the draft decodes ran outside of graphs",
    "prefill_only": "there were no draft decodes: one token was drafted, or none",
}
"""How a draft phase ran."""

ONE_GRAPH, FUSED, BY_STEPS, EAGER, PREFILL_ONLY = range(len(PATHS))  # plain integers, as an enum's take twice as long

_LENGTH = len(PATHS)  # the slot behind those of the paths
_FORMAT = struct.Struct(f"={_LENGTH + 1}q")

_folder: tempfile.TemporaryDirectory[str] | None = None  # is removed when the process that made it ends


class Counts(NamedTuple):
    """What a data-parallel rank has counted."""

    phases: dict[str, int]  # by path
    draft_length: int  # draft tokens a request of the latest batch


class DraftCounter:
    """Counts the draft phases of a data-parallel rank.

    Args:
        slots: one for each path, and one for the draft length; None keeps the counts from everybody.
    """

    def __init__(self, slots: list[int] | memoryview[int] | None = None) -> None:
        self.shared = slots is not None
        """Whether a front-end can read the counts."""
        self._slots = [0] * (_LENGTH + 1) if slots is None else slots

    @classmethod
    def of_rank(cls, rank: int) -> DraftCounter:
        """That of a data-parallel rank, shared where a front-end of this machine has made the folder."""
        with contextlib.suppress(OSError), (_shared() / str(rank)).open("a+b") as file:
            file.truncate(_FORMAT.size)
            return cls(memoryview(mmap.mmap(file.fileno(), _FORMAT.size)).cast("q"))
        return cls()

    def clear(self) -> None:
        """Forget what was counted."""
        for slot in range(len(self._slots)):
            self._slots[slot] = 0

    def count(self, path: int, draft_length: int) -> None:
        """Count a draft phase; called every iteration."""
        self._slots[path] += 1
        self._slots[_LENGTH] = draft_length


def share_folder() -> None:
    """Make the folder, unless this process or one that it descends from has."""
    global _folder
    if _shared().is_dir():
        return
    memory = "/dev/shm"  # a write there waits for no disk
    with contextlib.suppress(OSError):  # workers then say that nobody reads what they count
        _folder = tempfile.TemporaryDirectory(prefix="eagle_mrv2-", dir=memory if os.access(memory, os.W_OK) else None)
        os.environ[FOLDER_VARIABLE] = _folder.name


def read_counts() -> Iterator[tuple[int, Counts]]:
    """The data-parallel ranks that count on this machine, with their counts."""
    for file in sorted(_shared().glob("*"), key=lambda file: int(file.name)):
        read = file.read_bytes()
        if len(read) == _FORMAT.size:  # or it is being made
            *phases, draft_length = _FORMAT.unpack(read)
            yield int(file.name), Counts(dict(zip(PATHS, phases, strict=True)), draft_length)


def _shared() -> Path:
    return Path(os.environ.get(FOLDER_VARIABLE) or os.devnull)
