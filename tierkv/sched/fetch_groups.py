"""Brings groups of stored blocks, and a stored tail, into host slots and the index."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Protocol

import numpy as np

from tierkv.cache.copies import Mask
from tierkv.cache.index import Lease, runs_of
from tierkv.cache.keys import Prompt, StoredKey, Tail
from tierkv.cache.node import Space, Tier
from tierkv.cache.pool import Ids
from tierkv.cache.tokens import TOKEN_BYTES
from tierkv.errors import OutOfBlocksError
from tierkv.sched.copies import GROUP_BLOCKS
from tierkv.sched.events import Happening
from tierkv.sched.tiers import Tiers
from tierkv.storage.protocol import GetOutcome, GetStatus
from tierkv.tasks import task_group
from tierkv.transfer.storage_io import StorageIO
from tierkv.transfer.tails import SharedTail

NO_ROOM = GetOutcome(GetStatus.MISS, "the host tier has no room")


class Source(Protocol):
    """Where blocks beyond the local match come from: see StorageIO, which is one."""

    async def count_present(self, keys: Sequence[StoredKey]) -> int: ...

    async def fetch(self, keys: Sequence[StoredKey], slot_ids: Ids) -> list[GetOutcome]: ...


@dataclass(slots=True)
class Landed:
    """How far a fetch has come.

    lease, tail: of what the prompt has here by now. num_tokens: those of them that came from
    storage. direct: the prompt's tokens that came from another node's memory.
    problem: why there is no more; None if it goes on, or all is there.
    """

    lease: Lease
    tail: Lease | None = None
    num_tokens: int = 0
    direct: list[range] = field(default_factory=list)
    problem: GetOutcome | None = None


@dataclass(slots=True, eq=False)
class _Group:
    """kept: which of the slots the index has taken. has_ended: the others are free again."""

    keys: Sequence[StoredKey]
    slots: Ids
    space: Space
    kept: Mask = field(init=False)
    has_ended: bool = False

    def __post_init__(self) -> None:
        self.kept = np.zeros(len(self.slots), np.bool_)


class FetchGroups:
    """source: where blocks come from."""

    def __init__(self, tiers: Tiers, source: Source) -> None:
        self._tiers = tiers
        self._index = tiers.index
        self._source = source
        self._taken: Counter[str] = Counter()  # slots that are not in the index yet, by space

    async def take(self, count: int, space: Space) -> Ids | None:
        """1 to `count` host slots, after copies that make room for them, or that hold the host's
        slots as long as they are on their way; None if there are none of these either. They count
        in the space's quota until `settled`."""
        tiers = self._tiers
        while True:
            try:
                reserved = self._taken[space.name]
                slots = tiers.eviction.take_some(Tier.HOST, count, space, reserved=reserved)
                self._taken[space.name] += len(slots)
                return slots
            except OutOfBlocksError:
                if not tiers.eviction.is_making_room(Tier.HOST) and not tiers.copies.num_offloads:
                    return None
            await tiers.work.next_change()

    def settled(self, slots: Ids, space: Space) -> None:
        """What `take` gave is in the index, or free again."""
        self._taken[space.name] -= len(slots)
        if not self._taken[space.name]:
            del self._taken[space.name]

    async def fetch(
        self,
        prompt: Prompt,
        landed: Landed,
        keys: Sequence[StoredKey],
        on_arrival: Callable[[], None],
    ) -> None:
        """Fetch `keys`, which follow what `landed` has, in order.

        Two groups are on their way at a time, so that the store does not wait while one is taken
        in. on_arrival: called with each that was. What is missing is `landed.problem`.
        """
        space = self._index.spaces.root_of(prompt).space
        before: asyncio.Task[bool] | None = None
        at = 0
        async with task_group() as tasks:
            while at < len(keys):
                slots = await self.take(min(GROUP_BLOCKS, len(keys) - at), space)
                if slots is None:
                    if await _arrived(before):
                        landed.problem = NO_ROOM
                    return
                group = _Group(list(keys[at : at + len(slots)]), slots, space)
                self._tiers.slots.lend(Tier.HOST, slots)
                coming = tasks.create_task(
                    self._fetch(prompt, landed, group, before, on_arrival),
                    name="tierkv-fetch-group",
                )
                # Not at the end of the task: one that is cancelled at once never begins.
                coming.add_done_callback(partial(self._end, group))
                if not await _arrived(before):
                    return
                before = coming
                at += len(slots)

    async def _fetch(
        self,
        prompt: Prompt,
        landed: Landed,
        group: _Group,
        before: asyncio.Task[bool] | None,
        on_arrival: Callable[[], None],
    ) -> bool:
        """Fetch one group and put it into the index behind the one `before` it; whether all of it
        is there."""
        tiers, index = self._tiers, self._index
        keys, slots, kept = group.keys, group.slots, group.kept
        outcomes = await self._source.fetch(keys, slots)
        if not await _arrived(before):
            return False
        arrived = 0
        for result in outcomes:
            if result.status is not GetStatus.HIT:
                landed.problem = result
                break
            arrived += 1
        first = landed.lease.num_blocks
        blocks = sum(not key.is_tail for key in keys[:arrived])
        if blocks:
            refused = index.insert(Tier.HOST, landed.lease, prompt, first + blocks, slots[:blocks])
            kept[:blocks] = True
            kept[list(refused)] = False
            node = landed.lease.node
            for start, stop in runs_of(kept[:blocks]):  # others had, or bring, their own copies
                tiers.events.tell(Happening.STORED, "host", node, first + start, first + stop)
            index.mark_stored(landed.lease.node, first, first + blocks)
        landed.direct += _direct(outcomes[:arrived], keys, first * index.block_size)
        if arrived > blocks:
            tail, kept[blocks] = index.insert_tail(
                Tier.HOST, landed.lease, prompt, int(slots[blocks])
            )
            if kept[blocks]:
                tiers.events.tell(Happening.STORED, "host", tail, tail.start, tail.end)
            landed.tail = index.hold(tail, tail.end)
            index.mark_stored(tail, tail.start, tail.end)
        self._end(group)  # with the insertion, or for a turn of the loop two would own the slots
        landed.num_tokens += sum(key.num_tokens for key in keys[:arrived])
        if arrived < len(keys):
            return False
        on_arrival()
        return True

    def _end(self, group: _Group, _: asyncio.Task[bool] | None = None) -> None:
        if group.has_ended:
            return
        group.has_ended = True
        self.settled(group.slots, group.space)
        self._tiers.slots.unlend(Tier.HOST, group.slots)
        self._tiers.slots.give(Tier.HOST, group.slots[~group.kept])


