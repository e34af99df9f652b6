"""How many prompts run at once, and how many more may wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tierkv.gateway.failures import OverloadedError, QueueFullError
from tierkv.gateway.settings import LimitsSection


class Admission:
    """First come, first served."""

    def __init__(self, limits: LimitsSection) -> None:
        self._limits = limits
        self._slots = asyncio.Semaphore(limits.max_running)
        self.num_waiting = 0
        self.num_running = 0

    def check(self, num_prompts: int) -> None:
        """Raise QueueFullError if so many more would find no place to wait either."""
        free = self._limits.max_running - self.num_running - self.num_waiting
        if num_prompts > max(free, 0) + max(self._limits.max_queued - self.num_waiting, 0):
            raise QueueFullError(
                f"{self.num_running} prompts run and {self.num_waiting} wait already"
            )

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Room for one prompt. Raises OverloadedError if none came free in time."""
        self.num_waiting += 1
        try:
            async with asyncio.timeout(self._limits.queue_timeout_s):
                await self._slots.acquire()
        except TimeoutError as error:
            raise OverloadedError(
                f"no room came free within {self._limits.queue_timeout_s:g} s"
            ) from error
        finally:
            self.num_waiting -= 1
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1
            self._slots.release()
