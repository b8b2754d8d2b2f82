"""Which row of a draft's forward pass is read alone.

Of a draft prefill of one request nobody reads other hidden states than the last token's, and behind a draft's last
attention tokens no longer meet.  From the query of that attention on, one row is enough then, and the others may be
anything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class _Pass:
    """The forward pass that is under way in this process."""

    row: torch.Tensor | None = None


@contextlib.contextmanager
def only_row(index: torch.Tensor) -> Iterator[None]:
    """Within, a draft runs of which nothing but this row is read.

    Not for a pass that is captured for any number of requests.

    Args:
        index: [1] int64, written before the draft's first layer.
    """
    _Pass.row = index
    try:
        yield
    finally:
        _Pass.row = None


def row_read() -> torch.Tensor | None:
    """The index of the only row that is read; None where all may be."""
    return _Pass.row
