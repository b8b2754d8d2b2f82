"""The rows of a draft prefill that are read afterwards: the last token of each request.

In the only attention layer of a draft, the other rows serve only as keys and values: queries, attention and the layers
that follow are computed for the rows that are read, and the other rows of their output are undefined.  Where nothing is
drafted no row is read: the pass only writes keys and values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_ALL = -1


class RowsRead:
    """Tells the layers of a draft which rows of the current forward pass are read.

    The layers get both tensors as arguments, so a compiled model decides at every call.

    Args:
        index: [max_num_reqs] int64, whose first elements are written before the draft's first layer runs.
    """

    def __init__(self, index: torch.Tensor) -> None:
        self.index = index
        self.count = torch.full((1,), _ALL, dtype=torch.int32)
        """[1] int32 on the CPU: how many elements of ``index`` are meant; -1 means that all rows are read."""

    @contextlib.contextmanager
    def only(self, num_reqs: int) -> Iterator[None]:
        """Declare that of passes within the context only the rows of so many requests are read.

        Not for a pass that is captured for any number of requests.
        """
        self.count.fill_(num_reqs)
        try:
            yield
        finally:
            self.count.fill_(_ALL)

    def now(self) -> torch.Tensor | None:
        """Return the rows that are read; None if any may be."""
        return rows_read(self.index, self.count)


def rows_read(index: torch.Tensor | None, count: torch.Tensor | None) -> torch.Tensor | None:
    """Return the rows that are read, [count] int64, from the tensors of a `RowsRead`; None if any may be."""
    if index is None or count is None:
        return None
    return None if (num_reqs := int(count)) == _ALL else index[:num_reqs]
