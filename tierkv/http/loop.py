"""The event loop's health: how late it is, short garbage collections, and long lists in turns."""

from __future__ import annotations

import asyncio
import gc
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import TypeVar

from tierkv.tasks import background

T = TypeVar("T")

TICK_S = 0.05
_SHORT_S = 0.01  # any loop is late by so much
_ITEMS = 64  # each of which takes some 20 us
_TICKS = 1200  # one minute


class Heartbeat:
    """Beats inside `running()`.

    on_beat: told by how many seconds each beat was late, and in how many of these, at most, the
    loop's thread was at work; in the rest it was not given a core, or waited in a system call.
    """

    def __init__(self, on_beat: Callable[[float, float], None] = lambda *_: None) -> None:
        self.on_beat = on_beat
        self._last: float | None = None
        self._late: deque[float] = deque(maxlen=_TICKS)
        self._late_s = 0.0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with background({"tierkv-heartbeat": self._beat()}):
            yield

    @property
    def age_s(self) -> float | None:
        """Since the last beat; None before the first."""
        return None if self._last is None else asyncio.get_running_loop().time() - self._last

    @property
    def late_s(self) -> float:
        """By how much beats came late in all, with one that is late right now; short delays apart.
        The difference of two readings is how late the loop was between them."""
        now_late_s = 0.0 if self.age_s is None else self.age_s - TICK_S
        return self._late_s + (now_late_s if now_late_s > _SHORT_S else 0.0)

    @property
    def worst_lag_s(self) -> float:
        """The longest that a beat of the last minute came late."""
        return max(self._late, default=0.0)

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._last, worked_s = loop.time(), time.thread_time()
            await asyncio.sleep(TICK_S)
            late_s = max(loop.time() - self._last - TICK_S, 0.0)
            self._late.append(late_s)
            self._late_s += late_s if late_s > _SHORT_S else 0.0
            self.on_beat(late_s, min(late_s, time.thread_time() - worked_s))


@asynccontextmanager
async def patient_timeout(beat: Heartbeat, seconds: float) -> AsyncIterator[asyncio.Timeout]:
    """As asyncio.timeout, plus the time by which this process' own loop was late meanwhile: nobody
    else is blamed for that. `beat` must be running."""
    loop = asyncio.get_running_loop()
    seen_s = beat.late_s
    timer: asyncio.TimerHandle
    async with asyncio.timeout(None) as scope:

        def look() -> None:
            nonlocal seen_s, timer
            late_s, seen_s = beat.late_s - seen_s, beat.late_s
            if late_s > 0:
                timer = loop.call_later(late_s, look)
            elif not scope.expired():
                scope.reschedule(loop.time())

        timer = loop.call_later(seconds, look)
        try:
            yield scope
        finally:
            timer.cancel()


async def in_turns(items: Iterable[T]) -> AsyncIterator[T]:
    """`items`, so many in each turn of the event loop: for lists that callers may make long."""
    for number, item in enumerate(items, 1):
        yield item
        if number % _ITEMS == 0:
            await asyncio.sleep(0)


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
