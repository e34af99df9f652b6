"""Python's collector of reference cycles, set so that it does not stop a node for long."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# New objects until the youngest generation is looked through, collections of that one until the
# middle one is, and of the middle one until all is. The first two take 1 and 10 ms. The last takes
# 0.5 s where 10,000 requests are open (2-core x86-64 VM, 2026-11-21), so it is rare: what it alone
# can free are cycles that lived through two collections.
_THRESHOLDS = (10_000, 5, 2_000)


@contextmanager
def rare_full_collections() -> Iterator[None]:
    """What there is when this begins is looked through no more, and the rest as a whole seldom."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
