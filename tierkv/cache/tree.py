"""The radix tree's shape and its books: nodes, splits, holders, copies, eviction queues.

    root ── [b0 b1 b2] ─┬─ [b3 b4]        a node holds a run of blocks; children branch off
                        ├─ [b3' b4' b5']   at its end; a tail is a child with a partial block
                        └─ (tail, 5 tokens)

Every change keeps the counts of `TreeNode`, `Space` and the eviction orders right; what a
change means is the business of `Index`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tierkv.cache.copies import Change, CopyState, TierCopies
from tierkv.cache.eviction import EvictionKind, EvictionOrder, EvictionPolicy, make_policy
from tierkv.cache.keys import Prompt
from tierkv.cache.node import DEFAULT, HOST, TIERS, Quota, Space, Tier, TreeNode
from tierkv.cache.pool import Ids
from tierkv.cache.tokens import TOKEN_BYTES
from tierkv.errors import BadRequestError


class Spaces:
    """The roots of the tree, one for each fingerprint's space, and the queues of what may go.

    order: the eviction queues of all spaces together. own_orders: those of each space with a quota,
    by name.
    """

    def __init__(
        self, root_digest: bytes, policies: tuple[EvictionPolicy, EvictionPolicy] | None
    ) -> None:
        device, host = policies or (None, None)
        self.order = (EvictionOrder(Tier.DEVICE, device), EvictionOrder(Tier.HOST, host))
        self.own_orders: dict[str, tuple[EvictionOrder, EvictionOrder]] = {}
        self._roots: dict[str, TreeNode] = {}
        self.root = self.open(Space(DEFAULT, root_digest))

    def open(self, space: Space, kind: EvictionKind = EvictionKind.LRU) -> TreeNode:
        """Let prompts of `space.name` in; returns its root. kind: how it evicts within a quota."""
        if space.name in self._roots:
            raise BadRequestError(f"fingerprint {space.name!r} is open already")
        root = TreeNode(0, None, space, TierCopies(0))
        self._roots[space.name] = root
        if space.has_quota:
            self._open_own(space, kind)
        return root

    def close(self, name: str) -> None:
        """Let prompts of `name` in no more. It has no block, and is not the default one."""
        root = self.root_named(name)
        assert not root.children, "a space is closed when it is empty"
        assert root is not self.root, "the default space stays"
        del self._roots[name]
        self.own_orders.pop(name, None)

    def set_quota(self, space: Space, quota: Quota, kind: EvictionKind = EvictionKind.LRU) -> None:
        """Another quota from now on; nothing is evicted here. Walks the tree of the space if it
        had none before, to queue its blocks."""
        space.quota = quota
        if not space.has_quota:
            self.own_orders.pop(space.name, None)
        elif own := self.own_orders.get(space.name):
            for order in own:
                order.resized(quota[order.tier] or 0)
        else:
            self._open_own(space, kind)
            pending = list(self._roots[space.name].children.values())
            while pending:
                node = pending.pop()
                pending.extend(node.children.values())
                for order in self.own_orders[space.name]:
                    if not node.holders:
                        order.num_unheld += node.num_present(order.tier)
                    order.offer(node)

    def _open_own(self, space: Space, kind: EvictionKind) -> None:
        self.own_orders[space.name] = (
            EvictionOrder(Tier.DEVICE, make_policy(kind, space.quota[0] or 0)),
            EvictionOrder(Tier.HOST, make_policy(kind, space.quota[1] or 0)),
        )

    def root_of(self, prompt: Prompt) -> TreeNode:
        """Raises BadRequestError if no space of that name is open."""
        return self._roots.get(prompt.space) or self.root_named(prompt.space)

    def root_named(self, name: str) -> TreeNode:
        try:
            return self._roots[name]
        except KeyError:
            message = f"no fingerprint {name!r} is open here"
            raise BadRequestError(message) from None

    def all(self) -> list[Space]:
        return [root.space for root in self._roots.values()]

    def own_order(self, space: Space, tier: Tier) -> EvictionOrder | None:
        """The queue of the space's own blocks, None if it has no quota."""
        own = self.own_orders.get(space.name)
        return None if own is None else own[tier]

    def orders(self, tier: Tier) -> list[tuple[EvictionOrder, Space | None]]:
        """Every queue of the tier, with the space it is limited to."""
        own = [(order, space) for space in self.all() if (order := self.own_order(space, tier))]
        return [(self.order[tier], None), *own]

    def roots(self) -> list[TreeNode]:
        return list(self._roots.values())

    def nodes(self) -> Iterator[TreeNode]:
        """Every node but the roots. For `verify` and listings only: it walks the whole tree."""
        pending = [child for root in self._roots.values() for child in root.children.values()]
        while pending:
            node = pending.pop()
            pending.extend(node.children.values())
            yield node


