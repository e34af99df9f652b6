"""The index of cached blocks: the radix tree, the longest cached prefix of a prompt, leases.

The index is data in memory, without I/O and without a clock. A node of the tree has consecutive
blocks (a run); the path from the root to a node is a prefix of prompts. A lease protects a path
from eviction.

A block is in the tree while it has a slot on device or host, ready or incoming. If a block is on
the device, so are all blocks before it. Blocks that are only in storage are not in the index.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import msgspec
import numpy as np

from tierkv.cache.eviction import (
    EvictionKind,
    EvictionKinds,
    EvictionOrder,
    EvictionPolicy,
    make_policy,
)
from tierkv.cache.keys import (
    DIGEST_BYTES,
    TOKEN_BYTES,
    Prompt,
    block_digest,
    chain_tokens,
    common_blocks,
    common_tokens,
)
from tierkv.cache.node import (
    DEFAULT,
    HOST,
    TICKS_PER_S,
    TIERS,
    AgeCounts,
    Change,
    CopyState,
    Ids,
    Mask,
    Quota,
    Segment,
    Space,
    Tier,
    TierCopies,
    TreeNode,
    child_key,
)
from tierkv.errors import BadRequestError, OwnershipError

_BY_USE: Final = (EvictionKind.LRU, EvictionKind.LRU)


class Spaces:
    """The parts of the index for all fingerprints, and the eviction queues.

    A fingerprint (model, tenant, adapter ...) has a tree of its own in the index, which is its
    space.

    Args:
        root_digest: root (hash) of the service's own fingerprint.
        policies: eviction policies of device and host; None for LRU.

    Attributes:
        order: eviction queues of device and host, with the nodes of all spaces.
        own_orders: by the name of each space with a quota: eviction queues of device and host with
            the nodes of this space only.
        root: root node of the tree for the service's own fingerprint.
    """

    def __init__(
        self, root_digest: bytes, policies: tuple[EvictionPolicy, EvictionPolicy] | None
    ) -> None:
        device, host = policies or (None, None)
        self.order = (EvictionOrder(Tier.DEVICE, device), EvictionOrder(Tier.HOST, host))
        self.own_orders: dict[str, tuple[EvictionOrder, EvictionOrder]] = {}
        self._roots: dict[str, TreeNode] = {}
        self._retired: list[TreeNode] = []  # roots that `renew` has replaced, with blocks in use
        self.root = self.open(Space(DEFAULT, root_digest))

    def open(self, space: Space, kinds: EvictionKinds = _BY_USE) -> TreeNode:
        """Open a space, the part of the index for one fingerprint (model, tenant, adapter ...).

        Args:
            space: the space; no space of its name may be open.
            kinds: eviction policies of device and host; used when the space exceeds its quota.

        Returns:
            The root of the space.

        Raises:
            BadRequestError: a space of that name is open already.
        """
        if space.name in self._roots:
            raise BadRequestError(f"fingerprint {space.name!r} is already open")
        root = TreeNode(0, None, space, TierCopies(0))
        self._roots[space.name] = root
        if space.has_quota:
            self._open_own(space, kinds)
        return root

    def close(self, name: str) -> None:
        """Close the space of this name; it must have no blocks, and not be the service's own."""
        root = self.root_named(name)
        assert not root.children, "a space is closed when it is empty"
        assert root is not self.root, "the default space stays"
        assert not self.retired(name), "a space is closed when its blocks have no holder"
        del self._roots[name]
        self.own_orders.pop(name, None)

    def renew(self) -> None:
        """Exclude all cached blocks from matches: give each space a new, empty tree.

        Blocks with a lease stay in the old tree until their leases end; its root is now called
        retired. A request that held a lease before this call adds its new blocks to the old tree.
        """
        for name, root in self._roots.items():
            if root.children or root.holders:
                self._retired.append(root)
                self._roots[name] = TreeNode(0, None, root.space, TierCopies(0))
        self.root = self._roots[DEFAULT]

    def retired(self, name: str | None = None) -> list[TreeNode]:
        """Return the retired roots (replaced by `renew`) that still have blocks with leases.

        Args:
            name: name of a space; None for all spaces.
        """
        if self._retired:
            self._retired = [root for root in self._retired if root.children or root.holders]
        return [root for root in self._retired if name in (None, root.space.name)]

    def is_retired(self, node: TreeNode) -> bool:
        """Return whether a run belongs to a retired root, so that no prompt matches its blocks."""
        if not self._retired:
            return False
        while node.parent is not None:
            node = node.parent
        return self._roots.get(node.space.name) is not node

    def set_quota(self, space: Space, quota: Quota, kinds: EvictionKinds = _BY_USE) -> None:
        """Set the quota of a space. The call evicts nothing, even if the space exceeds the quota.

        The call visits all nodes of a space that had no quota before.

        Args:
            space: the space.
            quota: largest number of blocks on device and host; None for no limit.
            kinds: eviction policies of device and host that choose which of the space's blocks are
                evicted to keep the quota; ignored if the space has a quota already.
        """
        space.quota = quota
        if not space.has_quota:
            self.own_orders.pop(space.name, None)
        elif own := self.own_orders.get(space.name):
            for order in own:
                order.resized(quota[order.tier] or 0)
        else:
            self._open_own(space, kinds)
            for node in _below([self._roots[space.name], *self.retired(space.name)]):
                for order in self.own_orders[space.name]:
                    if not node.holders:
                        order.num_unheld += node.num_present(order.tier)
                    order.offer(node)

    def _open_own(self, space: Space, kinds: EvictionKinds) -> None:
        device, host = (make_policy(kinds[tier], space.quota[tier] or 0) for tier in TIERS)
        self.own_orders[space.name] = (
            EvictionOrder(Tier.DEVICE, device),
            EvictionOrder(Tier.HOST, host),
        )

    def root_of(self, prompt: Prompt) -> TreeNode:
        """Return the root node of the tree for the prompt's space (model, adapter, tenant).

        Raises:
            BadRequestError: the space is not open.
        """
        return self._roots.get(prompt.space) or self.root_named(prompt.space)

    def root_named(self, name: str) -> TreeNode:
        """Return the root node of the space (part of the index for one fingerprint) called `name`.

        Raises:
            BadRequestError: there is no space of this name.
        """
        try:
            return self._roots[name]
        except KeyError:
            message = f"the fingerprint {name!r} is not open: open it first"
            raise BadRequestError(message) from None

    def all(self) -> list[Space]:
        """Return all open spaces."""
        return [root.space for root in self._roots.values()]

    def own_order(self, space: Space, tier: Tier) -> EvictionOrder | None:
        """Return the eviction queue of one space, used when the space exceeds its quota.

        Args:
            space: the space.
            tier: the tier whose blocks are evicted.

        Returns:
            The queue; None if the space has no quota.
        """
        own = self.own_orders.get(space.name)
        return None if own is None else own[tier]

    def orders(self, tier: Tier) -> list[tuple[EvictionOrder, Space | None]]:
        """Return each eviction queue of the tier with its space; None stands for all spaces."""
        own = [(order, space) for space in self.all() if (order := self.own_order(space, tier))]
        return [(self.order[tier], None), *own]

    def roots(self) -> list[TreeNode]:
        """Return the roots of all open spaces, without retired roots."""
        return list(self._roots.values())

    def nodes(self) -> Iterator[TreeNode]:
        """Yield every node except the roots; nodes below retired roots are included.

        The call visits the whole tree, so only checks (`verify`) and listings use it.
        """
        return _below([*self._roots.values(), *self.retired()])


