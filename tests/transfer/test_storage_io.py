"""What comes from a store is what was put there, or it is not there at all."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import numpy as np
import pytest

from tests.faulty import FaultyStore
from tests.latch import PATIENCE_S, CopyLatch, finish, turns, until
from tests.layouts import LAYOUTS
from tests.storage.values import TurnedClock
from tests.stored import stored_keys
from tierkv.cache.keys import Fingerprint, Names, Prompt, StoredKey
from tierkv.cache.layout import Layout, layered
from tierkv.clock import Clock, SystemClock
from tierkv.gpu.cpu import CpuDevice
from tierkv.gpu.protocol import HostSlots
from tierkv.storage.base import WorkerThreads
from tierkv.storage.codec import HEADER_BYTES
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.storage.protocol import Capabilities, GetStatus, PutItem, PutStatus
from tierkv.transfer import storage_io
from tierkv.transfer.storage_io import StorageIO, made_ahead

NUM_SLOTS = 12


class Sending(FaultyStore):
    """Says so, as Redis does."""

    sends_from_loop = False

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, sends_from_loop=self.sends_from_loop)


@dataclass
class Ground:
    io: StorageIO
    store: Sending
    host: HostSlots
    names: Names
    layout: Layout
    keys: list[StoredKey]

    async def sizes(self) -> dict[str, int]:
        page = await self.store.list("tierkv", limit=1000)
        return {value.name: value.num_bytes for value in page.values}


@asynccontextmanager
async def ground(
    layout: Layout = LAYOUTS["fp8"],
    num_tokens: int = 11,
    capacity_bytes: int | None = None,
    *,
    num_slots: int = NUM_SLOTS,
    sends_from_loop: bool = False,
    clock: Clock | None = None,
    ttl_s: float | None = None,
) -> AsyncIterator[Ground]:
    """A host whose slots 0, 1, 2... hold random blocks of a prompt of `num_tokens`."""
    who = Fingerprint("model", layout)
    store = Sending(MemoryStore(MemorySettings(capacity_bytes), clock or SystemClock()))
    host = CpuDevice(CopyLatch()).allocate_host(layout, num_slots)
    host.array[:] = np.random.default_rng(3).integers(1, 256, host.array.shape, np.uint8)
    names = Names("tierkv", who.short)
    # Touched at every use that the loop's clock, which counts milliseconds, tells from the last.
    touches = 1_000_000_000 if ttl_s else 0
    io = StorageIO(store, names, layout, host, block_ttl_s=ttl_s, touches_per_ttl=touches)
    prompt = Prompt.of(range(num_tokens), layout.block_size)
    store.sends_from_loop = sends_from_loop
    async with store.running(), io.running():
        yield Ground(io, store, host, names, layout, stored_keys(who.root(), prompt))


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("num_tokens", [1, 4, 5, 11])
async def test_blocks_and_tails_come_back_byte_for_byte(name: str, num_tokens: int) -> None:
    async with ground(LAYOUTS[name], num_tokens) as here:
        n = len(here.keys)
        put = await here.io.flush(here.keys, ids(*range(n)))
        assert [outcome.status for outcome in put] == [PutStatus.STORED] * n
        assert await here.io.count_present(here.keys) == n
        back = ids(*range(11, 11 - n, -1))
        here.host.array[back] = 0xEE
        got = await here.io.fetch(here.keys, back)
        assert [outcome.status for outcome in got] == [GetStatus.HIT] * n
        for key, slot, target in zip(here.keys, range(n), back.tolist(), strict=True):
            expected = np.zeros(here.layout.block_bytes, np.uint8)
            payload = here.layout.cut_tail(here.host.array[slot], key.num_tokens).copy()
            here.layout.paste_tail(payload, expected, key.num_tokens)
            assert np.array_equal(here.host.array[target], expected)
        assert here.io.stats.fetched_blocks == here.io.stats.flushed_blocks == n


# Blocks between 256 KiB and 8 MiB, whose checksums are made by who sends them.
LONG = layered(16, [("key", "bfloat16", 8192), ("value", "bfloat16", 8192)], num_layers=2)


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("num_blocks", [1, 65])
async def test_long_blocks_and_tails_come_back_byte_for_byte_and_damage_is_found(
    num_blocks: int, is_late: bool
) -> None:
    tokens, slots = 16 * num_blocks + 5, 2 * num_blocks + 2
    async with ground(LONG, tokens, num_slots=slots, sends_from_loop=is_late) as here:
        n = len(here.keys)
        put = await here.io.flush(here.keys, ids(*range(n)))
        assert {outcome.status for outcome in put} == {PutStatus.STORED}
        back = ids(*range(n, 2 * n))
        got = await here.io.fetch(here.keys, back)
        assert {outcome.status for outcome in got} == {GetStatus.HIT}
        assert np.array_equal(here.host.array[n : n + num_blocks], here.host.array[:num_blocks])
        here.store.flip_next_get(8 * (HEADER_BYTES + 100_000))
        [first, *_] = await here.io.fetch(here.keys[:1], back[:1])
        assert first.status is GetStatus.DAMAGED


async def test_a_tail_is_stored_cut_to_its_tokens_under_its_own_name() -> None:
    async with ground(num_tokens=11) as here:
        await here.io.flush(here.keys, ids(0, 1, 2))
        sizes = await here.sizes()
        [tail] = [name for name in sizes if name.endswith(":partial:3")]
        assert sizes[tail] == HEADER_BYTES + here.layout.stored_bytes(3)
        assert sizes[tail] < HEADER_BYTES + here.layout.block_bytes
        blocks = {name for name in sizes if not name.endswith(":tails")}
        others = [sizes[name] for name in blocks - {tail}]
        assert others == [HEADER_BYTES + here.layout.block_bytes] * 2


async def test_what_is_stored_already_is_not_written_again() -> None:  # fault 11
    async with ground() as here:
        await here.io.flush(here.keys[:2], ids(0, 1))
        written = here.io.stats.flushed_bytes
        outcomes = await here.io.flush(here.keys, ids(0, 1, 2))
        assert [outcome.status for outcome in outcomes] == [
            PutStatus.EXISTED,
            PutStatus.EXISTED,
            PutStatus.STORED,
        ]
        assert here.io.stats.skipped_blocks == 2
        tail = HEADER_BYTES + here.layout.stored_bytes(3)
        assert here.io.stats.flushed_bytes == written + tail


async def test_a_tail_that_the_store_did_not_take_is_not_listed() -> None:
    async with ground(num_tokens=11) as here:
        here.store.fail_next(1)
        outcomes = await here.io.flush(here.keys, ids(0, 1, 2))
        assert {outcome.status for outcome in outcomes} == {PutStatus.FAILED}
        assert await here.sizes() == {}
        await here.io.flush(here.keys, ids(0, 1, 2))
        assert [name for name in await here.sizes() if name.endswith(":tails")]


async def test_a_store_that_fails_or_is_full_says_so_per_block() -> None:  # faults 11 and 15
    async with ground(capacity_bytes=400) as here:
        outcomes = await here.io.flush(here.keys, ids(0, 1, 2))
        assert PutStatus.FULL in {outcome.status for outcome in outcomes}
        assert here.io.stats.failed_writes
        here.store.fail_next(1)
        [outcome] = await here.io.fetch(here.keys[:1], ids(5))
        assert outcome.status is GetStatus.FAILED
        assert "does not answer" in outcome.reason
        assert here.io.stats.failed_reads == 1


async def test_a_tail_that_is_used_is_still_found_when_its_list_would_have_ended() -> None:
    clock, ttl_s = TurnedClock(), 100.0
    async with ground(num_tokens=3, clock=clock, ttl_s=ttl_s) as here:
        [key] = here.keys
        assert key.tail is not None
        await here.io.flush([key], ids(0))
        for _ in range(3):
            clock.now += 0.6 * ttl_s
            await asyncio.sleep(0.005)
            found = await here.io.tails.best(key.tail.parent, key.tail.tokens, b"", "")
            assert found is not None, "its list has ended"
            await here.io.fetch([found.key], ids(1))
            async with asyncio.timeout(10):
                while await first_end(here) < clock.now + 0.9 * ttl_s:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)  # the store is told in the background


async def test_a_block_that_is_written_again_lives_on() -> None:
    clock, ttl_s = TurnedClock(), 100.0
    async with ground(num_tokens=4, clock=clock, ttl_s=ttl_s) as here:
        for status in (PutStatus.STORED, PutStatus.EXISTED):
            clock.now += 0.6 * ttl_s
            await asyncio.sleep(0.005)
            [outcome] = await here.io.flush(here.keys, ids(0))
            assert outcome.status is status
        async with asyncio.timeout(10):
            while await first_end(here) < clock.now + 0.9 * ttl_s:  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # the store is told in the background


async def first_end(here: Ground) -> float:
    values = (await here.store.list("tierkv", limit=10)).values
    return min(value.expires_at or 0.0 for value in values)


async def test_of_checksums_made_ahead_a_cancel_waits_for_those_in_hand_and_begins_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(storage_io, "makes_ahead", True)
    may_go, begun, made = threading.Event(), list[int](), list[int]()

    def make() -> None:
        begun.append(threading.get_ident())
        assert may_go.wait(PATIENCE_S)
        made.append(threading.get_ident())

    async def send() -> None:
        items = [PutItem(f"t:f:{at}:0", (memoryview(b"x"),), complete=make) for at in range(10)]
        async with made_ahead(threads, items):
            await asyncio.Event().wait()

    threads = WorkerThreads("test", 2)
    async with threads.running():
        sending = asyncio.create_task(send())
        await until(lambda: len(begun) == 2)
        sending.cancel()
        await turns(20)
        assert not sending.done()
        may_go.set()
        with pytest.raises(asyncio.CancelledError):
            await finish(sending)
    assert len(made) == len(begun) == 2
