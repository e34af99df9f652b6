"""The radix tree's shape and its books: nodes, splits, holders, copies, eviction queues.

    root ── [b0 b1 b2] ─┬─ [b3 b4]        a node holds a run of blocks; children branch off
                        ├─ [b3' b4' b5']   at its end; a tail is a child with a partial block
                        └─ (tail, 5 tokens)

Every change keeps the counts of `Node`, `Space` and the eviction orders right; what a change means
is the business of `Index`.
"""

from __future__ import annotations

import bisect

from tierkv.cache.copies import TierCopies
from tierkv.cache.keys import Prompt
from tierkv.cache.node import Node, Tier, child_key
from tierkv.cache.policies import EvictionPolicy
from tierkv.cache.pool import Ids
from tierkv.cache.spaces import Spaces
from tierkv.cache.states import Change, CopyState
from tierkv.cache.tokens import TOKEN_BYTES

# A run that others do not hold grows in place while that copies little; a long one gets a child.
_SMALL_RUN_BLOCKS = 256
_READY = CopyState.READY


class Tree(Spaces):
    """Nodes and what is counted about them, below the roots of all spaces."""

    def __init__(
        self,
        block_size: int,
        root_digest: bytes = b"",
        policies: tuple[EvictionPolicy, EvictionPolicy] | None = None,
    ) -> None:
        super().__init__(root_digest, policies)
        self.block_size = block_size
        self.block_token_bytes = block_size * TOKEN_BYTES
        self._next_uid = 1
        self._tick = 0

    # Holders

    def _hold(self, node: Node) -> None:
        """One more holder at `node`'s end."""
        while True:
            node.holders += 1
            if node.holders > 1 or node.parent is None:
                return
            self._count_unheld(node, -1)
            node = node.parent

    def _unhold(self, node: Node) -> None:
        while True:
            node.holders -= 1
            if node.holders or node.parent is None:
                return
            parent = node.parent
            parent.last_used = max(parent.last_used, node.last_used)
            self._count_unheld(node, +1)
            self._offer(node)
            node = parent

    def _count_unheld(self, node: Node, sign: int) -> None:
        device, host = sign * node.copies[0].num_present, sign * node.copies[1].num_present
        self.order[0].num_unheld += device
        self.order[1].num_unheld += host
        if self._own_orders and (own := self._own_orders.get(node.space.name)) is not None:
            own[0].num_unheld += device
            own[1].num_unheld += host

    def _offer(self, node: Node) -> None:
        if node.holders:
            return
        self.order[0].offer(node)
        if node.copies[1].num_present:  # mostly there is none on the host
            self.order[1].offer(node)
        if self._own_orders and (own := self._own_orders.get(node.space.name)) is not None:
            own[0].offer(node)
            own[1].offer(node)

    # Growing

    def _new_node(
        self,
        parent: Node,
        prompt: Prompt,
        copies: tuple[TierCopies, TierCopies],
        *,
        is_held: bool = False,
    ) -> Node:
        """A child with the next blocks of `prompt`, as many as have `copies`; if only the tail is
        left, with it. is_held: the lease that ends at the parent is to end here instead."""
        tokens, width, first = prompt.tokens, self.block_token_bytes, parent.end
        key = tokens[first * width : (first + 1) * width]
        if prompt.extras:
            key = child_key(key, prompt.extra(first))
        node = Node(self._next_uid, parent, parent.space, key, copies)
        node.put_tokens(tokens, first * width, min(node.end * width, len(tokens)))
        self._next_uid += 1
        self._tick += 1
        node.last_used = self._tick
        if prompt.extras:
            node.extras = _extras_of(prompt, first, node.end)
        parent.children[key] = node
        bisect.insort(parent.order, key)
        used, children = node.space.used, parent.present_children
        if device := copies[0].num_present:
            children[0] += 1
            used[0] += device
        if host := copies[1].num_present:
            children[1] += 1
            used[1] += host
        if is_held:
            node.holders = 1
        else:
            self._count_unheld(node, +1)
            self._offer(node)
        return node

    def _grow(  # noqa: PLR0913, PLR0917 - a place, and what comes there
        self, tier: Tier, node: Node, pos: int, prompt: Prompt, stop: int, slots: Ids, held: Node
    ) -> Node:
        """Add blocks [pos, stop), which are not in the tree, ready in `slots`, below `pos` blocks
        of the path to `node`; returns the node they end in. held: where the caller's lease ends."""
        if pos < node.end:
            node = self._split(node, pos - node.start)
        elif self._grows_in_place(node, stop - pos, held):
            given = (slots, None) if tier is Tier.DEVICE else (None, slots)
            before = node.copies[tier].num_present
            node.append(stop - pos, given)
            node.put_tokens(
                prompt.tokens, node.start * self.block_token_bytes, stop * self.block_token_bytes
            )
            if prompt.extras:
                node.extras = _extras_of(prompt, node.start, stop)
            self._recount(tier, node, before)
            return node
        ready = TierCopies(stop - pos, _READY, slots)
        absent = TierCopies(stop - pos)
        copies = (ready, absent) if tier is Tier.DEVICE else (absent, ready)
        return self._new_node(node, prompt, copies, is_held=node is held)

    def _grows_in_place(self, node: Node, num_blocks: int, held: Node) -> bool:
        """Only if nobody but the caller holds it: a lease of others would protect what is added,
        too. And only while it was never matched: what is added has not been."""
        return (
            node.holders == int(node is held)
            and not node.hits
            and not node.children
            and node.parent is not None
            and (node.num_blocks < _SMALL_RUN_BLOCKS or node.num_blocks < num_blocks)
        )

    def _split(self, node: Node, at: int) -> Node:
        """Cut a run in two; returns the new upper half. Leases stay with the lower one, which is
        then the upper one's only child."""
        assert 0 < at < node.num_blocks, "a split leaves two non-empty runs"
        parent = node.parent
        assert parent is not None, "the root has no run"
        before = [copies.num_present > 0 for copies in node.copies]
        is_mixed = any(copies.uniform is None for copies in node.copies)
        upper = node.behead(self._next_uid, at)
        self._next_uid += 1
        upper.holders = int(node.holders > 0)
        parent.children[upper.key] = upper
        upper.children[node.key] = node
        upper.order = [node.key]
        for tier in Tier:
            upper.present_children[tier] = int(node.copies[tier].num_present > 0)
            # The parent counted this run once; now it has the upper half for a child.
            is_present = upper.copies[tier].num_present > 0
            parent.present_children[tier] += is_present - before[tier]
        self._offer(node)
        if is_mixed:  # else both halves are where the run was, and neither's turn has come
            self._offer(parent)
            self._offer(upper)
        return upper

    # Copies

    def _change(
        self, tier: Tier, node: Node, i: int, j: int, change: Change, *, slots: Ids | None = None
    ) -> Ids:
        """Advance the copies of run blocks [i, j); returns the slots they had."""
        copies = node.copies[tier]
        before = copies.num_present
        had = copies.change(i, j, change, slots)
        self._recount(tier, node, before)
        return had

    def _recount(self, tier: Tier, node: Node, before: int) -> None:
        """Bring the books in line after `node`'s copies on `tier` were `before` in number."""
        after = node.copies[tier].num_present
        if after == before:
            return
        node.space.used[tier] += after - before
        own = self._own_orders.get(node.space.name) if self._own_orders else None
        if node.holders == 0:
            self.order[tier].num_unheld += after - before
            if own is not None:
                own[tier].num_unheld += after - before
        parent = node.parent
        if parent is not None and (before > 0) != (after > 0):
            parent.present_children[tier] += 1 if after else -1
            if not after:
                self._offer(parent)
        if after > before:
            self._offer(node)

    def _count_gone(self, tier: Tier, node: Node, num_blocks: int) -> None:
        """So many copies of an unheld node are no more."""
        node.space.used[tier] -= num_blocks
        self.order[tier].num_unheld -= num_blocks
        if self._own_orders and (own := self._own_orders.get(node.space.name)) is not None:
            own[tier].num_unheld -= num_blocks

    # Shrinking

    def prune(self, node: Node) -> None:
        """Remove blocks without any copy from the end of `node`'s path."""
        while node.parent is not None and not node.children:
            device, host = node.copies
            if device.num_present or host.num_present:
                if max(device.num_present, host.num_present) < node.num_blocks:
                    self._trim(node)
                return
            if node.holders:
                return  # its lease will end; until then the path must stay
            node = self._unlink(node)

    def _unlink(self, node: Node) -> Node:
        """Take a node that has nothing left out of the tree; returns its parent."""
        parent = node.parent
        assert parent is not None, "the root stays"
        del parent.children[node.key]
        del parent.order[bisect.bisect_left(parent.order, node.key)]
        self.order[0].forget(node)
        self.order[1].forget(node)
        if self._own_orders and (own := self._own_orders.get(node.space.name)) is not None:
            own[0].forget(node)
            own[1].forget(node)
        return parent

    def _trim(self, node: Node) -> None:
        if node.holders:
            return
        resident = (node.copies[0].states | node.copies[1].states).nonzero()[0]
        keep = int(resident[-1]) + 1
        if keep < node.num_blocks:
            node.truncate(keep)


def _extras_of(prompt: Prompt, start: int, stop: int) -> dict[int, bytes] | None:
    """The extra keys of blocks [start, stop), None if there are none."""
    return {i: e for i, e in prompt.extras.items() if start <= i < stop and e} or None
