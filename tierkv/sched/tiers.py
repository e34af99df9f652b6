"""Slots and copies of the tiers: the whole of it, and the copies that the write rules ask for."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Unpack

import numpy as np

from tierkv.cache.copies import CopyState, Mask
from tierkv.cache.index import Lease, runs_of
from tierkv.cache.match import segments
from tierkv.cache.node import Node, Tier
from tierkv.errors import OutOfBlocksError, ShuttingDownError
from tierkv.sched.books import Leaving, Parts, TierStats
from tierkv.sched.budget import ByteBudget
from tierkv.sched.room import Watermarks
from tierkv.sched.write_back import WriteBack

__all__ = ["GROUP_BLOCKS", "TierStats", "Tiers", "Watermarks"]

GROUP_BLOCKS = 32  # how many blocks a background copy or a fetch moves at a time
LEAVING_PATIENCE_S = 1.0  # how long a host that shrinks waits for a store to take such a group
_SHARE_BEING_STORED = 4  # one of so many host slots, see Tiers
_MOST_TO_STORE = 4096  # groups that wait for the store; what comes then is not stored this time


class Tiers(WriteBack):
    """background, storing: how many bytes may be on their way down at once, by rule, to the host
    and to storage; loads go first. A store may be slow: of the host's slots, which nobody else
    gets meanwhile, it has a quarter at a time."""

    def __init__(
        self,
        *,
        background_copy_bytes: int,
        block_bytes: int,
        watermarks: tuple[Watermarks, Watermarks] | None = None,
        **parts: Unpack[Parts],
    ) -> None:
        super().__init__(watermarks, **parts)
        self._block_bytes = block_bytes
        self.background = ByteBudget(background_copy_bytes, lambda: self.num_loads > 0)
        self.storing = ByteBudget(background_copy_bytes, lambda: self.num_loads > 0)
        self.on_capacity(self.background.look_again)
        self.on_capacity(self._store_more)
        self._store_more()
        # Runs that a task is to copy to the host, and up to which block: nobody starts another.
        self._to_host: dict[Node, int] = {}

    def _store_more(self) -> None:
        """The host may have another size by now."""
        most = self.pools[Tier.HOST].capacity * self._block_bytes // _SHARE_BEING_STORED
        self.storing.max_bytes = min(self.background.max_bytes, most)
        self.storing.look_again()

    def findings(self) -> list[str]:
        """What is wrong, in words, when nothing is on its way."""
        wrong = []
        if self.num_loads:
            wrong.append(f"nothing runs, but {self.num_loads} loads are counted")
        if self.num_offloads:
            wrong.append(f"nothing runs, but {self.num_offloads} offloads are counted")
        if self.is_at_work():
            wrong.append("nothing runs, but copies that make room are counted")
        if count := self.num_being_stored(Tier.HOST):
            wrong.append(f"nothing runs, but {count} host slots are listed as being stored")
        return wrong + self.background.findings() + self.storing.findings()

    def write_down(self, node: Node, num_blocks: int) -> None:
        """Copy down what the rules want copied by now, of path blocks [0, num_blocks)."""
        host_rule, storage_rule = self.rules[Tier.DEVICE], self.rules[Tier.HOST]
        has_storage = self.storage is not None and storage_rule.writes_early
        if not has_storage and not host_rule.writes_early:
            return
        room: int | None = None
        for part, i, j in segments(node, 0, num_blocks):
            wants_host = host_rule.writes_now(part.hits)
            wants_storage = has_storage and storage_rule.writes_now(part.hits)
            copies = part.copies[Tier.HOST]
            if not wants_storage and not (wants_host and copies.num_present < part.num_blocks):
                continue
            told = part.stored_in(i, j)
            if told.all() and copies.uniform is CopyState.READY:
                continue
            absent = copies.is_in(CopyState.ABSENT, i, j)
            to_storage = ~told & wants_storage
            to_host = absent & ~to_storage & wants_host
            if (queued := self._to_host.get(part)) is not None:
                to_host[: max(queued - part.start - i, 0)] = False
            room = self.available(Tier.HOST, node.space) if room is None else room
            room -= self._cut(absent & (to_storage | to_host), room, to_storage, to_host)
            part.believe_stored(i, j, told | to_storage)  # claimed: no other task writes it too
            for mask, is_stored in ((to_storage, True), (to_host, False)):
                for start, stop in runs_of(mask):
                    first = part.start + i
                    self._start_down(part, first + start, first + stop, to_storage=is_stored)

    def _cut(self, needed: Mask, room: int, *masks: Mask) -> int:
        """Leave of `masks` what the host has room for: where it is too small for a prompt, tasks
        would only find out one by one, at each admission again. Returns how much room they take."""
        wanted = int(np.count_nonzero(needed))
        if wanted <= room:
            return wanted
        beyond = np.flatnonzero(needed)[max(room, 0) :]
        for mask in masks:
            mask[beyond] = False
        self.stats.skipped_offloads += len(beyond)
        return max(room, 0)

    def save(self, node: Node, num_blocks: int, *, first: int = 0) -> None:
        """Copy path blocks [first, num_blocks) to the host, whatever the rules want."""
        for part, i, j in segments(node, first, num_blocks):
            missing = part.copies[Tier.HOST].is_in(CopyState.ABSENT, i, j)
            for start, stop in runs_of(missing):
                at = part.start + i
                self._start_down(part, at + start, at + stop, to_storage=False)

    def _start_down(self, node: Node, first: int, stop: int, *, to_storage: bool) -> None:
        lease = self.index.hold_as_is(node)
        work = self._write_down(lease, first, stop, to_storage=to_storage)
        try:
            self.start(work, "tierkv-write-down", space=node.space.name)
        except ShuttingDownError:  # who ends a request on a node that has failed hears nothing
            self.index.release(lease)
            return
        self._to_host[node] = max(self._to_host.get(node, 0), stop)

    async def _write_down(self, lease: Lease, first: int, stop: int, *, to_storage: bool) -> None:
        index, node = self.index, lease.node
        to_store: list[tuple[int, int]] = []
        try:
            at = first
            while at < stop:
                end = min(at + GROUP_BLOCKS, stop)
                async with self.background.room((end - at) * self._block_bytes):
                    is_whole = await self._host_copy(node, at, end)
                if to_storage and not is_whole:
                    is_whole = await self._copied_by_others(node, at, end)
                if to_storage and is_whole and self.storing.num_waiting < _MOST_TO_STORE:
                    to_store.append((at, end))
                elif to_storage:
                    index.unmark_stored(node, at, end)
                at = end
                if not is_whole and not self.available(Tier.HOST, node.space):
                    if to_storage:
                        index.unmark_stored(node, at, stop)
                    break  # the others would find no room either
        finally:
            if self._to_host.get(node) == stop:
                del self._to_host[node]
            index.release(lease)
            self.capacity_changed()
        with suppress(ShuttingDownError):
            for at, end in to_store:
                self.start(self._store(node, at, end), "tierkv-store")

    async def _store(self, node: Node, first: int, stop: int) -> None:
        """Store path blocks [first, stop), as far as they are on the host still when it is their
        turn. Nothing is held, or a slow store would keep the device full."""
        async with self.storing.room((stop - first) * self._block_bytes):
            there, end = self._on_host(node, first, stop)
            self.index.unmark_stored(node, end, min(stop, node.end))
            if end == first:
                return
            stored = await self._end_flush(self._begin_flush(there, first, end))
            for at, is_stored in enumerate(stored, first):
                if not is_stored:
                    self.index.unmark_stored(there, at, at + 1)

    def store_first(self, node: Node, start: int) -> bool:
        """Whether of run blocks from `start` on, or of those below, some that leave the host are on
        their way to storage, as they must be before they are evicted. Each is tried once."""
        leaving = self.leaving[Tier.HOST]
        rule = self.rules[Tier.HOST]
        if self.storage is None or not rule.writes_on_eviction or not leaving.stores_first:
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

    def _start_leaving(self, leaving: Leaving, node: Node, first: int, stop: int) -> None:
        lease = self.index.hold_as_is(node)
        try:
            self.start(self._store_leaving(leaving, lease, first, stop), "tierkv-store")
        except ShuttingDownError:
            self.index.release(lease)
            raise
        self.index.mark_stored(node, first, stop)

    async def _store_leaving(self, leaving: Leaving, lease: Lease, first: int, stop: int) -> None:
        """Once a store has not taken some for LEAVING_PATIENCE_S, the rest goes without."""
        node, stored = lease.node, [False] * (stop - first)
        try:
            async with self.storing.room((stop - first) * self._block_bytes):
                if leaving.stores_first:
                    async with asyncio.timeout(LEAVING_PATIENCE_S):
                        stored = await self._end_flush(self._begin_flush(node, first, stop))
        except TimeoutError:
            leaving.stores_first = False
        finally:
            if not leaving.stores_first:  # what stays after all can be offered again
                for at, is_stored in enumerate(stored, first):
                    if not is_stored:
                        self.index.unmark_stored(node, at, at + 1)
            self.index.release(lease)
            self.capacity_changed()

    def _on_host(self, node: Node, first: int, stop: int) -> tuple[Node, int]:
        """Up to where path blocks from `first` to `stop` are on the host, and the run with the last
        of them. The node may have left the tree; then it has no copies."""
        last, at = node, first
        for part, i, j in segments(node, first, min(stop, node.end)):
            host = part.copies[Tier.HOST]
            ready = host.is_in(CopyState.READY, i, j) if host.num_present else np.zeros(1, np.bool_)
            count = j - i if ready.all() else int(np.argmin(ready))
            last, at = (part, at + count) if count else (last, at)
            if count < j - i:
                break
        return last, at

    async def _copied_by_others(self, node: Node, first: int, stop: int) -> bool:
        """Whether path blocks [first, stop) are all on the host, once nobody copies them there."""
        while CopyState.INCOMING in (states := self.index.states(Tier.HOST, node, first, stop)):
            await self.next_change()
        return all(state is CopyState.READY for state in states)

    async def _host_copy(self, node: Node, first: int, stop: int) -> bool:
        """Give path blocks [first, stop) a host copy where they have none; whether all have."""
        states = self.index.states(Tier.HOST, node, first, stop)
        missing = np.array([state == CopyState.ABSENT for state in states], np.bool_)
        complete = CopyState.INCOMING not in states
        for start, end in runs_of(missing):
            try:  # the first of them are of use without the others
                slots = self.take_some(Tier.HOST, end - start, node.space)
            except OutOfBlocksError:
                self.stats.skipped_offloads += end - start
                complete = False
                continue
            fitting = start + len(slots)
            self.stats.skipped_offloads += end - fitting
            movement = self._begin_offload(node, first + start, first + fitting, slots)
            is_whole = await self._end_offload(node, first + start, first + fitting, movement)
            complete = complete and is_whole and fitting == end
        return complete
