"""How fast long values are sent to a server on this machine, whatever the system is set to."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from tests.redis_server import RedisServer, empty_redis, module_redis
from tests.storage.values import content_of
from tierkv.clock import SystemClock
from tierkv.storage.protocol import PutItem, PutStatus
from tierkv.storage.redis.store import RedisSettings, RedisStore
from tierkv.storage.redis.url import parse_redis_url
from tierkv.storage.redis.wire import Address, PlainPipe, open_pipe

__all__ = ["empty_redis", "module_redis"]

SHORT, LONG = 192 << 10, 512 << 10
AT_HOME = (socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


class Asked(socket.socket):
    """A socket that notes what it is asked for. refuses: as a sandbox does. peer: where it says
    that it leads to; nowhere, if that is None."""

    refuses = False
    peer: tuple[str, int] | None = ("127.0.0.1", 1)

    def __init__(self, family: int, *, fileno: int | None = None) -> None:
        super().__init__(family, socket.SOCK_STREAM, fileno=fileno)
        self.asked: list[object] = []

    def setsockopt(self, *asked: object) -> None:
        self.asked.append(asked)
        if self.refuses:
            raise PermissionError("not in here")

    def getpeername(self) -> tuple[str, int]:
        if self.peer is None:
            raise OSError("not connected any more")
        return self.peer


@contextmanager
def connected() -> Iterator[tuple[Asked, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listening, Asked(socket.AF_INET) as ours:
        ours.connect(listening.getsockname())
        theirs, _ = listening.accept()
        with theirs:
            ours.setblocking(False)
            yield ours, theirs


def send(pipe: PlainPipe, num_bytes: int, theirs: socket.socket) -> None:
    """All of it, in pieces as they are sent, and see that it arrives."""
    content = content_of("a", num_bytes)
    head, left = memoryview(b"head"), memoryview(content)
    received = bytearray()
    while left:
        num_sent = pipe.write([head, left])
        assert num_sent > len(head)
        left = left[num_sent - len(head) :]
        received += theirs.recv(num_sent, socket.MSG_WAITALL)[len(head) :]
    assert received == content


def test_only_long_values_to_a_server_here_are_sent_as_fast_as_it_takes_them() -> None:
    with connected() as (ours, theirs):
        pipe = PlainPipe(ours)
        send(pipe, SHORT, theirs)
        assert ours.asked == []
        for _ in range(2):
            send(pipe, LONG, theirs)
        assert ours.asked == [AT_HOME], "once"
        assert pipe.is_at_home, "still"


def test_to_another_machine_all_is_sent_as_the_system_has_it() -> None:
    with connected() as (ours, theirs):
        ours.peer = ("192.0.2.1", 6379)
        pipe = PlainPipe(ours)
        send(pipe, LONG, theirs)
        assert ours.asked == []
        assert not pipe.is_at_home


def test_where_that_is_refused_values_are_sent_all_the_same() -> None:
    with connected() as (ours, theirs):
        ours.refuses = True
        pipe = PlainPipe(ours)
        for _ in range(2):
            send(pipe, LONG, theirs)
        assert ours.asked == [AT_HOME]


def test_a_server_that_has_gone_already_is_nobodys_error_yet() -> None:
    with connected() as (ours, theirs):
        ours.peer = None
        pipe = PlainPipe(ours)
        send(pipe, LONG, theirs)
        assert ours.asked == []
        assert not pipe.is_at_home


async def test_a_real_connection_is_not_held_back_after_its_first_long_value(
    empty_redis: RedisServer,
) -> None:
    pipe = await open_pipe(Address("127.0.0.1", empty_redis.port), None)
    try:
        with socket.socket(fileno=os.dup(pipe.fd)) as same:
            name = socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16
            usual = same.getsockopt(*name)
            head = b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$%d\r\n" % LONG
            pipe.write([memoryview(head)])
            assert same.getsockopt(*name) == usual
            pipe.write([memoryview(bytes(LONG)), memoryview(b"\r\n")])
            assert same.getsockopt(*name).rstrip(b"\0") == b"reno"
    finally:
        pipe.close()


async def test_values_of_all_sizes_arrive_over_connections_that_change_on_the_way(
    empty_redis: RedisServer,
) -> None:
    for url in (empty_redis.url, empty_redis.unix_url):
        store = RedisStore(
            parse_redis_url(url),
            RedisSettings(write_connections=1, timeout_s=30.0, connect_timeout_s=5.0),
            SystemClock(),
        )
        sizes = [SHORT, LONG, SHORT, 8 << 20, 1, LONG, SHORT]
        items = [PutItem(f"t:f:{i}:0", (content_of(str(i), n),)) for i, n in enumerate(sizes)]
        async with store.running():
            outcomes = await store.put(items)
            assert {outcome.status for outcome in outcomes} == {PutStatus.STORED}
            for index, (item, size) in enumerate(zip(items, sizes, strict=True)):
                found = await store.get(item.name, max_bytes=8 << 20)
                assert found == content_of(str(index), size)
            await store.delete([item.name for item in items])
