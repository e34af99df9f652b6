"""A file store on a disk that hangs: system calls do not return."""

from __future__ import annotations

import asyncio
import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.latch import finish, until
from tests.sessions import publish_request
from tests.storage.values import TurnedClock, get_one, put_one
from tests.world import BLOCK, World, world
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.node import Tier
from tierkv.clock import SystemClock
from tierkv.errors import HandoffError
from tierkv.pd.settings import DirectPath, HandoffSettings
from tierkv.sched import slots
from tierkv.storage.factory import StoreSettings, open_guarded_store
from tierkv.storage.file import FileSettings, FileStore
from tierkv.storage.guard import ResilienceSettings
from tierkv.storage.protocol import BreakerState, GetStatus, PutStatus

TOKENS = list(range(4 * BLOCK + 1))


class HungCalls:
    """A replacement of `os.NAME` whose calls block in the kernel until `release` is called."""

    def __init__(self, name: str, fifo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        os.mkfifo(fifo)
        self.num_hung = 0
        self._fd = os.open(fifo, os.O_RDWR)
        self._lock = threading.Lock()
        call = getattr(os, name)

        def hung(*arguments: object) -> object:
            with self._lock:
                self.num_hung += 1
            os.read(self._fd, 1)
            with self._lock:
                self.num_hung -= 1
            return call(*arguments)

        monkeypatch.setattr(os, name, hung)

    def release(self) -> None:
        """Let the blocked calls and all later ones return."""
        os.write(self._fd, bytes(4096))


def hung_reads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> HungCalls:
    return HungCalls("preadv", folder / "fifo", monkeypatch)


def node(
    root: Path, handoff: HandoffSettings | None = None, timeout_s: float = 1.0, **settings: Any
) -> AbstractAsyncContextManager[World]:
    """Return a service like a node's: files behind a breaker, where every block is stored at once.

    A read fails after `timeout_s` seconds; `settings` are fields of CacheSettings.
    """
    resilience = ResilienceSettings(timeout_s=timeout_s, probe_interval_s=0.1)
    chosen = StoreSettings(resilience=resilience)
    store = open_guarded_store(root.as_uri(), chosen, SystemClock())
    through = WritePolicy.WRITE_THROUGH
    cache: dict[str, Any] = {"host_write": through, "storage_write": through} | settings
    return world(store=store, handoff=handoff, fetch_deadline_s=2.5, **cache)


def is_closed(here: World) -> bool:
    return here.service.storage_state()[0].circuit == BreakerState.CLOSED.value


async def test_a_request_goes_on_and_the_slots_stay_lent_until_the_hung_read_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node(tmp_path / "store") as here:
        await here.run(TOKENS)
        here.service.reset()
        assert here.service.stats().host.free == 32
        disk = hung_reads(tmp_path, monkeypatch)
        try:
            async with asyncio.timeout(10):
                request = await here.admit(TOKENS)
            assert request.cached_tokens == 0
            assert disk.num_hung > 0
            assert len(here.service.tiers.slots.lent(Tier.HOST)) == 5
            assert here.service.stats().host.free == 32 - 5
            assert here.service.verify() == []
            await here.prefill(request, TOKENS)
            here.service.scheduler.end(request)
            # It does not wait for other requests' reads of these blocks either.
            async with asyncio.timeout(10):
                again = await here.admit([*TOKENS, 1, 2, 3])
            here.service.scheduler.end(again)
            assert len(here.service.tiers.slots.lent(Tier.HOST)) >= 5
        finally:
            disk.release()
        await here.settle()
        assert len(here.service.tiers.slots.lent(Tier.HOST)) == 0
        here.service.reset()
        await until(lambda: here.service.stats().host.free == 32, "all slots free again")
        assert (await here.run(TOKENS)).storage_tokens == len(TOKENS) - 1


async def test_hung_reads_open_the_breaker_and_it_closes_when_they_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node(tmp_path / "store", timeout_s=0.4) as here:
        prompts = [[number * 100 + token for token in TOKENS] for number in range(6)]
        for prompt in prompts:
            await here.run(prompt)
        here.service.reset()
        disk = hung_reads(tmp_path, monkeypatch)
        try:
            for prompt in prompts:
                async with asyncio.timeout(10):
                    request = await here.admit(prompt)
                here.service.scheduler.end(request)
            await until(lambda: not is_closed(here), "an open breaker")
            assert disk.num_hung <= FileSettings().num_threads
        finally:
            disk.release()
        await until(lambda: is_closed(here), "a closed breaker")
        await here.settle()
        assert len(here.service.tiers.slots.lent(Tier.HOST)) == 0


async def test_closing_waits_for_a_hung_read_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slots, "CLOSING_PATIENCE_S", 0.01)
    async with AsyncExitStack() as stack:
        here = await stack.enter_async_context(node(tmp_path / "store"))
        await here.run(TOKENS)
        here.service.reset()
        disk = hung_reads(tmp_path, monkeypatch)
        here.service.scheduler.end(await here.admit(TOKENS))
        closing = asyncio.ensure_future(stack.aclose())
        try:
            await until(lambda: "closing still waits for" in caplog.text, "a word on it")
            assert "5 host slots" in caplog.text
            assert not closing.done()
        finally:
            disk.release()
        await finish(closing)


