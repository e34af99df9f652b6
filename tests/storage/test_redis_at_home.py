"""Long values to a Redis server on this machine, two at a time over one connection; and very long
ones to any, of which the next is begun before the answer to the last."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from tests.latch import until
from tests.storage.test_redis_only_connection import open_all
from tests.storage.test_redis_traffic import AWAY, HOME, slow_server
from tests.storage.values import content_of, landing
from tierkv.storage.protocol import PutItem, PutStatus
from tierkv.storage.redis.pool import WRITE_BYTES, finished
from tierkv.storage.redis.requests import get_whole_request, put_request
from tierkv.storage.redis.socket import PlainPipe
from tierkv.storage.redis.wire import (
    LONG_BYTES,
    MOST_BYTES,
    Failure,
    Pace,
    Request,
    Traffic,
    Turn,
    Wire,
    WireStats,
)

LONG, VERY_LONG = 512 << 10, 8 << 20
NAMES = [f"t:f:{index:02}:0" for index in range(5)]


def puts(num_bytes: int, names: Sequence[str] = NAMES) -> list[PutItem]:
    return [PutItem(name, (content_of(name, num_bytes),)) for name in names]


async def test_two_long_values_at_a_time_are_sent_over_one_connection_and_the_others_idle() -> None:
    """Of several connections the server would read by turns."""
    async with slow_server(connections=4) as (slow, store), asyncio.TaskGroup() as group:
        await open_all(slow, store, connections=4)
        putting = group.create_task(store.put(puts(LONG)))
        carried_by = set()
        for name, count in zip(NAMES, (2, 2, 2, 2, 1), strict=True):
            _, key, value, _ = await slow.next_of(count)
            assert (key, value) == (name.encode(), content_of(name, LONG))
            carried_by |= {writer for _, writer in slow.heard}
            slow.answer(b"+OK\r\n")
        assert {outcome.status for outcome in await putting} == {PutStatus.STORED}
        assert len(carried_by) == 1


async def test_two_long_values_at_a_time_are_sent_whoever_gives_them() -> None:
    async with slow_server(connections=4) as (slow, store), asyncio.TaskGroup() as group:
        await open_all(slow, store, connections=4)
        putting = [group.create_task(store.put([item])) for item in puts(LONG)]
        carried_by = set()
        for count in (2, 2, 2, 2, 1):
            await slow.next_of(count)
            carried_by |= {writer for _, writer in slow.heard}
            slow.answer(b"+OK\r\n")
        for one in putting:
            [outcome] = await one
            assert outcome.status is PutStatus.STORED
        assert len(carried_by) == 1


async def test_another_connection_carries_short_values_beside_a_long_one() -> None:
    items = [*puts(LONG, NAMES[:1]), *puts(16, NAMES[1:])]
    async with slow_server(connections=2) as (slow, store), asyncio.TaskGroup() as group:
        await open_all(slow, store, connections=2)
        putting = group.create_task(store.put(items))
        await slow.next_of(len(NAMES))
        carried_by = {words[1].decode(): writer for words, writer in slow.heard}
        assert carried_by[NAMES[-1]] is not carried_by[NAMES[0]]
        for _ in NAMES:
            slow.answer(b"+OK\r\n")
        assert {outcome.status for outcome in await putting} == {PutStatus.STORED}


async def test_values_that_are_not_long_are_sent_as_many_as_there_is_room_for() -> None:
    names = [f"t:f:{index:02}:0" for index in range(8)]
    async with slow_server(connections=5) as (slow, store), asyncio.TaskGroup() as group:
        await open_all(slow, store, connections=5)
        putting = group.create_task(store.put(puts(LONG_BYTES, names)))
        await slow.next_of(len(names))
        for _ in names:
            slow.answer(b"+OK\r\n")
        assert {outcome.status for outcome in await putting} == {PutStatus.STORED}


@pytest.mark.parametrize("connections", [1, 4])
@pytest.mark.parametrize("host", [HOME, AWAY])
async def test_after_a_very_long_value_the_next_one_is_sent_before_it_is_answered(
    host: str, connections: int
) -> None:
    """Had it to wait for the answer, the server would wait, too. And no third one: the server would
    have it in its memory only."""
    async with (
        slow_server(connections=connections, host=host) as (slow, store),
        asyncio.TaskGroup() as group,
    ):
        await open_all(slow, store, connections=connections)
        for num_bytes in (VERY_LONG, VERY_LONG, 3 << 20):  # later ones go as the first
            putting = group.create_task(store.put(puts(num_bytes)))
            for name, count in zip(NAMES, (2, 2, 2, 2, 1), strict=True):
                _, key, value, _ = await slow.next_of(count)
                assert (key, value) == (name.encode(), content_of(name, num_bytes))
                is_on_one = len({writer for _, writer in slow.heard}) == 1
                assert is_on_one or (connections > 1 and num_bytes > LONG)
                slow.answer(b"+OK\r\n")
            assert {outcome.status for outcome in await putting} == {PutStatus.STORED}


@pytest.mark.parametrize("host", [HOME, AWAY])
async def test_very_long_values_whose_connections_are_lost_are_in_nobodys_way(host: str) -> None:
    async with (
        slow_server(connections=4, host=host) as (slow, store),
        asyncio.TaskGroup() as group,
    ):
        await open_all(slow, store, connections=4)
        putting = group.create_task(store.put(puts(VERY_LONG)))
        await slow.next_of(2)
        lost = {writer for _, writer in slow.heard}
        for writer in lost:
            writer.transport.abort()
        slow.heard.clear()
        slow.begun = 0
        for _ in NAMES:
            await until(lambda: bool(slow.heard))
            slow.answer(b"+OK\r\n")
        assert {outcome.status for outcome in await putting} == {PutStatus.STORED}
        await open_all(slow, store, connections=4 + len(lost))
        putting = group.create_task(store.put(puts(VERY_LONG)))
        for count in (2, 2, 2, 2, 1):
            await slow.next_of(count)
            slow.answer(b"+OK\r\n")
        assert {outcome.status for outcome in await putting} == {PutStatus.STORED}


@dataclass
class Told:
    """An owner with nothing more to send. fills: how often it was asked."""

    fills: int = 0
    taken_back: list[Request] = field(default_factory=list)

    def fill(self, wire: Wire) -> None:
        self.fills += 1

    def take_back(self, requests: Sequence[Request], failure: Failure) -> None:
        self.taken_back += requests


@asynccontextmanager
async def wire_to(host: str) -> AsyncIterator[tuple[Wire, Traffic, Told, socket.socket]]:
    """A connection for writing, whose other end is read by whoever asks."""
    traffic, owner = Traffic(WRITE_BYTES, 1), Told()
    with socket.create_server((host, 0)) as listening:
        # No more than that is on its way unread, whatever the system is set to.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        ours = socket.create_connection(listening.getsockname())
        theirs, _ = listening.accept()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
    for end in (ours, theirs):
        end.setblocking(False)
    wire = Wire(
        PlainPipe(ours), Pace(30.0, 1e6), WireStats(), turn=Turn(), traffic=traffic, owner=owner
    )
    wire.is_ready = True
    with theirs:
        yield wire, traffic, owner, theirs
        wire.close(Failure("is closed"))


def write_of(num_bytes: int) -> Request:
    return put_request(PutItem(NAMES[0], (bytes(num_bytes),)))


def is_empty(traffic: Traffic) -> bool:
    """Whether exactly as much fits as when nothing is on its way."""
    too_much = [write_of(MOST_BYTES), write_of(1)]
    fits = []
    for request in too_much:
        traffic.began(request)
        fits.append(traffic.has_room)
    for request in too_much:
        traffic.ended(request, request.bulk_bytes)
    too_many = [write_of(LONG_BYTES + 1), write_of(LONG_BYTES + 1)]
    for request in too_many:
        traffic.began(request)
        fits.append(traffic.has_room)
    for request in too_many:
        traffic.ended(request, request.bulk_bytes)
    return fits == [True, False, True, not traffic.is_at_home]


async def receive(theirs: socket.socket, num_bytes: int) -> None:
    while num_bytes:
        received = await asyncio.get_running_loop().sock_recv(theirs, min(num_bytes, 1 << 20))
        assert received, "it has ended"
        num_bytes -= len(received)


async def begin(wire: Wire, *, num_bytes: int) -> Request:
    request = write_of(num_bytes)
    wire.submit(request, since=asyncio.get_running_loop().time())
    wire.send()
    return request


def num_sent_bytes(request: Request) -> int:
    return sum(map(len, request.pieces))


@pytest.mark.parametrize("host", [HOME, AWAY])
async def test_all_of_a_very_long_value_counts_until_it_is_sent_then_as_much_as_is_left_of_it(
    host: str,
) -> None:
    async with asyncio.timeout(60), wire_to(host) as (wire, traffic, owner, theirs):
        request = await begin(wire, num_bytes=VERY_LONG)
        await receive(theirs, num_sent_bytes(request) - MOST_BYTES)
        assert (owner.fills, traffic.has_room) == (0, False)
        await receive(theirs, MOST_BYTES)
        await until(lambda: owner.fills > 0)
        assert traffic.has_room
        little = write_of(1)
        traffic.began(little)
        assert not traffic.has_room, "MOST_BYTES count"
        traffic.ended(little, 1)
        assert request.outcome is None
        assert owner.fills == 1
        theirs.send(b"+OK\r\n")
        assert await finished([request]) == [[b"OK"]]
        assert is_empty(traffic)


async def test_a_very_long_value_that_is_read_counts_until_it_has_come() -> None:
    async with asyncio.timeout(60), wire_to(HOME) as (wire, traffic, owner, theirs):
        item, [buffer] = landing(NAMES[0], VERY_LONG)
        request = get_whole_request(item)
        wire.submit(request, since=asyncio.get_running_loop().time())
        wire.send()
        await receive(theirs, num_sent_bytes(request))
        assert (owner.fills, traffic.has_room) == (0, False)
        content = content_of(NAMES[0], VERY_LONG)
        await asyncio.get_running_loop().sock_sendall(
            theirs, b"$%d\r\n%b\r\n" % (VERY_LONG, content)
        )
        await finished([request])
        assert buffer == content
        assert is_empty(traffic)


async def test_a_value_that_is_not_so_long_counts_to_the_end() -> None:
    async with asyncio.timeout(60), wire_to(AWAY) as (wire, traffic, owner, theirs):
        first = await begin(wire, num_bytes=MOST_BYTES)
        second = await begin(wire, num_bytes=1)
        await receive(theirs, num_sent_bytes(first) + num_sent_bytes(second))
        assert (owner.fills, traffic.has_room) == (0, False)
        theirs.send(b"+OK\r\n" * 2)
        await finished([first, second])
        assert is_empty(traffic)


async def test_what_waits_for_the_next_turn_of_the_loop_is_sent_as_that_begins() -> None:
    """Others that have their turn then take it, one after the other, and the server has nothing to
    do meanwhile."""
    async with asyncio.timeout(60), wire_to(HOME) as (wire, _, _, theirs):
        turn, stats, sent = wire._turn, wire._stats, []  # noqa: SLF001
        turn.spend(turn.left)
        request = await begin(wire, num_bytes=1)
        assert stats.sent_bytes == 0
        asyncio.get_running_loop().call_soon(lambda: sent.append(stats.sent_bytes))
        await receive(theirs, num_sent_bytes(request))
        assert sent == [num_sent_bytes(request)]
        theirs.send(b"+OK\r\n")
        assert await finished([request]) == [[b"OK"]]


@pytest.mark.parametrize("is_sent", [True, False])
@pytest.mark.parametrize("how", ["answered", "lost", "closed"])
@pytest.mark.parametrize("host", [HOME, AWAY])
async def test_nothing_counts_of_what_has_ended_however_it_did(
    host: str, how: str, *, is_sent: bool
) -> None:
    async with asyncio.timeout(60), wire_to(host) as (wire, traffic, owner, theirs):
        assert is_empty(traffic)
        requests = [await begin(wire, num_bytes=VERY_LONG)]
        if is_sent:
            await receive(theirs, num_sent_bytes(requests[0]))
            await until(lambda: owner.fills > 0)
            requests.append(await begin(wire, num_bytes=LONG))
        assert not is_empty(traffic)
        if how == "answered":
            theirs.send(b"+OK\r\n" * len(requests))
            await finished(requests)
        elif how == "lost":
            theirs.shutdown(socket.SHUT_RDWR)
            await until(lambda: wire.is_lost)
            assert owner.taken_back == requests
        else:
            wire.close(Failure("is closed"))
            assert owner.taken_back == requests
        assert is_empty(traffic)
