"""Host slots set aside for publishing, so that a hand-off never waits for the cache's own room."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import numpy as np

from tierkv.cache.pool import Ids
from tierkv.transfer.mover import Movement

GROUP_BLOCKS = 32
NUM_GROUPS = 2  # one is filled from the device while another goes to storage
STAGING_BLOCKS = GROUP_BLOCKS * NUM_GROUPS
_FIRST_BLOCKS = 8


def groups_of(start: int, stop: int) -> Iterator[range]:
    """[start, stop) in parts of GROUP_BLOCKS, and a shorter one first: the store has something to
    do as soon as that is staged, and the next one is while it is stored."""
    if start < stop:
        yield range(start, min(start + _FIRST_BLOCKS, stop))
    for at in range(start + _FIRST_BLOCKS, stop, GROUP_BLOCKS):
        yield range(at, min(at + GROUP_BLOCKS, stop))


class Group:
    """GROUP_BLOCKS host slots lent to one step of one publish."""

    def __init__(self, slots: Ids) -> None:
        self.slots = slots
        self.movement: Movement | None = None  # what writes to the slots right now


class Staging:
    """The slots [first_slot, first_slot + STAGING_BLOCKS), behind those of the host pool."""

    def __init__(self, first_slot: int) -> None:
        self._free: asyncio.Queue[Group] = asyncio.Queue()
        for i in range(NUM_GROUPS):
            start = first_slot + i * GROUP_BLOCKS
            self._free.put_nowait(Group(np.arange(start, start + GROUP_BLOCKS, dtype=np.int32)))

    @asynccontextmanager
    async def group(self) -> AsyncIterator[Group]:
        """A group, in the order of asking. If the body is cancelled while a copy into the slots
        is on its way, they become free when that copy has ended."""
        group = await self._free.get()
        try:
            yield group
        finally:
            movement, group.movement = group.movement, None
            if movement is None or movement.has_ended:
                self._free.put_nowait(group)
            else:
                movement.when_ended(lambda: self._free.put_nowait(group))

    @property
    def num_free_groups(self) -> int:
        return self._free.qsize()
