"""A few threads of one store, for work that blocks, and a wait that outlasts a cancel."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

from tierkv.errors import StoreUnavailableError, TierKVError
from tierkv.tasks import outlast

T = TypeVar("T")
Item = TypeVar("Item")


class WorkerThreads:
    """At most `num_threads` threads, alive inside `running()`.

    They read and write buffers lent by callers, so a cancelled caller is held until its thread is
    done with them.
    """

    def __init__(self, owner: str, num_threads: int) -> None:
        self._owner = owner
        self._num_threads = num_threads
        self._pool: ThreadPoolExecutor | None = None
        self._in_flight: set[asyncio.Future[None]] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Leaving refuses new work and waits for what is under way."""
        pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="tierkv-store")
        self._pool = pool
        try:
            yield
        finally:
            self._pool = None
            await self.idle()
            pool.shutdown(wait=False)  # only idle threads are left

    async def idle(self) -> None:
        """Return when nothing that was under way at the call is under way any more."""
        await outlast(set(self._in_flight), on_cancel=lambda: None)

    def check_open(self) -> None:
        """Raise StoreUnavailableError outside `running()`."""
        if self._pool is None:
            raise StoreUnavailableError(f"{self._owner} is closed")

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`, run in a thread. A cancel is raised after `work` has ended."""
        [result] = await self.run_each(lambda _: work(), [None])
        return result

    async def run_each(self, work: Callable[[Item], T], items: Sequence[Item]) -> list[T]:
        """`work(item)` for each item, spread over the threads; results in the items' order.

        A cancel lets each thread finish the item it has in hand, starts no other, and is raised
        when the last one has ended; at once, behind threads that are stuck with others' work.
        What `work` raises is raised here, after the rest is done; only what is no TierKVError lets
        its thread begin no other item.
        """
        self.check_open()
        assert self._pool is not None, "checked in the line above"
        results: dict[int, T] = {}
        failures: list[TierKVError] = []
        waiting = deque(enumerate(items))

        def drain() -> None:
            while True:
                try:
                    index, item = waiting.popleft()
                except IndexError:
                    return
                try:
                    results[index] = work(item)
                except TierKVError as error:
                    failures.append(error)

        calls = [self._pool.submit(drain) for _ in range(min(self._num_threads, len(items)))]
        futures = {asyncio.wrap_future(call) for call in calls}

        def withdraw() -> None:
            waiting.clear()
            for call in calls:  # has an effect on those that no thread has begun
                call.cancel()

        self._in_flight |= futures
        try:
            await outlast(futures, on_cancel=withdraw)
        finally:
            self._in_flight -= futures
        for error in [future.exception() for future in futures]:
            if error is not None:
                raise error
        if failures:
            raise failures[0]
        return [results[index] for index in range(len(items))]
