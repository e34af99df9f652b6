"""Emptying and resizing the tiers while requests run."""

from __future__ import annotations

import numpy as np

from tierkv.cache.node import Node, Tier
from tierkv.cache.states import CopyState
from tierkv.errors import ConfigError
from tierkv.sched.tiers import Tiers


class Lifecycle:
    """slots: how many device and host slots there is memory for."""

    def __init__(self, tiers: Tiers, slots: tuple[int, int]) -> None:
        self._tiers = tiers
        self._slots = slots

    def reset(self) -> int:
        """Forget every cached block that nobody holds, on both tiers, and what was believed to be
        stored. Storage keeps its values. Returns how many copies are left, held by requests."""
        index = self._tiers.index
        pending = [child for root in index.roots() for child in root.children.values()]
        while pending:
            node = pending.pop()
            if not node.holders:
                self._tiers.forget(node, 0)
                continue
            index.unmark_stored(node, node.start, node.end)
            pending.extend(node.children.values())
        self._tiers.capacity_changed()
        return sum(space.used[tier] for space in index.spaces() for tier in Tier)

    async def resize(self, tier: Tier, capacity: int) -> None:
        """Let the tier have `capacity` slots, within the memory there is.

        Shrinking takes the slots beyond as they come free, evicts what may go from them, and waits
        for what is held. Cancelling it leaves the capacity as it was. Raises ConfigError.
        """
        if not 1 <= capacity <= self._slots[tier]:
            raise ConfigError(
                f"the {tier.name.lower()} tier has memory for 1 to {self._slots[tier]} blocks, "
                f"not {capacity}"
            )
        tiers, pool = self._tiers, self._tiers.pools[tier]
        if capacity >= pool.capacity:
            pool.grow(capacity)
            tiers.capacity_changed()
            return
        retired = [np.zeros(0, np.int32)]
        try:
            while True:
                self._clear(tier, capacity)
                retired.append(pool.take_from(capacity))
                tiers.lend(tier, retired[-1])
                if sum(map(len, retired)) == pool.capacity - capacity:
                    break
                await tiers.next_change()
        finally:
            for slots in retired[1:]:
                tiers.unlend(tier, slots)
                pool.release(slots)
            is_empty = not len(pool.taken_from(capacity))
            if is_empty:
                pool.shrink(capacity)
            tiers.capacity_changed()

    def _clear(self, tier: Tier, first: int) -> None:
        """Evict unheld copies in slots from `first` on, with what depends on them."""
        for node in list(self._tiers.index.nodes()):
            in_the_way = np.flatnonzero(node.copies[tier].slots >= first)
            is_gone = not (node.copies[0].num_present or node.copies[1].num_present)
            if not len(in_the_way) or node.holders or is_gone:
                continue
            start = int(in_the_way[0])
            if _has_other_copies(node, start, tier):
                self._tiers.evict_below(tier, node, start)
            else:
                self._tiers.forget(node, start)


def _has_other_copies(node: Node, start: int, tier: Tier) -> bool:
    """Whether run blocks from `start` on and all below them are whole on the other tier, too."""
    pending = [(node, start)]
    while pending:
        part, first = pending.pop()
        other = part.copies[1 - tier]
        if not other.is_in(CopyState.READY, first, part.num_blocks).all():
            return False
        pending.extend((child, 0) for child in part.children.values())
    return True
