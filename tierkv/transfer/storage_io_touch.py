"""Lets stored blocks that are used live on: noted now, told to the store later, and rarely."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from tierkv.errors import StoreUnavailableError
from tierkv.storage.protocol import Store
from tierkv.tasks import background

log = logging.getLogger("tierkv.storage")

_BATCH_NAMES = 512
_MAX_NAMES = 65_536
_PAUSE_S = 0.2  # between batches: at most 2,560 names a second
_DEADLINE_S = 5.0


class Toucher:
    """ttl_s: what a block in use gets. interval_s: how long a block that was touched, or written,
    is not touched again."""

    def __init__(self, store: Store, *, ttl_s: float, interval_s: float) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self._interval_s = interval_s
        self._seen: OrderedDict[str, float] = OrderedDict()  # name -> when it was noted last
        self._due: OrderedDict[str, None] = OrderedDict()
        self._came = asyncio.Event()
        self.num_touched = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Leaving forgets what is still to be told: it is at most a block that ends in time."""
        async with background({"tierkv-touch": self._keep_touching()}):
            yield

    def wrote(self, names: Iterable[str]) -> None:
        """These have just been given their whole TTL."""
        now = asyncio.get_running_loop().time()
        for name in names:
            self._see(name, now)

    def used(self, names: Iterable[str]) -> None:
        """These were found in the store. What is too much to remember is not touched."""
        now = asyncio.get_running_loop().time()
        for name in names:
            if now - self._seen.get(name, -self._interval_s) < self._interval_s:
                continue
            if len(self._due) >= _MAX_NAMES:
                return
            self._see(name, now)
            self._due[name] = None
            self._came.set()

    def _see(self, name: str, now: float) -> None:
        self._seen[name] = now
        self._seen.move_to_end(name)
        while len(self._seen) > _MAX_NAMES:
            self._seen.popitem(last=False)

    async def _keep_touching(self) -> None:
        while True:
            while not self._due:
                self._came.clear()
                await self._came.wait()
            count = min(len(self._due), _BATCH_NAMES)
            names = [self._due.popitem(last=False)[0] for _ in range(count)]
            try:
                async with asyncio.timeout(_DEADLINE_S):
                    self.num_touched += await self._store.touch(names, ttl_s=self._ttl_s)
            except (TimeoutError, StoreUnavailableError) as error:
                log.debug("%d stored blocks were not touched: %s", len(names), error)
                for name in names:
                    self._seen.pop(name, None)  # the next use tries again
            await asyncio.sleep(_PAUSE_S)
