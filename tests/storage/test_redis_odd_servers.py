"""Servers that die, close connections in the middle, or send what no Redis sends.

Also values that tierkv has not written. No outcome is wrong, and nothing waits for ever.
"""

from __future__ import annotations

import asyncio
import re
import socket
import socketserver
import struct
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from tests.latch import until
from tests.redis_server import RedisServer
from tests.storage.values import content_of, get_one, landing, put_one, redis_store, refused
from tierkv.errors import StoreCorruptError, StoreUnavailableError
from tierkv.storage.protocol import GetStatus, PutItem, PutStatus
from tierkv.storage.redis import control, pool
from tierkv.storage.redis.control import Command, ControlReply, RedisNotifier, ask_once
from tierkv.storage.redis.store import RedisSettings

VALUE_BYTES = 200_000
NAMES = [f"t:f:{index:02}:0" for index in range(16)]
CONTENT = {name: content_of(name, VALUE_BYTES) for name in NAMES}
ROUNDS = 4
_VERB = re.compile(rb"\*\d+\r\n\$\d+\r\n([A-Z]+)\r\n")
_USUAL = {b"PING": b"+PONG\r\n", b"CLIENT": b"+OK\r\n"}


@dataclass
class OddServer:
    """A server that answers PING and CLIENT as usual, and any other command with `answer(verb)`.

    If `answer` returns None, the server closes the connection.
    """

    answer: Callable[[bytes], bytes | None]
    url: str = ""
    heard: Counter[bytes] = field(default_factory=Counter)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while said := await reader.read(65_536):
                for verb in _VERB.findall(said):
                    self.heard[verb] += 1
                    reply = _USUAL.get(verb) or self.answer(verb)
                    if reply is None:
                        writer.close()
                        return
                    writer.write(reply)
        writer.close()


@asynccontextmanager
async def odd_server(answer: Callable[[bytes], bytes | None]) -> AsyncIterator[OddServer]:
    server = OddServer(answer)
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
        server.url = f"redis://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        yield server


async def test_a_request_whose_connection_is_turned_away_goes_over_one_that_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "_MAX_RETRIES", 0)
    serving: list[asyncio.StreamWriter] = []
    num_turned_away = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_turned_away
        while said := await reader.read(65_536):
            verbs = _VERB.findall(said)
            if b"SET" in verbs and writer not in serving:
                if serving:
                    num_turned_away += 1
                    writer.write(b"-ERR max number of clients reached\r\n")
                    break
                serving.append(writer)
            await asyncio.sleep(0.01)
            writer.write(b"".join(_USUAL.get(verb, b"+OK\r\n") for verb in verbs))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
        url = f"redis://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        store = redis_store(url, RedisSettings(num_connections=4, write_connections=4))
        async with store.running():
            assert await put_one(store, NAMES[0], b"x") is PutStatus.STORED
            outcomes = await store.put([PutItem(name, (b"x",)) for name in NAMES])
            assert {outcome.status for outcome in outcomes} == {PutStatus.STORED}
            assert num_turned_away


# Servers that die or close connections


