"""A list of tails lives as long as the tails that are used."""

from __future__ import annotations

import asyncio

import numpy as np

from tests.latch import CopyLatch
from tests.layouts import LAYOUTS
from tests.storage.values import TurnedClock
from tests.stored import stored_keys
from tierkv.cache.keys import Fingerprint, Names, Prompt
from tierkv.gpu.cpu import CpuDevice
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.transfer.storage_io import StorageIO

LAYOUT = LAYOUTS["fp8"]
TTL_S = 100.0


async def test_a_tail_that_is_used_is_still_found_when_its_list_would_have_ended() -> None:
    clock = TurnedClock()
    store = MemoryStore(MemorySettings(), clock)
    who = Fingerprint("model", LAYOUT)
    host = CpuDevice(CopyLatch()).allocate_host(LAYOUT, 4)
    host.array[:] = 7
    # Touched at every use that the loop's clock, which counts milliseconds, tells from the last.
    io = StorageIO(
        store,
        Names("tierkv", who.short),
        LAYOUT,
        host,
        block_ttl_s=TTL_S,
        touches_per_ttl=1_000_000_000,
    )
    [key] = stored_keys(who.root(), Prompt.of(range(3), LAYOUT.block_size))
    assert key.tail is not None
    async with store.running(), io.running():
        await io.flush([key], np.array([0], np.int32))
        for _ in range(3):
            clock.now += 0.6 * TTL_S
            await asyncio.sleep(0.005)
            found = await io.tails.best(key.tail.parent, key.tail.tokens, b"", "")
            assert found is not None, "its list has ended"
            await io.fetch([found.key], np.array([1], np.int32))
            async with asyncio.timeout(10):
                while await first_end(store) < clock.now + 0.9 * TTL_S:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)  # the store is told in the background


async def first_end(store: MemoryStore) -> float:
    values = (await store.list("tierkv", limit=10)).values
    return min(value.expires_at or 0.0 for value in values)
