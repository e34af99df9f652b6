"""Threads that are started in advance, so that no later work fails for want of a thread.

The operating system limits the number of threads.
"""

from __future__ import annotations

import asyncio
import os
import queue
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import TypeVar

from tierkv.errors import ConfigError

T = TypeVar("T")

_NUM_SHARED = 8  # for short blocking calls, such as reading files and certificates
_NUM_OF_LIBUV = 4  # number of threads that libuv starts


class Threads(ThreadPoolExecutor):
    """A thread pool that starts all its threads at once, so that no later `submit` can fail.

    Args:
        num_threads: number of threads.
        name: prefix of the threads' names.

    Raises:
        ConfigError: the system cannot start all of the threads.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        super().__init__(num_threads, thread_name_prefix=name)
        # Before Python 3.13 each `get` from the pool's own SimpleQueue wakes one more idle thread,
        # which then competes for the GIL: 9 context switches per lookup in a file store, not 3.
        self._work_queue = queue.Queue()  # type: ignore[assignment]
        have_started = threading.Event()
        try:
            for _ in range(num_threads):  # each call starts a thread, since all others wait
                self.submit(have_started.wait)
        except RuntimeError as error:
            raise no_thread(name, error) from error
        finally:
            have_started.set()
            if len(self._threads) < num_threads:
                self.shutdown(wait=False)


def start_thread(target: Callable[[], object], name: str) -> threading.Thread:
    """Start a daemon thread.

    Args:
        target: function that the thread runs.
        name: name of the thread.

    Returns:
        The thread.

    Raises:
        ConfigError: the system cannot start another thread.
    """
    thread = threading.Thread(target=target, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise no_thread(name, error) from error
    return thread


def no_thread(name: str, error: RuntimeError) -> ConfigError:
    """Return the error to raise if the system cannot start another thread.

    Args:
        name: name of the thread.
        error: the error that Python raised.
    """
    return ConfigError(
        f"no thread can be started for {name} ({error}; this process has "
        f"{threading.active_count()} threads): raise the limit of processes and "
        "threads (ulimit -u, or pids.max of the container)"
    )


class _SharedThreads:
    """The thread pool of `in_thread`, which all event loops of the process share."""

    def __init__(self) -> None:
        self._pool: Threads | None = None
        self._lock = threading.Lock()

    @property
    def pool(self) -> Threads:
        with self._lock:
            if self._pool is None:
                self._pool = Threads(_NUM_SHARED, "tierkv-shared")
            return self._pool

    def forget(self) -> None:
        """Start new threads at the next use, in the child of a fork, which has no threads."""
        self._pool, self._lock = None, threading.Lock()  # the old lock may be held for ever


_shared = _SharedThreads()
os.register_at_fork(after_in_child=_shared.forget)


def start_in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Run `work` in a thread that was started in advance; return the future of its result.

    Raises:
        ConfigError: `start_threads` was not called, and the system cannot start another thread.
    """
    call = partial(copy_context().run, work)
    return asyncio.get_running_loop().run_in_executor(_shared.pool, call)


async def in_thread(work: Callable[..., T], *args: object) -> T:
    """Run `work(*args)` in a thread that was started in advance, and return its result.

    `asyncio.to_thread` starts a thread when it is first needed, which may fail.

    Args:
        work: the function.
        *args: its arguments.

    Raises:
        ConfigError: `start_threads` was not called, and the system cannot start another thread.
    """
    return await start_in_thread(partial(work, *args))


async def start_threads() -> None:
    """Start the threads of `in_thread`, and those with which uvloop looks up host names.

    Raises:
        ConfigError: the system cannot start all of the threads.
    """
    # libuv ends the process if it cannot start its threads, so a pool of as many is tried before.
    trial = Threads(_NUM_OF_LIBUV, "tierkv-lookups")
    await in_thread(trial.shutdown)
    loop = asyncio.get_running_loop()
    await loop.getnameinfo(("127.0.0.1", 0), socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)
