"""A store whose reads a test lets go one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tests.latch import until
from tierkv.storage.base import StoreWrapper
from tierkv.storage.memory import MemoryStore
from tierkv.storage.protocol import GetItem, GetOutcome, GetStatus


class GatedReads(StoreWrapper):
    """Batches of blocks wait, each for itself, until a test lets them go.

    gates: of the batches asked for so far. HIT lets one go to `inner`; another status is its end.
    """

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        self.gates: list[asyncio.Future[GetStatus]] = []

    async def get_into(self, items: Sequence[GetItem]) -> list[GetOutcome]:
        gate: asyncio.Future[GetStatus] = asyncio.get_running_loop().create_future()
        self.gates.append(gate)
        status = await gate
        if status is not GetStatus.HIT:
            return [GetOutcome(status, "as it was told")] * len(items)
        return await self.inner.get_into(items)

    async def until_asked(self, count: int) -> None:
        await until(lambda: len(self.gates) >= count, f"{count} batches asked for")
