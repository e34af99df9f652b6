"""Python's collector of reference cycles, set so that it does not stop a node for long."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tierkv.tasks import background

# New objects until the youngest generation is looked through, collections of that one until the
# middle one is, and of the middle one until all is. A middle one of 15,000 objects takes 5 to 8 ms;
# with thresholds of 10,000 and 5 it took 25 to 40. All takes 0.5 s where 10,000 requests are open
# (2-core x86-64 VM, 2026-11-21), so it is rare: what it alone can free are cycles that lived
# through two collections.
_THRESHOLDS = (5_000, 2, 8_000)
# New objects are counted less those that went. Where each request takes the place of one before,
# that comes to nothing while the youngest generation grows: 200,000 objects of 10,000 connections,
# 0.17 s to look through. So it is looked through by the clock, too.
_YOUNG_S = 0.05
_MIDDLE_TICKS = 5


@asynccontextmanager
async def short_collections() -> AsyncIterator[None]:
    """What there is when this begins is looked through no more, what is new often, and the rest as
    a whole seldom."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    try:
        async with background({"tierkv-garbage": _collect()}):
            yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


async def _collect() -> None:
    while True:
        for generation in (0,) * (_MIDDLE_TICKS - 1) + (1,):
            await asyncio.sleep(_YOUNG_S)
            gc.collect(generation)
