"""Brings groups of stored blocks into host slots, and into the index under their parent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tierkv.cache.keys import Prompt, StoredKey
from tierkv.cache.node import Tier
from tierkv.cache.pool import Ids
from tierkv.cache.space import Space
from tierkv.errors import OutOfBlocksError
from tierkv.sched.events import Happening
from tierkv.sched.fetched import Progress
from tierkv.sched.tiers import Tiers
from tierkv.storage.protocol import GetOutcome, GetStatus


class Source(Protocol):
    """Where blocks beyond the local match come from: see StorageIO, which is one."""

    async def count_present(self, keys: Sequence[StoredKey]) -> int: ...

    async def fetch(self, keys: Sequence[StoredKey], slot_ids: Ids) -> list[GetOutcome]: ...


class FetchGroups:
    """source: where blocks come from."""

    def __init__(self, tiers: Tiers, source: Source) -> None:
        self._tiers = tiers
        self._index = tiers.index
        self._source = source

    async def take(self, count: int, space: Space) -> Ids | None:
        """1 to `count` host slots, after copies that make room for them; None if none will."""
        tiers = self._tiers
        while True:
            try:
                wanted = min(count, max(tiers.available(Tier.HOST), 1))
                return tiers.take(Tier.HOST, wanted, space)
            except OutOfBlocksError:
                if not tiers.is_making_room(Tier.HOST):
                    return None
            await tiers.next_change()

    async def fetch(
        self, prompt: Prompt, progress: Progress, keys: list[StoredKey], slots: Ids
    ) -> bool:
        """Fetch one group into `slots`; whether all of it arrived."""
        tiers, index = self._tiers, self._index
        tiers.lend(Tier.HOST, slots)
        arrived = 0
        kept = [False] * len(slots)
        try:
            outcomes = await self._source.fetch(keys, slots)
            for result in outcomes:
                if result.status is not GetStatus.HIT:
                    progress.first_problem = result
                    break
                arrived += 1
            first = progress.lease.num_blocks
            blocks = sum(not key.is_tail for key in keys[:arrived])
            if blocks:
                progress.lease, inserted = index.insert(
                    Tier.HOST, progress.lease, prompt, first + blocks, slots[:blocks]
                )
                kept[:blocks] = inserted.adopted
                node = progress.lease.node
                tiers.events.tell(Happening.STORED, "host", node, first, first + blocks)
                index.mark_stored(progress.lease.node, first, first + blocks)
            if arrived > blocks:
                tail = index.insert_tail(Tier.HOST, progress.lease, prompt, int(slots[blocks]))
                kept[blocks] = tail.adopted[0]
                end = tail.num_blocks
                tiers.events.tell(Happening.STORED, "host", tail.node, end - 1, end)
                progress.tail = index.hold(tail.node, tail.num_blocks)
                index.mark_stored(tail.node, tail.num_blocks - 1, tail.num_blocks)
            progress.num_tokens += sum(key.num_tokens for key in keys[:arrived])
        finally:
            tiers.unlend(Tier.HOST, slots)
            tiers.give(Tier.HOST, slots[[not k for k in kept]])
        return arrived == len(keys)
