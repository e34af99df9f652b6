"""The Mooncake store in short; its full contract suite is marked slow."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace

import pytest

from tests.latch import CopyLatch, until
from tests.mooncake_server import MooncakeServer, master_gate, mooncake_server
from tests.redis_server import free_port
from tests.storage.values import content_of, get_one, landing, put_one
from tests.world import BLOCK, World, fingerprint
from tierkv.cache.eviction import WritePolicy
from tierkv.clock import SystemClock
from tierkv.errors import ConfigError, StoreUnavailableError
from tierkv.gpu.cpu import CpuDevice
from tierkv.pd.handoff import STAGING_BLOCKS
from tierkv.pd.settings import HandoffSettings
from tierkv.sched.settings import CacheSettings
from tierkv.sched.worth import FetchPolicy
from tierkv.service import Service
from tierkv.storage.factory import StoreSettings, open_store
from tierkv.storage.guard import GuardedStore, ResilienceSettings
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.storage.mooncake.client import Config, MooncakeClient, MooncakeSettings
from tierkv.storage.mooncake.store import MooncakeStore
from tierkv.storage.protocol import (
    GetItem,
    GetStatus,
    PutItem,
    PutStatus,
    Store,
)


async def test_values_go_there_and_come_back(empty_mooncake: MooncakeServer) -> None:
    store = open_store(empty_mooncake.url, StoreSettings(), SystemClock())
    names = [f"t:f:{index:02}:0" for index in range(20)]
    async with store.running():
        await store.ping()
        items = [PutItem(n, (content_of(n, 88), content_of(n, 50_000))) for n in names[:15]]
        assert {o.status for o in await store.put(items)} == {PutStatus.STORED}
        assert {o.status for o in await store.put(items)} == {PutStatus.EXISTED}
        assert await store.exists(names) == 15
        landings = [landing(name, 88, 50_000) for name in names]
        outcomes = await store.get_into([item for item, _ in landings])
        assert [o.status for o in outcomes] == [GetStatus.HIT] * 15 + [GetStatus.MISS] * 5
        for name, (_, [header, payload]) in zip(names[:15], landings, strict=False):
            assert header == content_of(name, 88)
            assert payload == content_of(name, 50_000)
        for room in (50_087, 10):
            assert (await get_one(store, names[0], room))[0] is GetStatus.DAMAGED
        for room in (50_089, 200_000):
            item, [buffer] = landing(names[0], room)
            [got] = await store.get_into([item])
            assert (got.status, got.num_bytes) == (GetStatus.HIT, 50_088)
            assert buffer[:88] == content_of(names[0], 88)
            assert buffer[88:50_088] == content_of(names[0], 50_000)
        for count in (90, 120):  # a third of the pieces are empty; a call takes 64 pieces
            sizes = [at % 3 for at in range(count)]
            item, buffers = landing(names[0], *sizes, 50_088 - sum(sizes))
            assert [one.status for one in await store.get_into([item])] == [GetStatus.HIT]
            assert b"".join(buffers) == content_of(names[0], 88) + content_of(names[0], 50_000)
        assert await put_one(store, "t:ticket", b"one", keep_existing=False) is PutStatus.STORED
        assert await put_one(store, "t:ticket", b"second", keep_existing=False) is PutStatus.STORED
        assert await store.get("t:ticket", max_bytes=10) == b"second"
        assert await store.delete([*names, "t:ticket"]) == 16
        assert await store.exists(names) == 0
        with pytest.raises(StoreUnavailableError, match="cannot list"):
            await store.list("t", limit=10)


async def test_a_master_nobody_runs_is_reported(module_mooncake: MooncakeServer) -> None:
    store = MooncakeStore(f"mooncake://127.0.0.1:{free_port()}", MooncakeSettings())
    with pytest.raises(StoreUnavailableError, match="cannot be reached"):
        async with store.running():
            pass


async def test_without_the_package_it_is_said_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    store = MooncakeStore("mooncake://127.0.0.1:1", MooncakeSettings())
    with pytest.raises(StoreUnavailableError, match=r"\[mooncake\].*libibverbs1"):
        async with store.running():
            pass


def test_more_threads_than_the_deadline_of_its_calls_allows_are_refused() -> None:
    for threads, limit_s in ((33, 1.0), (7, 60.0)):
        with pytest.raises(ConfigError, match="exceed the deadline of Mooncake's calls"):
            MooncakeSettings(num_threads=threads, connect_timeout_s=limit_s)
    assert MooncakeSettings(num_threads=32, connect_timeout_s=0.5).max_pieces == 2


class Watched:
    """Mooncake's client, with a record of registered memory and of the memory that calls use."""

    def __init__(self, client: MooncakeClient) -> None:
        self._client = client
        self.registered: dict[int, int] = {}
        self.asked: list[tuple[int, int]] = []
        self.num_pieces: list[int] = []  # of each call

    def __getattr__(self, name: str) -> object:
        return getattr(self._client, name)

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        self.registered[buffer_ptr] = size
        return self._client.register_buffer(buffer_ptr, size)

    def unregister_buffer(self, buffer_ptr: int) -> int:
        del self.registered[buffer_ptr]
        return self._client.unregister_buffer(buffer_ptr)

    def batch_get_into_multi_buffers(
        self, keys: list[str], pointers: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        self._note(pointers, sizes)
        return self._client.batch_get_into_multi_buffers(keys, pointers, sizes)

    def batch_put_from_multi_buffers(
        self, keys: list[str], pointers: list[list[int]], sizes: list[list[int]], config: Config
    ) -> list[int]:
        self._note(pointers, sizes)
        return self._client.batch_put_from_multi_buffers(keys, pointers, sizes, config)

    def _note(self, pointers: list[list[int]], sizes: list[list[int]]) -> None:
        self.num_pieces.append(sum(map(len, pointers)))
        for some, lengths in zip(pointers, sizes, strict=True):
            self.asked += zip(some, lengths, strict=True)

    def is_told_of(self, pointer: int, size: int) -> bool:
        return any(
            start <= pointer and pointer + size <= start + length
            for start, length in self.registered.items()
        )


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[Watched]:
    """Return a list that receives every client that is created."""
    made: list[Watched] = []
    package = importlib.import_module("mooncake.store")

    def watch() -> Watched:
        made.append(Watched(package.MooncakeDistributedStore()))
        return made[-1]

    names = {"SoftPinAction": package.SoftPinAction, "ReplicateConfig": package.ReplicateConfig}
    replaced = SimpleNamespace(**names, MooncakeDistributedStore=watch)
    monkeypatch.setitem(sys.modules, "mooncake.store", replaced)
    return made


@pytest.fixture
def as_over_rdma(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the store use its client as over RDMA; the client still uses TCP."""
    monkeypatch.setattr(MooncakeSettings, "is_rdma", property(lambda _: True))


@pytest.mark.usefixtures("as_over_rdma")
@pytest.mark.parametrize("form", ["itself", "resilient", "attached"])
async def test_blocks_go_between_the_stores_memory_and_slots_that_its_client_was_told_of(
    empty_mooncake: MooncakeServer, watched: list[Watched], form: str
) -> None:
    """Over RDMA only registered memory can be accessed, also for headers."""
    store: Store = open_store(empty_mooncake.url, StoreSettings(), SystemClock())
    if form == "resilient":
        store = GuardedStore(store, ResilienceSettings(timeout_s=60.0), SystemClock())
    at_start = store if form != "attached" else MemoryStore(MemorySettings(), SystemClock())
    cache = CacheSettings(
        block_size=BLOCK,
        device_blocks=32,
        host_blocks=32,
        storage_write=WritePolicy.WRITE_THROUGH,
        fetch_policy=FetchPolicy.WAIT_COMPLETE,
        fetch_deadline_s=60.0,
    )
    service = Service(CpuDevice(), fingerprint(), cache, HandoffSettings(), at_start)
    tokens = list(range(4 * BLOCK + 1))
    async with service.running():
        if form == "attached":
            await service.attach_storage(store)
        here = World(service, CopyLatch())
        await here.run(tokens)
        await here.settle()
        service.reset()
        again = await here.run(tokens)
        assert again.storage_tokens == 4 * BLOCK
        [client] = watched
        assert len(client.asked) >= 2 * 2 * 4  # each header and payload is written and read
        assert [one for one in client.asked if not client.is_told_of(*one)] == []
        pool_bytes = (32 + STAGING_BLOCKS) * here.layout.block_bytes
        [start] = [at for at, size in client.registered.items() if size == pool_bytes]
        payloads = [at for at, size in client.asked if size == here.layout.block_bytes]
        assert len(payloads) == 2 * 4
        assert all(start <= at < start + pool_bytes for at in payloads)  # nothing copied them
        service.detach_storage()
        await until(lambda: not client.registered, "the memory is its own again")


@pytest.mark.usefixtures("as_over_rdma")
@pytest.mark.parametrize("count", [2, 70])
async def test_a_call_has_no_more_pieces_than_a_frozen_provider_may_hold_it_for(
    empty_mooncake: MooncakeServer, watched: list[Watched], count: int
) -> None:
    """A call returns after 60 s.

    Later pieces would be written into buffers that are in use again.
    """
    settings = MooncakeSettings()
    store = MooncakeStore(empty_mooncake.url, settings)
    names = [f"t:pieces:{count}:{index}" for index in range(19)]
    values = {
        name: [bytes([at, piece]) * 8 for piece in range(count)] for at, name in enumerate(names)
    }
    async with store.running():
        puts = await store.put([PutItem(name, tuple(parts)) for name, parts in values.items()])
        assert {one.status for one in puts} == {PutStatus.STORED}
        into = {name: [bytearray(16) for _ in range(count)] for name in names}
        items = [GetItem(name, tuple(map(memoryview, some))) for name, some in into.items()]
        gets = await store.get_into(items)
        assert {one.status for one in gets} == {GetStatus.HIT}
        assert into == values
    [client] = watched
    pieces = count if count <= settings.max_pieces else 1
    assert max(client.num_pieces) <= settings.max_pieces
    assert sum(client.num_pieces) == 2 * len(names) * pieces
    if count == 2:
        assert len(client.num_pieces) == 3 + 3, "eight at a time"


@pytest.mark.usefixtures("as_over_rdma")
async def test_memory_that_cannot_be_registered_is_reported(
    empty_mooncake: MooncakeServer, watched: list[Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Watched, "register_buffer", lambda *_: -1)
    store = MooncakeStore(empty_mooncake.url, MooncakeSettings())
    store.use_memory([memoryview(bytearray(4096))])
    with pytest.raises(StoreUnavailableError, match="cannot register 4096 bytes"):
        async with store.running():
            pass
    assert watched[0].registered == {}


async def test_over_tcp_nobody_is_told_of_host_memory(
    empty_mooncake: MooncakeServer, watched: list[Watched]
) -> None:
    """Any host that reaches the client's port could read and write registered memory."""
    store = MooncakeStore(empty_mooncake.url, MooncakeSettings())
    store.use_memory([memoryview(bytearray(4096))])
    async with store.running():
        assert await put_one(store, "t:tcp:0", b"x" * 100) is PutStatus.STORED
        assert await get_one(store, "t:tcp:0", 100) == (GetStatus.HIT, b"x" * 100)
        assert watched[0].registered == {}


@contextmanager
def stopped(
    process: subprocess.Popen[bytes], how: signal.Signals = signal.SIGSTOP
) -> Iterator[None]:
    process.send_signal(how)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


@asynccontextmanager
async def longest_wait_of_the_loop() -> AsyncIterator[list[float]]:
    """Yield a list of the seconds between turns of the event loop."""
    waits: list[float] = []

    async def watch() -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            waits.append(time.monotonic() - before)

    async with asyncio.TaskGroup() as group:
        watcher = group.create_task(watch())
        await asyncio.sleep(0)  # the watcher has begun
        yield waits
        await asyncio.sleep(0.02)  # the last turn is recorded
        watcher.cancel()


@pytest.mark.parametrize(
    "how", [pytest.param(signal.SIGKILL, marks=pytest.mark.slow), signal.SIGSTOP]
)
async def test_a_master_that_is_gone_or_frozen_holds_calls_and_the_stores_end_for_seconds_only(
    how: signal.Signals,
) -> None:
    """By default Mooncake's client waits 30 s for each call, and 20 times to connect."""
    names = [f"t:f:{index:02}:0" for index in range(24)]
    with mooncake_server("64 MB") as server:
        store = MooncakeStore(server.url, MooncakeSettings())
        async with store.running():
            await store.ping()
            with stopped(server.master, how):
                with pytest.raises(StoreUnavailableError, match="does not answer"):
                    await store.ping()
                started = time.monotonic()
                puts = await store.put([PutItem(name, (b"x",)) for name in names])
                gets = await store.get_into([landing(name, 100)[0] for name in names])
                assert {one.status for one in puts} == {PutStatus.FAILED}
                assert {one.status for one in gets} == {GetStatus.FAILED}
                assert time.monotonic() - started < 20, "one batch of each waits for it"
                async with longest_wait_of_the_loop() as waits:
                    with pytest.raises(StoreUnavailableError, match="cannot be reached"):
                        async with MooncakeStore(server.url, MooncakeSettings()).running():
                            pass
                assert max(waits) < 1, "others work meanwhile"
                assert time.monotonic() - started < 40


async def test_what_a_frozen_provider_sends_later_lands_in_no_buffer_of_a_read_that_ended() -> None:
    names = [f"t:f:{index:02}:0" for index in range(24)]  # more than there are connections
    items = [PutItem(name, (b"head", content_of(name, 512 << 10))) for name in names]
    landings = [landing(name, 4, 512 << 10) for name in names]
    with mooncake_server("64 MB") as server:
        store = MooncakeStore(server.url, MooncakeSettings())
        async with store.running():
            assert {one.status for one in await store.put(items)} == {PutStatus.STORED}
            with stopped(server.provider):
                started = time.monotonic()
                gets = await store.get_into([item for item, _ in landings])
                assert {one.status for one in gets} == {GetStatus.FAILED}
                assert 2 <= time.monotonic() - started < 10, "a halt, and what the machine needs"
                before = [[bytes(buffer) for buffer in buffers] for _, buffers in landings]
            # New reads wait behind the values that were being sent. The master may have dropped the
            # provider and its values in the meantime.
            give_up_at = time.monotonic() + 60
            statuses = {GetStatus.MISS}
            while statuses != {GetStatus.HIT} and time.monotonic() < give_up_at:
                await store.put(items)
                again = [landing(name, 4, 512 << 10)[0] for name in names]
                statuses = {one.status for one in await store.get_into(again)}
            assert statuses == {GetStatus.HIT}
            assert [[bytes(buffer) for buffer in buffers] for _, buffers in landings] == before


@pytest.mark.slow
async def test_of_a_provider_frozen_while_values_came_none_is_seen_and_all_can_be_put() -> None:
    names = [f"t:f:{index:02}:0" for index in range(24)]
    items = [PutItem(name, (b"head", content_of(name, 512 << 10))) for name in names]
    with mooncake_server("64 MB") as server:
        store = MooncakeStore(server.url, MooncakeSettings())
        async with store.running():
            assert await put_one(store, "t:met:0", b"x" * 100) is PutStatus.STORED
            with stopped(server.provider):
                started = time.monotonic()
                assert {one.status for one in await store.put(items)} == {PutStatus.FAILED}
                assert time.monotonic() - started < 10
                assert await store.present(names) == [False] * 24
            give_up_at = time.monotonic() + 60
            while not all(await store.present(names)) and time.monotonic() < give_up_at:
                await store.put(items)
            assert all(await store.present(names))


@pytest.mark.slow
async def test_a_value_whose_master_froze_while_it_became_visible_is_whole_or_not_there() -> None:
    """A proxy stops the third message about the value, which makes the value visible.

    The first two messages ask if the value exists, and for memory.
    """
    name = "t:becomes-visible:0"
    content = content_of(name, 512 << 10)
    with mooncake_server("64 MB") as server, master_gate(server.master_port, name) as gate:
        store = MooncakeStore(f"mooncake://127.0.0.1:{gate.port}", MooncakeSettings())
        other = MooncakeStore(server.url, MooncakeSettings())
        async with other.running():
            started = time.monotonic()
            async with store.running():
                [put] = await store.put([PutItem(name, (content,))])
                assert await asyncio.to_thread(gate.has_held)
                assert put.status is PutStatus.FAILED
                assert (await get_one(other, name, len(content)))[0] is GetStatus.MISS
            assert time.monotonic() - started < 20, "nor is the store's end held up"
            gate.release()
            statuses: set[GetStatus] = set()
            give_up_at = time.monotonic() + 60
            while GetStatus.HIT not in statuses and time.monotonic() < give_up_at:
                status, got = await get_one(other, name, len(content))
                assert status is GetStatus.MISS or (status, got) == (GetStatus.HIT, content)
                statuses.add(status)
                await put_one(other, name, content)
            assert GetStatus.HIT in statuses, "it can be put again"


@pytest.mark.parametrize(
    ("readings", "outcome"),
    [
        ((b"bbaa", b"bbba", b"bbbb", b"bbbb", b"else"), b"bbbb"),
        (tuple(bytes([i]) * 4 for i in range(50)), "during each of"),
        ((b"aaaa", b"", b""), "removed"),
    ],
)
async def test_a_small_value_is_read_until_two_readings_agree(
    monkeypatch: pytest.MonkeyPatch, readings: tuple[bytes, ...], outcome: bytes | str
) -> None:
    """Mooncake replaces a value in place, so one read can return parts of two values."""
    left = list(readings)
    client = SimpleNamespace(
        setup=lambda *_: 0,
        close=lambda: 0,
        get_size=lambda _: 4,
        get=lambda _: left.pop(0) if len(left) > 1 else left[0],
    )
    package = SimpleNamespace(MooncakeDistributedStore=lambda: client)
    monkeypatch.setitem(sys.modules, "mooncake.store", package)
    async with await asyncio.start_server(lambda _, w: w.close(), "127.0.0.1", 0) as master:
        url = f"mooncake://127.0.0.1:{master.sockets[0].getsockname()[1]}"
        store = MooncakeStore(url, MooncakeSettings())
        async with store.running():
            if isinstance(outcome, bytes):
                assert await store.get("t:ticket", max_bytes=10) == outcome
            else:
                with pytest.raises(StoreUnavailableError, match=outcome):
                    await store.get("t:ticket", max_bytes=10)