# A run that others do not hold grows in place while that copies little; a long one gets a child.
_SMALL_RUN_BLOCKS: Final = 256
_READY: Final = CopyState.READY


class Tree:
    """Nodes and what is counted about them, below the roots of all spaces."""

    def __init__(self, spaces: Spaces, block_size: int) -> None:
        self.block_size = block_size
        self.block_token_bytes = block_size * TOKEN_BYTES
        self._order, self._own_orders = spaces.order, spaces.own_orders
        self._next_uid = 1

    # Holders

    def hold(self, node: TreeNode) -> None:
        """One more holder at `node`'s end."""
        device = host = 0
        while True:
            before, parent = node.holders, node.parent
            node.holders = before + 1
            if before or parent is None:
                break
            device -= node.device.num_present
            if node.host is not None:
                host -= node.host.num_present
            node = parent
        if device or host:
            self.count_unheld(node.space, device, host)

    def unhold(self, node: TreeNode) -> None:
        device = host = 0
        while True:
            left, parent = node.holders - 1, node.parent
            node.holders = left
            if left or parent is None:
                break
            if parent.last_used < node.last_used:  # noqa: PLR1730 - max() takes 0.1 us
                parent.last_used = node.last_used
            device += node.device.num_present
            if node.host is not None:
                host += node.host.num_present
                self.offer(node)
            elif not node.children_on_device:
                self.offer(node)
            node = parent
        if device or host:
            self.count_unheld(node.space, device, host)

    def count_unheld(self, space: Space, device: int, host: int) -> None:
        """So many more copies of `space` can be evicted."""
        self._order[0].num_unheld += device
        if host:
            self._order[1].num_unheld += host
        if self._own_orders and (own := self._own_orders.get(space.name)) is not None:
            own[0].num_unheld += device
            own[1].num_unheld += host

    def offer(self, node: TreeNode) -> None:
        """Let it be queued wherever it can go now."""
        device, host = self._order
        device.offer(node)
        if node.host is not None:
            host.offer(node)
        if self._own_orders and (own := self._own_orders.get(node.space.name)) is not None:
            own[0].offer(node)
            own[1].offer(node)

    # Growing

    def new_node(self, parent: TreeNode, prompt: Prompt, device: TierCopies) -> TreeNode:
        """A child with the next blocks of `prompt`, as many as `device` has; if only the tail is
        left, with it. To count the copies is the caller's business."""
        tokens, width, first = prompt.tokens, self.block_token_bytes, parent.end
        uid = self._next_uid
        self._next_uid = uid + 1
        node = TreeNode(uid, parent, parent.space, device)
        stop = node.end * width
        if stop > len(tokens):
            stop, node.is_tail = len(tokens), True
        node.put_tokens(tokens, first * width, stop)
        if prompt.extras:
            node.extras = _extras_of(prompt, first, node.end)
        parent.adopt(node)
        return node

    def grow(  # noqa: PLR0913, PLR0917 - a place, and what comes there
        self,
        tier: Tier,
        node: TreeNode,
        pos: int,
        prompt: Prompt,
        stop: int,
        slots: Ids,
        held: TreeNode,
    ) -> TreeNode:
        """Add blocks [pos, stop), which are not in the tree, ready in `slots`, below `pos` blocks
        of the path to `node`; returns the node they end in, which is held if it is new.
        held: where the caller's lease ends."""
        if pos < node.end:
            node = self.split(node, pos - node.start)
        elif not node.children and self._grows_in_place(node, stop - pos, held):
            before, packed = node.num_present(tier), node.packed
            node.append(tier, slots)
            node.put_tokens(
                prompt.tokens, node.start * self.block_token_bytes, stop * self.block_token_bytes
            )
            if prompt.extras:
                node.extras = _extras_of(prompt, node.start, stop)
            assert node.parent is not None, "the root has no run"
            node.parent.keep_less(packed)
            self._recount(tier, node, before)
            return node
        ready = TierCopies(stop - pos, _READY, slots)
        child = self.new_node(node, prompt, TierCopies(stop - pos) if tier is HOST else ready)
        if tier is HOST:
            child.host = ready
        child.holders = 1
        child.space.used[tier] += stop - pos
        node.count_present(tier, 1)
        return child

    def _grows_in_place(self, node: TreeNode, num_blocks: int, held: TreeNode) -> bool:
        """A leaf does, if nobody but the caller holds it: a lease of others would protect what is
        added, too. And only while it was never matched, nor softly pinned, as what is added."""
        return (
            node.holders == int(node is held)
            and not node.hits
            and not node.soft_pins
            and node.parent is not None
            and (node.num_blocks < _SMALL_RUN_BLOCKS or node.num_blocks < num_blocks)
        )

    def split(self, node: TreeNode, at: int) -> TreeNode:
        """Cut a run in two; returns the new upper half. Leases stay with the lower one, which is
        then the upper one's only child."""
        assert 0 < at < node.num_blocks, "a split leaves two non-empty runs"
        parent = node.parent
        assert parent is not None, "the root has no run"
        device, host = node.device, node.host
        is_mixed = device.uniform is None or (host is not None and host.uniform is None)
        had = device.num_present > 0, host is not None and host.num_present > 0
        upper = node.behead(self._next_uid, at)
        self._next_uid += 1
        upper.holders = int(node.holders > 0)
        parent.children[upper.key] = upper  # in the place of `node`, whose key it has
        upper.adopt(node)
        upper.children_on_device, upper.children_on_host = int(had[0]), int(had[1])
        self.offer(node)
        if is_mixed:  # else both halves are where the run was, and neither's turn has come
            self._recount_halves(parent, upper, node, had)
        return upper

    def _recount_halves(
        self, parent: TreeNode, upper: TreeNode, lower: TreeNode, had: tuple[bool, bool]
    ) -> None:
        """After a run was cut in two that is somewhere else than where they are, each."""
        is_lower, is_upper = (
            tuple(int(half.num_present(tier) > 0) for tier in TIERS) for half in (lower, upper)
        )
        upper.children_on_device, upper.children_on_host = is_lower
        for tier in TIERS:
            # The parent counted this run once; now it has the upper half for a child.
            parent.count_present(tier, is_upper[tier] - had[tier])
        self.offer(parent)
        self.offer(upper)

    # Copies

    def change(
        self,
        tier: Tier,
        node: TreeNode,
        i: int,
        j: int,
        change: Change,
        *,
        slots: Ids | None = None,
    ) -> Ids:
        """Advance the copies of run blocks [i, j); returns the slots they had."""
        copies = node.on(tier)
        before = copies.num_present
        had = copies.change(i, j, change, slots)
        if tier is HOST and not copies.num_present:
            node.host = None
        self._recount(tier, node, before)
        return had

    def _recount(self, tier: Tier, node: TreeNode, before: int) -> None:
        """Bring the books in line after `node`'s copies on `tier` were `before` in number."""
        after = node.num_present(tier)
        if after == before:
            return
        node.space.used[tier] += after - before
        own = self._own_orders.get(node.space.name) if self._own_orders else None
        if node.holders == 0:
            self._order[tier].num_unheld += after - before
            if own is not None:
                own[tier].num_unheld += after - before
        parent = node.parent
        if parent is not None and (before > 0) != (after > 0):
            parent.count_present(tier, 1 if after else -1)
            if not after:
                self.offer(parent)
        if after > before:
            self.offer(node)

    # Shrinking

    def prune(self, node: TreeNode) -> None:
        """Remove blocks without any copy from the end of `node`'s path."""
        while node.parent is not None and not node.children:
            device, host = node.device.num_present, node.host.num_present if node.host else 0
            if device or host:
                if device < node.num_blocks and host < node.num_blocks:
                    self._trim(node)
                return
            if node.holders:
                return  # its lease will end; until then the path must stay
            node = self.unlink(node)

    def unlink(self, node: TreeNode) -> TreeNode:
        """Take a node that has nothing left out of the tree; returns its parent."""
        parent = node.parent
        assert parent is not None, "the root stays"
        parent.disown(node)
        if parent.packed is node.packed:
            parent.keep_less(node.packed)
        device, host = self._order
        device.forget(node)
        host.forget(node)
        if self._own_orders and (own := self._own_orders.get(node.space.name)) is not None:
            own[0].forget(node)
            own[1].forget(node)
        return parent

    def _trim(self, node: TreeNode) -> None:
        if node.holders:
            return
        device, host = node.copies
        resident = (device.states | host.states).nonzero()[0]
        keep = int(resident[-1]) + 1
        if keep < node.num_blocks:
            node.truncate(keep)


def _extras_of(prompt: Prompt, start: int, stop: int) -> dict[int, bytes] | None:
    """The extra keys of blocks [start, stop), None if there are none."""
    extras = prompt.extras  # of which there may be many more than these blocks
    return {i: e for i in range(start, stop) if (e := extras.get(i))} or None
