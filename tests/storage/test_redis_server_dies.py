"""A Redis server that dies in the middle of a reply, seen from the client's socket."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.latch import until
from tests.storage.values import landing
from tierkv.clock import SystemClock
from tierkv.storage.protocol import GetStatus
from tierkv.storage.redis.store import RedisSettings, RedisStore
from tierkv.storage.redis.url import parse_redis_url


class DyingServer:
    """A server that answers PING. For a value it waits for `go`, sends half of it, and dies."""

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
                    return  # the connection for TIME, which this server does not answer
                if b"PING" in request:
                    connection.sendall(b"+PONG\r\n")
                    continue
                self.was_asked.set()
                self.go.wait(20)
                connection.sendall(b"$200000\r\n" + b"x" * 100_000)
                # Send a reset, as the kernel does for a killed process with unread requests.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                break
        self.is_gone.set()


@contextmanager
def dying_server() -> Iterator[tuple[DyingServer, str]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = DyingServer(listener)
        accepting = threading.Thread(target=server.accept)
        accepting.start()
        try:
            yield server, f"redis://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join()


async def test_what_a_dead_peer_left_in_the_socket_does_not_hide_its_death() -> None:
    """uvloop reports a failed socket only once, even if received bytes are left to read."""
    patient = RedisSettings(timeout_s=20.0, connect_timeout_s=20.0)
    with dying_server() as (server, url):
        store = RedisStore(parse_redis_url(url), patient, SystemClock())
        async with store.running(), asyncio.timeout(10):
            item, _ = landing("t:f:a:0", 200_000)
            reading = asyncio.ensure_future(store.get_into([item]))
            await until(server.was_asked.is_set, "a question")
            server.go.set()
            while not server.is_gone.is_set():  # block the loop until all bytes have arrived
                pass
            [outcome] = await reading
    assert outcome.status is GetStatus.FAILED
    assert "cannot be reached" in outcome.reason
