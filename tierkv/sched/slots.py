"""Allocation of device and host slots, and the running copies that use slots."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np

from tierkv.cache.node import BlockPool, Ids, Tier
from tierkv.errors import ShuttingDownError
from tierkv.tasks import task_group

log = logging.getLogger(__name__)
STORE_PATIENCE_S = 0.25  # longest wait of a request without room for one write to a store
CLOSING_PATIENCE_S = 5.0  # seconds between log lines while closing waits for copies
MAX_AT_ONCE_S = 0.5  # twice STORE_PATIENCE_S
WRITE_SHARE = 0.02


@dataclass(slots=True)
class Allowance:
    """Seconds that requests in need of room may still wait for writes to a slow store.

    The allowance begins with MAX_AT_ONCE_S, grows by WRITE_SHARE of the elapsed time up to the same
    limit, and shrinks by the seconds spent waiting. While nothing of it is left, blocks are evicted
    without being stored, so that a slow store does not slow down engines.

    Attributes:
        seconds: the seconds left; 0 or less if no request may wait.
        is_waiting: True while a request waits for a write.
    """

    seconds: float = MAX_AT_ONCE_S
    is_waiting: bool = False
    _seen_at: float | None = None

    def update_allowance(self, now: float) -> bool:
        """Update the number of seconds for which requests may wait for writes to a slow store.

        The number grows slowly, up to a limit. While a request waits, the seconds of the wait are
        subtracted.

        Args:
            now: seconds on the loop's clock.

        Returns:
            True if a request may wait for a write now.
        """
        went_by = now - (now if self._seen_at is None else self._seen_at)
        self._seen_at = now
        spent = went_by if self.is_waiting else 0.0
        self.seconds = min(self.seconds + WRITE_SHARE * went_by - spent, MAX_AT_ONCE_S)
        return self.seconds > 0


class Work:
    """The running copies of one node, and the tasks that make them.

    Each task updates the index at its end, even if no caller waits for it.

    Attributes:
        num_tasks: number of running tasks and copies.
        num_late: number of running writes to a store that have taken longer than STORE_PATIENCE_S.
        num_changes: number of calls of `capacity_changed` so far.
        allowance: the time that all requests together may still wait for writes to a slow store,
            before blocks are evicted without being stored.
    """

    def __init__(self) -> None:
        self.num_tasks = 0
        self.num_late = 0
        self.num_changes = 0
        self.allowance = Allowance()
        self._tasks: asyncio.TaskGroup | None = None
        self._listeners: list[Callable[[], None]] = []
        self._changed: asyncio.Event | None = None  # created by the first wait
        self._is_closed = False
        # Number of tasks that make room at their end, by space.
        self._at_work: Counter[str] = Counter()

    @asynccontextmanager
    async def running(self, num_lent: Callable[[], tuple[int, int]]) -> AsyncIterator[None]:
        """Accept tasks inside the `async with` block; at its end, wait for tasks and copies.

        The wait has no limit, because the memory of the slots is freed next. A log line every
        CLOSING_PATIENCE_S seconds shows that the wait goes on.

        Args:
            num_lent: returns the numbers of device and host slots that copies use outside the
                index, for that log line.
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
                            "closing still waits for %d tasks; stores and copies use "
                            "%d device and %d host slots",
                            self.num_tasks,
                            *num_lent(),
                        )
        finally:
            self._is_closed = True  # ends the waits for slots
            if self._changed is not None:
                self._changed.set()

    async def next_change(self) -> None:
        """Wait until slots may have become free; `capacity_changed` ends the wait.

        Raises:
            ShuttingDownError: the node has shut down.
        """
        if self._changed is None:
            self._changed = asyncio.Event()
        if not self._is_closed:
            await self._changed.wait()
        if self._is_closed:
            raise ShuttingDownError("this node has shut down")

    def on_capacity(self, listener: Callable[[], None]) -> None:
        """Register `listener`, a function to call whenever slots may have become free."""
        self._listeners.append(listener)

    def capacity_changed(self) -> None:
        """Wake the tasks that wait for slots, and call the functions passed to `on_capacity`."""
        self.num_changes += 1
        if self._changed is not None:
            self._changed.set()
            self._changed = None
        for listener in self._listeners:
            listener()

    def is_at_work(self, space: str | None = None) -> bool:
        """Return whether running copies will free slots, or make blocks evictable, at their end.

        Fetches from storage do not count, because a request needs their blocks.

        Args:
            space: name of the space (part of the index for one fingerprint) of the copied blocks;
                None for all spaces.
        """
        return bool(self._at_work if space is None else self._at_work[space])

    def start(
        self, work: Coroutine[None, None, None], name: str, *, space: str | None = None
    ) -> None:
        """Run `work` in a task; the exit of `running()` waits until the task has ended.

        Args:
            work: the coroutine to run.
            name: name of the task.
            space: name of the space (part of the index for one fingerprint) from which blocks can
                be evicted once the task has ended; None if the task does not help to free slots.

        Raises:
            ShuttingDownError: the node is stopping after a failure.
        """
        task = self.started(work, name)
        if space is not None:
            self._at_work[space] += 1
            task.add_done_callback(lambda _: self._work_ended(space))

    def begin(self, space: str) -> Callable[[], None]:
        """Count a running copy that has no task, so that the service waits for it before it closes.

        Args:
            space: name of the space in which the end of the copy frees slots or makes blocks
                evictable.

        Returns:
            The function to call at the end of the copy.
        """
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
        """Record that a write of blocks from host slots to a store has begun.

        A request that needs host slots waits for such a write, but at most STORE_PATIENCE_S
        seconds.

        Args:
            space: name of the space (part of the index for one fingerprint) that has the blocks.

        Returns:
            A function to call when the write has ended.
        """
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
        """Run `work` in a task, and return the task.

        Args:
            work: the coroutine to run.
            name: name of the task.

        Returns:
            The task, which can be cancelled. `running` ends only after the task has ended.

        Raises:
            ShuttingDownError: the node is stopping after a failure.
        """
        assert self._tasks is not None, "the tiers are running"
        try:
            task = self._tasks.create_task(work, name=name)
        except RuntimeError:  # the task group has failed and accepts no more tasks
            work.close()
            raise ShuttingDownError("this node has failed and is shutting down") from None
        self.num_tasks += 1
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, _: asyncio.Task[None]) -> None:
        self.num_tasks -= 1
        if not self.num_tasks:
            self.capacity_changed()


