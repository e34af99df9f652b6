"""The thread with a loop: work that is cancelled, and a close while it opens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.latch import PATIENCE_S
from tierkv.loop_thread import LoopThread


@asynccontextmanager
async def lifetime() -> AsyncIterator[None]:
    yield


def test_cancelling_the_future_cancels_its_work() -> None:
    begun, ended = threading.Event(), threading.Event()

    async def endless() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    thread = LoopThread("loop of this test", lifetime, name="test-loop", close_s=PATIENCE_S)
    assert thread.open(PATIENCE_S)
    future = thread.run(endless())
    assert begun.wait(PATIENCE_S)
    assert future.cancel()
    assert ended.wait(10.0)
    assert thread.close()


def test_a_thread_that_is_asked_to_close_while_it_opens_accepts_no_work() -> None:
    @asynccontextmanager
    async def closed_early() -> AsyncIterator[None]:
        thread.ask_to_close()
        yield

    thread = LoopThread("loop of this test", closed_early, name="test-loop", close_s=PATIENCE_S)
    assert not thread.open(PATIENCE_S)
    assert thread.close()
