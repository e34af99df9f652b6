"""Copies of blocks from device to host and from host to storage, and lookups in storage.

A block is copied early if the settings say so, or at the latest when it would otherwise be lost by
eviction. The bytes of running copies are limited.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import numpy as np

from tierkv.cache.index import Index, Lease, Match, runs_of, segments
from tierkv.cache.keys import TOKEN_BYTES, KeyRun, Prompt, StoredKey, Tail
from tierkv.cache.node import Change, CopyState, Ids, Mask, Tier, TreeNode
from tierkv.errors import OutOfBlocksError, ShuttingDownError, TransferError
from tierkv.sched.events import BlockRun, CacheEventKind, CacheEvents, EventPoint
from tierkv.sched.eviction import CopyDown, Eviction
from tierkv.sched.log_throttle import LogThrottle
from tierkv.sched.planner import Step
from tierkv.sched.slots import Leaving, Slots, Work
from tierkv.storage.protocol import PutStatus
from tierkv.transfer.mover import Movement, Mover
from tierkv.transfer.storage_io import SharedTail, StorageIO

# Number of keys that are computed and looked up at once, in at most 20 ms of the loop's time. For a
# prompt that was never stored, only the first of these pieces is computed.
PIECE_BLOCKS = 2048
HASHED_BLOCKS = 512  # keys computed in one turn of the loop: 4 ms


def path_keys(index: Index, node: TreeNode, first: int, stop: int) -> list[StoredKey]:
    """Return the storage keys of blocks [first, stop) of a path.

    A storage key names a block in storage. A path is a prefix in the index, from the root to a
    node. A tail (partial last block of a prompt) can only be the last block of a path.

    Args:
        index: the index that has the path.
        node: the node of the index at the end of the path.
        first: index of the first block, from the start of the prompt.
        stop: index after the last block.
    """
    size, space = index.block_size, node.space
    digests = index.digests(node, node.start if node.is_tail else stop)
    keys = [StoredKey(one, size, is_tail=False, space=space.name) for one in digests]
    if node.is_tail:
        parent = digests[-1] if digests else space.root_digest
        tail = Tail(parent, node.tokens, node.extra(node.start))
        tokens = len(node.tokens) // TOKEN_BYTES
        keys.append(StoredKey(tail.digest, tokens, is_tail=True, space=space.name, tail=tail))
    return keys[first:stop]


def keys_beyond(index: Index, prompt: Prompt, match: Match) -> KeyRun:
    """Return the storage keys of the blocks after a match, the prompt's tail included.

    Args:
        index: the index of the match.
        prompt: the prompt whose keys are returned.
        match: the cached blocks of `prompt` at this moment.

    Returns:
        The keys, in order; each is computed when it is first read.
    """
    end = match.num_blocks
    return KeyRun.of(prompt, last_digest(index, match.node, end), end)


def last_digest(index: Index, node: TreeNode, end: int) -> bytes:
    """Return the digest of block `end` - 1 of a path, or of its root if there is no such block."""
    last = index.digests(node, end, start=max(end - 1, 0))
    return last[-1] if last else node.space.root_digest


@dataclass(frozen=True, slots=True)
class Beyond:
    """The blocks of a prompt that are in storage but not in the index, at one moment.

    Attributes:
        blocks: indexes of the blocks that storage has after the cached ones, without a gap; a tail
            (partial last block) is included.
        tail: the stored tail of another prompt that shares the most tokens with the block after
            `blocks`; None if there is none, or if storage has all blocks.
        num_tokens: number of tokens that a fetch would bring.
    """

    blocks: range
    tail: SharedTail | None = None
    num_tokens: int = 0


async def stored_beyond(index: Index, storage: StorageIO, prompt: Prompt, match: Match) -> Beyond:
    """Ask storage which blocks of a prompt it has after the cached ones.

    If storage lacks one of these blocks, the result may name a stored tail (partial last block) of
    another prompt that begins with the same tokens as the missing block.

    Args:
        index: the index in which `match` was found.
        storage: the storage tier.
        prompt: the prompt whose blocks are looked up.
        match: the cached blocks of `prompt` at this moment.

    Returns:
        The blocks that storage has, the tail, and the number of tokens that a fetch would bring.

    Raises:
        StoreUnavailableError: the store did not answer in time.
    """
    here = match.partial.num_tokens if match.partial else 0
    first, start = match.num_blocks, match.num_blocks * prompt.block_size
    if here >= prompt.num_tokens - start:
        return Beyond(range(first, first))
    keys = keys_beyond(index, prompt, match)
    found = await count_stored(storage, keys)
    blocks = range(first, first + found)
    num_tokens = min(blocks.stop * prompt.block_size, prompt.num_tokens) - start
    if found == len(keys):
        return Beyond(blocks, None, num_tokens)
    wanted, extra = prompt.block(blocks.stop), prompt.extra(blocks.stop)
    # Storage does not have the prompt's own tail, whatever is listed.
    missing = (keys[found].digest,) if blocks.stop == prompt.num_blocks else ()
    parent = keys.parent_of(found)
    tail = await storage.tails.best(parent, wanted, extra, prompt.space, missing=missing)
    shared = tail.num_shared if tail is not None else 0
    if not found and shared <= here:
        return Beyond(blocks)
    return Beyond(blocks, tail, num_tokens + shared)


async def count_stored(storage: StorageIO, keys: KeyRun) -> int:
    """Return the number of a prompt's leading blocks that storage has.

    Args:
        storage: the storage tier.
        keys: the storage keys of the prompt's blocks, in order.

    Raises:
        StoreUnavailableError: the store did not answer in time.
    """
    found = 0
    while found < len(keys):
        piece = keys[found : found + PIECE_BLOCKS]
        present = await storage.count_present(piece)
        found += present
        if present < len(piece):
            break
    return found


GROUP_BLOCKS = 32  # blocks that a background copy, a fetch or a publish moves at a time
PIECE_BYTES = 8 << 20  # small blocks are copied to the host in pieces of 0.15 ms on PCIe 5
LEAVING_PATIENCE_S = 1.0  # longest write of a group to a store while the host tier shrinks
_SHARE_BEING_STORED = 4  # writes use at most one n-th of the host slots
_MAX_TO_STORE = 4096  # largest number of groups that wait for the store; more are not stored
log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _ByteGrant:
    num_bytes: int
    granted: asyncio.Future[None]


class ByteBudget:
    """A limit on the bytes of copies in flight.

    Callers wait in the order of their calls. A copy larger than the limit may start when no other
    one is in flight.

    Args:
        max_bytes: the limit.
        is_busy: returns True while more urgent copies run. Then only one copy of this budget is in
            flight at a time, so that the urgent copies have the bandwidth. Call `start_waiting`
            when the result may have changed.

    Attributes:
        bytes_in_flight: bytes of the copies in flight.
        max_in_flight: largest value of `bytes_in_flight` so far.
    """

    def __init__(self, max_bytes: int, is_busy: Callable[[], bool]) -> None:
        self.max_bytes = max_bytes
        self.bytes_in_flight = 0
        self.max_in_flight = 0
        self._is_busy = is_busy
        self._num_in_flight = 0
        self._line: deque[_ByteGrant] = deque()

    @property
    def num_waiting(self) -> int:
        return sum(not grant.granted.cancelled() for grant in self._line)

    @asynccontextmanager
    async def room(self, num_bytes: int) -> AsyncIterator[None]:
        """Wait until a copy of `num_bytes` bytes may start.

        The bytes count toward the limit until the `async with` block ends.
        """
        grant = _ByteGrant(num_bytes, asyncio.get_running_loop().create_future())
        self._line.append(grant)
        self.start_waiting()
        try:
            await grant.granted
        except asyncio.CancelledError:
            if not grant.granted.cancelled() and grant.granted.done():
                self._ended(grant)
            else:
                grant.granted.cancel()
                self.start_waiting()  # copies behind this one may fit
            raise
        try:
            yield
        finally:
            self._ended(grant)

    def _ended(self, grant: _ByteGrant) -> None:
        self.bytes_in_flight -= grant.num_bytes
        self._num_in_flight -= 1
        self.start_waiting()

    def start_waiting(self) -> None:
        """Start waiting copies in order, while the limit of bytes in flight permits it."""
        while self._line:
            grant = self._line[0]
            if grant.granted.cancelled():
                self._line.popleft()
                continue
            fits = self.bytes_in_flight + grant.num_bytes <= self.max_bytes
            if self._num_in_flight and (not fits or self._is_busy()):
                return
            self._line.popleft()
            self._num_in_flight += 1
            self.bytes_in_flight += grant.num_bytes
            self.max_in_flight = max(self.max_in_flight, self.bytes_in_flight)
            grant.granted.set_result(None)

    def findings(self) -> list[str]:
        """Return violated invariants, one sentence each; call only when no copy runs."""
        if not (self.bytes_in_flight or self._num_in_flight):
            return []
        count = self.bytes_in_flight
        return [f"no copy runs, but {count} bytes of copies to lower tiers are counted"]


@dataclass(slots=True, eq=False)
class Flush:
    """A write of blocks from host slots to a store.

    Until the write has ended, the slots are not reused, even if their blocks are evicted.

    Attributes:
        keys: storage keys of the blocks.
        slots: host slots of the blocks, int32 [len(keys)].
        worth: for each block, a number that is higher for more useful blocks. A full store may
            refuse blocks with low numbers.
        runs: the blocks as cache events describe them; [] if nobody subscribes to events.
        generation: number of deletions of stored values that had begun when the write was planned.
            A later deletion cancels the write.
        began: the point in the order of cache events at which the write began.
    """

    keys: list[StoredKey]
    slots: Ids
    worth: list[float]
    runs: list[BlockRun]
    generation: int
    began: EventPoint


class Copies:
    """Copies blocks from device to host and from host to storage.

    Each copy is a task. Its slots are not reused before it has ended: a lease protects the blocks
    from eviction, or the slots are listed as in use. The write rule of a tier says whether its
    blocks are copied to the tier below early, or only when they are evicted.

    Args:
        eviction: frees slots for the copies. An eviction that must not lose a block has the block
            copied first, by `copy_down`.
        slots: slots of device and host.
        work: owns the tasks.
        events: publishes new copies.
        mover: copies between device and host.
        storage: the storage tier; None for none.
        block_bytes: bytes of a block.
        background_copy_bytes: largest number of bytes that early copies to the host may have under
            way; the same for early copies to storage.

    Attributes:
        background: limit on the bytes of early copies to the host; loads to the device have
            precedence.
        storing: limit on the bytes of early copies to storage, at most a quarter of the host tier.
        num_loads: number of running loads to the device. While there are any, copies to lower tiers
            run one at a time.
        num_offloads: number of running copies to the host.
        storage: the storage tier; None while none is attached.
    """

    def __init__(  # noqa: PLR0913 - what it moves between, and how much
        self,
        eviction: Eviction,
        slots: Slots,
        work: Work,
        *,
        events: CacheEvents,
        mover: Mover,
        storage: StorageIO | None,
        block_bytes: int,
        background_copy_bytes: int,
    ) -> None:
        self.storage = storage
        self.num_loads = 0
        self.num_offloads = 0
        self._index = eviction.index
        self._rules = eviction.rules
        self._offloads_early = eviction.rules[Tier.DEVICE].writes_early
        self._stores_early = eviction.rules[Tier.HOST].writes_early
        self._eviction = eviction
        self._slots = slots
        self._work = work
        self._events = events
        self._mover = mover
        self._block_bytes = block_bytes
        self._not_stored = LogThrottle(log, "a block was not stored (x%d): %s")
        self.background = ByteBudget(background_copy_bytes, lambda: self.num_loads > 0)
        self.storing = ByteBudget(background_copy_bytes, lambda: self.num_loads > 0)
        # Nodes that a task copies to the host, with the index after the last block that it copies.
        self._to_host: dict[TreeNode, int] = {}
        eviction.copy_down = self.copy_down
        self.resized()

    def prompt_keys(self, prompt: Prompt) -> KeyRun:
        """Return the storage keys of a prompt, its tail included.

        Each key is computed when it is first read.
        """
        root = self._index.spaces.root_of(prompt).space.root_digest
        keys = prompt.keys
        if keys is None or keys.parent != root:
            match = self._index.match(prompt)
            known = self._index.known_digests(match.node, match.num_blocks)
            keys = prompt.keys = KeyRun.of(prompt, root, known=known)
        return keys

    async def hashed_keys(self, prompt: Prompt) -> KeyRun:
        """Return the storage keys of a prompt, all computed, without blocking the event loop.

        Each turn of the loop computes HASHED_BLOCKS of them.
        """
        keys = self.prompt_keys(prompt)
        while not keys.hash_more(HASHED_BLOCKS):  # noqa: ASYNC110 - no event to wait for
            await asyncio.sleep(0)
        return keys

    def load_ended(self) -> None:
        """Record that a load to the device has ended.

        While loads run, copies to the host and to storage run one at a time, so that the loads have
        the bandwidth. After the last load, all copies that wait are started.
        """
        self.num_loads -= 1
        if not self.num_loads:
            self.background.start_waiting()
            self.storing.start_waiting()

    def resized(self) -> None:
        """Adapt the limit on bytes being written to storage to the new size of the host tier."""
        most = self._slots.pools[Tier.HOST].capacity * self._block_bytes // _SHARE_BEING_STORED
        self.storing.max_bytes = min(self.background.max_bytes, most)
        self.storing.start_waiting()

    def findings(self) -> list[str]:
        """Return violated invariants, one sentence each; call only when no copy runs."""
        wrong = []
        if self.num_loads:
            wrong.append(f"no copy runs, but {self.num_loads} loads are counted")
        if self.num_offloads:
            wrong.append(f"no copy runs, but {self.num_offloads} offloads are counted")
        if self._work.is_at_work():
            wrong.append("no copy runs, but copies that make room are counted")
        if count := self._slots.num_being_stored:
            wrong.append(f"no copy runs, but {count} host slots are listed as being stored")
        return wrong + self.background.findings() + self.storing.findings()

    def write_down(self, node: TreeNode, num_blocks: int) -> None:
        """Start the copies to lower tiers that are due now for the first blocks of a path.

        The settings `cache.host_write` and `cache.storage_write` decide when a block is copied to
        the host and to storage: when it is computed, after some matches, or when it is evicted.

        Args:
            node: the node of the index at the end of the path (a prefix in the index).
            num_blocks: number of blocks from the start of the path.
        """
        is_retired = self._index.spaces.is_retired(node)
        has_storage = self._stores_early and self.storage is not None
        if is_retired or not (has_storage or self._offloads_early):
            return
        host_rule, storage_rule = self._rules[Tier.DEVICE], self._rules[Tier.HOST]
        room: int | None = None
        for part, i, j in segments(node, 0, num_blocks):
            wants_host = host_rule.writes_now(part.hits)
            wants_storage = has_storage and storage_rule.writes_now(part.hits)
            copies = part.copies[Tier.HOST]
            if not wants_storage and not (wants_host and copies.num_present < part.num_blocks):
                continue
            stored = part.stored_in(i, j)
            if stored.all() and copies.uniform is CopyState.READY:
                continue
            absent = copies.is_in(CopyState.ABSENT, i, j)
            to_storage = ~stored & wants_storage
            to_host = absent & ~to_storage & wants_host
            if (queued := self._to_host.get(part)) is not None:
                to_host[: max(queued - part.start - i, 0)] = False
            room = self._eviction.available(Tier.HOST, node.space) if room is None else room
            room -= self._cut(absent & (to_storage | to_host), room, to_storage, to_host)
            part.believe_stored(i, j, stored | to_storage)  # so that no other task writes them
            for mask, is_stored in ((to_storage, True), (to_host, False)):
                for start, stop in runs_of(mask):
                    first = part.start + i
                    self._start_down(part, first + start, first + stop, to_storage=is_stored)

    def _cut(self, needed: Mask, room: int, *masks: Mask) -> int:
        """Clear `masks` where `needed` is True, except at its first `room` True blocks.

        Return the number of blocks that stay: those for which the host has a slot.
        """
        # Otherwise each copy's task would find out by itself, and again at each admission, that the
        # host is too small for the prompt.
        wanted = int(np.count_nonzero(needed))
        if wanted <= room:
            return wanted
        beyond = np.flatnonzero(needed)[max(room, 0) :]
        for mask in masks:
            mask[beyond] = False
        self._eviction.stats.skipped_offloads += len(beyond)
        return max(room, 0)

    def save(self, node: TreeNode, num_blocks: int, *, first: int = 0) -> None:
        """Copy blocks [first, num_blocks) of a path to the host, regardless of the write rules.

        The call starts the copies and does not wait for them.

        Args:
            node: the node of the index at the end of the path (a prefix in the index).
            num_blocks: index after the last block.
            first: index of the first block.
        """
        for part, i, j in segments(node, first, num_blocks):
            missing = part.copies[Tier.HOST].is_in(CopyState.ABSENT, i, j)
            for start, stop in runs_of(missing):
                at = part.start + i
                self._start_down(part, at + start, at + stop, to_storage=False)

    def _start_down(self, node: TreeNode, first: int, stop: int, *, to_storage: bool) -> None:
        lease = self._index.hold_as_is(node)
        generation = self._generation
        work = self._write_down(lease, first, stop, generation, to_storage=to_storage)
        try:
            self._work.start(work, "tierkv-write-down", space=node.space.name)
        except ShuttingDownError:  # the end of a request on a failed node must not raise
            self._index.release(lease)
            return
        self._to_host[node] = max(self._to_host.get(node, 0), stop)

    @property
    def _generation(self) -> int:
        return self.storage.deletions.generation if self.storage is not None else 0

    async def _write_down(
        self, lease: Lease, first: int, stop: int, generation: int, *, to_storage: bool
    ) -> None:
        index, node = self._index, lease.node
        to_store: list[tuple[int, int]] = []
        try:
            at = first
            while at < stop and not index.spaces.is_retired(node):
                end = min(at + max(GROUP_BLOCKS, PIECE_BYTES // self._block_bytes), stop)
                async with self.background.room((end - at) * self._block_bytes):
                    is_whole = await self._host_copy(node, at, end)
                if to_storage and not is_whole:
                    is_whole = await self._wait_for_other_copies(node, at, end)
                if to_storage and is_whole and self.storing.num_waiting < _MAX_TO_STORE:
                    groups = range(at, end, GROUP_BLOCKS)
                    to_store += [(one, min(one + GROUP_BLOCKS, end)) for one in groups]
                elif to_storage:
                    index.unmark_stored(node, at, end)
                at = end
                if not is_whole and not self._eviction.available(Tier.HOST, node.space):
                    if to_storage:
                        index.unmark_stored(node, at, stop)
                    break  # later groups would find no room either
        finally:
            if self._to_host.get(node) == stop:
                del self._to_host[node]
            index.release(lease)
            self._work.capacity_changed()
        with suppress(ShuttingDownError):
            for at, end in to_store:
                self._work.start(self._store(node, at, end, generation), "tierkv-store")

    async def _store(self, node: TreeNode, first: int, stop: int, generation: int) -> None:
        """Store the blocks [first, stop) that are on the host, once earlier writes leave room.

        `node` is the index node at the end of the blocks' path. `generation` is the value of
        `Deletions.generation` when the blocks were queued.
        """
        # No lease protects the blocks during the wait: a slow store would keep the device full.
        async with self.storing.room((stop - first) * self._block_bytes):
            if self._index.spaces.is_retired(node):
                return
            there, end = self._on_host(node, first, stop)
            self._index.unmark_stored(node, end, min(stop, node.end))
            if end == first:
                return
            stored = await self._end_flush(self._begin_flush(there, first, end, generation))
            self._unmark_lacking(there, first, stored)

    def _unmark_lacking(self, node: TreeNode, first: int, stored: Sequence[bool]) -> None:
        for at, is_stored in enumerate(stored, first):
            if not is_stored:
                self._index.unmark_stored(node, at, at + 1)

    def store_first(self, node: TreeNode, start: int) -> bool:
        """Start to store blocks that a shrinking host tier would otherwise lose.

        The blocks are those of the node from `start` on, and all blocks of the nodes below it. A
        block is stored if neither the device nor storage has it. Each block is written at most
        once.

        Args:
            node: a node of the index.
            start: index of the first block within the node.

        Returns:
            True if any write was started.
        """
        leaving = self._slots.leaving[Tier.HOST]
        rule = self._rules[Tier.HOST]
        is_off = self.storage is None or self._index.spaces.is_retired(node)
        if is_off or not rule.writes_on_eviction or not leaving.stores_first:
            return False
        pending, has_started = [(node, start)], False
        while pending:
            part, first = pending.pop()
            pending.extend((child, 0) for child in part.children.values())
            only_here = part.copies[Tier.HOST].is_in(CopyState.READY, first, part.num_blocks)
            only_here &= ~part.copies[Tier.DEVICE].is_in(CopyState.READY, first, part.num_blocks)
            for i, j in runs_of(only_here & ~part.stored_in(first, part.num_blocks)):
                for at in range(part.start + first + i, part.start + first + j, GROUP_BLOCKS):
                    stop = min(at + GROUP_BLOCKS, part.start + first + j)
                    self._start_leaving(leaving, part, at, stop)
                    has_started = True
        return has_started

    def _start_leaving(self, leaving: Leaving, node: TreeNode, first: int, stop: int) -> None:
        lease = self._index.hold_as_is(node)
        work = self._store_leaving(leaving, lease, first, stop, self._generation)
        try:
            self._work.start(work, "tierkv-store")
        except ShuttingDownError:
            self._index.release(lease)
            raise
        self._index.mark_stored(node, first, stop)

    async def _store_leaving(
        self, leaving: Leaving, lease: Lease, first: int, stop: int, generation: int
    ) -> None:
        """Write host blocks [first, stop) to storage before the shrinking host tier loses them.

        After a write that takes longer than 1 second, the remaining blocks are removed without
        being stored.
        """
        node, stored = lease.node, [False] * (stop - first)
        try:
            async with self.storing.room((stop - first) * self._block_bytes):
                if leaving.stores_first:
                    async with asyncio.timeout(LEAVING_PATIENCE_S):
                        flush = self._begin_flush(node, first, stop, generation)
                        stored = await self._end_flush(flush)
        except TimeoutError:
            leaving.stores_first = False
        finally:
            if not leaving.stores_first:  # blocks that were not stored may be stored later
                self._unmark_lacking(node, first, stored)
            self._index.release(lease)
            self._work.capacity_changed()

    def _on_host(self, node: TreeNode, first: int, stop: int) -> tuple[TreeNode, int]:
        """Find the last of the consecutive blocks from `first` on that are ready on the host.

        Return the index node that has this block, and the index after the block. If block `first`
        is not ready on the host, return `node` and `first`.
        """
        last, at = node, first
        for part, i, j in segments(node, first, min(stop, node.end)):
            host = part.copies[Tier.HOST]
            ready = host.is_in(CopyState.READY, i, j) if host.num_present else np.zeros(1, np.bool_)
            count = j - i if ready.all() else int(np.argmin(ready))
            last, at = (part, at + count) if count else (last, at)
            if count < j - i:
                break
        return last, at

    async def _wait_for_other_copies(self, node: TreeNode, first: int, stop: int) -> bool:
        path = Tier.HOST, node, first, stop
        while self._index.is_in(CopyState.INCOMING, *path).any():
            await self._work.next_change()
        return bool(self._index.is_in(CopyState.READY, *path).all())

    async def _host_copy(self, node: TreeNode, first: int, stop: int) -> bool:
        missing = self._index.is_in(CopyState.ABSENT, Tier.HOST, node, first, stop)
        ready = self._index.is_in(CopyState.READY, Tier.HOST, node, first, stop)
        complete = bool((missing | ready).all())
        for start, end in runs_of(missing):
            try:  # some blocks are useful without the rest, since a match begins at the start
                slots = self._eviction.acquire_some(Tier.HOST, end - start, node.space)
            except OutOfBlocksError:
                self._eviction.stats.skipped_offloads += end - start
                complete = False
                continue
            fitting = start + len(slots)
            self._eviction.stats.skipped_offloads += end - fitting
            movement = self._begin_offload(node, first + start, first + fitting, slots)
            is_whole = await self._end_offload(node, first + start, first + fitting, movement)
            complete = complete and is_whole and fitting == end
        return complete

    # Copies that must come before an eviction

    def copy_down(self, tier: Tier, step: Step) -> CopyDown:
        """Start to copy blocks to the tier below, because they are to be evicted from `tier`.

        If the host has room for only some of the blocks, the last ones are evicted without a copy.
        A write to storage is tried once, and the host slots become free even if it fails.

        Args:
            tier: the tier that the blocks are to leave: device or host.
            step: the step of an eviction plan, with the blocks.

        Returns:
            STARTED; LATER if slots of the tier below will become free soon; IMPOSSIBLE if they will
                not, or if there is no tier below.
        """
        node = step.victim.node
        first, stop = node.start + step.victim.start, node.start + step.victim.stop
        lacks_storage = tier is Tier.HOST and self.storage is None
        if lacks_storage or self._index.spaces.is_retired(node):
            return CopyDown.IMPOSSIBLE
        if tier is Tier.HOST:
            # The mark lets the blocks leave after one attempt, even a failed one: without it every
            # later plan would try again, and a failing store would hold up inference.
            self._index.mark_stored(node, first, stop)
            self._eviction.on_the_way[tier] += stop - first
            end = self._work.begin_storing(node.space.name)
            flush = self._begin_flush(node, first, stop, self._generation)
            self._work.start(self._flush_for_room(flush, end), "tierkv-flush")
            return CopyDown.STARTED
        room = self._eviction.available(Tier.HOST, node.space)
        if (
            0 < room < stop - first
            and not node.holders
            and not self._eviction.is_making_room(Tier.HOST)
        ):
            self._eviction.forget(node, step.victim.start + room)
            stop = first + room
        lease = self._index.hold_as_is(node)
        try:
            slots = self._eviction.acquire(Tier.HOST, stop - first, node.space)
        except OutOfBlocksError:
            self._index.release(lease)
            is_soon = (
                self._eviction.on_the_way[Tier.HOST]
                and not self._work.num_late
                and self._may_wait()
            )
            return CopyDown.LATER if is_soon else CopyDown.IMPOSSIBLE
        self._eviction.on_the_way[tier] += stop - first
        movement = self._begin_offload(node, first, stop, slots)
        work = self._offload_for_room(lease, first, stop, movement)
        self._work.start(work, "tierkv-write-back", space=node.space.name)
        return CopyDown.STARTED

    def _may_wait(self) -> bool:
        may = self._work.allowance.update_allowance(asyncio.get_running_loop().time())
        self._work.allowance.is_waiting = may
        return may

    async def _offload_for_room(
        self, lease: Lease, first: int, stop: int, movement: Movement
    ) -> None:
        has_copy = False
        try:
            has_copy = await self._end_offload(lease.node, first, stop, movement)
        finally:
            self._eviction.on_the_way[Tier.DEVICE] -= stop - first
            self._index.release(lease)
            node = lease.node
            if not has_copy and not node.holders and node.copies[Tier.DEVICE].num_present:
                # If kept, every later plan would try the copy again.
                self._eviction.forget(node, max(first - node.start, 0))
            self._work.capacity_changed()

    async def _flush_for_room(self, flush: Flush, end: Callable[[], None]) -> None:
        try:
            await self._end_flush(flush)
        finally:
            self._eviction.on_the_way[Tier.HOST] -= len(flush.slots)
            self._work.allowance.update_allowance(asyncio.get_running_loop().time())
            self._work.allowance.is_waiting = False  # a waiting request asks again now
            end()  # last: it wakes requests, for which these slots must not be on the way
            self._work.capacity_changed()

    def _begin_offload(self, node: TreeNode, first: int, stop: int, slots: Ids) -> Movement:
        index = self._index
        index.change(Tier.HOST, node, first, stop, Change.RESERVE, slots=slots)
        self.num_offloads += 1
        return self._mover.offload(slots, index.slots(Tier.DEVICE, node, first, stop))

    async def _end_offload(self, node: TreeNode, first: int, stop: int, movement: Movement) -> bool:
        index = self._index
        try:
            try:
                await movement.done()
            finally:
                self.num_offloads -= 1
        except TransferError as error:
            log.warning(
                "%d blocks could not be copied from the device to the host: %s", stop - first, error
            )
            self._eviction.stats.failed_transfers += 1
            self._slots.free(Tier.HOST, index.change(Tier.HOST, node, first, stop, Change.FAIL))
            return False
        index.change(Tier.HOST, node, first, stop, Change.ARRIVE)
        self._eviction.stats.offloaded_blocks += stop - first
        self._events.publish(CacheEventKind.STORED, "host", node, first, stop)
        self._work.capacity_changed()  # wakes tasks that wait for these blocks on the host
        return True

    def _begin_flush(self, node: TreeNode, first: int, stop: int, generation: int) -> Flush:
        """Protect the slots of host blocks until `_end_flush` has written the blocks."""
        # A block is useless without the blocks before it: with equal hits the first is worth most.
        worth = [node.hits + 1 / (1 + at) for at in range(first, stop)]
        slots = self._index.slots(Tier.HOST, node, first, stop)
        self._slots.begin_reading(slots)
        keys = path_keys(self._index, node, first, stop)
        runs = self._events.runs(node, first, stop)
        return Flush(keys, slots, worth, runs, generation, self._events.now())

    async def _end_flush(self, flush: Flush) -> list[bool]:
        try:
            storage = self.storage
            if storage is None:  # detached since the start
                return [False] * len(flush.keys)
            outcomes = await storage.flush(
                flush.keys, flush.slots, flush.worth, generation=flush.generation
            )
        finally:
            self._slots.end_reading(flush.slots)
        is_there = [one.status in (PutStatus.STORED, PutStatus.EXISTED) for one in outcomes]
        self._publish_stored(flush.runs, is_there, flush.began)
        if storage.deletions.generation == flush.generation:
            for outcome, there in zip(outcomes, is_there, strict=True):
                if not there:
                    self._not_stored.warn(outcome.reason)
        return is_there

    def _publish_stored(
        self, runs: Sequence[BlockRun], is_there: Sequence[bool], began: EventPoint
    ) -> None:
        at, found = 0, []
        for run in runs:
            first = 0
            for there, group in itertools.groupby(is_there[at : at + len(run.digests)]):
                stop = first + len(list(group))
                if there:
                    found.append(run.part(first, stop))
                first = stop
            at += len(run.digests)
        self._events.publish_stored(found, began)

    def note_stored(self, node: TreeNode, first: int, stop: int, began: EventPoint) -> None:
        """Record and publish that storage has blocks [first, stop) of a path.

        Args:
            node: the node of the index at the end of the path (a prefix in the index).
            first: index of the first block.
            stop: index after the last block.
            began: the point in the order of events at which the write or lookup began. If storage
                has lost all of its blocks after that point, the call does nothing.
        """
        if began.num_clears == self._events.now().num_clears:
            self._index.mark_stored(node, first, stop)
            self._events.publish_stored(self._events.runs(node, first, stop), began)

    def note_not_stored(self, node: TreeNode, first: int, stop: int) -> None:
        """Record that storage lacks blocks [first, stop) of a path, and report it as a cache event.

        Args:
            node: the node of the index at the end of the path (a prefix in the index).
            first: index of the first block.
            stop: index after the last block.
        """
        self._index.unmark_stored(node, first, stop)
        self._events.publish_not_stored(node, first, stop)

    def note_nothing_stored(self) -> None:
        """Record that storage may have lost all blocks, and send cache events that say so."""
        self._index.unmark_all_stored()
        self._events.publish_storage_lost()
