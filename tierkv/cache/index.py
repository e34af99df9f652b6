"""The radix tree: which blocks are cached, and on which tiers. Plain data, no I/O, no clock.

    root ── [b0 b1 b2] ─┬─ [b3 b4]        a node holds a run of blocks; children branch off
                        ├─ [b3' b4' b5']   at its end; a tail is a child with a partial block
                        └─ (tail, 5 tokens)

A block is in the tree while Device or Host has a copy, ready or incoming. Device copies are
prefix-closed: a block on the device has its whole path there. What Storage has is asked for by
digest, not remembered here.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tierkv.cache.eviction import LruOrder
from tierkv.cache.keys import Prompt
from tierkv.cache.match import Match, descend, longest_match, segments
from tierkv.cache.node import Node, Tier
from tierkv.cache.pool import Ids
from tierkv.cache.states import Change, CopyState
from tierkv.cache.tokens import TOKEN_BYTES
from tierkv.errors import OwnershipError


@dataclass(slots=True, eq=False)
class Lease:
    """Forbids eviction of blocks [0, num_blocks) on the path to `node`, on every tier."""

    node: Node
    num_blocks: int
    is_released: bool = False


@dataclass(frozen=True, slots=True)
class Inserted:
    """Where an insertion ended, and which of the given slots the index now owns."""

    node: Node
    num_blocks: int
    adopted: tuple[bool, ...]


class Index:
    """All cached runs of one fingerprint."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.block_token_bytes = block_size * TOKEN_BYTES
        self.root = Node(0, None, b"", num_blocks=0)
        self.num_held_leases = 0
        self.order = (LruOrder(Tier.DEVICE), LruOrder(Tier.HOST))
        self._next_uid = 1
        self._tick = 0

    # Looking

    def match(self, prompt: Prompt, max_tokens: int | None = None) -> Match:
        """The longest run of `prompt`'s first `max_tokens` tokens. Changes nothing."""
        limit = prompt.num_tokens if max_tokens is None else max_tokens
        return longest_match(self.root, prompt, limit)

    def slots(self, tier: Tier, node: Node, start: int, stop: int) -> Ids:
        """Slots of blocks [start, stop) on the path to `node`."""
        parts = [n.copies[tier].slots[i:j] for n, i, j in segments(node, start, stop)]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def states(self, tier: Tier, node: Node, start: int, stop: int) -> list[CopyState]:
        return [
            CopyState(state)
            for n, i, j in segments(node, start, stop)
            for state in n.copies[tier].states[i:j]
        ]

    def nodes(self) -> Iterator[Node]:
        """Every node but the root. For `verify` and listings only: it walks the whole tree."""
        pending = list(self.root.children.values())
        while pending:
            node = pending.pop()
            pending.extend(node.children.values())
            yield node

    # Leases

    def hold(self, node: Node, num_blocks: int) -> Lease:
        """Forbid eviction of the path up to `num_blocks`, and mark it as used now.

        A run that goes on beyond is split, so that its rest stays free to go.
        """
        while node.parent is not None and node.start >= num_blocks:
            node = node.parent
        if num_blocks < node.end:
            node = self._split(node, num_blocks - node.start)
        self._tick += 1
        lease = self.hold_as_is(node)
        lease.num_blocks = num_blocks
        for part in node.path():
            part.last_used = self._tick
        return lease

    def hold_as_is(self, node: Node) -> Lease:
        """Forbid eviction of the path to `node`'s end for a movement: no split, not a use."""
        for part in node.path():
            if part.holders == 0:
                self._count_unheld(part, -1)
            part.holders += 1
        self.num_held_leases += 1
        return Lease(node, node.end)

    def release(self, lease: Lease) -> None:
        """End a lease. Raises OwnershipError if it has ended already."""
        if lease.is_released:
            raise OwnershipError("a lease was released twice")
        lease.is_released = True
        self.num_held_leases -= 1
        for part in lease.node.path():
            part.holders -= 1
            if part.holders == 0:
                self._count_unheld(part, +1)
                self._offer(part)
        self.prune(lease.node)

    def count_hit(self, lease: Lease) -> None:
        for part in lease.node.path():
            part.hits += 1

    def _end_of(self, lease: Lease) -> Node:
        """The node in which the lease's path ends: a split moves that end up from `lease.node`."""
        node = lease.node
        while node.parent is not None and node.start >= lease.num_blocks:
            node = node.parent
        return node

    # Growing

    def insert(
        self, tier: Tier, at: Lease, prompt: Prompt, stop: int, slots: Ids
    ) -> tuple[Lease, Inserted]:
        """Add blocks [at.num_blocks, stop) of `prompt`, whole bytes in `slots` of `tier`.

        A block that is there already keeps its copy, and the slot given for it stays the
        caller's. Returns a lease one path longer in place of `at`, which is released.
        """
        first = at.num_blocks
        node, pos = descend(self._end_of(at), first, prompt, stop)
        adopted = [False] * (stop - first)
        for part, start, end in segments(node, first, pos):
            for i in range(start, end):
                block = part.start + i
                state = part.copies[tier].states[i]
                if state == CopyState.ABSENT:
                    self._change(
                        tier, part, i, i + 1, Change.PLACE, slots=slots[block - first :][:1]
                    )
                    adopted[block - first] = True
                elif state == CopyState.INCOMING and tier is Tier.DEVICE:
                    # Somebody's load of this block may still fail, and the device is
                    # prefix-closed: the rest stays private to the caller.
                    return self._moved(at, part, block), Inserted(part, block, tuple(adopted))
        if pos < stop:
            node = self._grow(node, pos, prompt, stop)
            self._change(
                tier,
                node,
                pos - node.start,
                stop - node.start,
                Change.PLACE,
                slots=slots[pos - first :],
            )
            adopted[pos - first :] = [True] * (stop - pos)
        return self._moved(at, node, stop), Inserted(node, stop, tuple(adopted))

    def insert_tail(self, tier: Tier, at: Lease, prompt: Prompt, slot: int) -> Inserted:
        """Add the tail of `prompt` under `at`, which covers its full blocks, in `slot`."""
        assert at.num_blocks == prompt.num_blocks, "a tail hangs under its parent block"
        assert prompt.tail_tokens, "the prompt has no tail"
        node = self._end_of(at)
        if at.num_blocks < node.end:
            node = self._split(node, at.num_blocks - node.start)
        key = (prompt.extra(at.num_blocks), prompt.block(at.num_blocks))
        tail = node.children.get(key)
        if tail is None:
            tail = self._new_node(node, key[1], num_blocks=1, extras={at.num_blocks: key[0]})
            tail.is_tail = True
        is_new = tail.copies[tier].states[0] == CopyState.ABSENT
        if is_new:
            self._change(tier, tail, 0, 1, Change.PLACE, slots=np.array([slot], np.int32))
        return Inserted(tail, at.num_blocks + 1, (is_new,))

    def _moved(self, at: Lease, node: Node, num_blocks: int) -> Lease:
        lease = self.hold(node, num_blocks)
        self.release(at)
        return lease

    def _grow(self, node: Node, pos: int, prompt: Prompt, stop: int) -> Node:
        """A node that ends at `stop` and covers blocks [pos, stop), which are not in the tree."""
        width = self.block_token_bytes
        tokens = prompt.tokens[pos * width : stop * width]
        extras = {i: prompt.extras[i] for i in prompt.extras if pos <= i < stop}
        if pos < node.end:
            node = self._split(node, pos - node.start)
        elif node.parent is not None and not node.children:
            node.tokens += tokens
            node.extras |= extras
            node.num_blocks += stop - pos
            for copies in node.copies:
                copies.extend(stop - pos)
            node.stored = np.append(node.stored, np.zeros(stop - pos, np.bool_))
            return node
        return self._new_node(node, tokens, num_blocks=stop - pos, extras=extras)

    def _new_node(
        self, parent: Node, tokens: bytes, *, num_blocks: int, extras: dict[int, bytes]
    ) -> Node:
        node = Node(self._next_uid, parent, tokens, num_blocks=num_blocks)
        self._next_uid += 1
        self._tick += 1
        node.last_used = self._tick
        node.extras = {block: extra for block, extra in extras.items() if extra}
        key = node.first_key(self.block_token_bytes)
        parent.children[key] = node
        bisect.insort(parent.order, key)
        return node

    def _split(self, node: Node, at: int) -> Node:
        """Cut a run in two; returns the new upper half. Leases stay with the lower one, whose
        holders count for the whole path."""
        assert 0 < at < node.num_blocks, "a split leaves two non-empty runs"
        parent = node.parent
        assert parent is not None, "the root has no run"
        cut = at * self.block_token_bytes
        upper = Node(self._next_uid, parent, node.tokens[:cut], num_blocks=at)
        self._next_uid += 1
        upper.extras = {b: e for b, e in node.extras.items() if b < node.start + at}
        upper.holders, upper.hits, upper.last_used = node.holders, node.hits, node.last_used
        key = upper.first_key(self.block_token_bytes)
        parent.children[key] = upper

        device, host = (copies.split(at) for copies in node.copies)
        upper.copies = (device[0], host[0])
        node.parent = upper
        node.start += at
        node.num_blocks -= at
        node.tokens = node.tokens[cut:]
        node.extras = {b: e for b, e in node.extras.items() if b >= node.start}
        node.copies = (device[1], host[1])
        upper.stored, node.stored = node.stored[:at].copy(), node.stored[at:].copy()
        lower_key = node.first_key(self.block_token_bytes)
        upper.children[lower_key] = node
        upper.order = [lower_key]
        for tier in Tier:
            present = [node.copies[tier].num_present > 0, upper.copies[tier].num_present > 0]
            upper.present_children[tier] = int(present[0])
            # The parent counted this run once; now it has the upper half for a child.
            parent.present_children[tier] += present[1] - (present[0] or present[1])
        self._offer(parent)
        if upper.holders == 0:
            self._offer(node)
            self._offer(upper)
        return upper

    # Changing copies

    def change(
        self,
        tier: Tier,
        node: Node,
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
            had.append(self._change(tier, part, i, j, change, slots=given))
            at += j - i
        self.prune(node)
        return np.concatenate(had) if had else np.zeros(0, np.int32)

    def _change(
        self, tier: Tier, node: Node, i: int, j: int, change: Change, *, slots: Ids | None = None
    ) -> Ids:
        copies = node.copies[tier]
        before = copies.num_present
        had = copies.change(i, j, change, slots)
        after = copies.num_present
        if node.holders == 0:
            self.order[tier].num_unheld += after - before
        parent = node.parent
        if parent is not None and (before > 0) != (after > 0):
            parent.present_children[tier] += 1 if after else -1
            if not after:
                self._offer(parent)
        if node.holders == 0:
            self._offer(node)
        return had

    def mark_stored(self, node: Node, start: int, stop: int) -> None:
        """Remember that Storage was told of path blocks [start, stop), to not tell it again.

        A belief, never a match: the store may lose values, and is asked before it is relied on.
        """
        for part, i, j in segments(node, start, stop):
            part.stored[i:j] = True

    def unmark_stored(self, node: Node, start: int, stop: int) -> None:
        for part, i, j in segments(node, start, stop):
            part.stored[i:j] = False

    def drop(self, tier: Tier, node: Node, i: int, j: int) -> Ids:
        """Evict ready copies of run blocks [i, j) of an unheld node; returns their slots."""
        assert node.holders == 0, "a held copy is never evicted"
        had = self._change(tier, node, i, j, Change.EVICT)
        self.prune(node)
        return had

    def forget_below(self, node: Node, i: int) -> tuple[Ids, Ids]:
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
                ready = np.flatnonzero(part.copies[tier].states[start:] == CopyState.READY) + start
                freed[tier].extend(
                    self._change(tier, part, int(at), int(at) + 1, Change.EVICT) for at in ready
                )
            self.prune(part)
        empty = np.zeros(0, np.int32)
        return (np.concatenate([empty, *freed[0]]), np.concatenate([empty, *freed[1]]))

    def prune(self, node: Node) -> None:
        """Remove blocks without any copy from the end of `node`'s path."""
        while node.parent is not None and not node.children:
            device, host = node.copies
            if device.num_present or host.num_present:
                resident = np.flatnonzero(device.states | host.states)
                keep = int(resident[-1]) + 1
                if keep < node.num_blocks:
                    self._truncate(node, keep)
                return
            if node.holders:
                return  # its lease will end; until then the path must stay
            parent = node.parent
            key = node.first_key(self.block_token_bytes)
            del parent.children[key]
            del parent.order[bisect.bisect_left(parent.order, key)]
            node = parent

    def _truncate(self, node: Node, num_blocks: int) -> None:
        if node.holders:
            return
        node.tokens = node.tokens[: num_blocks * self.block_token_bytes]
        node.num_blocks = num_blocks
        node.extras = {b: e for b, e in node.extras.items() if b < node.end}
        node.stored = node.stored[:num_blocks].copy()
        for copies in node.copies:
            copies.truncate(num_blocks)

    def _count_unheld(self, node: Node, sign: int) -> None:
        for tier in Tier:
            self.order[tier].num_unheld += sign * node.copies[tier].num_present

    def _offer(self, node: Node) -> None:
        for order in self.order:
            order.offer(node)
