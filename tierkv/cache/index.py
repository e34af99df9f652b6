"""The index: which blocks are cached, and on which tiers. Plain data, no I/O, no clock.

A block is in the tree while Device or Host has a copy, ready or incoming. Device copies are
prefix-closed: a block on the device has its whole path there. What Storage has is asked for by
digest, not remembered here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from tierkv.cache.copies import Change, CopyState, TierCopies
from tierkv.cache.eviction import EvictionPolicy
from tierkv.cache.keys import DIGEST_BYTES, Prompt, block_digest, chain_tokens
from tierkv.cache.match import Match, descend, longest_match, segments
from tierkv.cache.node import HOST, Tier, TreeNode
from tierkv.cache.pool import Ids
from tierkv.cache.tree import Spaces, Tree
from tierkv.errors import OwnershipError

_READY: Final = CopyState.READY
_STATES: Final = tuple(CopyState)  # by value


@dataclass(slots=True, eq=False)
class Lease:
    """Forbids eviction of blocks [0, num_blocks) on the path to `node`, on every tier."""

    node: TreeNode
    num_blocks: int
    is_released: bool = False


class Index:
    """All cached runs, of one fingerprint or of several, each in a space of its own.

    A lease ends on the node that ends where it does, which is split off for it.
    """

    def __init__(
        self,
        block_size: int,
        root_digest: bytes = b"",
        policies: tuple[EvictionPolicy, EvictionPolicy] | None = None,
    ) -> None:
        self.spaces = Spaces(root_digest, policies)
        self.block_size = block_size
        self.num_held_leases = 0
        self._tree = Tree(self.spaces, block_size)
        self._tick = 0

    # Looking

    def match(self, prompt: Prompt, max_tokens: int | None = None) -> Match:
        """The longest run of `prompt`'s first `max_tokens` tokens. Changes nothing."""
        limit = prompt.num_tokens
        if max_tokens is not None and max_tokens < limit:
            limit = max_tokens
        return longest_match(self.spaces.root_of(prompt), prompt, limit)

    def slots(self, tier: Tier, node: TreeNode, start: int, stop: int) -> Ids:
        """Slots of blocks [start, stop) on the path to `node`."""
        if start >= stop:
            return np.zeros(0, np.int32)
        parts = [n.copies[tier].slots[i:j] for n, i, j in segments(node, start, stop)]
        return np.concatenate(parts)

    def states(self, tier: Tier, node: TreeNode, start: int, stop: int) -> list[CopyState]:
        return [
            _STATES[state]
            for n, i, j in segments(node, start, stop)
            for state in n.copies[tier].states[i:j].tolist()
        ]

    def digests(self, node: TreeNode, stop: int, *, start: int = 0) -> list[bytes]:
        """Keys of full blocks [start, stop) of the path to `node`.

        Each is computed once and remembered on its run.
        """
        found: list[bytes] = []
        digest = node.space.root_digest
        for part, _, last in segments(node, 0, stop):
            known = len(part.digests) // DIGEST_BYTES
            more = self._compute_digests(part, digest, known, last) if known < last else []
            kept, first = part.digests, max(start - part.start, 0) * DIGEST_BYTES
            end = min(known, last) * DIGEST_BYTES
            found += [kept[i : i + DIGEST_BYTES] for i in range(first, end, DIGEST_BYTES)]
            found += more[max(start - part.start - known, 0) :]
            digest = kept[(last - 1) * DIGEST_BYTES : last * DIGEST_BYTES]
        return found

    def _compute_digests(self, part: TreeNode, parent: bytes, known: int, stop: int) -> list[bytes]:
        """Those of run blocks [known, stop), the first that have none."""
        digest = part.digests[-DIGEST_BYTES:] or parent
        if part.extras:
            more = []
            for i in range(known, stop):
                tokens = part.tokens_of(i, i + 1)
                digest = block_digest(digest, tokens, part.extra(part.start + i))
                more.append(digest)
        else:
            more = chain_tokens(digest, part.tokens_of(known, stop), self._tree.block_token_bytes)
        part.digests += b"".join(more)
        return more

    # Leases: what may not be evicted

    def hold(self, node: TreeNode, num_blocks: int) -> Lease:
        """Forbid eviction of the path up to `num_blocks`, and mark it as used now.

        A run that goes on beyond is split, so that its rest stays free to go.
        """
        if node.end != num_blocks:
            node = self._ending_at(node, num_blocks)
        self._tree.hold(node)
        self._use(node)
        self.num_held_leases += 1
        return Lease(node, num_blocks)

    def hold_as_is(self, node: TreeNode) -> Lease:
        """Forbid eviction of the path to `node`'s end for a movement: no split, not a use."""
        self._tree.hold(node)
        self.num_held_leases += 1
        return Lease(node, node.end)

    def release(self, lease: Lease) -> None:
        """End a lease. Raises OwnershipError if it has ended already."""
        if lease.is_released:
            raise OwnershipError("a lease was released twice")
        lease.is_released = True
        self.num_held_leases -= 1
        node = lease.node
        self._tree.unhold(node)
        if node.device.uniform is not _READY:  # else there is nothing to prune
            self._tree.prune(node)

    def _move(self, lease: Lease, node: TreeNode, *, is_new: bool = False) -> None:
        """Let `lease` end where `node` does from now on, a use of that.

        is_new: a run made for it, which has its holder already and is one of its parent's.
        """
        before, lease.node, lease.num_blocks = lease.node, node, node.end
        end = node.parent if is_new else node
        if end is not before and end is not None:
            self._tree.hold(end)
            self._tree.unhold(before)
            self._tree.prune(before)
        self._use(node)

    def _use(self, node: TreeNode) -> None:
        """The path to `node` is used now: what is above is told when its holder ends."""
        self._tick += 1
        node.last_used = self._tick

    def count_hit(self, lease: Lease) -> None:
        for part in lease.node.path():
            part.hits += 1

    def _ending_at(self, node: TreeNode, num_blocks: int) -> TreeNode:
        """The node of the path to `node` that ends at `num_blocks`, after a split if need be."""
        while node.parent is not None and node.start >= num_blocks:
            node = node.parent
        if num_blocks < node.end:
            node = self._tree.split(node, num_blocks - node.start)
        return node

    # Soft pins

    def pin_softly(self, node: TreeNode, num_blocks: int) -> TreeNode:
        """Let the path up to `num_blocks` go after everything that is not pinned; returns what
        `unpin_softly` takes."""
        node = self._ending_at(node, num_blocks)
        self._pin(node, +1)
        return node

    def unpin_softly(self, node: TreeNode) -> None:
        """Undo one `pin_softly`. What went meanwhile is no error."""
        self._pin(node, -1)

    def _pin(self, node: TreeNode, step: int) -> None:
        for part in node.path():
            part.soft_pins += step
            self._tree.offer(part)

    # Growing

    def insert(
        self, tier: Tier, at: Lease, prompt: Prompt, stop: int, slots: Ids
    ) -> tuple[int, ...]:
        """Add blocks [at.num_blocks, stop) of `prompt`, whole bytes in `slots` of `tier`, and let
        `at` hold them, too.

        A block that is there already keeps its copy. Returns which of `slots`, by position, the
        index does not own: they stay the caller's. On the device all stay from a block on that is
        still incoming, and `at` ends before it.
        """
        assert not at.is_released, "a lease is extended while it holds"
        first, node = at.num_blocks, at.node
        while node.parent is not None and node.start >= first:
            node = node.parent
        node, pos = descend(node, first, prompt, stop)
        refused: tuple[int, ...] = ()
        if pos > first:
            reached, refused = self._fill_in(tier, node, first, pos, slots)
            if reached < pos:
                refused += tuple(range(reached - first, stop - first))
                pos = stop = reached
        if pos < stop:
            below = node
            new = slots[pos - first :] if pos > first else slots
            node = self._tree.grow(tier, node, pos, prompt, stop, new, at.node)
            self._move(at, node, is_new=node is not below)
        else:
            self._move(at, self._ending_at(node, stop))
        return refused

    def _fill_in(
        self, tier: Tier, node: TreeNode, first: int, pos: int, slots: Ids
    ) -> tuple[int, tuple[int, ...]]:
        """Place what is absent of blocks [first, pos) of the path; how far, and which of the slots
        up to there were not needed.

        On the device it ends at an incoming block: somebody's load of it may still fail, and the
        device is prefix-closed, so the rest stays private to the caller.
        """
        refused: list[int] = []
        for part, start, end in segments(node, first, pos):
            copies, above = part.copies[tier], part.start - first
            if copies.uniform is _READY:
                refused += range(above + start, above + end)
                continue
            for i, state in enumerate(copies.states[start:end].tolist(), start=start):
                at = above + i
                if state == CopyState.ABSENT:
                    self._tree.change(tier, part, i, i + 1, Change.PLACE, slots=slots[at : at + 1])
                elif state == CopyState.INCOMING and tier is Tier.DEVICE:
                    return part.start + i, tuple(refused)
                else:
                    refused.append(at)
        return pos, tuple(refused)

    def insert_tail(
        self, tier: Tier, at: Lease, prompt: Prompt, slot: int
    ) -> tuple[TreeNode, bool]:
        """Add the tail of `prompt` under `at`, which covers its full blocks, in `slot`. Returns
        where it is, and whether the index owns `slot` now: else it was there already."""
        assert at.num_blocks == prompt.num_blocks, "a tail hangs under its parent block"
        assert prompt.tail_tokens, "the prompt has no tail"
        node = self._ending_at(at.node, at.num_blocks)
        tail = node.child_with(prompt.block(at.num_blocks), prompt.extra(at.num_blocks))
        if tail is None:
            tail = self._tree.new_node(node, prompt, TierCopies(1))
            self._use(tail)
            node.last_used = tail.last_used
        is_new = tail.copies[tier].uniform is CopyState.ABSENT
        if is_new:
            self._tree.change(tier, tail, 0, 1, Change.PLACE, slots=np.array([slot], np.int32))
        return tail, is_new

    # Changing copies

    def change(
        self,
        tier: Tier,
        node: TreeNode,
        start: int,
        stop: int,
        change: Change,
        *,
        slots: Ids | None = None,
    ) -> Ids:
        """Advance the copies of path blocks [start, stop); returns the slots they had.

        Blocks that are then on no tier leave the tree.
        """
        had, at = [], 0
        for part, i, j in segments(node, start, stop):
            given = None if slots is None else slots[at : at + j - i]
            had.append(self._tree.change(tier, part, i, j, change, slots=given))
            at += j - i
        self._tree.prune(node)
        return np.concatenate(had) if had else np.zeros(0, np.int32)

    def mark_stored(self, node: TreeNode, start: int, stop: int) -> None:
        """Remember that Storage was told of path blocks [start, stop), to not tell it again.

        A belief, never a match: the store may lose values, and is asked before it is relied on.
        """
        for part, i, j in segments(node, start, stop):
            part.believe_stored(i, j, np.ones(j - i, np.bool_))

    def unmark_stored(self, node: TreeNode, start: int, stop: int) -> None:
        for part, i, j in segments(node, start, stop):
            part.believe_stored(i, j, np.zeros(j - i, np.bool_))

    def unmark_all_stored(self) -> None:
        """Storage is another one, or may have lost what it had: walks the tree, 1 us a run."""
        for node in self.spaces.nodes():
            node.believe_nothing_stored()

    def drop(self, tier: Tier, node: TreeNode, i: int, j: int) -> Ids:
        """Evict ready copies of run blocks [i, j) of an unheld node; returns their slots."""
        assert node.holders == 0, "a held copy is never evicted"
        copies, other = (node.on(tier), node.device) if tier is HOST else (node.device, node.host)
        order = self.spaces.order[tier]
        if order.memory is not None:
            order.memory.evicted(node)
        if (
            copies.uniform is _READY
            and j == node.num_blocks
            and not node.children
            and (other is None or not other.num_present)
        ):
            # The common case, a leaf's last blocks on their last tier: no state is needed between.
            node.space.used[tier] -= j - i
            if tier is HOST:
                self._tree.count_unheld(node.space, 0, i - j)
            else:
                self._tree.count_unheld(node.space, i - j, 0)
            if i:
                node.cut(tier, i)
                return copies.drop_ready(i)
            parent = self._tree.unlink(node)
            parent.count_present(tier, -1)
            # Else there's nothing new for it.
            if not (parent.children_on_host if tier is HOST else parent.children_on_device):
                self._tree.offer(parent)
            return copies.drop_ready(0)
        had = self._tree.change(tier, node, i, j, Change.EVICT)
        self._tree.prune(node)
        return had

    def forget_below(self, node: TreeNode, i: int) -> tuple[Ids, Ids]:
        """Evict every copy of run blocks from `i` on and of all that hangs below; an unheld node.

        Returns the device slots and the host slots that are free now.
        """
        assert node.holders == 0, "a held copy is never evicted"
        freed: tuple[list[Ids], list[Ids]] = ([], [])
        pending, order = [node], []
        while pending:
            part = pending.pop()
            order.append(part)
            pending.extend(part.children.values())
        for part in reversed(order):
            start = i if part is node else 0
            for tier in Tier:
                ready = part.copies[tier].is_in(CopyState.READY, start, part.num_blocks)
                freed[tier].extend(
                    self._tree.change(tier, part, start + at, start + end, Change.EVICT)
                    for at, end in runs_of(ready)
                )
            self._tree.prune(part)
        empty = np.zeros(0, np.int32)
        return (np.concatenate([empty, *freed[0]]), np.concatenate([empty, *freed[1]]))


def runs_of(mask: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> list[tuple[int, int]]:
    """Where `mask` is true, as (start, stop)."""
    if mask.all():  # the common case, in a tenth of the time
        return [(0, len(mask))] if len(mask) else []
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]
