"""The thread with a loop: work that it runs, and a fork's child that has no such thread."""

from __future__ import annotations

import asyncio
import os
import threading
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.latch import PATIENCE_S
from tierkv.loop_thread import LoopClosedError, LoopThread


@asynccontextmanager
async def lifetime() -> AsyncIterator[None]:
    yield


async def work() -> int:
    return 7


def test_a_forks_child_is_refused_at_once_and_its_parent_goes_on() -> None:
    thread = LoopThread("loop of this test", lifetime, name="test-loop", close_s=PATIENCE_S)
    assert thread.open(PATIENCE_S)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
        pid = os.fork()
    if not pid:
        try:
            error = thread.run(work()).exception(timeout=10.0)
            os._exit(0 if isinstance(error, LoopClosedError) and not thread.is_open else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert thread.run(work()).result(PATIENCE_S) == 7
    assert thread.close()


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
