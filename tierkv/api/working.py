"""Work under way, of a node or a gateway: counted, waited for at the end, cut off in the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from tierkv.errors import TierKVError
from tierkv.tasks import deadline


class Working:
    """cut_off: makes what is raised in the middle of work whose time is up. num_open: what else is
    waited for, besides calls; say `changed` when it may have become less."""

    def __init__(
        self, cut_off: Callable[[], TierKVError], num_open: Callable[[], int] = lambda: 0
    ) -> None:
        self._cut_off = cut_off
        self._num_open = num_open
        self._scopes: set[asyncio.Timeout] = set()
        self._changed = asyncio.Event()
        self._is_hurried = False

    def __len__(self) -> int:
        return len(self._scopes)

    @asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        async with deadline(None, self._cut_off) as scope:
            self._scopes.add(scope)
            try:
                yield
            finally:
                self._scopes.discard(scope)
                self.changed()

    def changed(self) -> None:
        self._changed.set()

    def hurry(self) -> None:
        """Wait for nobody's work any more."""
        self._is_hurried = True
        self.changed()

    async def idle(self, *, grace_s: float) -> None:
        """Return when no call is left: all done, or cut off after `grace_s` or a `hurry`."""
        try:
            async with asyncio.timeout(grace_s):
                while (self._scopes or self._num_open()) and not self._is_hurried:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass
        for scope in self._scopes:
            if not scope.expired():
                scope.reschedule(asyncio.get_running_loop().time())
        while self._scopes:
            self._changed.clear()
            await self._changed.wait()