def _direct(outcomes: Sequence[GetOutcome], keys: Sequence[StoredKey], start: int) -> list[range]:
    """The tokens, of those from `start` on, that came from another node's memory."""
    stops = list(accumulate((key.num_tokens for key in keys), initial=start))
    return [
        range(stops[at], stops[at + 1]) for at, result in enumerate(outcomes) if result.is_direct
    ]


async def _arrived(group: asyncio.Task[bool] | None) -> bool:
    """Whether all of a group is in the index, once that is known; of none before the first: yes."""
    if group is None:
        return True
    if not group.done():
        await asyncio.wait([group])
    return not group.cancelled() and group.exception() is None and group.result()


class SharedTails:
    """What a prompt shares beyond its last whole block, with prompts that ended in that block."""

    def __init__(self, tiers: Tiers, storage: StorageIO) -> None:
        self._tiers = tiers
        self._storage = storage

    async def find(
        self, prompt: Prompt, at: Lease, *, missing: Collection[bytes]
    ) -> SharedTail | None:
        """The stored tail under `at`, which covers the prompt's first blocks, that shares most.

        None if none shares more than what is cached here. One small read.

        missing: digests that are known not to be in storage, whatever is listed.
        """
        wanted = prompt.block(at.num_blocks)
        here = self._cached_tokens(prompt, at.num_blocks)
        if len(wanted) <= here * TOKEN_BYTES:
            return None
        index = self._tiers.index
        digests = index.digests(at.node, at.num_blocks, start=max(at.num_blocks - 1, 0))
        parent = digests[-1] if digests else index.spaces.root_of(prompt).space.root_digest
        found = await self._storage.tails.best(
            parent, wanted, prompt.extra(at.num_blocks), prompt.space, missing=missing
        )
        return found if found and found.num_shared > here else None

    def _cached_tokens(self, prompt: Prompt, block: int) -> int:
        """How many tokens of `block` are cached here, all of what is before it being so."""
        match = self._tiers.index.match(prompt)
        if match.num_blocks > block:
            return prompt.block_size
        return match.partial.num_tokens if match.partial and match.num_blocks == block else 0

    async def fetch(self, prompt: Prompt, at: Lease, found: SharedTail, slots: Ids) -> Lease | None:
        """Bring the tail into the one host slot of `slots`, and into the index under `at`; a lease
        of it. None, and the slot is free again, if it is gone or not what it should be."""
        tiers, index = self._tiers, self._tiers.index
        is_kept = False
        tiers.slots.lend(Tier.HOST, slots)
        try:
            [outcome] = await self._storage.fetch([found.key], slots)
            if outcome.status is not GetStatus.HIT:
                return None
            whole = _ending_in(prompt, at.num_blocks, found.tail)
            tail, is_kept = index.insert_tail(Tier.HOST, at, whole, int(slots[0]))
            if is_kept:
                tiers.events.tell(Happening.STORED, "host", tail, tail.start, tail.end)
            lease = index.hold(tail, tail.end)
            index.mark_stored(tail, tail.start, tail.end)
            return lease
        finally:
            tiers.slots.unlend(Tier.HOST, slots)
            if not is_kept:
                tiers.slots.give(Tier.HOST, slots)


def _ending_in(prompt: Prompt, num_blocks: int, tail: Tail) -> Prompt:
    """The prompt's first blocks and then `tail`."""
    tokens = prompt.tokens[: num_blocks * prompt.block_token_bytes] + tail.tokens
    extras = {block: extra for block, extra in prompt.extras.items() if block < num_blocks}
    if tail.extra:
        extras[num_blocks] = tail.extra
    return Prompt(tokens, prompt.block_size, extras, prompt.space)