class DyingServer(socketserver.ThreadingTCPServer):
    """A server that answers PING. For a value it waits for `go`, sends half of it, and dies."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Dying)
        self.was_asked, self.go, self.is_gone = (threading.Event() for _ in range(3))


class Dying(socketserver.BaseRequestHandler):
    server: DyingServer
    request: socket.socket

    def handle(self) -> None:
        while said := self.request.recv(65_536):
            if b"CLIENT" in said:
                return  # the connection for TIME, which this server does not answer
            if b"PING" in said:
                self.request.sendall(b"+PONG\r\n")
                continue
            self.server.was_asked.set()
            self.server.go.wait(20)
            self.request.sendall(b"$200000\r\n" + b"x" * 100_000)
            # Send a reset, as the kernel does for a killed process with unread requests.
            self.request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.request.close()
            self.server.is_gone.set()
            return


async def test_what_a_dead_peer_left_in_the_socket_does_not_hide_its_death() -> None:
    """uvloop reports a failed socket only once, even if received bytes are left to read."""
    patient = RedisSettings(timeout_s=20.0, connect_timeout_s=20.0)
    with DyingServer() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        try:
            store = redis_store(f"redis://127.0.0.1:{server.server_address[1]}", patient)
            async with store.running(), asyncio.timeout(10):
                item, _ = landing("t:f:a:0", 200_000)
                reading = asyncio.ensure_future(store.get_into([item]))
                await until(server.was_asked.is_set, "a question")
                server.go.set()
                while not server.is_gone.is_set():  # block the loop until all bytes have arrived
                    pass
                [outcome] = await reading
        finally:
            server.shutdown()
    assert outcome.status is GetStatus.FAILED
    assert "cannot be reached" in outcome.reason


async def test_connections_that_end_in_the_middle_cost_nobody_an_answer(
    empty_redis: RedisServer,
) -> None:
    store = redis_store(empty_redis.url)

    async def use(at: int) -> None:
        landings = [landing(name, VALUE_BYTES) for name in (NAMES[at], *NAMES[:7])]
        for outcome in await store.get_into([item for item, _ in landings]):
            assert outcome.status is GetStatus.HIT, outcome.reason
        for item, [buffer] in landings:
            assert buffer == CONTENT[item.name]
        assert await put_one(store, NAMES[at], bytes(VALUE_BYTES)) is PutStatus.EXISTED
        assert await store.exists(NAMES) == len(NAMES)

    async with store.running():
        await store.put([PutItem(name, (CONTENT[name],)) for name in NAMES])
        for _ in range(ROUNDS):
            async with asyncio.TaskGroup() as group:
                for at in range(len(NAMES)):
                    group.create_task(use(at))
                await asyncio.to_thread(empty_redis.execute, "CLIENT", "KILL", "TYPE", "normal")


async def test_only_what_may_be_done_twice_is_sent_again_to_a_server_that_ends_without_a_word() -> (
    None
):
    async with odd_server(lambda _: None) as server:
        store = redis_store(server.url)
        async with store.running():
            with pytest.raises(StoreUnavailableError):
                await store.delete([NAMES[0]])
            with pytest.raises(StoreUnavailableError):
                await store.present([NAMES[0]])
    assert server.heard[b"UNLINK"] == 1
    assert server.heard[b"EXISTS"] > 1


async def test_a_question_behind_a_change_that_a_new_replica_refuses_is_answered() -> None:
    """Its connection is closed, so that the next one goes to the new master."""
    replies = {b"PEXPIRE": b"-READONLY You can't write against a read only replica.\r\n"}
    async with odd_server(lambda verb: replies.get(verb, b":1\r\n")) as server:
        store = redis_store(server.url)
        async with store.running(), asyncio.TaskGroup() as group:
            touching = group.create_task(refused(store.touch([NAMES[0]], ttl_s=60.0)))
            asking = group.create_task(store.present([NAMES[0]]))
    assert "refused PEXPIRE: READONLY" in touching.result()
    assert asking.result() == [True]


@pytest.mark.parametrize(
    ("only_new", "status"), [(True, PutStatus.FAILED), (False, PutStatus.EXISTED)]
)
async def test_who_wrote_a_value_that_must_be_new_is_not_told_that_it_existed(
    only_new: bool, status: PutStatus
) -> None:
    """The first reply is lost with its connection. A second attempt finds the value."""
    replies = iter([None, b"$-1\r\n"])
    async with odd_server(lambda verb: next(replies) if verb == b"SET" else b"+OK\r\n") as server:
        store = redis_store(server.url)
        async with store.running():
            assert await put_one(store, NAMES[0], b"x", only_new=only_new) is status


async def test_answers_to_earlier_requests_give_a_later_one_no_more_time() -> None:
    """100 kB have 100 ms in addition to 400 ms."""
    answers = iter([b"$1\r\nx\r\n"] * 3)
    settings = RedisSettings(timeout_s=0.4, slowest_bytes_per_s=1e6)
    async with odd_server(
        lambda verb: next(answers, b"") if verb == b"GET" else b"+OK\r\n"
    ) as server:
        store = redis_store(server.url, settings)
        async with store.running():
            for _ in range(3):
                assert await store.get(NAMES[0], max_bytes=100_000) == b"x"
            why = await refused(store.get(NAMES[0], max_bytes=100_000))
    assert why.endswith("did not answer within 500 ms")


async def test_a_question_that_a_dead_master_does_not_answer_leads_to_its_successor() -> None:
    masters: list[OddServer] = []

    def answers(to_question: bytes | None) -> Callable[[bytes], bytes | None]:
        def answer(verb: bytes) -> bytes | None:
            if verb != b"CLUSTER":
                return to_question
            port = int(masters[-1].url.rpartition(":")[2])
            return b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n" % port

        return answer

    async with odd_server(answers(None)) as dead, odd_server(answers(b":1\r\n")) as successor:
        masters.append(dead)
        store = redis_store(dead.url.replace("redis:", "redis+cluster:"))
        async with store.running(), asyncio.timeout(20):
            masters.append(successor)
            await refused(store.present([NAMES[0]]))
            while not successor.heard[b"EXISTS"]:
                with suppress(StoreUnavailableError):
                    assert await store.present([NAMES[0]]) == [True]


# Servers that send what no Redis sends


@pytest.fixture(params=[b"-MOVED 1\r\n", b"-ASK 1 kv:x\r\n", b"%1\r\n*0\r\n:1\r\n"])
async def odd(request: pytest.FixtureRequest) -> AsyncIterator[OddServer]:
    async with odd_server(lambda _: request.param) as server:
        yield server


async def test_a_server_of_another_kind_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_USUAL, b"PING", b"HTTP/1.1 400 Bad Request\r\n\r\n")
    async with odd_server(lambda _: None) as server:
        with pytest.raises(StoreUnavailableError, match="does not use the Redis protocol"):
            async with redis_store(server.url).running():
                pass


async def test_a_listing_of_what_no_redis_says_is_refused_and_harms_nobody(odd: OddServer) -> None:
    store = redis_store(odd.url)
    async with store.running():
        with pytest.raises(StoreUnavailableError, match="does not use the Redis protocol"):
            await store.list("t:f", limit=1)
        await store.ping()


@pytest.mark.parametrize(
    ("scheme", "path"), [("redis+cluster", ""), ("redis+sentinel", "/service")]
)
async def test_a_group_whose_members_say_what_no_redis_says_is_refused(
    odd: OddServer, scheme: str, path: str
) -> None:
    with pytest.raises(StoreUnavailableError, match="does not use the Redis protocol"):
        async with redis_store(odd.url.replace("redis", scheme) + path).running():
            pass


async def test_who_listens_to_what_no_redis_says_listens_again_less_and_less_often(
    odd: OddServer,
) -> None:
    store = redis_store(odd.url)
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


def notifier_over(*connections: StumblingConnection) -> RedisNotifier:
    to_come = iter(connections)

    async def connect() -> StumblingConnection:
        return next(to_come)

    async def publish(topic: str, message: str) -> None: ...

    return RedisNotifier(connect, publish, url="redis://one")


async def test_a_notifier_that_is_left_while_its_connection_fails_is_left() -> None:
    connection = StumblingConnection()
    notifier = notifier_over(connection)
    async with asyncio.timeout(20), notifier.running():
        with notifier.listen("t:topic"):
            await until(lambda: connection.is_heard, "an ear")
    assert connection.is_left


async def test_a_connection_that_takes_nothing_any_more_is_left_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the server was stopped, unsent bytes stay in the socket for ever."""
    monkeypatch.setattr(control, "_SILENT_S", 0.05)
    first, second = StumblingConnection(takes_nothing=True), StumblingConnection()
    notifier = notifier_over(first, second)
    async with notifier.running():
        with notifier.listen("t:topic"):
            await until(lambda: second.is_heard, "another connection")
        assert first.is_left


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
