"""Servers that send replies that no Redis sends, and values that tierkv has not written."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from tests.latch import until
from tests.redis_server import RedisServer
from tests.storage.values import get_one, redis_store
from tierkv.errors import StoreCorruptError, StoreUnavailableError
from tierkv.storage.protocol import GetStatus
from tierkv.storage.redis import control
from tierkv.storage.redis.control import Command, ControlReply, RedisNotifier, ask_once

_VERB = re.compile(rb"\*\d+\r\n\$\d+\r\n([A-Z]+)\r\n")
_USUAL = {b"PING": b"+PONG\r\n", b"CLIENT": b"+OK\r\n"}


@dataclass
class OddServer:
    """A server that answers `oddity` to every command except PING and CLIENT."""

    oddity: bytes
    port: int = 0
    heard: Counter[bytes] = field(default_factory=Counter)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while said := await reader.read(65_536):
                for verb in _VERB.findall(said):
                    self.heard[verb] += 1
                    writer.write(_USUAL.get(verb, self.oddity))
        writer.close()


@asynccontextmanager
async def odd_server(oddity: bytes) -> AsyncIterator[OddServer]:
    server = OddServer(oddity)
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
        server.port = listening.sockets[0].getsockname()[1]
        yield server


@pytest.fixture(params=[b"-MOVED 1\r\n", b"-ASK 1 kv:x\r\n", b"%1\r\n*0\r\n:1\r\n"])
async def odd(request: pytest.FixtureRequest) -> AsyncIterator[OddServer]:
    async with odd_server(request.param) as server:
        yield server


async def test_a_listing_of_what_no_redis_says_is_refused_and_harms_nobody(odd: OddServer) -> None:
    store = redis_store(f"redis://127.0.0.1:{odd.port}")
    async with store.running():
        with pytest.raises(StoreUnavailableError, match="does not use the Redis protocol"):
            await store.list("t:f", limit=1)
        await store.ping()


@pytest.mark.parametrize("url", ["redis+cluster://{}", "redis+sentinel://{}/service"])
async def test_a_group_whose_members_say_what_no_redis_says_is_refused(
    odd: OddServer, url: str
) -> None:
    with pytest.raises(StoreUnavailableError, match="does not use the Redis protocol"):
        async with redis_store(url.format(f"127.0.0.1:{odd.port}")).running():
            pass


async def test_who_listens_to_what_no_redis_says_listens_again_less_and_less_often(
    odd: OddServer,
) -> None:
    store = redis_store(f"redis://127.0.0.1:{odd.port}")
    notifier = store.notifier()
    async with store.running(), notifier.running():
        with notifier.listen("t:topic") as listener:
            await until(lambda: odd.heard[b"SUBSCRIBE"] >= 1, "a first try")
            started = time.monotonic()
            await until(lambda: odd.heard[b"SUBSCRIBE"] >= 5, "four more")
            # Pauses of at least 25, 50, 100 and 200 ms.
            assert time.monotonic() - started > 0.3
            assert not listener.is_live


class StumblingConnection:
    """A connection that receives nothing, and raises an error when the wait is cancelled."""

    is_connected = True

    def __init__(self, *, takes_nothing: bool = False) -> None:
        self.takes_nothing = takes_nothing
        self.is_heard = self.is_left = False

    async def connect(self) -> None: ...

    async def disconnect(self) -> None:
        self.is_left = True

    def pack_commands(self, commands: Sequence[Command]) -> list[bytes]:
        return [repr(command).encode() for command in commands]

    async def send_packed_command(self, command: list[bytes]) -> None:
        if self.takes_nothing:
            await asyncio.Event().wait()

    async def read_response(self) -> bytes | int | list[ControlReply] | None:
        self.is_heard = True
        try:
            await asyncio.Event().wait()
        finally:
            raise RedisConnectionError("cut")


def notifier_over(
    connections: list[StumblingConnection],
) -> tuple[RedisNotifier, list[StumblingConnection]]:
    to_come = iter(connections)

    async def connect() -> StumblingConnection:
        return next(to_come)

    async def publish(topic: str, message: str) -> None: ...

    return RedisNotifier(connect, publish, url="redis://one"), connections


async def test_a_notifier_that_is_left_while_its_connection_fails_is_left() -> None:
    notifier, connections = notifier_over([StumblingConnection()])
    async with asyncio.timeout(20):
        async with notifier.running():
            with notifier.listen("t:topic"):
                await until(lambda: connections[0].is_heard, "an ear")
    assert connections[0].is_left


async def test_a_connection_that_takes_nothing_any_more_is_left_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the server was stopped, unsent bytes stay in the socket for ever."""
    monkeypatch.setattr(control, "_SILENT_S", 0.05)
    notifier, connections = notifier_over(
        [StumblingConnection(takes_nothing=True), StumblingConnection()]
    )
    async with notifier.running():
        with notifier.listen("t:topic"):
            await until(lambda: connections[1].is_heard, "another connection")
        assert connections[0].is_left


async def test_a_cancel_that_comes_as_a_connection_fails_is_not_forgotten() -> None:
    """Otherwise a task that repeats its question, as for a cluster's slots, would never end."""
    connection = StumblingConnection()
    asks = ask_once(lambda: connection, ("PING",), url="redis://one", deadline_s=100.0)
    task = asyncio.ensure_future(asks)
    await until(lambda: connection.is_heard, "the question")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_of_a_small_value_far_too_long_no_more_is_read_than_it_may_have(
    empty_redis: RedisServer,
) -> None:
    name = "t:f:long:0"
    await asyncio.to_thread(empty_redis.execute, "SETRANGE", name, 64 << 20, "x")
    store = redis_store(empty_redis.url)
    async with store.running():
        with pytest.raises(StoreCorruptError):
            await store.get(name, max_bytes=1_000)
        assert store.stats.received_bytes < 1 << 20


async def test_a_value_far_too_long_is_damage_before_all_of_it_has_come(
    empty_redis: RedisServer,
) -> None:
    name, other = "t:f:long:0", "t:f:other:0"
    await asyncio.to_thread(empty_redis.execute, "SETRANGE", name, 64 << 20, "x")
    await asyncio.to_thread(empty_redis.execute, "SET", other, "right")
    store = redis_store(empty_redis.url)
    async with store.running():
        assert (await get_one(store, name, 1_000))[0] is GetStatus.DAMAGED
        assert store.stats.received_bytes < 16 << 20
        for _ in range(8):  # also after the rest of the reply
            assert await get_one(store, other, 5) == (GetStatus.HIT, b"right")
