"""A gateway: its nodes, what it does for callers right now, and how that ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tierkv.gateway.backend import Backend
from tierkv.gateway.failures import GatewayShuttingDownError
from tierkv.gateway.nodes import NodeState
from tierkv.gateway.settings import GatewaySettings
from tierkv.http.process import Working


class Gateway:
    """Everything behind the HTTP interface. Use it inside `running()`, from one event loop."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        self.backend = Backend(settings)
        self.is_draining = False
        self._working = Working(
            lambda: GatewayShuttingDownError("this gateway was stopped before the end")
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self.backend.running():
            try:
                yield
            finally:
                self.drain()
                await self.idle(grace_s=0)

    def states(self) -> dict[str, tuple[NodeState, str]]:
        """By URL, with a word on it."""
        now = asyncio.get_running_loop().time()
        return {node.url: (node.state(now), node.word(now)) for node in self.backend.nodes.all}

    @asynccontextmanager
    async def work(self) -> AsyncIterator[None]:
        """One prompt's work. Raises GatewayShuttingDownError once draining, and in the middle of
        the work when its time is up."""
        if self.is_draining:
            raise GatewayShuttingDownError("this gateway is shutting down")
        async with self._working.call():
            yield

    def drain(self) -> None:
        """Be unready, and take no more work; what runs goes on."""
        self.is_draining = True

    def hurry(self) -> None:
        """Wait for nobody's work any more."""
        self._working.hurry()

    async def idle(self, *, grace_s: float) -> None:
        """Return when no work is left: all done, or cut off after `grace_s` or a `hurry`."""
        await self._working.idle(grace_s=grace_s)