def _below(nodes: Iterable[TreeNode]) -> Iterator[TreeNode]:
    """Yield all nodes below these ones, each before its children."""
    pending = [child for node in nodes for child in node.children.values()]
    while pending:
        node = pending.pop()
        pending.extend(node.children.values())
        yield node


# A node with more blocks gets a child for new blocks: appending them would copy the node's arrays.
_SMALL_RUN_BLOCKS: Final = 256
_READY: Final = CopyState.READY


class Tree:
    """The nodes of the radix tree below the roots, with the operations that change them.

        root ── [b0 b1 b2] ─┬─ [b3 b4]        a node has consecutive blocks; children begin
                            ├─ [b3' b4' b5']   at its end; a tail is a child with a partial block
                            └─ (tail, 5 tokens)

    Every change updates the block counts in `TreeNode` and `Space`, and the eviction queues.
    `Index` decides which changes are made.
    """

    def __init__(self, spaces: Spaces, block_size: int) -> None:
        self.block_token_bytes = block_size * TOKEN_BYTES
        self._order, self._own_orders = spaces.order, spaces.own_orders
        self._next_uid = 1

    # Holders

    def hold(self, node: TreeNode) -> None:
        """Add a lease that ends at `node`; no block on its path is evicted until `unhold`."""
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
        """Remove a lease that ends at `node`.

        Queue for eviction the nodes that have no lease left.
        """
        device = host = 0
        (on_device, on_host), has_quotas = self._order, bool(self._own_orders)
        while True:
            left, parent = node.holders - 1, node.parent
            node.holders = left
            if left or parent is None:
                break
            if parent.last_used < node.last_used:  # noqa: PLR1730 - max() takes 0.1 us
                parent.last_used = node.last_used
            device += node.device.num_present
            if has_quotas:
                self.offer(node)
            elif not node.children_on_device and node.device.num_present:
                on_device.queue(node)
            if node.host is not None:
                host += node.host.num_present
                if not has_quotas:
                    on_host.offer(node)
            node = parent
        if device or host:
            self.count_unheld(node.space, device, host)

    def count_unheld(self, space: Space, device: int, host: int) -> None:
        """Change the counts of a space's blocks that no lease protects, on device and host.

        The eviction queues of the tiers, and of the space if it has its own, keep these counts.

        Args:
            space: the space.
            device: number of device blocks to add to the count; negative to subtract.
            host: number of host blocks to add to the count; negative to subtract.
        """
        self._order[0].num_unheld += device
        if host:
            self._order[1].num_unheld += host
        if self._own_orders and (own := self._own_orders.get(space.name)) is not None:
            own[0].num_unheld += device
            own[1].num_unheld += host

    def offer(self, node: TreeNode) -> None:
        """Queue `node` for eviction on each tier on which its last block can be evicted now."""
        device, host = self._order
        device.offer(node)
        if node.host is not None:
            host.offer(node)
        if self._own_orders and (own := self._own_orders.get(node.space.name)) is not None:
            own[0].offer(node)
            own[1].offer(node)

    # Growing

    def new_node(self, parent: TreeNode, prompt: Prompt, device: TierCopies) -> TreeNode:
        """Add a node with the next blocks of a prompt below `parent`.

        The counts of used blocks in `parent.space` do not change; the caller must add the new
        blocks.

        Args:
            parent: the node after which the blocks come.
            prompt: the prompt. If its full blocks end with `parent`, the new node is the tail
                (partial last block).
            device: slots and states on the device, one for each block of the new node.

        Returns:
            The new node.
        """
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

    def grow(  # noqa: PLR0913, PLR0917 - a position, and the blocks
        self,
        tier: Tier,
        node: TreeNode,
        pos: int,
        prompt: Prompt,
        stop: int,
        slots: Ids,
        lease_node: TreeNode,
    ) -> TreeNode:
        """Add blocks [pos, stop) of a prompt after block `pos` - 1 of the path to `node`.

        Args:
            tier: the tier on which the blocks are ready.
            node: the tree node that has block `pos` - 1 of the prompt.
            pos: index of the first new block; the tree has no block of the prompt from there on.
            prompt: the prompt.
            stop: index after the last new block.
            slots: slots of the new blocks on `tier`, int32 [stop - pos].
            lease_node: the tree node at which the lease of the request ends.

        Returns:
            The node in which the new blocks end: `node`, or a new child. A new child is already
                protected by one lease, and the request's lease must be moved to it.
        """
        if pos < node.end:
            node = self.split(node, pos - node.start)
        elif not node.children and self._grows_in_place(node, stop - pos, lease_node):
            before, packed = node.num_present(tier), node.packed
            node.append(tier, slots)
            node.put_tokens(
                prompt.tokens, node.start * self.block_token_bytes, stop * self.block_token_bytes
            )
            if prompt.extras:
                node.extras = _extras_of(prompt, node.start, stop)
            assert node.parent is not None, "the root has no run"
            node.parent.keep_less(packed)
            changed = self._recount(tier, node, before)
            if changed is not None:
                self.offer(changed)
            return node
        ready = TierCopies(stop - pos, _READY, slots)
        child = self.new_node(node, prompt, TierCopies(stop - pos) if tier is HOST else ready)
        if tier is HOST:
            child.host = ready
        child.holders = 1
        child.space.used[tier] += stop - pos
        node.count_present(tier, 1)
        return child

    def _grows_in_place(self, node: TreeNode, num_blocks: int, lease_node: TreeNode) -> bool:
        return (
            node.holders == int(node is lease_node)
            and not node.hits
            and not node.soft_pins
            and node.parent is not None
            and (node.num_blocks < _SMALL_RUN_BLOCKS or node.num_blocks < num_blocks)
        )

    def split(self, node: TreeNode, at: int) -> TreeNode:
        """Split a node in two.

        Its leases, its children and its later blocks stay with the lower node.

        Args:
            node: the node, which becomes the lower node.
            at: number of blocks to move to the upper node.

        Returns:
            The upper node, which is new; `node` is its only child.
        """
        assert 0 < at < node.num_blocks, "a split leaves two non-empty runs"
        parent = node.parent
        assert parent is not None, "the root has no run"
        device, host = node.device, node.host
        is_mixed = device.uniform is None or (host is not None and host.uniform is None)
        had = device.num_present > 0, host is not None and host.num_present > 0
        upper = node.split_head(self._next_uid, at)
        self._next_uid += 1
        upper.holders = int(node.holders > 0)
        parent.children[upper.key] = upper  # replaces `node`, and has its key
        upper.adopt(node)
        upper.children_on_device, upper.children_on_host = int(had[0]), int(had[1])
        self.offer(node)
        if is_mixed:  # otherwise both halves are on the same tiers
            self._recount_halves(parent, upper, node, had)
        return upper

    def _recount_halves(
        self, parent: TreeNode, upper: TreeNode, lower: TreeNode, had: tuple[bool, bool]
    ) -> None:
        """Correct the child counts of `parent` and `upper` after a node was split.

        `had` says for each tier whether the node had blocks there before the split.
        """
        is_lower, is_upper = (
            tuple(int(half.num_present(tier) > 0) for tier in TIERS) for half in (lower, upper)
        )
        upper.children_on_device, upper.children_on_host = is_lower
        for tier in TIERS:
            # The parent has counted `node`; its child is the upper half now.
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
        """Change the state of a node's blocks on a tier, and update all counts.

        Args:
            tier: the tier.
            node: the node.
            i: index of the first block within the node.
            j: index after the last block.
            change: the change of the state.
            slots: new slots for RESERVE and PLACE, int32 [j - i]; None for other changes.

        Returns:
            The slots that the blocks had before, int32 [j - i], NO_SLOT for none.

        Raises:
            OwnershipError: the change is not possible for one of the blocks; nothing changed.
        """
        copies = node.on(tier)
        before = copies.num_present
        had = copies.change(i, j, change, slots)
        if tier is HOST and not copies.num_present:
            node.host = None
        changed = self._recount(tier, node, before)
        if changed is not None:
            self.offer(changed)
        return had

    def _recount(self, tier: Tier, node: TreeNode, before: int) -> TreeNode | None:
        """Update counts after the node's blocks on `tier` have changed; `before` was their number.

        Return the node that may have become a candidate for eviction, or None.
        """
        after = node.num_present(tier)
        if after == before:
            return None
        node.space.used[tier] += after - before
        own = self._own_orders.get(node.space.name) if self._own_orders else None
        if node.holders == 0:
            self._order[tier].num_unheld += after - before
            if own is not None:
                own[tier].num_unheld += after - before
        parent = node.parent
        if parent is not None and (before > 0) != (after > 0):
            parent.count_present(tier, 1 if after else -1)
        if after > before:
            return node
        return None if after else parent

    # Shrinking

    def prune(self, node: TreeNode) -> None:
        """Remove blocks without a copy on any tier from the end of a path.

        The removal begins at the last block of the path and goes towards the root. It stops at the
        first block that has a copy, has blocks after it, or is in a node that a lease protects.

        Args:
            node: the last node of the path.
        """
        while node.parent is not None and not node.children:
            device, host = node.device.num_present, node.host.num_present if node.host else 0
            if device or host:
                if device < node.num_blocks and host < node.num_blocks and not node.holders:
                    self._trim(node)
                return
            if node.holders:
                return  # the path must stay until the lease has ended
            node = self.unlink(node)

    def unlink(self, node: TreeNode) -> TreeNode:
        """Remove a node without blocks and children from the tree; return its parent."""
        parent = node.parent
        assert parent is not None, "the root stays"
        parent.disown(node)
        if parent.packed is node.packed:
            parent.keep_less(node.packed)
        for order in self._order:
            order.forget(node)
        if self._own_orders and (own := self._own_orders.get(node.space.name)) is not None:
            own[0].forget(node)
            own[1].forget(node)
        return parent

    def _trim(self, node: TreeNode) -> None:
        device, host = node.copies
        resident = (device.states | host.states).nonzero()[0]
        keep = int(resident[-1]) + 1
        if keep < node.num_blocks:
            node.truncate(keep)


