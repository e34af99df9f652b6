"""A host name with several addresses, some of which do not answer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.redis_server import redis_server
from tests.storage.values import PATIENT
from tierkv.clock import SystemClock
from tierkv.storage.redis.store import RedisStore
from tierkv.storage.redis.url import parse_redis_url
from tierkv.storage.redis.wire import PlainPipe


@contextmanager
def deaf(port: int) -> Iterator[str]:
    """Yield an address that neither accepts nor refuses connections: its backlog is full."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.2", port))
        listener.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.2", port))
        yield "127.0.0.2"


async def connect(monkeypatch: pytest.MonkeyPatch, port: int, *addresses: str) -> None:
    async def resolved(_: object, host: str, port: int, **__: object) -> list[object]:
        found = addresses if host == "kv.example" else (host,)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in found]

    monkeypatch.setattr(type(asyncio.get_running_loop()), "getaddrinfo", resolved)
    url = parse_redis_url(f"redis://kv.example:{port}")
    async with RedisStore(url, PATIENT, SystemClock()).running():
        pass


async def test_an_address_that_never_answers_does_not_use_up_the_time_of_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with redis_server() as server, deaf(server.port) as nobody:
        async with asyncio.timeout(PATIENT.connect_timeout_s / 2):
            await connect(monkeypatch, server.port, nobody, "127.0.0.1")


async def test_a_cancel_leaves_no_attempt_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    with redis_server() as server, deaf(server.port) as nobody:
        before = asyncio.all_tasks()
        connecting = asyncio.create_task(connect(monkeypatch, server.port, nobody, nobody))
        await asyncio.sleep(0.15)  # connections to both addresses are being tried
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        assert asyncio.all_tasks() == before


class Leading(socket.socket):
    """A socket whose peer a test sets; None for a connection that has ended."""

    peer: str | None = None

    def getpeername(self) -> tuple[str, int]:
        if self.peer is None:
            raise OSError("not connected any more")
        return self.peer, 6379


@pytest.mark.parametrize(
    ("peer", "is_local"), [("127.0.0.1", True), ("192.0.2.1", False), (None, False)]
)
def test_a_connection_within_this_machine_is_known(peer: str | None, *, is_local: bool) -> None:
    with Leading(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.bind(("127.0.0.1", 0))
        sock.peer = peer
        assert PlainPipe(sock).is_local is is_local
