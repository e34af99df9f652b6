"""The cache's events for HTTP clients: one bounded ring that all of them read at their own pace."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice

from tierkv.sched.events import CacheEvent
from tierkv.service import Service
from tierkv.tasks import task_group

RING_EVENTS = 8192
KEEP_S = 60.0  # seconds without a reader after which events are no longer kept


@dataclass(slots=True)
class Reader:
    """The position of one client in the feed.

    Attributes:
        epoch: The run of the feed that the client reads.
        number: Number of the last event that the client has read.
        num_lost: Number of events that the client has missed; 1 if the number is unknown, since the
            client returned too late.
    """

    epoch: int
    number: int
    num_lost: int = 0


class EventFeed:
    """The events of the cache, collected while there is a reader and for KEEP_S seconds after.

    Use it inside `running()`; `close` ends every reading.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._ring: deque[CacheEvent] = deque(maxlen=RING_EVENTS)
        self._last = 0  # number of the ring's newest event; numbers have no gaps
        self._epoch = 0
        self._num_readers = 0
        self._is_closed = False
        self._changed = asyncio.Event()
        self._listening: asyncio.Task[None] | None = None
        self._ending: asyncio.TimerHandle | None = None
        self._tasks: asyncio.TaskGroup | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with task_group() as self._tasks:
            try:
                yield
            finally:
                self.close()
                self._stop()

    def close(self) -> None:
        """End every reading, after what has happened until now."""
        self._is_closed = True
        self._wake()

    @asynccontextmanager
    async def reading(self, epoch: int | None, number: int) -> AsyncIterator[Reader]:
        """Yield a reader of the events after `number` of the run `epoch`, or from now on."""
        self._listen()
        reader = Reader(self._epoch, self._last)
        if epoch == self._epoch and number <= self._last:
            reader.number = number
        elif epoch is not None:
            reader.num_lost = 1
        self._num_readers += 1
        try:
            yield reader
        finally:
            self._num_readers -= 1
            if not self._num_readers and not self._is_closed:
                loop = asyncio.get_running_loop()
                self._ending = loop.call_later(KEEP_S, self._stop)

    async def next(self, reader: Reader, *, most: int, timeout_s: float) -> list[CacheEvent] | None:
        """Return up to `most` events, in order.

        A reader that fell behind the ring continues with its oldest event, and the loss is counted.

        Returns:
            The events; empty after `timeout_s` seconds without an event, None at the end.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while reader.number >= self._last and not self._is_closed:
                    await self._changed.wait()
        except TimeoutError:
            return []
        if reader.number >= self._last or not self._ring:
            return None
        oldest = self._last - len(self._ring) + 1
        if reader.number < oldest - 1:
            reader.num_lost += oldest - 1 - reader.number
            reader.number = oldest - 1
        first = reader.number + 1 - oldest
        events = list(islice(self._ring, first, first + most))
        reader.number += len(events)
        return events

    def _listen(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
        if self._listening is None and not self._is_closed:
            assert self._tasks is not None, "the feed is running"
            self._epoch = secrets.randbits(48)  # a restarted node does not continue the numbers
            self._listening = self._tasks.create_task(self._run(), name="tierkv-events")

    def _stop(self) -> None:
        if self._listening is not None:
            self._listening.cancel()
            self._listening = None
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
        self._ring.clear()

    async def _run(self) -> None:
        with self._service.tiers.events.subscribe(RING_EVENTS) as subscription:
            num_dropped = 0
            async for event in subscription:
                if subscription.num_dropped > num_dropped:
                    self._ring.clear()  # a gap: a reader that is behind it has lost events
                    self._last += subscription.num_dropped - num_dropped
                    num_dropped = subscription.num_dropped
                self._ring.append(event)
                self._last += 1
                self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