def _extras_of(prompt: Prompt, start: int, stop: int) -> dict[int, bytes] | None:
    extras = prompt.extras  # may have entries for many more blocks
    return {i: e for i in range(start, stop) if (e := extras.get(i))} or None


class PartialMatch(NamedTuple):
    """A cached block that has only some of the prompt's next tokens at its start.

    A request copies the block to reuse these tokens.

    Attributes:
        node: the tree node with the block.
        block: index of the block, from the start of the prompt.
        num_tokens: number of shared leading tokens, at least 1.
    """

    node: TreeNode
    block: int
    num_tokens: int


class Match(msgspec.Struct):
    """The cached blocks at the start of a prompt.

    The matched blocks are, in this order: `device_blocks` that are on the device, `loading_blocks`
    that are being copied to the device, and `host_blocks` that are on the host only.

    Attributes:
        node: the tree node with the last matched block; the root if no block matches.
        num_blocks: number of matched blocks.
        device_blocks: number of matched blocks on the device.
        loading_blocks: number of matched blocks that are being copied to the device.
        host_blocks: number of matched blocks on the host only.
        partial: a cached block that shares the first tokens of the next block; None for none.
    """

    node: TreeNode
    num_blocks: int
    device_blocks: int
    loading_blocks: int
    host_blocks: int
    partial: PartialMatch | None


