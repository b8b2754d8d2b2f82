"""Hidden states that the next draft step starts from, stored by the kernel that prepares its other inputs."""

from __future__ import annotations

import triton
import triton.language as tl

_MAX_BLOCK = 4096


def feedback_block(hidden_size: int) -> int:
    """Return how many columns a kernel loads at once, before it stores anything: all, unless they are many."""
    return min(_MAX_BLOCK, int(triton.next_power_of_2(hidden_size)))


@triton.jit
def store_feedback(out_ptr, feedback_ptr, values, hidden_size, stored, BLOCK: tl.constexpr):
    """Store a row of hidden states whose first columns are loaded as ``values``, and copy the others, if ``stored``."""
    column = tl.arange(0, BLOCK)
    tl.store(out_ptr + column, values, mask=stored & (column < hidden_size))
    for start in range(BLOCK, hidden_size, BLOCK):
        inside = stored & (start + column < hidden_size)
        tl.store(out_ptr + start + column, tl.load(feedback_ptr + start + column, mask=inside), mask=inside)
