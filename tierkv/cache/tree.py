"""The radix tree's shape and its books: nodes, splits, holders, copies, eviction queues.

    root ── [b0 b1 b2] ─┬─ [b3 b4]        a node holds a run of blocks; children branch off
                        ├─ [b3' b4' b5']   at its end; a tail is a child with a partial block
                        └─ (tail, 5 tokens)

Every change keeps the counts of `Node`, `Space` and the eviction orders right; what a change means
is the business of `Index`.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from tierkv.cache.copies import TierCopies
from tierkv.cache.eviction import EvictionOrder
from tierkv.cache.keys import Prompt
from tierkv.cache.node import Node, Tier, child_key
from tierkv.cache.policies import EvictionKind, EvictionPolicy, make_policy
from tierkv.cache.pool import Ids
from tierkv.cache.space import DEFAULT, Quota, Space
from tierkv.cache.states import Change, CopyState
from tierkv.cache.tokens import TOKEN_BYTES
from tierkv.errors import BadRequestError

# A run that others do not hold grows in place while that copies little; a long one gets a child.
_SMALL_RUN_BLOCKS = 256
_READY = CopyState.READY


class Tree:
    """order: the eviction queues of all spaces together. A space with a quota has its own, too."""

    def __init__(
        self,
        block_size: int,
        root_digest: bytes = b"",
        policies: tuple[EvictionPolicy, EvictionPolicy] | None = None,
    ) -> None:
        self.block_size = block_size
        self.block_token_bytes = block_size * TOKEN_BYTES
        device, host = policies or (None, None)
        self.order = (EvictionOrder(Tier.DEVICE, device), EvictionOrder(Tier.HOST, host))
        self._own_orders: dict[str, tuple[EvictionOrder, EvictionOrder]] = {}
        self._roots: dict[str, Node] = {}
        self._next_uid = 1
        self._tick = 0
        self.root = self.open_space(Space(DEFAULT, root_digest))

    # Spaces

    def open_space(self, space: Space, kind: EvictionKind = EvictionKind.LRU) -> Node:
        """Let prompts of `space.name` in; returns its root. kind: how it evicts within a quota."""
        if space.name in self._roots:
            raise BadRequestError(f"fingerprint {space.name!r} is open already")
        root = Node(0, None, space, b"", (TierCopies(0), TierCopies(0)))
        self._roots[space.name] = root
        if space.has_quota:
            self._open_own_orders(space, kind)
        return root

    def close_space(self, name: str) -> None:
        """Let prompts of `name` in no more. It has no block, and is not the default one."""
        root = self.root_named(name)
        assert not root.children, "a space is closed when it is empty"
        assert root is not self.root, "the default space stays"
        del self._roots[name]
        self._own_orders.pop(name, None)

    def set_quota(self, space: Space, quota: Quota, kind: EvictionKind = EvictionKind.LRU) -> None:
        """Another quota from now on; nothing is evicted here. Walks the tree of the space if it
        had none before, to queue its blocks."""
        space.quota = quota
        if not space.has_quota:
            self._own_orders.pop(space.name, None)
        elif space.name not in self._own_orders:
            self._open_own_orders(space, kind)
            pending = list(self._roots[space.name].children.values())
            while pending:
                node = pending.pop()
                pending.extend(node.children.values())
                for order in self._own_orders[space.name]:
                    if not node.holders:
                        order.num_unheld += node.copies[order.tier].num_present
                    order.offer(node)

    def _open_own_orders(self, space: Space, kind: EvictionKind) -> None:
        self._own_orders[space.name] = (
            EvictionOrder(Tier.DEVICE, make_policy(kind, space.quota[0] or 0)),
            EvictionOrder(Tier.HOST, make_policy(kind, space.quota[1] or 0)),
        )

    def root_of(self, prompt: Prompt) -> Node:
        """Raises BadRequestError if no space of that name is open."""
        return self.root_named(prompt.space)

    def root_named(self, name: str) -> Node:
        try:
            return self._roots[name]
        except KeyError:
            message = f"no fingerprint {name!r} is open here"
            raise BadRequestError(message) from None

    def spaces(self) -> list[Space]:
        return [root.space for root in self._roots.values()]

    def own_order(self, space: Space, tier: Tier) -> EvictionOrder | None:
        """The queue of the space's own blocks, None if it has no quota."""
        own = self._own_orders.get(space.name)
        return None if own is None else own[tier]

    def orders(self, tier: Tier) -> list[tuple[EvictionOrder, Space | None]]:
        """Every queue of the tier, with the space it is limited to."""
        own = [(self._own_orders[s.name][tier], s) for s in self.spaces() if s.has_quota]
        return [(self.order[tier], None), *own]

    def roots(self) -> list[Node]:
        return list(self._roots.values())

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots. For `verify` and listings only: it walks the whole tree."""
        pending = [child for root in self._roots.values() for child in root.children.values()]
        while pending:
            node = pending.pop()
            pending.extend(node.children.values())
            yield node

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
        self._offer(parent)
        self._offer(node)
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