_NO_SLOTS: Ids = np.zeros(0, np.int32)


@dataclass(slots=True)
class Leaving:
    """The slots that a tier loses because it shrinks or is emptied.

    No new blocks are put into these slots, so that all of them become free.

    Attributes:
        first: the lowest of these slots; all slots with a higher number leave too.
        slots: the slots among them that are empty and out of use by now, as arrays of ids.
        stores_first: True to write host blocks in these slots to storage before their eviction, if
            the host's write policy requires that; False to evict them unwritten.
    """

    first: int
    slots: list[Ids] = field(default_factory=list)
    stores_first: bool = True

    @property
    def num_slots(self) -> int:
        return sum(map(len, self.slots))


class Slots:
    """The free and the lent slots of device and host: those that no block in the index has.

    A lent slot is used by a copy; its block is not in the index yet, or was evicted during the
    copy. Every slot is free, lent or in the index; `verify` counts all three to find lost slots.

    Attributes:
        pools: by tier, the free slots.
        leaving: by tier, the slots that a shrinking tier loses.
    """

    def __init__(self, device_pool: BlockPool, host_pool: BlockPool, work: Work) -> None:
        self.pools = {Tier.DEVICE: device_pool, Tier.HOST: host_pool}
        self.leaving: dict[Tier, Leaving] = {}
        self._work = work
        self._in_flight: dict[Tier, list[Ids]] = {Tier.DEVICE: [], Tier.HOST: []}
        self._reads = _NO_SLOTS  # number of stores that read each host slot
        self._num_reads = 0
        self._still_read = _NO_SLOTS  # host slots of evicted blocks that are being read

    def free(self, tier: Tier, slots: Ids) -> None:
        """Free slots, and wake callers that wait for slots.

        Args:
            tier: the tier of the slots.
            slots: slots that neither the index nor a copy uses, int32 [n].
        """
        if len(slots):
            self.pools[tier].release(slots)
            self._work.capacity_changed()

    def lend(self, tier: Tier, slots: Ids) -> None:
        """Record that a copy uses slots which are neither free nor in the index.

        Args:
            tier: the tier of the slots.
            slots: the slots, int32 [n]; pass the same array to `unlend` later.
        """
        self._in_flight[tier].append(slots)

    def unlend(self, tier: Tier, slots: Ids) -> None:
        """Record that a copy no longer uses slots; they are not freed.

        Args:
            tier: the tier of the slots.
            slots: the array that was passed to `lend`.
        """
        lent = self._in_flight[tier]
        del lent[next(i for i, other in enumerate(lent) if other is slots)]

    def retire(self, tier: Tier, slots: Ids) -> None:
        """Take acquired slots out of use, because their tier is becoming smaller.

        Args:
            tier: the shrinking tier, a key of `leaving`.
            slots: ids of the slots, int32 [n]; none is below `leaving[tier].first`.
        """
        self.lend(tier, slots)
        self.leaving[tier].slots.append(slots)

    def num_lent(self) -> tuple[int, int]:
        """Return the numbers of lent slots on the device and on the host."""
        return len(self.lent(Tier.DEVICE)), len(self.lent(Tier.HOST))

    def lent(self, tier: Tier) -> Ids:
        """Return the lent slots of `tier`, int32 [n].

        Host slots of evicted blocks that a store still reads are included.
        """
        gone = self._still_read if tier is Tier.HOST else _NO_SLOTS
        return np.concatenate([gone, *self._in_flight[tier]])

    # Slots that a store reads. Their blocks have no lease, since a store that hangs would then keep
    # whole prompts on the device. The blocks can be evicted, but their slots are free only later.

    @property
    def num_still_read(self) -> int:
        """Number of host slots that are not free yet because a store reads their evicted blocks."""
        return len(self._still_read)

    @property
    def num_being_stored(self) -> int:
        """Number of host slots in the index that a store is reading."""
        return self._num_reads - len(self._still_read)

    def begin_reading(self, slots: Ids) -> None:
        """Record that a store reads host slots from now on; call `end_reading` with the same slots.

        Before the call of `end_reading`, the blocks in the slots can be evicted, but the slots do
        not become free.
        """
        self._readers()[slots] += 1
        self._num_reads += len(slots)

    def end_reading(self, slots: Ids) -> None:
        """Record that a store no longer reads host slots.

        Slots whose blocks were evicted since `begin_reading` become free.
        """
        self._reads[slots] -= 1
        self._num_reads -= len(slots)
        if len(self._still_read):
            is_read = self._reads[self._still_read] > 0
            freed, self._still_read = self._still_read[~is_read], self._still_read[is_read]
            self.pools[Tier.HOST].release(freed)
        self._work.capacity_changed()  # slots still in the index can be evicted now

    def free_of(self, tier: Tier, slots: Ids) -> Ids:
        """Return those slots of evicted blocks that are free now.

        A host slot that a store still reads is freed later, by `end_reading`.

        Args:
            tier: the tier of the slots.
            slots: slots whose blocks were just removed from the index, int32 [n].

        Returns:
            The slots that are free, int32 [m], 0 <= m <= n.
        """
        if tier is Tier.DEVICE or not self._num_reads:
            return slots
        is_read = self._readers()[slots] > 0
        self._still_read = np.concatenate([self._still_read, slots[is_read]])
        return slots[~is_read]

    def _readers(self) -> Ids:
        more = self.pools[Tier.HOST].capacity - len(self._reads)
        if more > 0:
            self._reads = np.concatenate([self._reads, np.zeros(more, np.int32)])
        return self._reads
