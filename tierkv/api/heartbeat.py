"""How late the event loop is: a tick that should come often, and when it last did."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from tierkv.tasks import background

TICK_S = 0.05
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

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with background({"tierkv-heartbeat": self._beat()}):
            yield

    @property
    def age_s(self) -> float | None:
        """Since the last beat; None before the first."""
        return None if self._last is None else asyncio.get_running_loop().time() - self._last

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
            self.on_beat(late_s, min(late_s, time.thread_time() - worked_s))
