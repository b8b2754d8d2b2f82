"""What the engine tests rely on."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from support import small_heap


def test_what_is_dropped_while_the_heap_is_small_is_collected_afterwards() -> None:
    """As the engine before, with its memory on the GPU."""

    class Engine:
        itself: Any = None

    engine = Engine()
    engine.itself = engine
    gone = weakref.ref(engine)
    with small_heap():
        del engine
        gc.collect()
        assert gone() is not None
    gc.collect()
    assert gone() is None
