"""Tracks the only row of a draft's forward pass that is read.

In a draft prefill of one request only the last token's hidden state is read.  After the last attention layer tokens no
longer interact, so only that row is computed, from the query of that layer on; the other rows are undefined.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class _Pass:
    """State of the forward pass that is running in this process."""

    row: torch.Tensor | None = None


@contextlib.contextmanager
def only_row(index: torch.Tensor) -> Iterator[None]:
    """Declare that only this row is read of the draft's forward pass within the context.

    Not for a pass that is captured for any number of requests.

    Args:
        index: [1] int64, written before the draft's first layer runs.
    """
    _Pass.row = index
    try:
        yield
    finally:
        _Pass.row = None


def row_read() -> torch.Tensor | None:
    """Return the index of the only row that is read; None if any row may be read."""
    return _Pass.row
