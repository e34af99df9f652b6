"""Tasks that the tiers own, and who is told when slots may have become available."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager

from tierkv.errors import ShuttingDownError
from tierkv.sched.worth import Allowance
from tierkv.tasks import task_group

log = logging.getLogger("tierkv.tiers")
STORE_PATIENCE_S = 0.25  # how long who needs room waits for a store to be done with blocks
CLOSING_PATIENCE_S = 5.0  # how often closing says what it still waits for


class Work:
    """Every copy runs in a task of this object and ends in bookkeeping, whether or not anybody
    still waits for it.

    num_late: pieces that a store has had for longer than they are waited for. num_changes: counts
    up with each `capacity_changed`.
    """

    def __init__(self) -> None:
        self.num_tasks = 0
        self.num_late = 0
        self.num_changes = 0
        self.allowance = Allowance()
        self._tasks: asyncio.TaskGroup | None = None
        self._listeners: list[Callable[[], None]] = []
        self._changed: asyncio.Event | None = None  # made for those who wait for it
        self._is_closed = False
        self._at_work: Counter[str] = Counter()  # tasks whose end makes room, by space

    @asynccontextmanager
    async def running(self, num_lent: Callable[[], tuple[int, int]]) -> AsyncIterator[None]:
        """Leaving waits for every copy under way, however long a store or device takes to leave
        the slots: their memory goes next. It says what it waits for.

        num_lent: how many device and host slots movements hold outside the index.
        """
        try:
            async with task_group() as self._tasks:
                yield
                while self.num_tasks:
                    try:
                        async with asyncio.timeout(CLOSING_PATIENCE_S):
                            await self.next_change()
                    except TimeoutError:
                        log.error(
                            "closing waits for %d tasks; stores and copies still use %d device and "
                            "%d host slots outside the index",
                            self.num_tasks,
                            *num_lent(),
                        )
        finally:
            self._is_closed = True  # who waits for slots still is told, and waits no more
            if self._changed is not None:
                self._changed.set()

    async def next_change(self) -> None:
        """Return after the next time slots may have become available. Raises ShuttingDownError
        when there will be none any more."""
        if self._changed is None:
            self._changed = asyncio.Event()
        if not self._is_closed:
            await self._changed.wait()
        if self._is_closed:
            raise ShuttingDownError("this node has shut down")

    def on_capacity(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever slots may have become available."""
        self._listeners.append(listener)

    def capacity_changed(self) -> None:
        self.num_changes += 1
        if self._changed is not None:
            self._changed.set()
            self._changed = None
        for listener in self._listeners:
            listener()

    def is_at_work(self, space: str | None = None) -> bool:
        """Whether copies are under way whose end makes room, in this space or in any. What is
        asked of storage for a request makes none: it comes to be held for that request."""
        return bool(self._at_work if space is None else self._at_work[space])

    def start(
        self, work: Coroutine[None, None, None], name: str, *, space: str | None = None
    ) -> None:
        """Run `work` in a task that this object owns and waits for. Raises ShuttingDownError once
        something has failed that stops the service. space: whose blocks can go at its end."""
        task = self.started(work, name)
        if space is not None:
            self._at_work[space] += 1
            task.add_done_callback(lambda _: self._work_ended(space))

    def begin(self, space: str) -> Callable[[], None]:
        """A copy is under way without a task here, whose end makes room; call what is returned
        then."""
        self.num_tasks += 1
        self._at_work[space] += 1

        def end() -> None:
            self.num_tasks -= 1
            self._at_work[space] -= 1
            if not self._at_work[space]:
                del self._at_work[space]
            self.capacity_changed()

        return end

    def begin_storing(self, space: str) -> Callable[[], None]:
        """A store has been given blocks which can go when it is done with them; call what is
        returned then. STORE_PATIENCE_S long they are waited for, and count in `num_late` after
        that: a store may be slower than any engine."""
        is_late = False

        def late() -> None:
            nonlocal is_late
            is_late = True
            self.num_late += 1
            self._work_ended(space)
            self.capacity_changed()

        def end() -> None:
            timer.cancel()
            if is_late:
                self.num_late -= 1
            else:
                self._work_ended(space)

        self._at_work[space] += 1
        timer = asyncio.get_running_loop().call_later(STORE_PATIENCE_S, late)
        return end

    def _work_ended(self, space: str) -> None:
        self._at_work[space] -= 1
        if not self._at_work[space]:
            del self._at_work[space]
            self.capacity_changed()

    def started(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        """As `start`; the task, for who may want to cancel it."""
        assert self._tasks is not None, "the tiers are running"
        try:
            task = self._tasks.create_task(work, name=name)
        except RuntimeError:  # the group takes no more tasks: one failed, or its body did
            work.close()
            raise ShuttingDownError("this node has failed and is shutting down") from None
        self.num_tasks += 1
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, _: asyncio.Task[None]) -> None:
        self.num_tasks -= 1
        if not self.num_tasks:
            self.capacity_changed()
