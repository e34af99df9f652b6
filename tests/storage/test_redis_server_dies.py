"""A Redis server that dies in the middle of a reply, seen from the socket."""

from __future__ import annotations

import asyncio
import fcntl
import re
import socket
import struct
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.latch import until
from tests.storage.values import content_of, landing
from tierkv.clock import SystemClock
from tierkv.storage.protocol import GetStatus
from tierkv.storage.redis.store import RedisSettings, RedisStore
from tierkv.storage.redis.url import parse_redis_url

MANY = 64  # as many as are on their way on one connection at a time
NAMES = [f"t:f:{index:02}:0" for index in range(MANY + 8)]
MISSING = set(NAMES[::3])
VALUE_BYTES = 700  # all that are on their way fit into a socket, and not into one small read


class DyingServer:
    """Answers PING. Asked for a value it waits for `go`, sends the half of it, and is gone."""

    def __init__(self, listener: socket.socket) -> None:
        self.was_asked, self.go, self.is_gone = (threading.Event() for _ in range(3))
        self._listener = listener

    def accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # the test is over
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            while request := connection.recv(65_536):
                if b"CLIENT" in request:
                    return  # a connection to ask for the time, which this server does not tell
                if b"PING" in request:
                    connection.sendall(b"+PONG\r\n")
                    continue
                self.was_asked.set()
                self.go.wait(20)
                connection.sendall(b"$200000\r\n" + b"x" * 100_000)
                # As the kernel does for a process that is killed with requests unread: a reset.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                break
        self.is_gone.set()


class ServerThatDiesOnce(DyingServer):
    """Answers PING, and the first MANY requests for values, when `go` is said, as its last words.
    After that it answers over other connections."""

    def _serve(self, connection: socket.socket) -> None:
        received = b""
        with connection:
            while more := connection.recv(65_536):
                received += more
                if b"CLIENT" in received:
                    return  # as above
                if b"PING" in received:
                    connection.sendall(b"+PONG\r\n")
                    received = b""
                    continue
                names = re.findall(rb"GET\r\n\$[0-9]+\r\n(\S+)\r\n", received)
                if self.is_gone.is_set():
                    received = b""
                    connection.sendall(b"".join(map(_answer, names)))
                elif len(names) == MANY:
                    self.was_asked.set()
                    self.go.wait(20)
                    connection.sendall(b"".join(map(_answer, names)))
                    while _unacknowledged(connection):
                        pass
                    linger = struct.pack("ii", 1, 0)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    break
        self.is_gone.set()


def _answer(name: bytes) -> bytes:
    if name.decode() in MISSING:
        return b"$-1\r\n"
    return b"$%d\r\n%b\r\n" % (VALUE_BYTES, content_of(name.decode(), VALUE_BYTES))


def _unacknowledged(connection: socket.socket) -> int:
    [num_bytes] = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))
    assert isinstance(num_bytes, int)
    return num_bytes


@contextmanager
def dying_server(
    kind: Callable[[socket.socket], DyingServer] = DyingServer,
) -> Iterator[tuple[DyingServer, str]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = kind(listener)
        accepting = threading.Thread(target=server.accept)
        accepting.start()
        try:
            yield server, f"redis://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join()


async def test_what_a_dead_peer_left_in_the_socket_does_not_hide_its_death() -> None:
    """uvloop tells once of a socket with an error, and then there are bytes to read first."""
    patient = RedisSettings(timeout_s=20.0, connect_timeout_s=20.0)
    with dying_server() as (server, url):
        store = RedisStore(parse_redis_url(url), patient, SystemClock())
        async with store.running(), asyncio.timeout(10):
            item, _ = landing("t:f:a:0", 200_000)
            reading = asyncio.ensure_future(store.get_into([item]))
            await until(server.was_asked.is_set, "a question")
            server.go.set()
            while not server.is_gone.is_set():  # the loop looks when all of it has come
                pass
            [outcome] = await reading
    assert outcome.status is GetStatus.FAILED
    assert "cannot be reached" in outcome.reason


async def test_last_words_reach_whom_they_answer_though_the_next_request_cannot_be_sent() -> None:
    """With the first of the answers there is room for another request: sending it fails, and the
    other answers are still in the socket."""
    settings = RedisSettings(1, 1, timeout_s=20.0, connect_timeout_s=20.0)
    with dying_server(ServerThatDiesOnce) as (server, url):
        store = RedisStore(parse_redis_url(url), settings, SystemClock())
        landings = [landing(name, VALUE_BYTES) for name in NAMES]
        async with store.running(), asyncio.timeout(20), asyncio.TaskGroup() as group:
            reading = group.create_task(store.get_into([item for item, _ in landings]))
            await until(server.was_asked.is_set, "as many questions as go at once")
            server.go.set()
            while not server.is_gone.is_set():  # the loop looks when all of it has come
                pass
            outcomes = await reading
    for (item, [buffer]), outcome in zip(landings, outcomes, strict=True):
        if item.name in MISSING:
            assert outcome.status is GetStatus.MISS
        else:
            assert outcome.status is GetStatus.HIT
            assert buffer == content_of(item.name, VALUE_BYTES)
