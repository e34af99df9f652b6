"""Slots of the tiers: takes them, makes room, copies blocks down, and keeps the books right.

Everything here that decides is synchronous; every copy runs in a task of this object, under a
lease of its own, and ends in bookkeeping whether or not anybody still waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum

import numpy as np

from tierkv.cache.history import History
from tierkv.cache.index import Index, Lease
from tierkv.cache.keys import Prompt, StoredKey, chain, keys_of, tail_digest
from tierkv.cache.match import segments
from tierkv.cache.node import Node, Tier
from tierkv.cache.pool import BlockPool, Ids
from tierkv.cache.space import Space
from tierkv.cache.states import Change, CopyState
from tierkv.cache.tokens import TOKEN_BYTES
from tierkv.cache.write_policy import WriteRule
from tierkv.errors import ConfigError, OutOfBlocksError, TransferError
from tierkv.sched.pins import Pins
from tierkv.sched.planner import Step, plan_eviction, plan_room
from tierkv.storage.protocol import PutStatus
from tierkv.tasks import task_group
from tierkv.transfer.mover import Movement, Mover
from tierkv.transfer.storage_io import StorageIO

log = logging.getLogger("tierkv.tiers")


@dataclass(slots=True)
class TierStats:
    """Counts since the start."""

    evicted_device_blocks: int = 0
    evicted_host_blocks: int = 0
    forgotten_blocks: int = 0  # evicted from their last tier
    offloaded_blocks: int = 0
    skipped_offloads: int = 0  # no room on the host
    failed_transfers: int = 0


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Shares of a tier's slots. When fewer than `low` are free, blocks are evicted, and copied down
    first where the rule says so, until `high` are: a burst then need not wait for copies."""

    low: float = 0.0
    high: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high < 1:
            raise ConfigError("watermarks: 0 <= low <= high < 1")


GROUP_BLOCKS = 32  # how many blocks a background copy or a fetch moves at a time


class _CopyDown(Enum):
    STARTED = "started"
    LATER = "later"  # room below is being made
    IMPOSSIBLE = "impossible"


