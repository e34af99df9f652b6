"""The thread with a loop: work that is cancelled, and a close while it opens."""

from __future__ import annotations

import asyncio
import subprocess
import sys
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


def test_a_child_of_a_fork_refuses_work_whatever_threads_of_its_parent_were_doing() -> None:
    script = """
import asyncio, os, signal, sys, threading
from contextlib import asynccontextmanager
from tierkv.loop_thread import LoopClosedError, LoopThread

@asynccontextmanager
async def lifetime():
    yield

async def nothing():
    pass

class Slow(LoopThread):
    def call(self, callback):  # `run` calls this while it holds the thread's lock
        if threading.current_thread() is other:
            handing_over.set()
            forked.wait(60)
        return super().call(callback)

thread = Slow("loop of this test", lifetime, name="test-loop", close_s=60)
handing_over, forked = threading.Event(), threading.Event()
other = threading.Thread(target=lambda: thread.run(nothing()).result(60))
assert thread.open(60)
other.start()
handing_over.wait(60)
child = os.fork()
if child == 0:
    signal.alarm(20)  # ends a child that waits for the lock
    os._exit(not isinstance(thread.run(nothing()).exception(60), LoopClosedError))
forked.set()
_, status = os.waitpid(child, 0)
other.join()
print(os.waitstatus_to_exitcode(status), thread.close())
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "0 True\n"), ended.stderr
