"""Behaviour that only the Redis store has: its faults, connections and error sentences."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import socket
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import pytest
from click.testing import CliRunner

from tests.latch import until
from tests.redis_proxy import redis_proxy
from tests.redis_server import RedisServer, redis_server
from tests.storage.values import (
    PATIENT,
    Taken,
    cancelled_after,
    content_of,
    get_one,
    guarded,
    landing,
    put_one,
    redis_store,
    refused,
)
from tierkv.cli.storage import storage
from tierkv.errors import StoreRefusedError, StoreUnavailableError
from tierkv.storage import guard
from tierkv.storage.protocol import GetStatus, PutItem, PutStatus, Usage
from tierkv.storage.redis.store import RedisSettings, RedisStore
from tierkv.storage.redis.url import TlsFiles
from tierkv.storage.redis.wire import Address, PlainPipe, open_pipe

NAMES = [f"t:f:{index:03}:0" for index in range(100)]


@pytest.fixture
async def store(empty_redis: RedisServer) -> AsyncIterator[RedisStore]:
    store = redis_store(empty_redis.url)
    async with store.running():
        yield store


@contextmanager
def ends_within(seconds: float, *, after: float = 0.0) -> Iterator[None]:
    """Check that the body takes `after` to `seconds` seconds, with 3 s for a busy machine."""
    started = time.monotonic()
    yield
    # The upper bound is below redis-py's own 12 s, also on a busy machine.
    assert after <= time.monotonic() - started <= seconds + 3.0


async def refusal(url: str, settings: RedisSettings = PATIENT) -> str:
    """Return the error of a store that cannot be opened."""
    with pytest.raises(StoreUnavailableError) as caught:
        async with redis_store(url, settings).running():
            pass
    return str(caught.value)


async def test_a_black_hole_costs_one_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        settings = RedisSettings(timeout_s=0.25, connect_timeout_s=0.25)
        with ends_within(0.25, after=0.2):
            sentence = await refusal(f"redis://127.0.0.1:{port}", settings)
    assert "did not answer within 250 ms" in sentence


async def test_a_frozen_server_costs_a_batch_one_deadline_however_long_it_is(
    empty_redis: RedisServer,
) -> None:
    async with (writer := redis_store(empty_redis.url)).running():
        assert await put_one(writer, "t:f:a:0", b"value") is PutStatus.STORED
    store = redis_store(empty_redis.url, RedisSettings(timeout_s=1.0, connect_timeout_s=1.0))
    async with store.running():
        large = bytes(4_000_000)
        empty_redis.pause()
        try:
            with ends_within(2.0, after=0.95):
                async with asyncio.TaskGroup() as group:
                    gets = [
                        group.create_task(store.get_into([landing(name, 10)[0] for name in NAMES]))
                        for _ in range(10)
                    ]
                    puts = [
                        group.create_task(store.put([PutItem(n, (large,)) for n in NAMES]))
                        for _ in range(10)
                    ]
                    questions = [group.create_task(refused(store.exists(NAMES))) for _ in range(20)]
        finally:
            empty_redis.resume()
        for got in gets:
            assert [outcome.status for outcome in got.result()] == [GetStatus.FAILED] * 100
        for put in puts:
            assert [outcome.status for outcome in put.result()] == [PutStatus.FAILED] * 100
        assert "did not answer" in gets[0].result()[99].reason
        assert all("did not answer" in question.result() for question in questions)
        async with asyncio.timeout(20):
            while (await get_one(store, "t:f:a:0", 5))[0] is GetStatus.FAILED:
                pass  # a busy machine may miss its deadline
        assert await get_one(store, "t:f:a:0", 5) == (GetStatus.HIT, b"value")


async def test_a_connection_given_up_is_closed_though_its_peer_took_nothing(
    empty_redis: RedisServer,
) -> None:
    settings = RedisSettings(write_connections=1, timeout_s=1.0, connect_timeout_s=5.0)
    store = redis_store(empty_redis.url, settings)
    async with store.running():
        assert await put_one(store, "t:f:a:0", b"value") is PutStatus.STORED
        open_before = num_open_files()
        empty_redis.pause()
        try:
            assert await put_one(store, "t:f:b:0", bytes(8_000_000)) is PutStatus.FAILED
            await until(lambda: num_open_files() <= open_before - 1, "a closed socket")
        finally:
            empty_redis.resume()


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_an_idle_connection_shows_that_it_is_in_use(empty_redis: RedisServer) -> None:
    """Without keepalive a firewall drops an idle connection, and the next request is lost."""
    pipe = await open_pipe(Address("127.0.0.1", empty_redis.port), None)
    try:
        with socket.socket(fileno=os.dup(pipe.fd)) as same:
            assert same.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert same.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 120
    finally:
        pipe.close()


async def test_addresses_and_passwords_of_any_spelling_reach_the_server(tmp_path: Path) -> None:
    """Values, listings and hints are tested, because each uses other sockets."""
    directory = tmp_path / "a b#%?"
    directory.mkdir()
    words = ("--unixsocket", str(directory / "r s.sock"), "--bind", "127.0.0.1", "-::1")
    with redis_server(*words, password="p@s:s/w%rd \u00fc#?") as server:
        login = quote(server.password or "", safe="")
        urls = [
            f"unix://:{login}@{quote(str(directory))}/r s.sock?db=3",
            f"redis://:{login}@LOCALHOST:{server.port}/4/",
        ]
        if os.path.exists("/proc/net/if_inet6"):  # noqa: ASYNC240 - of the kernel, not a disk
            urls += [
                f"redis://default:{login}@[::1]:{server.port}/5",
                f"redis://:{login}@[::1%25lo]:{server.port}/6",
            ]
        for url in urls:
            store = redis_store(url)
            async with store.running():
                assert await put_one(store, "t:f:1:0", b"value") is PutStatus.STORED, url
                assert await get_one(store, "t:f:1:0", 5) == (GetStatus.HIT, b"value")
                assert await store.usage("t:f") == Usage(1, 5)
                notifier = store.notifier()
                async with notifier.running():
                    with notifier.listen("t:topic") as listener:
                        await until(lambda: listener.is_live)
            assert login not in store.url


async def test_connections_are_bounded_and_closed_at_the_end(empty_redis: RedisServer) -> None:
    store = redis_store(empty_redis.url, replace(PATIENT, num_connections=3, write_connections=2))
    async with store.running():
        async with asyncio.TaskGroup() as group:
            for start in range(50):
                items = [PutItem(f"t:{start}:{i}", (bytes(50_000),)) for i in range(10)]
                group.create_task(store.put(items))
                group.create_task(store.exists(NAMES))
                group.create_task(store.get_into([landing(name, 1)[0] for name in NAMES]))
        assert await asyncio.to_thread(empty_redis.num_connections) == 3 + 2 + 1
    async with asyncio.timeout(5):
        while await asyncio.to_thread(empty_redis.num_connections):
            pass  # the server notices closed connections late


async def test_a_turn_of_the_loop_sends_a_bounded_number_of_bytes(empty_redis: RedisServer) -> None:
    """The limit holds for any number of connections, so that other work on the loop can run."""
    store = redis_store(empty_redis.url, replace(PATIENT, write_connections=16))
    items = [PutItem(f"t:f:{i}:0", (bytes(1 << 20),)) for i in range(64)]
    most = 0
    async with store.running():
        writing = asyncio.create_task(store.put(items))
        before = store.stats.sent_bytes
        while not writing.done():
            await asyncio.sleep(0)
            most = max(most, store.stats.sent_bytes - before)
            before = store.stats.sent_bytes
        assert {outcome.status for outcome in await writing} == {PutStatus.STORED}
    assert 0 < most <= 2 << 20, "what one turn begins with, and what tasks do in it"


async def test_a_server_that_takes_no_more_connections_serves_over_those_it_has() -> None:
    with redis_server("--maxclients", "10") as server, ExitStack() as others:
        store = redis_store(server.url, replace(PATIENT, num_connections=4, write_connections=4))
        async with store.running():
            assert await put_one(store, NAMES[0], b"x") is PutStatus.STORED
            assert await get_one(store, NAMES[0], 1) == (GetStatus.HIT, b"x")

            def fill() -> None:
                address = ("127.0.0.1", server.port)
                with suppress(OSError):
                    for _ in range(20):
                        client = others.enter_context(socket.create_connection(address))
                        client.sendall(b"PING\r\n")
                        if not client.recv(5).startswith(b"+PONG"):
                            break

            await asyncio.to_thread(fill)
            content = bytes(100_000)
            puts = await store.put([PutItem(name, (content,)) for name in NAMES[1:]])
            assert {put.status for put in puts} == {PutStatus.STORED}
            gets = await store.get_into([landing(name, len(content))[0] for name in NAMES[1:]])
            assert {get.status for get in gets} == {GetStatus.HIT}
            assert store.stats.connections < 20, "it does not storm"
            assert "refuses connections (ERR max number of clients" in await refusal(server.url)


async def test_more_callers_than_can_wait_are_turned_away(empty_redis: RedisServer) -> None:
    store = redis_store(empty_redis.url, RedisSettings(timeout_s=2.0, connect_timeout_s=5.0))
    async with store.running():
        empty_redis.pause()
        try:
            async with asyncio.TaskGroup() as group:
                questions = [group.create_task(refused(store.ping())) for _ in range(17_000)]
        finally:
            empty_redis.resume()
        sentences = [question.result() for question in questions]
        # 16,384 requests wait, and 64 are in flight if there was a connection.
        turned_away = sum("16384 requests waiting" in sentence for sentence in sentences)
        assert turned_away >= 17_000 - 16_448
        assert sum("did not answer" in sentence for sentence in sentences) >= 16_384
        await store.ping()


@pytest.mark.parametrize(
    ("command", "refuses_changes"),
    [
        ("REPLICAOF 127.0.0.1 1", True),  # READONLY
        ("CONFIG SET min-replicas-to-write 1", True),  # NOREPLICAS
        ("CONFIG SET maxmemory 1", False),  # OOM
        ("ACL SETUSER default -set -pexpire -unlink", True),  # NOPERM
        ("CONFIG SET proto-max-bulk-len 1mb", False),  # ERR Protocol error: invalid bulk length
    ],
)
async def test_a_server_that_refuses_writes_and_changes_is_still_read(
    command: str, refuses_changes: bool
) -> None:
    with redis_server() as server:
        store = guarded(redis_store(server.url))
        async with store.running():
            assert await put_one(store, NAMES[0], b"x") is PutStatus.STORED
            await asyncio.to_thread(server.execute, *command.split())
            for _ in range(10 * refuses_changes):
                with pytest.raises(StoreRefusedError, match="refused PEXPIRE"):
                    await store.touch(NAMES[:1], ttl_s=60)
                with pytest.raises(StoreRefusedError, match="refused UNLINK"):
                    await store.delete(NAMES[:1])
            for name in NAMES[1:50]:
                assert await put_one(store, name, bytes((1 << 20) + 1)) is PutStatus.FULL
            assert store.health.num_opened == 0
            assert await get_one(store, NAMES[0], 1) == (GetStatus.HIT, b"x")


def test_the_command_line_takes_the_files_for_tls(tls_redis: str, certificates: Path) -> None:
    trusting = ["--tls-ca", str(certificates / "cert.pem"), "du", tls_redis]
    result = CliRunner().invoke(storage, trusting, catch_exceptions=False)
    assert result.exit_code == 0
    refused = CliRunner().invoke(storage, ["du", tls_redis])
    assert isinstance(refused.exception, StoreUnavailableError)


async def test_a_write_over_tls_that_was_held_up_goes_on_though_less_may_be_sent_now(
    certificates: Path,
) -> None:
    """OpenSSL requires the same length again, though this turn may send fewer bytes."""
    key, certificate = str(certificates / "key.pem"), str(certificates / "cert.pem")
    content = random.randbytes(12 << 20)
    may_read = asyncio.Event()
    received: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await may_read.wait()
        received.set_result(await reader.readexactly(len(content)))
        writer.close()

    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    await asyncio.to_thread(theirs.load_cert_chain, certificate, key)
    ours = await asyncio.to_thread(TlsFiles(ca=certificate).context)
    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=theirs, limit=4096) as server:
        pipe = await open_pipe(Address("127.0.0.1", server.sockets[0].getsockname()[1]), ours)
        rest, sizes = memoryview(content), itertools.cycle((512 << 10, 88, 100_000))
        while rest:
            try:
                rest = rest[pipe.write([rest[: next(sizes)]]) :]
            except BlockingIOError:
                may_read.set()
                await asyncio.sleep(0.001)
        assert await asyncio.wait_for(received, 30) == content
        pipe.close()


async def test_a_caller_that_goes_while_its_connection_is_made_gets_its_buffers_untouched(
    empty_redis: RedisServer,
) -> None:
    for ticks in range(40):
        store = redis_store(empty_redis.url)
        async with store.running():
            await put_one(store, "t:f:a:0", b"x" * 1_000, keep_existing=False)
            item, [buffer] = landing("t:f:a:0", 1_000)
            await cancelled_after(ticks, store.get_into([item]))
            buffer[:] = bytes(1_000)
            assert (await get_one(store, "t:f:a:0", 1_000))[0] is GetStatus.HIT
            assert buffer == bytes(1_000)


async def test_a_digest_is_of_the_try_that_brought_the_value(
    empty_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt receives a part of the value before its connection is closed."""
    # Otherwise a late failure is not tried again.
    monkeypatch.setattr(guard, "_RETRY_WITHIN_S", 100.0)
    content = content_of("a", 1 << 20)
    async with redis_proxy(empty_redis.port) as proxy:
        store = guarded(redis_store(proxy.url))
        async with store.running():
            await put_one(store, "t:f:a:0", content)
            digests: list[Taken] = []

            def made() -> Taken:
                digests.append(Taken())
                return digests[-1]

            item, [buffer] = landing("t:f:a:0", len(content))
            proxy.cut_after, proxy.cuts_once = 300_000, True
            [outcome] = await store.get_into([replace(item, digest=made)])
            assert outcome.status is GetStatus.HIT, outcome.reason
            assert bytes(buffer) == content, "other bytes"  # avoids a long comparison by pytest
            first, last = digests
            assert 0 < len(first.content) < len(content)
            assert outcome.digest is last
            assert last.content == content


async def test_no_batch_is_too_large_and_many_at_once_all_have_their_turn(
    store: RedisStore,
) -> None:
    names = [f"t:f:{index:05}:0" for index in range(17_000)]
    puts = await store.put([PutItem(name, (b"x",)) for name in names])
    assert {put.status for put in puts} == {PutStatus.STORED}
    gets = await store.get_into([landing(name, 1)[0] for name in names])
    assert {get.status for get in gets} == {GetStatus.HIT}
    async with asyncio.TaskGroup() as group:
        touches = [group.create_task(store.touch(names[:1_000], ttl_s=60.0)) for _ in range(8)]
    assert {touch.result() for touch in touches} == {1_000}
    assert await store.delete(names) == len(names)


# A host name with several addresses, some of which do not answer


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
    async with redis_store(f"redis://kv.example:{port}").running():
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
