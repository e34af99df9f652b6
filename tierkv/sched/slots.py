"""Slots of the tiers and who holds them: pools, tasks, slots in flight, listeners; stored keys."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypedDict, Unpack

import numpy as np

from tierkv.cache.eviction import WriteRule
from tierkv.cache.history import History
from tierkv.cache.index import Index
from tierkv.cache.keys import Prompt, StoredKey, Tail, chain, keys_of
from tierkv.cache.node import Node, Tier
from tierkv.cache.pool import BlockPool, Ids
from tierkv.cache.tokens import TOKEN_BYTES
from tierkv.errors import ShuttingDownError
from tierkv.sched.events import CacheEvents
from tierkv.sched.log_throttle import LogThrottle
from tierkv.sched.pins import Pins
from tierkv.sched.worth import Allowance
from tierkv.tasks import task_group
from tierkv.transfer.mover import Mover
from tierkv.transfer.storage_io import StorageIO


@dataclass(slots=True)
class Decisions:
    """Counts since the start, one for each run of blocks that was decided on.

    load_host: brought to the device from the host. fetch_storage: brought from storage.
    wait_device: waited for, while another request computes them. wait_storage: waited for, while
    another request's fetch brings them. recompute_device: computed, although another request was
    at it. recompute_storage: computed, although storage had them, or was not even asked, since
    that was estimated to be slower. recompute_late: computed, since storage was too slow.
    """

    load_host: int = 0
    fetch_storage: int = 0
    wait_device: int = 0
    wait_storage: int = 0
    recompute_device: int = 0
    recompute_storage: int = 0
    recompute_late: int = 0


log = logging.getLogger("tierkv.tiers")
STORE_PATIENCE_S = 0.25  # how long who needs room waits for a store to be done with blocks
CLOSING_PATIENCE_S = 5.0  # how often closing says what it still waits for
_NO_SLOTS: Ids = np.zeros(0, np.int32)


@dataclass(slots=True)
class TierStats:
    """Counts since the start."""

    evicted_device_blocks: int = 0
    evicted_host_blocks: int = 0
    forgotten_blocks: int = 0  # evicted from their last tier
    offloaded_blocks: int = 0
    skipped_offloads: int = 0  # no room on the host
    failed_transfers: int = 0


@dataclass(slots=True)
class Leaving:
    """Slots of a tier that go, those from `first` on: who takes some gets others, so that those who
    wait for room cannot keep them in use for ever. slots: those that are out of use by now.
    stores_first: whether blocks are still stored before they go, where the rule says so."""

    first: int
    slots: list[Ids] = field(default_factory=list)
    stores_first: bool = True

    @property
    def num_slots(self) -> int:
        return sum(map(len, self.slots))


class Parts(TypedDict):
    """What the tiers are made of. host_rule: when a device block is copied to the host;
    storage_rule: when a host block is stored."""

    index: Index
    root_digest: bytes
    device_pool: BlockPool
    host_pool: BlockPool
    mover: Mover
    storage: StorageIO | None
    host_rule: WriteRule
    storage_rule: WriteRule


class TierBooks:
    """Pools and index, and who holds slots outside the index. Every copy runs in a task of this
    object, under a lease of its own, and ends in bookkeeping whether or not anybody still waits."""

    def __init__(self, **parts: Unpack[Parts]) -> None:
        self.index = parts["index"]
        self.root_digest = parts["root_digest"]
        self.pools = {Tier.DEVICE: parts["device_pool"], Tier.HOST: parts["host_pool"]}
        self.mover = parts["mover"]
        self.storage = parts["storage"]
        self.rules = {Tier.DEVICE: parts["host_rule"], Tier.HOST: parts["storage_rule"]}
        self.stats = TierStats()
        self.decisions = Decisions()
        self._not_stored = LogThrottle(log, "block not stored (x%d): %s")
        self.events = CacheEvents(self._digests_of)
        self.num_loads = 0  # on their way to the device: copies down make way for them
        self.num_offloads = 0  # on their way to the host: they hold its slots until they end
        self.history = History()
        self.pins = Pins(self.index, self.capacity_changed)
        self._in_flight_slots: dict[Tier, list[Ids]] = {Tier.DEVICE: [], Tier.HOST: []}
        self._reads = _NO_SLOTS  # by host slot, how many stores read it, see `begin_reading`
        self._num_reads = 0
        self._gone = _NO_SLOTS  # host slots that the index gave up while they were being read
        self.leaving: dict[Tier, Leaving] = {}  # of tiers that shrink, or are being emptied
        self._tasks: asyncio.TaskGroup | None = None
        self._listeners: list[Callable[[], None]] = []
        self._changed: asyncio.Event | None = None  # made for those who wait for it
        self._is_closed = False
        self.num_tasks = 0
        self.num_late = 0  # pieces that a store has had for longer than they are waited for
        self.allowance = Allowance()
        self.num_changes = 0  # counts up with each `capacity_changed`
        self._at_work: Counter[str] = Counter()  # tasks whose end makes room, by space

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Leaving waits for every copy under way, however long a store or device takes to leave
        the slots: their memory goes next. It says what it waits for."""
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
                            *(len(self.lent_slots(tier)) for tier in Tier),
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

    # Slots that movements hold

    def give(self, tier: Tier, slots: Ids) -> None:
        if len(slots):
            self.pools[tier].release(slots)
            self.capacity_changed()

    def lend(self, tier: Tier, slots: Ids) -> None:
        """Note slots that a movement holds outside the index, so that `verify` finds an owner."""
        self._in_flight_slots[tier].append(slots)

    def unlend(self, tier: Tier, slots: Ids) -> None:
        lent = self._in_flight_slots[tier]
        del lent[next(i for i, other in enumerate(lent) if other is slots)]

    def retire(self, tier: Tier, slots: Ids) -> None:
        """Taken slots, of those that leave, go out of use."""
        self.lend(tier, slots)
        self.leaving[tier].slots.append(slots)

    def lent_slots(self, tier: Tier) -> Ids:
        gone = self._gone if tier is Tier.HOST else _NO_SLOTS
        return np.concatenate([gone, *self._in_flight_slots[tier]])

    # Slots that a store reads. Their blocks are not held, or a store that hangs would keep whole
    # prompts on the device: they may go, but their host slots are free only when it is done.

    def num_being_stored(self, tier: Tier) -> int:
        """How many of the index's slots a store reads."""
        return self._num_reads - len(self._gone) if tier is Tier.HOST else 0

    def begin_reading(self, slots: Ids) -> None:
        """A store reads these host slots until `end_reading`."""
        self._readers()[slots] += 1
        self._num_reads += len(slots)

    def end_reading(self, slots: Ids) -> None:
        self._reads[slots] -= 1
        self._num_reads -= len(slots)
        if len(self._gone):
            is_read = self._reads[self._gone] > 0
            freed, self._gone = self._gone[~is_read], self._gone[is_read]
            self.pools[Tier.HOST].release(freed)
        self.capacity_changed()  # also where they are the index's still: now they may go

    def free_of(self, tier: Tier, slots: Ids) -> Ids:
        """Which of `slots`, that the index has given up, are nobody's now; the others will be."""
        if tier is Tier.DEVICE or not self._num_reads:
            return slots
        is_read = self._readers()[slots] > 0
        self._gone = np.concatenate([self._gone, slots[is_read]])
        return slots[~is_read]

    def _readers(self) -> Ids:
        """How many read each host slot; the tier may have grown."""
        more = self.pools[Tier.HOST].capacity - len(self._reads)
        if more > 0:
            self._reads = np.concatenate([self._reads, np.zeros(more, np.int32)])
        return self._reads

    # Stored keys

    def keys_of(self, node: Node, first: int, stop: int) -> list[StoredKey]:
        """The stored keys of path blocks [first, stop), a tail being the last of its path."""
        size, space = self.index.block_size, node.space
        digests = self.index.digests(node, node.start if node.is_tail else stop)
        keys = [StoredKey(one, size, is_tail=False, space=space.name) for one in digests]
        if node.is_tail:
            parent = digests[-1] if digests else space.root_digest
            tail = Tail(parent, node.tokens, node.extra(node.start))
            tokens = len(node.tokens) // TOKEN_BYTES
            keys.append(StoredKey(tail.digest, tokens, is_tail=True, space=space.name, tail=tail))
        return keys[first:stop]

    def _digests_of(self, node: Node, first: int, stop: int) -> list[bytes]:
        if node.is_tail:
            return [key.digest for key in self.keys_of(node, first, stop)]
        return self.index.digests(node, stop, start=first)

    def prompt_keys(self, prompt: Prompt) -> list[StoredKey]:
        """The stored keys of `prompt`, tail included. What is cached of it keeps its digests."""
        match = self.index.match(prompt)
        root = match.node.space.root_digest
        digests = self.index.digests(match.node, match.num_blocks)
        parent = digests[-1] if digests else root
        return keys_of(root, prompt, digests + chain(parent, prompt, match.num_blocks))
