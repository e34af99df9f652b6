"""Finds and fetches a stored tail of which a prompt shares the first tokens."""

from __future__ import annotations

from collections.abc import Collection

from tierkv.cache.index import Lease
from tierkv.cache.keys import Prompt, Tail
from tierkv.cache.node import Tier
from tierkv.cache.pool import Ids
from tierkv.cache.tokens import TOKEN_BYTES
from tierkv.sched.events import Happening
from tierkv.sched.tiers import Tiers
from tierkv.storage.protocol import GetStatus
from tierkv.transfer.storage_io import StorageIO
from tierkv.transfer.tails import SharedTail


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
        parent = digests[-1] if digests else index.root_of(prompt).space.root_digest
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
        tiers.lend(Tier.HOST, slots)
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
            tiers.unlend(Tier.HOST, slots)
            if not is_kept:
                tiers.give(Tier.HOST, slots)


def _ending_in(prompt: Prompt, num_blocks: int, tail: Tail) -> Prompt:
    """The prompt's first blocks and then `tail`."""
    tokens = prompt.tokens[: num_blocks * prompt.block_token_bytes] + tail.tokens
    extras = {block: extra for block, extra in prompt.extras.items() if block < num_blocks}
    if tail.extra:
        extras[num_blocks] = tail.extra
    return Prompt(tokens, prompt.block_size, extras, prompt.space)
