"""Between processes that share a Redis, blocks come straight from the producer's memory in each way
that there is, and from Redis whatever happens to the producer."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.pd.direct_producer import Producer, claim, no_leases, producer
from tests.pd.nodes import ROOM, settings, ticket_of
from tests.redis_server import PATIENT, RedisServer, empty_redis, module_redis
from tests.world import World, world
from tierkv.clock import SystemClock
from tierkv.gpu import process_memory
from tierkv.pd.direct.address import DirectAddress
from tierkv.pd.settings import DirectPath
from tierkv.storage.factory import open_store

__all__ = ["empty_redis", "module_redis"]

COUNT = 83  # 20 blocks of 4 and a tail
BLOCKS = 20
WAYS: dict[str, dict[str, Any]] = {
    "device": {"direct": "device"},
    "memory": {"direct": "memory"},
    "network": {"direct": "network", "direct_host": "127.0.0.1"},
}


@pytest.fixture
def url(empty_redis: RedisServer) -> str:
    return empty_redis.url


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    """Each way that blocks can take."""
    name = str(request.param)
    if name == "network":
        pytest.importorskip("mooncake.engine", reason="Mooncake's package cannot be loaded")
    return name


@asynccontextmanager
async def claimer(
    url: str, *, direct: str = "auto", fetch_deadline_s: float = 10.0, **fields: Any
) -> AsyncIterator[World]:
    chosen = settings(direct=DirectPath(direct), **fields)
    cache: dict[str, Any] = ROOM | {"fetch_deadline_s": fetch_deadline_s}
    store = open_store(url, PATIENT, SystemClock())
    async with world(store=store, handoff=chosen, **cache) as node:
        yield node


def counts(node: World) -> dict[str, int]:
    """How many blocks came which way, where any did."""
    handoff = node.service.stats().handoff
    found = {
        "device": handoff.device_blocks,
        "memory": handoff.memory_blocks,
        "network": handoff.network_blocks,
        "storage": node.storage_stats.fetched_blocks,
    }
    return {name: count for name, count in found.items() if count}


@asynccontextmanager
async def published(
    url: str, there: dict[str, Any], here: dict[str, Any] | None = None, **patience: Any
) -> AsyncIterator[tuple[World, Producer]]:
    """A claimer, and a producer that has published COUNT tokens under the ticket t."""
    async with claimer(url, **(there if here is None else here), **patience) as node:
        with producer(url, **there) as other:
            await asyncio.to_thread(other.publish, COUNT, "t")
            yield node, other


FROM_STORAGE = {"storage": BLOCKS + 1}
WHO = ("producer", "claimer")


async def test_blocks_come_from_the_producer_and_only_the_tail_from_storage(
    url: str, way: str
) -> None:
    async with published(url, WAYS[way]) as (node, other):
        await claim(node, COUNT)
        assert counts(node) == {way: BLOCKS, "storage": 1}
        assert other.state()["shown"] == BLOCKS
        await no_leases(other)


@pytest.mark.parametrize("way", ["memory", "network"], indirect=True)
async def test_a_producer_that_dies_after_it_has_said_where_blocks_are_is_no_loss(
    url: str, way: str
) -> None:
    async with published(url, WAYS[way]) as (node, other):
        source = node.service.require_handoff().source
        with source.supply() as near:
            near.learn(await ticket_of(node, "t"))
            await near.ask(node.prompt(range(COUNT)))
            assert source.num_offered == BLOCKS
            other.kill()
            await claim(node, COUNT)
        assert source.num_offered == 0
        assert counts(node) == FROM_STORAGE
        assert node.service.stats().handoff.failed_direct_reads == 1


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("way", ["device", "memory"], indirect=True)
async def test_a_producer_that_dies_while_it_is_read_is_no_loss(
    url: str, way: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = process_memory.read
    async with published(url, WAYS[way]) as (node, other):

        def dying(pid: int, pieces: Sequence[process_memory.RemotePiece]) -> None:
            if when == "before":
                other.kill()
            read(pid, pieces)
            other.kill()

        monkeypatch.setattr(process_memory, "read", dying)
        await claim(node, COUNT)
        # A checksum says that what came is right; without one only the producer could.
        is_told = (way, when) == ("memory", "after")
        assert counts(node) == ({"memory": BLOCKS, "storage": 1} if is_told else FROM_STORAGE)
        assert node.service.stats().handoff.failed_direct_reads == (not is_told)


async def test_a_producer_that_hangs_costs_a_second(url: str, way: str) -> None:
    patience: dict[str, Any] = dict.fromkeys(
        ("lookup_deadline_s", "claim_deadline_s", "fetch_deadline_s"), 200.0
    )
    async with published(url, WAYS[way], **patience) as (node, other):
        other.popen.send_signal(signal.SIGSTOP)
        started = asyncio.get_running_loop().time()
        await claim(node, COUNT)
        # With room for a slow machine: what it waits for else is 200 s.
        assert asyncio.get_running_loop().time() - started < 50
        assert counts(node) == FROM_STORAGE


@pytest.mark.parametrize("who", WHO)
async def test_a_node_that_may_not_is_handed_over_to_through_storage(url: str, who: str) -> None:
    there, here = ({"direct": "off"} if one == who else WAYS["memory"] for one in WHO)
    async with published(url, there, here) as (node, other):
        await claim(node, COUNT)
        assert counts(node) == FROM_STORAGE
        assert other.state()["shown"] == 0


async def test_without_the_transfer_library_blocks_come_from_storage(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)  # as if it were not installed
    async with published(url, WAYS["memory"], WAYS["network"]) as (node, _):
        assert "transfer engine did not start" in caplog.text
        await claim(node, COUNT)
        assert counts(node) == FROM_STORAGE


_ASKS_AND_HANGS = """
import asyncio, sys, msgspec
from tierkv.pd.direct.address import DirectAsk, Channel, DirectAddress
async def main():
    address = msgspec.json.decode(sys.argv[1], type=DirectAddress)
    channel = Channel(*await asyncio.open_connection(address.host, address.port))
    await channel.receive_nonce()
    await channel.send_ask(DirectAsk(offer=address.offer, first=0, stop=20), address.secret)
    print(len((await channel.answer(address.secret)).blocks), flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


def hanging_claimer(address: DirectAddress) -> subprocess.Popen[str]:
    script = [sys.executable, "-c", _ASKS_AND_HANGS, msgspec.json.encode(address).decode()]
    return subprocess.Popen(script, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("end", ["killed", "silent"])
async def test_a_claimer_that_dies_or_hangs_holds_nothing_for_long(url: str, end: str) -> None:
    lease: dict[str, Any] = {"direct_lease_s": 60.0 if end == "killed" else 0.5}
    async with published(url, lease) as (node, other):
        address = (await ticket_of(node, "t")).direct
        assert address is not None
        popen = await asyncio.to_thread(hanging_claimer, address)
        try:
            assert popen.stdout is not None
            assert await asyncio.to_thread(popen.stdout.readline) == f"{BLOCKS}\n"
            if end == "killed":
                state = await asyncio.to_thread(other.state)
                assert (state["leases"], state["findings"]) == (1, [])
                popen.kill()
            await no_leases(other)
        finally:
            popen.kill()
            popen.communicate()


def connections_to(port: int) -> int:
    """Of any process here, to that port of this machine."""
    rows = Path("/proc/self/net/tcp").read_text(encoding="ascii").splitlines()[1:]
    return sum(row.split()[2].endswith(f":{port:04X}") and row.split()[3] == "01" for row in rows)


async def test_hand_offs_leave_no_connection_and_no_thread(url: str, way: str) -> None:
    async with published(url, WAYS[way]) as (node, other):
        await claim(node, COUNT)  # what is opened once for all
        threads = threading.active_count()
        for number in range(10):
            node.service.reset()
            await asyncio.to_thread(other.publish, COUNT, f"t{number}")
            await claim(node, COUNT, f"t{number}")
        assert counts(node)[way] == 11 * BLOCKS
        await no_leases(other)
        address = (await ticket_of(node, "t9")).direct
        assert address is not None
        async with asyncio.timeout(20):
            while await asyncio.to_thread(connections_to, address.port):
                pass  # the system closes them in its own time
        # A few: pools start theirs when they first need them. One each time would be ten.
        assert threading.active_count() <= threads + 5
