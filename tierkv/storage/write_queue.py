"""Writes that wait for a store: bounded in bytes, the least valuable dropped first."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count

from tierkv.storage.protocol import PutItem, PutOutcome, PutStatus
from tierkv.tasks import background, outlast

# One write at the store: enough for its connections, few enough to end soon.
_BATCH_BYTES = 16 << 20
_BATCH_ITEMS = 64


# Ranks of writes that wait no more are cleared away when they are most of all.
_STALE_RANKS = 64


@dataclass(eq=False, slots=True)
class _Write:
    """One queued write. serial: order of arrival; the lowest is the oldest."""

    serial: int
    item: PutItem
    outcome: asyncio.Future[PutOutcome]

    @property
    def rank(self) -> tuple[bool, float, int]:
        """The lowest is dropped first: tickets (replacing) are small and somebody waits for them;
        then worth; then the newest."""
        return (not self.item.keep_existing, self.item.worth, -self.serial)


class WriteQueue:
    """`num_writers` tasks write what callers have queued, oldest first, in batches.

    A caller's buffers are in use until its outcomes are there.
    """

    def __init__(
        self,
        write: Callable[[Sequence[PutItem]], Awaitable[Sequence[PutOutcome]]],
        *,
        num_writers: int,
        max_bytes: int,
        owner: str,
    ) -> None:
        self._write = write
        self._num_writers = num_writers
        self._max_bytes = max_bytes
        self._owner = owner
        self._waiting: OrderedDict[int, _Write] = OrderedDict()  # by serial
        self._ranks: list[tuple[bool, float, int]] = []  # a heap; also of some that wait no more
        self._serials = count()
        self._came = asyncio.Event()
        self._is_open = False
        self.waiting_bytes = 0
        self.num_dropped = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Leaving drops what waits, and ends what is being written as the store's `put` does."""
        self._came = asyncio.Event()  # of this loop
        writers = {f"tierkv-write-{i}": self._keep_writing() for i in range(self._num_writers)}
        async with background(writers):
            self._is_open = True
            try:
                yield
            finally:
                self._is_open = False
                self.give_up(f"{self._owner} is closed")

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        """As `Store.put`. A cancel withdraws what is not being written yet, waits for the rest."""
        if not self._is_open:
            return [PutOutcome(PutStatus.FAILED, f"{self._owner} is closed")] * len(items)
        loop = asyncio.get_running_loop()
        writes = [_Write(next(self._serials), item, loop.create_future()) for item in items]
        for write in writes:
            self._waiting[write.serial] = write
            self.waiting_bytes += write.item.num_bytes
            heappush(self._ranks, write.rank)
        self._drop_the_least()
        self._came.set()

        def withdraw() -> None:
            for write in writes:
                if write.serial in self._waiting:
                    self._settle(write.serial, PutOutcome(PutStatus.FAILED, "nobody waits for it"))

        await outlast({write.outcome for write in writes}, on_cancel=withdraw)  # type: ignore[misc]
        return [write.outcome.result() for write in writes]

    def give_up(self, reason: str) -> None:
        """Fail all that waits, such as behind writes that are stuck."""
        for serial in list(self._waiting):
            self._settle(serial, PutOutcome(PutStatus.FAILED, reason))

    def _drop_the_least(self) -> None:
        if len(self._ranks) > 2 * len(self._waiting) + _STALE_RANKS:
            self._ranks = [write.rank for write in self._waiting.values()]
            heapify(self._ranks)
        outcome = PutOutcome(
            PutStatus.FULL, f"dropped: more is written to {self._owner} than it takes"
        )
        while self.waiting_bytes > self._max_bytes:
            *_, newness = heappop(self._ranks)
            if -newness in self._waiting:
                self.num_dropped += 1
                self._settle(-newness, outcome)

    def _settle(self, serial: int, outcome: PutOutcome) -> None:
        write = self._waiting.pop(serial)
        self.waiting_bytes -= write.item.num_bytes
        write.outcome.set_result(outcome)

    async def _keep_writing(self) -> None:
        while True:
            while not self._waiting:
                self._came.clear()
                await self._came.wait()
            batch = self._take()
            outcomes: Sequence[PutOutcome] = [
                PutOutcome(PutStatus.FAILED, f"{self._owner} is closed")
            ] * len(batch)
            try:
                outcomes = await self._write([write.item for write in batch])
            finally:
                for write, outcome in zip(batch, outcomes, strict=True):
                    write.outcome.set_result(outcome)

    def _take(self) -> list[_Write]:
        batch: list[_Write] = []
        num_bytes = 0
        while self._waiting and len(batch) < _BATCH_ITEMS:
            serial, write = next(iter(self._waiting.items()))
            if batch and num_bytes + write.item.num_bytes > _BATCH_BYTES:
                break
            del self._waiting[serial]
            self.waiting_bytes -= write.item.num_bytes
            num_bytes += write.item.num_bytes
            batch.append(write)
        return batch