class Tiers:
    """background_copies: how many groups of blocks may be on their way down at once, by policy."""

    def __init__(  # noqa: PLR0913 - the tiers and their movers, all of them needed
        self,
        *,
        index: Index,
        root_digest: bytes,
        device_pool: BlockPool,
        host_pool: BlockPool,
        mover: Mover,
        storage: StorageIO | None,
        host_rule: WriteRule,
        storage_rule: WriteRule,
        background_copies: int,
        watermarks: tuple[Watermarks, Watermarks] | None = None,
    ) -> None:
        self.index = index
        self.root_digest = root_digest
        self.pools = {Tier.DEVICE: device_pool, Tier.HOST: host_pool}
        self.mover = mover
        self.storage = storage
        self.stats = TierStats()
        self._rules = {Tier.DEVICE: host_rule, Tier.HOST: storage_rule}
        self._watermarks = watermarks or (Watermarks(), Watermarks())
        self.history = History()
        self.pins = Pins(index, self.capacity_changed)
        self._on_the_way = {Tier.DEVICE: 0, Tier.HOST: 0}
        self._in_flight_slots: dict[Tier, list[Ids]] = {Tier.DEVICE: [], Tier.HOST: []}
        self._background = asyncio.Semaphore(background_copies)
        self._tasks: asyncio.TaskGroup | None = None
        self._listeners: list[Callable[[], None]] = []
        self._changed = asyncio.Event()
        self.num_tasks = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Leaving waits for every copy under way."""
        async with task_group() as self._tasks:
            yield

    async def next_change(self) -> None:
        """Return after the next time slots may have become available."""
        await self._changed.wait()

    def is_making_room(self, tier: Tier) -> bool:
        """Whether copies are under way after which slots of `tier` will be free."""
        return self._on_the_way[tier] > 0

    def on_capacity(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever slots may have become available."""
        self._listeners.append(listener)

    def capacity_changed(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        for listener in self._listeners:
            listener()

    def start(self, work: Coroutine[None, None, None], name: str) -> None:
        """Run `work` in a task that this object owns and waits for."""
        assert self._tasks is not None, "the tiers are running"
        self.num_tasks += 1
        task = self._tasks.create_task(work, name=name)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, _: asyncio.Task[None]) -> None:
        self.num_tasks -= 1
        if not self.num_tasks:
            self.capacity_changed()

    # Slots

    def take(self, tier: Tier, count: int, space: Space | None = None, *, reserved: int = 0) -> Ids:
        """`count` slots of `tier`, evicting what may go. Raises OutOfBlocksError with none taken;
        if copies that must come first have been started, `on_capacity` tells when to ask again.

        space: whose quota they count in, together with `reserved` slots that are not in the index
        yet. Who is over its quota evicts from its own.
        """
        if space is not None:
            self._stay_within_quota(tier, space, count + reserved)
        pool = self.pools[tier]
        while True:
            steps = plan_room(
                self.index,
                pool,
                tier,
                needed=count,
                on_the_way=self._on_the_way[tier],
                rule=self._rules[tier],
            )
            if not steps or not self._make_room(tier, steps):
                break
        slots = pool.allocate(count)
        self._keep_free(tier)
        return slots

    def _stay_within_quota(self, tier: Tier, space: Space, count: int) -> None:
        """Let `space` have `count` more. Raises OutOfBlocksError if what it holds is in the way."""
        quota, order = space.quota[tier], self.index.own_order(space, tier)
        if quota is None or order is None:
            return
        while (excess := space.used[tier] + count - quota) > 0:
            is_possible = excess <= order.num_unheld
            steps = plan_eviction(order, tier, excess, self._rules[tier]) if is_possible else []
            if not steps or not self._make_room(tier, steps):
                available = max(quota - space.used[tier], 0) + order.num_unheld
                raise OutOfBlocksError(tier.name.lower(), needed=count, available=available)

    def _keep_free(self, tier: Tier) -> None:
        """Below the low watermark, evict ahead of need up to the high one."""
        marks, pool = self._watermarks[tier], self.pools[tier]
        if pool.num_free >= marks.low * pool.capacity:
            return
        missing = int(marks.high * pool.capacity) - pool.num_free - self._on_the_way[tier]
        steps = plan_eviction(self.index.order[tier], tier, missing, self._rules[tier])
        self._make_room(tier, steps)

    def available(self, tier: Tier) -> int:
        """Slots that `take` could give at once or after copies it would start."""
        return self.pools[tier].num_free + self.index.order[tier].num_unheld

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

    def lent_slots(self, tier: Tier) -> Ids:
        return np.concatenate([np.zeros(0, np.int32), *self._in_flight_slots[tier]])

    def _make_room(self, tier: Tier, steps: Sequence[Step]) -> int:
        """Carry out `steps`; returns how many slots are free now that were not."""
        pool = self.pools[tier]
        before = pool.num_free
        # A copy that must go down first keeps everything above it where it is, since a match is
        # a run from the root: those steps come again in a later plan.
        waits_for_copy: set[int] = set()
        for step in steps:
            node = step.victim.node
            if step.must_copy:
                waits_for_copy.update(part.uid for part in node.path())
            elif node.uid not in waits_for_copy:
                self._evict(tier, node, step.victim.start, step.victim.stop)
        for step in steps:
            node = step.victim.node
            if step.must_copy and not node.copies[tier].num_present:
                continue  # forgotten meanwhile, together with what it hung below
            if not step.must_copy or self._copy_down(tier, step) is not _CopyDown.IMPOSSIBLE:
                continue
            if not node.holders:
                self.forget(node, step.victim.start)
        return pool.num_free - before

    def _evict(self, tier: Tier, node: Node, start: int, stop: int) -> None:
        self.history.evicted(node, start, tier, asyncio.get_running_loop().time())
        other = Tier.HOST if tier is Tier.DEVICE else Tier.DEVICE
        lost = node.copies[other].states[start:stop] == CopyState.ABSENT
        self.stats.forgotten_blocks += int(np.count_nonzero(lost))
        if tier is Tier.DEVICE:
            self.stats.evicted_device_blocks += stop - start
        else:
            self.stats.evicted_host_blocks += stop - start
        self.pools[tier].release(self.index.drop(tier, node, start, stop))

    def forget(self, node: Node, start: int) -> None:
        """Evict run blocks from `start` on and all below them, an unheld node's, from all tiers."""
        tier = Tier.DEVICE if node.copies[Tier.DEVICE].num_present else Tier.HOST
        self.history.evicted(node, start, tier, asyncio.get_running_loop().time())
        device, host = self.index.forget_below(node, start)
        self.stats.forgotten_blocks += max(len(device), len(host))
        self.stats.evicted_device_blocks += len(device)
        self.stats.evicted_host_blocks += len(host)
        self.pools[Tier.DEVICE].release(device)
        self.pools[Tier.HOST].release(host)

    def evict_below(self, tier: Tier, node: Node, start: int) -> None:
        """Evict the copies on `tier` of run blocks from `start` on and of all below them, of an
        unheld node all of whose blocks there are whole on the other tier."""
        pending, order = [(node, start)], []
        while pending:
            part, first = pending.pop()
            order.append((part, first))
            pending.extend((child, 0) for child in part.children.values())
        for part, first in reversed(order):
            stop = part.num_blocks
            for i, j in _runs(part.copies[tier].is_in(CopyState.READY, first, stop)):
                self._evict(tier, part, first + i, first + j)

    # Copies downwards

    def _copy_down(self, tier: Tier, step: Step) -> _CopyDown:
        node = step.victim.node
        first, stop = node.start + step.victim.start, node.start + step.victim.stop
        if tier is Tier.HOST:
            if self.storage is None:
                return _CopyDown.IMPOSSIBLE
            lease = self.index.hold_as_is(node)
            self._on_the_way[tier] += stop - first
            self.start(self._flush_for_room(lease, first, stop), "tierkv-flush")
            return _CopyDown.STARTED
        # What the host cannot take of a run is forgotten from its end, so that the rest is kept.
        room = self.available(Tier.HOST)
        if 0 < room < stop - first and not node.holders and not self.is_making_room(Tier.HOST):
            self.forget(node, step.victim.start + room)
            stop = first + room
        lease = self.index.hold_as_is(node)
        try:
            slots = self.take(Tier.HOST, stop - first, node.space)
        except OutOfBlocksError:
            self.index.release(lease)
            return _CopyDown.LATER if self._on_the_way[Tier.HOST] else _CopyDown.IMPOSSIBLE
        self._on_the_way[tier] += stop - first
        movement = self._begin_offload(node, first, stop, slots)
        self.start(self._offload_for_room(lease, first, stop, movement), "tierkv-write-back")
        return _CopyDown.STARTED

    async def _offload_for_room(
        self, lease: Lease, first: int, stop: int, movement: Movement
    ) -> None:
        has_copy = False
        try:
            has_copy = await self._end_offload(lease.node, first, stop, movement)
        finally:
            self._on_the_way[Tier.DEVICE] -= stop - first
            self.index.release(lease)
            node = lease.node
            if not has_copy and not node.holders and node.copies[Tier.DEVICE].num_present:
                self.forget(node, max(first - node.start, 0))  # or it would be tried for ever
            self.capacity_changed()

    async def _flush_for_room(self, lease: Lease, first: int, stop: int) -> None:
        try:
            await self._flush(lease.node, first, stop)
            # Stored or not, it was tried: the slots are needed, and the store must not hold
            # up inference. Without the mark the next plan would try again for ever.
            self.index.mark_stored(lease.node, first, stop)
        finally:
            self._on_the_way[Tier.HOST] -= stop - first
            self.index.release(lease)
            self.capacity_changed()

    def _begin_offload(self, node: Node, first: int, stop: int, slots: Ids) -> Movement:
        """Start to copy path blocks [first, stop), held and without a host copy, to `slots`."""
        index = self.index
        index.change(Tier.HOST, node, first, stop, Change.RESERVE, slots=slots)
        return self.mover.offload(slots, index.slots(Tier.DEVICE, node, first, stop))

    async def _end_offload(self, node: Node, first: int, stop: int, movement: Movement) -> bool:
        """Wait for the copy and note its result; whether the blocks have a host copy now."""
        index = self.index
        try:
            await movement.done()
        except TransferError as error:
            log.warning("offload of %d blocks failed: %s", stop - first, error)
            self.stats.failed_transfers += 1
            self.give(Tier.HOST, index.change(Tier.HOST, node, first, stop, Change.FAIL))
            return False
        index.change(Tier.HOST, node, first, stop, Change.ARRIVE)
        self.stats.offloaded_blocks += stop - first
        return True

    def write_down(self, node: Node, num_blocks: int) -> None:
        """Copy down what the rules want copied by now, of path blocks [0, num_blocks)."""
        for part, i, j in segments(node, 0, num_blocks):
            wants_host = self._rules[Tier.DEVICE].writes_now(part.hits)
            rule = self._rules[Tier.HOST]
            wants_storage = self.storage is not None and rule.writes_now(part.hits)
            host = part.copies[Tier.HOST].states[i:j]
            told = part.stored_in(i, j)
            to_storage = ~told & (host != CopyState.INCOMING) & wants_storage
            to_host = (host == CopyState.ABSENT) & ~to_storage & wants_host
            part.believe_stored(i, j, told | to_storage)  # claimed: no other task writes it too
            for mask, is_stored in ((to_storage, True), (to_host, False)):
                for start, stop in _runs(mask):
                    lease = self.index.hold_as_is(part)
                    first = part.start + i
                    work = self._write_down(
                        lease, first + start, first + stop, to_storage=is_stored
                    )
                    self.start(work, "tierkv-write-down")

    def save(self, node: Node, num_blocks: int) -> None:
        """Copy path blocks [0, num_blocks) to the host, whatever the rules want."""
        for part, i, j in segments(node, 0, num_blocks):
            missing = part.copies[Tier.HOST].is_in(CopyState.ABSENT, i, j)
            for start, stop in _runs(missing):
                lease, first = self.index.hold_as_is(part), part.start + i
                work = self._write_down(lease, first + start, first + stop, to_storage=False)
                self.start(work, "tierkv-save")

    async def _write_down(self, lease: Lease, first: int, stop: int, *, to_storage: bool) -> None:
        index, node = self.index, lease.node
        try:
            at = first
            while at < stop:
                end = min(at + GROUP_BLOCKS, stop)
                async with self._background:
                    is_whole = await self._host_copy(node, at, end)
                    if to_storage and is_whole:
                        await self._flush(node, at, end)
                    elif to_storage:
                        index.unmark_stored(node, at, end)
                at = end
        finally:
            index.release(lease)
            self.capacity_changed()

    async def _host_copy(self, node: Node, first: int, stop: int) -> bool:
        """Give path blocks [first, stop) a host copy where they have none; whether all have."""
        states = self.index.states(Tier.HOST, node, first, stop)
        missing = np.array([state == CopyState.ABSENT for state in states], np.bool_)
        complete = CopyState.INCOMING not in states
        for start, end in _runs(missing):
            try:
                slots = self.take(Tier.HOST, end - start, node.space)
            except OutOfBlocksError:
                self.stats.skipped_offloads += end - start
                complete = False
                continue
            movement = self._begin_offload(node, first + start, first + end, slots)
            if not await self._end_offload(node, first + start, first + end, movement):
                complete = False
        return complete

    async def _flush(self, node: Node, first: int, stop: int) -> bool:
        """Store path blocks [first, stop), held and ready on the host; whether all are stored."""
        assert self.storage is not None, "there is a storage tier"
        keys = self.keys_of(node, first, stop)
        outcomes = await self.storage.flush(keys, self.index.slots(Tier.HOST, node, first, stop))
        fine = (PutStatus.STORED, PutStatus.EXISTED)
        for at, outcome in enumerate(outcomes):
            if outcome.status not in fine:
                log.warning("block not stored: %s", outcome.reason)
                self.index.unmark_stored(node, first + at, first + at + 1)
        return all(outcome.status in fine for outcome in outcomes)

    def keys_of(self, node: Node, first: int, stop: int) -> list[StoredKey]:
        """The stored keys of path blocks [first, stop), a tail being the last of its path."""
        size, space = self.index.block_size, node.space
        digests = self.index.digests(node, node.start if node.is_tail else stop)
        keys = [StoredKey(one, size, is_tail=False, space=space.name) for one in digests]
        if node.is_tail:
            parent = digests[-1] if digests else space.root_digest
            digest = tail_digest(parent, node.tokens, node.extra(node.start))
            tokens = len(node.tokens) // TOKEN_BYTES
            keys.append(StoredKey(digest, tokens, is_tail=True, space=space.name))
        return keys[first:stop]

    def prompt_keys(self, prompt: Prompt) -> list[StoredKey]:
        """The stored keys of `prompt`, tail included. What is cached of it keeps its digests."""
        match = self.index.match(prompt)
        root = match.node.space.root_digest
        digests = self.index.digests(match.node, match.num_blocks)
        parent = digests[-1] if digests else root
        return keys_of(root, prompt, digests + chain(parent, prompt, match.num_blocks))


def _runs(mask: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> list[tuple[int, int]]:
    """Where `mask` is true, as (start, stop)."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]
