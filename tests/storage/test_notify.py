"""Hints arrive where a store can send them; a missing hint does no harm; nothing is left behind."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from tests.latch import finish, until
from tests.redis_server import PATIENT, RedisServer, redis_server
from tierkv.clock import SystemClock
from tierkv.storage import file
from tierkv.storage.factory import StoreSettings, open_store
from tierkv.storage.file import DIRECTORY, FileNotifier
from tierkv.storage.protocol import EMPTY_MESSAGE, Listener, Notifier, PutItem, Store

TOPIC = "tierkv:ticket:1"


@asynccontextmanager
async def opened(*urls: str) -> AsyncIterator[list[tuple[Store, Notifier]]]:
    """Yield a running store and its notifier for each URL, as in separate processes."""
    async with AsyncExitStack() as stack:
        found = []
        for url in urls:
            store = open_store(url, PATIENT, SystemClock())
            await stack.enter_async_context(store.running())
            notifier = store.notifier()
            await stack.enter_async_context(notifier.running())
            found.append((store, notifier))
        yield found


@contextmanager
def again(server: RedisServer) -> Iterator[None]:
    """Start a killed server again, without values."""
    server.popen.wait()
    with subprocess.Popen(server.popen.args, stdout=subprocess.DEVNULL) as popen:
        try:
            yield
        finally:
            popen.kill()


async def live(listener: Listener) -> None:
    await until(lambda: listener.is_live, "a listener that hears")


@pytest.fixture(scope="module")
def server() -> object:
    with redis_server() as running:
        yield running


@pytest.fixture(params=["file", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return tmp_path.as_uri()
    running: RedisServer = request.getfixturevalue("server")
    return running.url


async def test_what_one_tells_the_other_hears_in_order(url: str) -> None:
    async with opened(url, url) as [(_, teller), (_, hearer)]:
        with hearer.listen(TOPIC) as listener:
            assert await finish(listener.next(10)) == EMPTY_MESSAGE  # from now on messages arrive
            assert listener.is_live
            for number in range(20):
                await teller.notify(TOPIC, f"p{number}")
            heard = [await finish(listener.next(10)) for _ in range(20)]
            assert heard == [f"p{number}" for number in range(20)]


async def test_nobody_hears_of_other_topics_or_when_no_longer_listening(url: str) -> None:
    async with opened(url, url) as [(_, teller), (_, hearer)]:
        with hearer.listen(TOPIC) as listener, hearer.listen(TOPIC + "0") as other:
            await live(listener)
            await live(other)
            while await listener.next(0.01) is not None or await other.next(0.01) is not None:
                pass
            await teller.notify(TOPIC, "a")
            assert await finish(listener.next(10)) == "a"
            assert await other.next(0.05) is None
        await teller.notify(TOPIC, "b")
        assert await listener.next(0.2) is None
        assert await other.next(0.01) is None


async def test_a_store_that_cannot_tell_is_polled() -> None:
    notifier = open_store("mooncake://m:1", StoreSettings(), SystemClock()).notifier()
    with notifier.listen(TOPIC) as listener:
        await notifier.notify(TOPIC, "x")
        assert not listener.is_live
        assert await listener.next(0.01) is None


async def test_hints_between_files_leave_no_file_behind(tmp_path: Path) -> None:
    async with opened(tmp_path.as_uri(), tmp_path.as_uri()) as [(store, teller), (_, hearer)]:
        await teller.notify(TOPIC, "early")  # no process has ever listened
        assert not (tmp_path / DIRECTORY).exists()
        left = tmp_path / DIRECTORY / "left"
        left.parent.mkdir()
        left.touch()
        os.utime(left, (1, 1))  # left by a process that died during `notify`
        with hearer.listen(TOPIC) as listener:
            await live(listener)
            for number in range(50):
                await teller.notify(TOPIC, f"p{number}")
        assert list((tmp_path / DIRECTORY).iterdir()) == []
        assert (await store.list("tierkv", limit=10)).values == ()


async def test_without_inotify_files_are_polled_and_it_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: Path) -> int:
        raise OSError(24, "too many watches")

    monkeypatch.setattr(file, "_watch", refuse)
    monkeypatch.setattr(file, "_TRY_AGAIN_S", 0.001)
    async with opened(tmp_path.as_uri()) as [(_, notifier)]:
        with notifier.listen(TOPIC) as listener:
            await until(lambda: "polled" in caplog.text, "a word of it")
            assert await listener.next(0.1) is None
            assert not listener.is_live
    assert len([r for r in caplog.records if "polled" in r.getMessage()]) == 1


async def test_hints_that_hang_with_their_disk_hold_up_nobody_else(tmp_path: Path) -> None:
    directory = tmp_path / DIRECTORY
    directory.mkdir()
    # Opening a FIFO without a reader hangs in the kernel.
    fifo = directory / f"{hashlib.sha256(TOPIC.encode()).hexdigest()[:32]}.hello"
    os.mkfifo(fifo)
    notifier = FileNotifier(tmp_path)
    async with notifier.running():
        async with asyncio.timeout(10), asyncio.TaskGroup() as group:
            for _ in range(200):
                group.create_task(notifier.notify(TOPIC, "hello"))
        async with asyncio.timeout(10):  # the threads of asyncio's default executor
            await asyncio.gather(*(asyncio.to_thread(int) for _ in range(40)))
        reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        try:
            with notifier.listen("t:other") as listener:
                await live(listener)
                assert await listener.next(5) == EMPTY_MESSAGE
                async with asyncio.timeout(10):
                    while await listener.next(0.1) != "there":
                        await notifier.notify("t:other", "there")
        finally:
            os.close(reader)


async def test_a_listener_comes_back_after_its_server_was_killed() -> None:
    with redis_server() as first:
        async with opened(first.url) as [(_, notifier)]:
            with notifier.listen(TOPIC) as listener:
                await live(listener)
                first.kill()
                await until(lambda: not listener.is_live, "a loss that is noticed")
                await notifier.notify(TOPIC, "lost")  # raises no error
                with again(first):
                    await live(listener)
                    while await listener.next(0.05) is not None:
                        pass
                    for _ in range(100):  # the store reconnects when it is used
                        await notifier.notify(TOPIC, "back")
                        if await listener.next(0.1) == "back":
                            return
    pytest.fail("nothing was heard again")


def url_of_user(server: RedisServer, *rights: str) -> str:
    """Return the URL for a user with `rights` and those that each store needs."""
    of_stores = ("+get", "+set", "+exists", "+unlink", "+pexpire", "+ping")
    user = ("reset", "on", ">pw", "~tierkv:*")
    server.execute("ACL", "SETUSER", "limited", *user, *of_stores, *rights)
    return f"redis://limited:pw@127.0.0.1:{server.port}/0"


async def test_a_user_who_may_not_tell_polls_and_it_is_said_once(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with opened(url_of_user(server)) as [(store, notifier)]:
        with notifier.listen(TOPIC) as listener:
            for _ in range(3):
                await notifier.notify(TOPIC, "x")
            assert await listener.next(0.3) in (None, EMPTY_MESSAGE)
            assert not listener.is_live
            [outcome] = await store.put([PutItem("tierkv:x", (b"y",), ttl_s=5)])
            assert outcome.status.value == "stored"
    assert len([r for r in caplog.records if "polled" in r.getMessage()]) == 1


async def test_the_documented_access_is_enough(server: RedisServer) -> None:
    rights = ("&tierkv:*", "+publish", "+subscribe", "+unsubscribe")
    async with opened(url_of_user(server, *rights)) as [(_, notifier)]:
        with notifier.listen(TOPIC) as listener:
            await live(listener)
            await notifier.notify(TOPIC, "x")
            while await finish(listener.next(10)) != "x":
                pass


async def test_a_server_that_is_down_is_not_taken_for_one_that_forbids(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with redis_server() as server:
        async with opened(server.url) as [(_, notifier)]:
            server.popen.kill()
            server.popen.wait()
            await finish(notifier.notify(TOPIC))
            await finish(notifier.notify(TOPIC))
    assert "refuses notifications" not in caplog.text


async def test_what_others_write_into_a_channel_is_at_most_a_reason_to_look(
    server: RedisServer,
) -> None:
    async with opened(server.url) as [(store, notifier)]:
        with notifier.listen(TOPIC) as listener:
            await live(listener)
            assert await listener.next(1.0) == EMPTY_MESSAGE
            for message in ("x" * 100_000, "p\n1", "p\N{SUPERSCRIPT TWO}"):
                await asyncio.to_thread(server.execute, "PUBLISH", TOPIC, message)
                assert await listener.next(5.0) == EMPTY_MESSAGE
            await notifier.notify(TOPIC, "p12")
            assert await listener.next(5.0) == "p12"
        await store.ping()
