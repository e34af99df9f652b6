"""One rotten copy costs that copy: what other stores have of the value is read, and stays."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
import pytest

from tests.faulty import FaultyStore
from tests.latch import CopyLatch, until
from tests.layouts import LAYOUTS
from tests.storage.values import Routed
from tests.stored import stored_keys
from tierkv.cache.keys import Fingerprint, Names, Prompt, StoredKey
from tierkv.clock import SystemClock
from tierkv.errors import StoreUnavailableError
from tierkv.gpu.cpu import CpuDevice
from tierkv.gpu.protocol import HostSlots
from tierkv.storage.base import StoreWrapper
from tierkv.storage.guard import GuardedStore, ResilienceSettings
from tierkv.storage.layered import LayeredSettings, LayeredStore
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.storage.protocol import GetStatus, PutItem, Store
from tierkv.transfer.storage_io import StorageIO

LAYOUT = LAYOUTS["fp8"]


@dataclass
class Ground:
    io: StorageIO
    parts: Sequence[FaultyStore]
    host: HostSlots
    names: Sequence[str]
    keys: Sequence[StoredKey]

    async def fetched(self) -> list[GetStatus]:
        self.host.array[4:] = 0xEE
        outcomes = await self.io.fetch(self.keys, np.array([4, 5, 6], np.int32))
        for at, outcome in enumerate(outcomes):
            if outcome.status is GetStatus.HIT:
                assert np.array_equal(self.host.array[4 + at], self.host.array[at])
        return [outcome.status for outcome in outcomes]

    async def rot(self, part: int, at: int) -> None:
        """Change one bit of one value, where it lies."""
        content = bytearray(await self.parts[part].get(self.names[at], max_bytes=1 << 20) or b"")
        content[-1] ^= 1
        await self.parts[part].put([PutItem(self.names[at], (content,), keep_existing=False)])

    async def have(self, part: int) -> list[bool]:
        return await self.parts[part].present(self.names)


def layered(parts: Sequence[Store]) -> Store:
    return LayeredStore(parts[0], parts[1], LayeredSettings())


class ReadOnly(StoreWrapper):
    """What is there can be read, and not removed."""

    async def delete(self, names: Sequence[str]) -> int:
        raise StoreUnavailableError(f"{names} cannot be removed")


def read_only_near(parts: Sequence[Store]) -> Store:
    return layered([ReadOnly(parts[0]), parts[1]])


def around(parts: Sequence[Store]) -> Store:
    """As deep as a node has it."""
    clock, settings = SystemClock(), ResilienceSettings(timeout_s=10.0)
    inner = [GuardedStore(part, settings, clock) for part in parts]
    whole = GuardedStore(layered(inner), settings, clock)
    return Routed({"t:other": MemoryStore(MemorySettings(), clock)}, whole)


@asynccontextmanager
async def ground(
    compose: Callable[[Sequence[Store]], Store], num_parts: int = 2
) -> AsyncIterator[Ground]:
    """Three blocks, stored in every part."""
    clock = SystemClock()
    parts = [FaultyStore(MemoryStore(MemorySettings(), clock)) for _ in range(num_parts)]
    who = Fingerprint("model", LAYOUT)
    host = CpuDevice(CopyLatch()).allocate_host(LAYOUT, 8)
    host.array[:] = np.random.default_rng(3).integers(1, 256, host.array.shape, np.uint8)
    names = Names("tierkv", who.short)
    keys = stored_keys(who.root(), Prompt.of(range(3 * LAYOUT.block_size), LAYOUT.block_size))
    store = compose(parts)
    io = StorageIO(store, names, LAYOUT, host, block_ttl_s=None)
    async with store.running(), io.running():
        await io.flush(keys, np.arange(3, dtype=np.int32))
        yield Ground(io, parts, host, [names.name(key) for key in keys], keys)


@pytest.mark.parametrize("compose", [layered, around])
@pytest.mark.parametrize("rotten", [(0,), (0, 1)], ids=["the first copy", "all copies"])
async def test_a_rotten_copy_goes_and_a_good_one_is_read_and_stays(
    compose: Callable[[Sequence[Store]], Store], rotten: Sequence[int]
) -> None:
    is_good = rotten == (0,)
    async with ground(compose) as here:
        for part in rotten:
            await here.rot(part, 1)
        found = GetStatus.HIT if is_good else GetStatus.DAMAGED
        assert await here.fetched() == [GetStatus.HIT, found, GetStatus.HIT]
        assert await here.have(0) == [True, False, True]
        assert await here.have(1) == [True, is_good, True]
        again = GetStatus.HIT if is_good else GetStatus.MISS
        assert await here.fetched() == [GetStatus.HIT, again, GetStatus.HIT]
        assert here.io.stats.damaged_blocks == 1


async def test_a_value_that_is_rotten_afar_leaves_no_copy_behind() -> None:
    async with ground(layered) as here:
        await here.rot(1, 0)
        await here.parts[0].delete(here.names)
        assert (await here.fetched())[0] is GetStatus.DAMAGED
        assert (await here.have(1))[0] is False
        await until(lambda: here.parts[0].num_operations > 5, "the copies of the others")
        assert (await here.have(0))[0] is False


async def test_a_rotten_near_copy_that_cannot_be_removed_is_passed_by() -> None:
    async with ground(read_only_near) as here:
        await here.rot(0, 0)
        assert await here.fetched() == [GetStatus.HIT] * 3
        assert [await here.have(part) for part in range(2)] == [[True] * 3] * 2


async def test_a_near_store_that_fails_meanwhile_costs_no_good_copy_and_saves_no_rotten_one() -> (
    None
):
    async with ground(layered) as here:
        await here.rot(0, 0)
        assert (await here.fetched())[0] is GetStatus.HIT  # from afar
        await here.rot(1, 1)
        here.parts[0].fail_next(1_000)  # from now on
        assert await here.fetched() == [GetStatus.HIT, GetStatus.DAMAGED, GetStatus.HIT]
        assert await here.have(1) == [True, False, True]
