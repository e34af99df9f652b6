"""A gateway: its nodes, what it does for callers right now, and how that ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tierkv.gateway.backend import Backend
from tierkv.gateway.failures import GatewayShuttingDownError
from tierkv.gateway.nodes import NodeState
from tierkv.gateway.settings import GatewaySettings


class Gateway:
    """Everything behind the HTTP interface. Use it inside `running()`, from one event loop."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        self.backend = Backend(settings)
        self.is_draining = False
        self._work: set[asyncio.Timeout] = set()
        self._changed = asyncio.Event()
        self._is_hurried = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self.backend.running():
            try:
                yield
            finally:
                self.drain()
                await self.idle(grace_s=0)

    def states(self) -> dict[str, NodeState]:
        now = asyncio.get_running_loop().time()
        return {node.url: node.state(now) for node in self.backend.nodes.all}

    @asynccontextmanager
    async def work(self) -> AsyncIterator[None]:
        """One prompt's work. Raises GatewayShuttingDownError once draining, and in the middle of
        the work when its time is up."""
        if self.is_draining:
            raise GatewayShuttingDownError("this gateway is shutting down")
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._work.add(scope)
                try:
                    yield
                finally:
                    self._work.discard(scope)
                    self._changed.set()
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise GatewayShuttingDownError("this gateway was stopped before the end") from error

    def drain(self) -> None:
        """Be unready, and take no more work; what runs goes on."""
        self.is_draining = True

    def hurry(self) -> None:
        """Wait for nobody's work any more."""
        self._is_hurried = True
        self._changed.set()

    async def idle(self, *, grace_s: float) -> None:
        """Return when no work is left: all done, or cut off after `grace_s` or a `hurry`."""
        try:
            async with asyncio.timeout(grace_s):
                while self._work and not self._is_hurried:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass
        for scope in self._work:
            if not scope.expired():
                scope.reschedule(asyncio.get_running_loop().time())
        while self._work:
            self._changed.clear()
            await self._changed.wait()
