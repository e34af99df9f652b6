"""Plans of evictions: the blocks to evict, and the copies to a lower tier that come first.

Making a plan changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tierkv.cache.eviction import EvictionOrder, Victim, WriteRule
from tierkv.cache.node import CopyState, Tier, TreeNode


@dataclass(slots=True)
class Step:
    """Blocks to evict, and whether they must be copied to the tier below first.

    Attributes:
        victim: the blocks to evict, all of one index node.
        must_copy: True if the tier's write policy requires the copy, or if later blocks of the same
            prompt stay cached and could not be matched without these blocks.
    """

    victim: Victim
    must_copy: bool


def plan_eviction(order: EvictionOrder, tier: Tier, missing: int, rule: WriteRule) -> list[Step]:
    """Plan which blocks to evict from a tier, and which of them to copy to the tier below first.

    Args:
        order: the order of eviction of the tier's blocks.
        tier: the tier to evict from.
        missing: number of blocks to evict; 0 or less for none.
        rule: the rule for copies to the tier below.

    Returns:
        The evictions, in order. Fewer than `missing` blocks are evicted if no more can be.
    """
    if missing <= 0:
        return []
    writes = rule.writes_on_eviction
    steps: list[Step] = []
    forgotten: set[tuple[int, int]] = set()  # (uid of a node, its first forgotten block)
    for victim in order.victims(missing):
        for part, has_copy_below in _parts(victim, tier):
            if has_copy_below:
                steps.append(Step(part, must_copy=False))
                continue
            keeps = writes or _has_below(part, tier, forgotten)
            if not keeps:
                forgotten.add((part.node.uid, part.start))
            steps.append(Step(part, must_copy=keeps))
    return steps


def _parts(victim: Victim, tier: Tier) -> list[tuple[Victim, bool]]:
    """Split blocks into parts of which another tier has all blocks (True) or none (False).

    The last blocks come first.
    """
    node, start, stop = victim.node, victim.start, victim.stop
    host = node.copies[Tier.HOST]
    if tier is Tier.DEVICE and host.uniform is not None:
        return [(victim, host.uniform is CopyState.READY)]
    if tier is Tier.DEVICE:
        below = host.is_in(CopyState.READY, start, stop)
    else:
        # A host copy can go if the device has one too, or if it is marked as stored.
        on_device = node.copies[Tier.DEVICE].is_in(CopyState.READY, start, stop)
        below = on_device | node.stored_in(start, stop)
    breaks = [0, *(np.flatnonzero(np.diff(below.astype(np.int8))) + 1).tolist(), stop - start]
    return [
        (Victim(node, start + i, start + j), bool(below[i]))
        for i, j in reversed(list(pairwise(breaks)))
    ]


def _has_below(part: Victim, tier: Tier, forgotten: set[tuple[int, int]]) -> bool:
    """Return True if later blocks of the same prompts would stay on the device after `part`.

    Without `part`, no request could match the later blocks. `forgotten` has the (node uid, first
    block) of the blocks that the plan evicts from the device without a copy.
    """
    if tier is Tier.HOST:
        return False  # a host victim has no descendant that is on the host only
    node: TreeNode = part.node
    if part.stop == node.num_blocks and not node.children:
        return False
    if part.stop < node.num_blocks and (node.uid, part.stop) not in forgotten:
        return True
    return any((child.uid, 0) not in forgotten for child in node.children.values())