@pytest.mark.parametrize("on_host", [False, True])
async def test_a_publish_ends_at_its_deadline_and_the_slots_stay_lent_until_the_hung_write_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_host: bool
) -> None:
    """If `on_host` is True, blocks are written from the host tier, otherwise from staging slots."""
    settings = HandoffSettings(publish_deadline_s=2.0, direct=DirectPath.OFF)
    rule = WritePolicy.WRITE_THROUGH if on_host else WritePolicy.NONE
    async with node(
        tmp_path / "store", handoff=settings, host_write=rule, storage_write=WritePolicy.NONE
    ) as here:
        request = await here.admit(TOKENS)
        await here.prefill(request, TOKENS)
        await until(lambda: (here.service.stats().host.used > 0) == on_host, "copies to the host")
        disk = HungCalls("writev", tmp_path / "fifo", monkeypatch)
        try:
            with pytest.raises(HandoffError) as problem:
                async with asyncio.timeout(5):
                    await publish_request(here.service, request, "ticket", [1])
            assert problem.value.reason == "storage_unavailable"
            assert disk.num_hung > 0
            here.service.scheduler.end(request)
            assert here.service.verify() == []
            here.service.reset()  # blocks that are being read are not evicted
            assert (here.service.stats().host.used > 0) == on_host
        finally:
            disk.release()
        await here.settle()
        here.service.reset()
        assert here.service.stats().host.used == 0
        request = await here.admit(TOKENS)
        await here.prefill(request, TOKENS)

        await until(lambda: is_closed(here), "a closed breaker")
        await finish(publish_request(here.service, request, "ticket", [1]))
        here.service.scheduler.end(request)


# Locks of other processes: a system call that waits for them hangs


@contextmanager
def all_locked(root: Path) -> Iterator[None]:
    """Lock each directory below `root`, as a process does that was stopped with the locks."""
    fds = [os.open(path, os.O_RDONLY) for path, _, _ in os.walk(root)]
    try:
        for fd in fds:
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        for fd in fds:
            os.close(fd)


async def test_reads_and_the_sweep_do_not_wait_for_the_lock_of_a_frozen_writer(
    tmp_path: Path,
) -> None:
    clock = TurnedClock()
    store = FileStore(tmp_path, FileSettings(num_threads=1), clock)
    async with store.running():
        await put_one(store, "t:f:kept:0", b"kept")
        await put_one(store, "t:f:short:0", b"short", ttl_s=5.0)
        await store.sweep()  # after the sweep at the start
        clock.now += 3_600  # expired, and unused for long enough that a read sets the access time
        with all_locked(tmp_path):
            async with asyncio.timeout(10):
                assert await get_one(store, "t:f:kept:0", 4) == (GetStatus.HIT, b"kept")
                assert (await get_one(store, "t:f:short:0", 5))[0] is GetStatus.MISS
                assert await store.exists(["t:f:kept:0"]) == 1
                assert await store.sweep() == 0
            writing = asyncio.ensure_future(put_one(store, "t:f:kept:0", b"x", keep_existing=False))
            done, _ = await asyncio.wait([writing], timeout=0.1)
            assert not done
        assert await finish(writing) is PutStatus.STORED
        assert await store.sweep() == 1
