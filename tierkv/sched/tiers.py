"""Device, host and storage of one node, put together: slots, eviction, copies, and their work."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tierkv.cache.eviction import WriteRule
from tierkv.cache.index import Index
from tierkv.cache.keys import Prompt, StoredKey
from tierkv.cache.node import Tier, TreeNode
from tierkv.cache.pool import BlockPool
from tierkv.sched.computing import Decisions
from tierkv.sched.copies import Copies
from tierkv.sched.events import CacheEvents
from tierkv.sched.eviction import Eviction, Watermarks
from tierkv.sched.pins import Pins
from tierkv.sched.slots import Slots
from tierkv.sched.stored import path_keys, prompt_keys
from tierkv.sched.work import Work
from tierkv.transfer.mover import Mover
from tierkv.transfer.storage_io import StorageIO


class Tiers:
    """host_rule: when a device block is copied to the host; storage_rule: when a host block is
    stored. background_copy_bytes: of copies down by rule that may be on their way at once."""

    def __init__(  # noqa: PLR0913 - what the tiers are made of
        self,
        *,
        index: Index,
        device_pool: BlockPool,
        host_pool: BlockPool,
        mover: Mover,
        storage: StorageIO | None,
        host_rule: WriteRule,
        storage_rule: WriteRule,
        background_copy_bytes: int,
        block_bytes: int,
        watermarks: tuple[Watermarks, Watermarks] = (Watermarks(), Watermarks()),
    ) -> None:
        self.index = index
        self.mover = mover
        self.decisions = Decisions()
        self.events = CacheEvents(self._digests_of)
        self.work = Work()
        self.slots = Slots(device_pool, host_pool, self.work)
        rules = {Tier.DEVICE: host_rule, Tier.HOST: storage_rule}
        self.eviction = Eviction(
            index, self.slots, self.work, rules, events=self.events, watermarks=watermarks
        )
        self.copies = Copies(
            self.eviction,
            self.slots,
            self.work,
            events=self.events,
            mover=mover,
            storage=storage,
            block_bytes=block_bytes,
            background_copy_bytes=background_copy_bytes,
        )
        self.pins = Pins(index, self.work.capacity_changed)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Leaving waits for every copy under way."""
        async with self.work.running(self.slots.num_lent):
            yield

    def prompt_keys(self, prompt: Prompt) -> list[StoredKey]:
        """See `stored.prompt_keys`."""
        return prompt_keys(self.index, prompt)

    def _digests_of(self, node: TreeNode, first: int, stop: int) -> list[bytes]:
        if node.is_tail:
            return [key.digest for key in path_keys(self.index, node, first, stop)]
        return self.index.digests(node, stop, start=first)
