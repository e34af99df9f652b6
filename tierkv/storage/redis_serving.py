"""The life of a server's connections: a task owns each, from when they are opened to when they are
closed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Protocol

from tierkv.tasks import background


class Lanes(Protocol):
    """is_open: requests are taken."""

    is_open: bool

    @property
    def num_connections(self) -> int: ...

    @property
    def url(self) -> str: ...

    def serve(self) -> Coroutine[None, None, None]:
        """Own one connection."""

    def fail_waiting(self, reason: str) -> None:
        """Let whoever waits for a connection know that there is none."""


@asynccontextmanager
async def serving(lanes: Lanes) -> AsyncIterator[None]:
    """Leaving closes the connections; whoever still waits is told so."""
    tasks = {f"tierkv-redis-{lane}": lanes.serve() for lane in range(lanes.num_connections)}
    try:
        async with background(tasks):
            lanes.is_open = True
            try:
                yield
            finally:
                lanes.is_open = False
    finally:
        lanes.fail_waiting(f"{lanes.url} is closed")
