"""Work in a store's threads: a cancel waits for what has buffers, and for nothing else."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tests.latch import finish, until
from tierkv.storage.base import WorkerThreads


async def test_a_cancelled_caller_waits_for_its_thread_but_not_for_one_it_has_not_got() -> None:
    threads = WorkerThreads("here", 1)
    is_stuck, release = threading.Event(), threading.Event()
    begun: list[str] = []

    def hang() -> None:
        is_stuck.set()
        assert release.wait(20)

    async with threads.running():
        stuck = asyncio.ensure_future(threads.run(hang))
        try:
            await until(is_stuck.is_set, "a thread in a call that does not return")
            later = asyncio.ensure_future(threads.run_each(begun.append, ["a", "b"]))
            await asyncio.sleep(0)
            later.cancel()
            with pytest.raises(asyncio.CancelledError):
                await finish(later)
            stuck.cancel()
            await asyncio.sleep(0.01)
            assert not stuck.done()
        finally:
            release.set()
        with pytest.raises(asyncio.CancelledError):
            await finish(stuck)
    assert begun == []