def longest_match(root: TreeNode, prompt: Prompt, max_tokens: int) -> Match:
    """Return the longest prefix of a prompt that is cached on device and host.

    Args:
        root: root of the fingerprint's tree, from which the search starts.
        prompt: the prompt.
        max_tokens: number of tokens of the prompt that may match; the tokens after these are
            ignored.

    Returns:
        The matching full blocks, and the cached block that shares the most tokens after them. No
            block is protected from eviction.
    """
    size = prompt.block_size
    node, pos = descend(root, 0, prompt, max_tokens // size)
    device, loading = pos, 0
    if node.device.uniform is not _READY and pos:  # otherwise the path above is on the device too
        device, loading = _on_device(node, pos)
    partial = None
    at = pos * size
    if at < max_tokens and (pos < node.end or _may_go_on(node, prompt, at)):
        stop = at + size
        if stop > max_tokens:  # noqa: PLR1730 - min() takes 0.1 us
            stop = max_tokens
        partial = _partial(node, pos, prompt, stop)
    return Match(node, pos, device, loading, pos - device - loading, partial)


def _may_go_on(node: TreeNode, prompt: Prompt, at: int) -> bool:
    """Return False only if no child of `node` can match the prompt from token `at` on."""
    if prompt.extras or not node.children:
        return bool(node.children)
    return prompt.tokens[at * TOKEN_BYTES : (at + 1) * TOKEN_BYTES] in node.children


def _on_device(node: TreeNode, pos: int) -> tuple[int, int]:
    device = loading = 0
    for part, start, stop in segments(node, 0, pos):
        copies = part.device
        ready = copies.leading(_READY, start, stop) if loading == 0 else 0
        device += ready
        if start + ready < stop:
            loading += copies.present_in(start + ready, stop)
    return device, loading


def descend(node: TreeNode, pos: int, prompt: Prompt, stop: int) -> tuple[TreeNode, int]:
    """Find the tree node with the last cached block of a prompt.

    Args:
        node: the node from which to start; its path has the first `pos` blocks of the prompt.
        pos: index of the first block to search for.
        prompt: the prompt.
        stop: index of the block to stop before.

    Returns:
        The node with the last block that was found, and the index after that block.
    """
    tokens, width, extras = prompt.tokens, prompt.block_size * TOKEN_BYTES, prompt.extras
    startswith = tokens.startswith
    end = node.end
    if pos < end and pos < stop:
        pos += _shared_blocks(node, pos, prompt, stop)
    while pos == end and pos < stop:
        at = pos * width
        key = tokens[at : at + TOKEN_BYTES]
        if extras:
            key = child_key(key, prompt.extra(pos))
        child = node.children.get(key)
        if child is None:
            break
        num_bytes = child.token_bytes
        if child.end <= stop and num_bytes >= width and not (extras or child.extras):
            run: bytes | memoryview = child.packed
            if len(run) != num_bytes:  # `packed` has other tokens too; a view copies nothing
                first = child.packed_at
                run = memoryview(run)[first : first + num_bytes]
            if startswith(run, at):
                node, pos = child, child.end  # all blocks of the child, the usual case
                end = pos
                continue
        if node.order:  # other children begin with the same token
            child = node.child_with(tokens[at : at + width], prompt.extra(pos))
        if child is None or child.is_tail or not (n := _shared_blocks(child, pos, prompt, stop)):
            break
        node, end, pos = child, child.end, pos + n
    return node, pos


def segments(node: TreeNode, start: int, stop: int) -> list[Segment]:
    """Divide blocks [start, stop) of a path into parts, each of which belongs to one tree node.

    Args:
        node: the tree node at the end of the path.
        start: index of the first block, from the start of the prompt.
        stop: index after the last block.

    Returns:
        In the order of the path: a node, the index of the first block within the node, and the
            index after the last block within the node.
    """
    parts: list[Segment] = []
    part: TreeNode | None = node
    while part is not None and part.end > start:
        first, last = max(start, part.start), min(stop, part.end)
        if first < last:
            parts.append((part, first - part.start, last - part.start))
        part = part.parent
    parts.reverse()
    return parts


def _shared_blocks(node: TreeNode, pos: int, prompt: Prompt, stop: int) -> int:
    width = prompt.block_size * TOKEN_BYTES
    at, most = node.packed_at + (pos - node.start) * width, min(stop, node.end) - pos
    blocks = common_blocks(prompt.tokens, pos * width, node.packed, at, most, width)
    if node.extras or prompt.extras:
        for block in range(pos, pos + blocks):
            if node.extra(block) != prompt.extra(block):
                return block - pos
    return blocks


def _partial(node: TreeNode, pos: int, prompt: Prompt, stop: int) -> PartialMatch | None:
    """Find the cached block that shares the most leading tokens with block `pos`.

    The path to `node` must match all earlier blocks of the prompt, and `stop` is a token
    index.
    """
    rest = prompt.tokens[pos * prompt.block_size * TOKEN_BYTES : stop * TOKEN_BYTES]
    extra = prompt.extras.get(pos, b"")
    if pos < node.end:
        shared = common_tokens(node.tokens_of(pos - node.start, pos - node.start + 1), rest)
        if shared and node.extra(pos) == extra:
            return PartialMatch(node, pos, shared)
        return None
    first, order = child_key(rest[:TOKEN_BYTES], extra), node.order
    if first not in node.children:
        return None
    keys = [first]
    if order:
        # The key with the most leading bytes of `rest` is next to the position of `rest`.
        place = bisect.bisect_left(order, child_key(rest, extra))
        keys += [key for key in order[max(place - 1, 0) : place + 1] if key.startswith(first)]
    found = [node.children[key] for key in keys]
    lengths = [common_tokens(child.tokens_of(0, 1), rest) for child in found]
    best = max(lengths)
    return PartialMatch(found[lengths.index(best)], pos, best)


_STATES: Final = tuple(CopyState)  # by value


class Lease(msgspec.Struct, eq=False):
    """A reference that protects blocks [0, num_blocks) of the path to `node` from eviction.

    The protection applies to device and host.

    Attributes:
        node: the tree node at the end of the path.
        num_blocks: number of protected blocks.
        used_before: LRU tick of the last use of `node` before this lease.
        is_released: True once the lease has ended.
    """

    node: TreeNode
    num_blocks: int
    used_before: int = 0
    is_released: bool = False


class Index:
    """All cached blocks on device and host, with leases.

    If a lease ends inside a node, the node is split there, so every node is covered by a lease as a
    whole or not at all.

    Args:
        block_size: number of tokens of a block.
        root_digest: root digest of the service's own fingerprint.
        policies: eviction policies of device and host; None for LRU.

    Attributes:
        spaces: the parts of the index, one for each fingerprint, and the order of eviction.
        num_held_leases: number of leases that have not ended.
        reuse_gaps: histogram of the seconds between two requests' uses of the same cached prefix.
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
        self.reuse_gaps = AgeCounts()
        self._tree = Tree(self.spaces, block_size)
        self._tick = 0

    # Lookups

    def match(self, prompt: Prompt, max_tokens: int | None = None) -> Match:
        """Return the longest cached prefix of a prompt; change nothing.

        Args:
            prompt: the prompt.
            max_tokens: largest number of tokens to match; None for all.

        Returns:
            The match.

        Raises:
            BadRequestError: the prompt's space is not open.
        """
        limit = prompt.num_tokens
        if max_tokens is not None and max_tokens < limit:
            limit = max_tokens
        return longest_match(self.spaces.root_of(prompt), prompt, limit)

    def slots(self, tier: Tier, node: TreeNode, start: int, stop: int) -> Ids:
        """Return the slots of blocks [start, stop) of the path to `node`.

        Args:
            tier: the tier.
            node: the tree node at the end of the path.
            start: index of the first block, from the start of the prompt.
            stop: index after the last block.

        Returns:
            The slots, int32 [stop - start], NO_SLOT for a block without a copy; read-only.
        """
        if start >= stop:
            return np.zeros(0, np.int32)
        parts = [n.copies_on(tier).slots[i:j] for n, i, j in segments(node, start, stop)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def is_in(self, state: CopyState, tier: Tier, node: TreeNode, start: int, stop: int) -> Mask:
        """Return which of blocks [start, stop) of the path to `node` are in `state`.

        Args:
            state: the state.
            tier: the tier.
            node: the tree node at the end of the path.
            start: index of the first block, from the start of the prompt.
            stop: index after the last block.

        Returns:
            A mask, bool [stop - start].
        """
        found = [
            part.copies_on(tier).is_in(state, i, j) for part, i, j in segments(node, start, stop)
        ]
        return found[0] if len(found) == 1 else np.concatenate([*found, np.zeros(0, np.bool_)])

    def states(self, tier: Tier, node: TreeNode, start: int, stop: int) -> list[CopyState]:
        """Return the states of blocks [start, stop) of the path to `node`.

        Args:
            tier: the tier.
            node: the tree node at the end of the path.
            start: index of the first block, from the start of the prompt.
            stop: index after the last block.
        """
        return [
            _STATES[state]
            for n, i, j in segments(node, start, stop)
            for state in n.copies[tier].states[i:j].tolist()
        ]

    def digests(self, node: TreeNode, stop: int, *, start: int = 0) -> list[bytes]:
        """Return the keys of full blocks [start, stop) of the path to `node`, 32 bytes each.

        Each key is computed once, and then stored in its node.

        Args:
            node: the tree node at the end of the path.
            stop: index after the last block.
            start: index of the first block, from the start of the prompt.
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

    def known_digests(self, node: TreeNode, stop: int) -> list[bytes]:
        """Return keys of a path's first blocks, without computing any.

        Args:
            node: the tree node at the end of the path.
            stop: position after the last block whose key is wanted.

        Returns:
            The keys from block 0 up to the first block whose key was not computed before, or up to
                `stop`; 32 bytes each.
        """
        found: list[bytes] = []
        for part, _, last in segments(node, 0, stop):
            kept = part.digests
            end = min(len(kept), last * DIGEST_BYTES)
            found += [kept[i : i + DIGEST_BYTES] for i in range(0, end, DIGEST_BYTES)]
            if end < last * DIGEST_BYTES:
                break
        return found

    def _compute_digests(self, part: TreeNode, parent: bytes, known: int, stop: int) -> list[bytes]:
        """Append the keys of blocks [known, stop) to `part.digests`, and return these keys.

        `known` and `stop` count from the first block of `part`, and `parent` is the key of the
        block before it.
        """
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

    # Leases

    def hold(self, node: TreeNode, num_blocks: int) -> Lease:
        """Protect the first blocks of a path from eviction, and mark the path as used now.

        If `node` has further blocks after these, it is split, so that the others can be evicted.

        Args:
            node: the tree node at the end of a path with at least `num_blocks` blocks.
            num_blocks: number of blocks to protect.

        Returns:
            The lease; `release` ends it.
        """
        if node.end != num_blocks:
            node = self._ending_at(node, num_blocks)
        self._tree.hold(node)
        used_before = node.last_used
        self._use(node)
        self.num_held_leases += 1
        return Lease(node, num_blocks, used_before)

    def hold_as_is(self, node: TreeNode) -> Lease:
        """Protect all blocks from the root to the end of `node` from eviction.

        Copies between tiers use this lease: unlike a request's lease, it does not mark the blocks
        as recently used. `release` ends the lease.
        """
        self._tree.hold(node)
        self.num_held_leases += 1
        return Lease(node, node.end)

    def release(self, lease: Lease) -> None:
        """End a lease; the blocks can then be evicted, unless another lease protects them.

        Raises:
            OwnershipError: the lease has ended already.
        """
        if lease.is_released:
            raise OwnershipError("a lease was released twice")
        lease.is_released = True
        self.num_held_leases -= 1
        node = lease.node
        self._tree.unhold(node)
        if node.device.uniform is not _READY:  # otherwise there is nothing to prune
            self._tree.prune(node)

    def _move(self, lease: Lease, node: TreeNode, *, is_new: bool = False) -> None:
        """Let `lease` end at `node`, which already counts the lease as a holder if `is_new`."""
        before, lease.node, lease.num_blocks = lease.node, node, node.end
        end = node.parent if is_new else node
        if end is not before and end is not None:
            self._tree.hold(end)
            self._tree.unhold(before)
            self._tree.prune(before)
        self._use(node)

    def _use(self, node: TreeNode) -> None:
        tick = self._tick = self._tick + 1
        node.last_used = tick
        if not node.born:
            node.born = tick

    def at(self, seconds: float) -> None:
        """Set the LRU clock to `seconds`, unless the clock is further already."""
        tick = int(seconds * TICKS_PER_S)
        if tick > self._tick:  # noqa: PLR1730 - max() takes 0.1 us
            self._tick = tick

    def count_hit(self, lease: Lease) -> None:
        """Add one hit to each node on the path of a request's lease.

        The time since the last use of the path's last node is added to the histogram `reuse_gaps`.
        The time counts as 0 if other leases still protect that node.
        """
        node = lease.node
        for part in node.path():
            part.hits += 1
        self.reuse_gaps.add(self._tick - lease.used_before if node.holders == 1 else 0)

    def _ending_at(self, node: TreeNode, num_blocks: int) -> TreeNode:
        while node.parent is not None and node.start >= num_blocks:
            node = node.parent
        if num_blocks < node.end:
            node = self._tree.split(node, num_blocks - node.start)
        return node

    # Soft pins

    def pin_softly(self, node: TreeNode, num_blocks: int) -> TreeNode:
        """Let the first blocks of a path be evicted only after all blocks without a soft pin.

        Args:
            node: the tree node at the end of a path with at least `num_blocks` blocks.
            num_blocks: number of blocks to pin.

        Returns:
            The node to pass to `unpin_softly`.
        """
        node = self._ending_at(node, num_blocks)
        self._pin(node, +1)
        return node

    def unpin_softly(self, node: TreeNode) -> None:
        """Remove one soft pin from the node that `pin_softly` has returned.

        The blocks of the node can have been evicted in the meantime.
        """
        self._pin(node, -1)

    def _pin(self, node: TreeNode, step: int) -> None:
        for part in node.path():
            part.soft_pins += step
            self._tree.offer(part)

    # Growing

    def insert(
        self, tier: Tier, lease: Lease, prompt: Prompt, stop: int, slots: Ids
    ) -> tuple[int, ...]:
        """Add blocks [lease.num_blocks, stop) of a prompt, and extend the lease to cover them.

        The slots then belong to the index, except for blocks that already have a slot on `tier`. If
        one of the blocks is being loaded to the device, that block and all later blocks are neither
        added nor covered by the lease.

        Args:
            tier: the tier of `slots`.
            lease: a lease of the prompt's blocks before the new ones.
            prompt: the prompt.
            stop: index after the last block to add.
            slots: slots with all bytes of the blocks, int32 [stop - lease.num_blocks].

        Returns:
            Positions in `slots` of the slots that do not belong to the index; the caller must free
                these slots or use them otherwise.
        """
        assert not lease.is_released, "a lease that has ended cannot be extended"
        first, node = lease.num_blocks, lease.node
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
            node = self._tree.grow(tier, node, pos, prompt, stop, new, lease.node)
            self._move(lease, node, is_new=node is not below)
        else:
            self._move(lease, self._ending_at(node, stop))
        return refused

    def _fill_in(
        self, tier: Tier, node: TreeNode, first: int, pos: int, slots: Ids
    ) -> tuple[int, tuple[int, ...]]:
        """Give a slot to each block in [first, pos) that has no slot on `tier`.

        On the device, stop at a block that is being loaded. Return the index of the block at
        which the call stopped, and the positions of the unused slots before it.
        """
        refused: list[int] = []
        for part, start, end in segments(node, first, pos):
            copies, above = part.copies_on(tier), part.start - first
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
        self, tier: Tier, lease: Lease, prompt: Prompt, slot: int
    ) -> tuple[TreeNode, bool]:
        """Add the tail (partial last block) of `prompt` after the prompt's full blocks.

        Args:
            tier: the tier of `slot`.
            lease: a lease of all full blocks of the prompt.
            prompt: the prompt; it must have a tail.
            slot: the slot with the tail's bytes.

        Returns:
            The tail's node; and True if the index owns `slot` now, False if the tail already had a
                slot on `tier`, so that the caller still owns `slot`.
        """
        assert lease.num_blocks == prompt.num_blocks, (
            "the lease must end at the block before the tail"
        )
        assert prompt.tail_tokens, "the prompt has no tail"
        node = self._ending_at(lease.node, lease.num_blocks)
        tail = node.child_with(prompt.block(lease.num_blocks), prompt.extra(lease.num_blocks))
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
        """Change the state of blocks [start, stop) of a path on a tier.

        Blocks that are on no tier afterwards leave the tree.

        Args:
            tier: the tier.
            node: the tree node at the end of the path.
            start: index of the first block, from the start of the prompt.
            stop: index after the last block.
            change: the change of the state.
            slots: new slots for RESERVE and PLACE, int32 [stop - start]; None for other changes.

        Returns:
            The slots that the blocks had before, int32 [stop - start], NO_SLOT for none.

        Raises:
            OwnershipError: the change is not possible for one of the blocks.
        """
        had, at = [], 0
        for part, i, j in segments(node, start, stop):
            given = None if slots is None else slots[at : at + j - i]
            had.append(self._tree.change(tier, part, i, j, change, slots=given))
            at += j - i
        self._tree.prune(node)
        return np.concatenate(had) if had else np.zeros(0, np.int32)

    def mark_stored(self, node: TreeNode, start: int, stop: int) -> None:
        """Record that blocks [start, stop) of a path were written to storage.

        The mark avoids a second write. Matches ignore it, since storage may delete values.

        Args:
            node: the tree node at the end of the path.
            start: index of the first block, from the start of the prompt.
            stop: index after the last block.
        """
        for part, i, j in segments(node, start, stop):
            part.believe_stored(i, j, np.ones(j - i, np.bool_))

    def unmark_stored(self, node: TreeNode, start: int, stop: int) -> None:
        """Record that blocks [start, stop) of a path are not in storage.

        The blocks can then be written again.

        Args:
            node: the tree node at the end of the path.
            start: index of the first block, from the start of the prompt.
            stop: index after the last block.
        """
        for part, i, j in segments(node, start, stop):
            part.believe_stored(i, j, np.zeros(j - i, np.bool_))

    def unmark_all_stored(self) -> None:
        """Record that no block is known to be in storage, so that all blocks can be written again.

        The call visits the whole tree, which takes 1 us for each node.
        """
        for node in self.spaces.nodes():
            node.believe_nothing_stored()

    def drop(self, tier: Tier, node: TreeNode, i: int, j: int) -> Ids:
        """Evict the blocks [i, j) of a node from one tier.

        Args:
            tier: the tier.
            node: a node without leases.
            i: index of the first block within the node.
            j: index after the last block; all blocks between are ready on `tier`.

        Returns:
            The slots that the blocks had, int32 [j - i].
        """
        assert node.holders == 0, "a held copy is never evicted"
        copies, other = (node.on(tier), node.device) if tier is HOST else (node.device, node.host)
        memory = self.spaces.order[tier].memory
        if memory is not None:
            memory.evicted(node)
        if (
            copies.uniform is _READY
            and j == node.num_blocks
            and not node.children
            and (other is None or not other.num_present)
        ):
            # The common case: a leaf's last blocks on their only tier, removed in one step.
            tree, gone = self._tree, j - i
            node.space.used[tier] -= gone
            if tier is HOST:
                tree.count_unheld(node.space, 0, -gone)
            else:
                tree.count_unheld(node.space, -gone, 0)
            if i:
                node.cut(tier, i)
                return copies.drop_ready(i)
            parent = tree.unlink(node)
            parent.count_present(tier, -1)
            # Otherwise the parent has not become a candidate; a root never does.
            last = not (parent.children_on_host if tier is HOST else parent.children_on_device)
            if last and parent.parent is not None:
                tree.offer(parent)
            return copies.drop_ready(0)
        had = self._tree.change(tier, node, i, j, Change.EVICT)
        self._tree.prune(node)
        return had

    def forget_below(self, node: TreeNode, i: int) -> tuple[Ids, Ids]:
        """Evict a node's blocks from `i` on, and all blocks below the node, from device and host.

        Args:
            node: a node without leases.
            i: index of the first block within the node.

        Returns:
            The device slots, and the host slots, that these blocks had; int32 [n] each.
        """
        assert node.holders == 0, "a held copy is never evicted"
        freed: tuple[list[Ids], list[Ids]] = ([], [])
        for part in reversed([node, *_below([node])]):
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
    """Return the ranges in which `mask` is true, as (start, stop)."""
    if mask.all():  # the common case, in a tenth of the time
        return [(0, len(mask))] if len(mask) else []
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]
