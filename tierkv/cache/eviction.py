"""Eviction policies, and the queues of nodes whose blocks can be evicted.

A node of the radix tree is evicted only after its children. Among nodes without children, a policy
decides. This module also has the write rules, which say when a block is copied to the tier below:
early, at its eviction, or never.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from dataclasses import dataclass
from enum import Enum, IntEnum
from itertools import pairwise
from typing import Final, NamedTuple, assert_never

from tierkv.cache.node import HOST, CopyState, Segment, Tier, TreeNode
from tierkv.errors import ConfigError

_AGE_BITS: Final = 48  # bits of a rank for the tick of the last use: 2.8e14 uses
_SMALL_SHARE = 0.1  # share of the tier for S3-FIFO's small queue, as in the paper
SOFT_PIN: Final = 1 << 120  # added to the rank of a softly pinned node, so that it is evicted last
# The node's rank, a number that no other entry has, and the node.
Entry = tuple[int, int, TreeNode]
_FEW_ENTRIES: Final = 64
_READY: Final = CopyState.READY


class WritePolicy(Enum):
    """The moment at which a block is copied to the tier below."""

    NONE = "none"  # never
    WRITE_THROUGH = "write_through"  # as soon as the block is computed
    SELECTIVE = "write_through_selective"  # once it has been matched `after_hits` times
    WRITE_BACK = "write_back"  # when it is evicted; its slot is reused only after the copy is done


@dataclass(frozen=True, slots=True)
class WriteRule:
    """The moment at which a tier's blocks are copied to the tier below.

    Attributes:
        policy: never, when a block is computed, after some matches, or when a block is evicted.
        after_hits: number of matches after which the policy SELECTIVE copies a block, at least 1.
    """

    policy: WritePolicy
    after_hits: int = 2

    def __post_init__(self) -> None:
        if self.after_hits < 1:
            raise ConfigError(f"after_hits must be at least 1, not {self.after_hits}")

    def writes_now(self, hits: int) -> bool:
        """Return True if a block is copied to the tier below now, before it is evicted.

        Args:
            hits: number of requests that have matched the block.
        """
        if self.policy is WritePolicy.SELECTIVE:
            return hits >= self.after_hits
        return self.policy is WritePolicy.WRITE_THROUGH

    @property
    def writes_early(self) -> bool:
        """True if blocks (all, or popular ones) are copied to the lower tier before eviction."""
        return self.policy in (WritePolicy.WRITE_THROUGH, WritePolicy.SELECTIVE)

    @property
    def writes_on_eviction(self) -> bool:
        return self.policy is WritePolicy.WRITE_BACK


class Victim(NamedTuple):
    """Blocks [start, stop) of one node that are to be evicted from a tier.

    Attributes:
        node: a node without leases.
        start: index of the first block within the node.
        stop: index after the last block within the node.
    """

    node: TreeNode
    start: int
    stop: int


class EvictionOrder:
    """A queue of the nodes with blocks that can be evicted from one tier.

    A node is a candidate if it has blocks on the tier, no lease, and no child with blocks on the
    tier. The owner of the tree calls `offer` whenever a node may have become a candidate. A node
    that is no candidate any more stays in the queue for a while and is skipped. No call visits the
    whole tree.

    Args:
        tier: device or host.
        policy: ranks the candidates; None for LRU.

    Attributes:
        num_unheld: number of blocks on the tier in nodes without leases. All of them can be
            evicted.
        memory: the policy, if it records which blocks were evicted; None if it does not.
    """

    def __init__(self, tier: Tier, policy: EvictionPolicy | None = None) -> None:
        self.tier = tier
        self.policy = policy or Lru()
        self.num_unheld = 0
        self._line: deque[Entry] = deque()  # in ascending order
        self._heap: list[Entry] = []
        self._newest: dict[int, Entry] = {}  # by uid of the node: its only valid entry
        self._max_queued = _FEW_ENTRIES  # with more entries, outdated ones are removed
        self._num_pushed = 0
        # LRU's rank is read from the node directly, which saves a call.
        self._rank = None if type(self.policy) is Lru else self.policy.rank
        self.memory = self.policy if self.policy.has_memory else None

    def is_candidate(self, node: TreeNode) -> bool:
        """Return whether the node's last block can be evicted without evicting a child first."""
        if self.tier is HOST:
            copies, children = node.host, node.children_on_host
        else:
            copies, children = node.device, node.children_on_device
        # A root has no copies and is never a candidate.
        return not (node.holders or children or copies is None or not copies.num_present)

    def rank(self, node: TreeNode) -> int:
        """Return the number by which nodes are evicted: the node with the lowest number first.

        The number is the policy's rank of the node. SOFT_PIN is added if the node has a soft pin.
        """
        rank = self.policy.rank(node)
        return rank + SOFT_PIN if node.soft_pins else rank

    def offer(self, node: TreeNode) -> None:
        """Queue `node` for eviction if its last block can be evicted now.

        Call this after each change that can make the block evictable.
        """
        if self.is_candidate(node):
            self.queue(node)

    def queue(self, node: TreeNode) -> None:
        """Queue a node for eviction.

        The node must have blocks on the tier, no lease, and no child with blocks on the tier.
        """
        if self.memory is None:
            self._push(node)
            return
        fallen = self.memory.queued(node)
        self._push(node)
        for other in fallen:
            self._push_again(other)

    def _push(self, node: TreeNode) -> None:
        rank, uid = self._rank(node) if self._rank else node.last_used, node.uid
        if node.soft_pins:
            rank += SOFT_PIN
        known = self._newest.get(uid)
        if known is not None and known[0] == rank:
            return
        self._num_pushed += 1
        entry = self._newest[uid] = (rank, self._num_pushed, node)
        line, heap = self._line, self._heap
        if not line or line[-1][0] <= rank:
            line.append(entry)
        else:
            heapq.heappush(heap, entry)
        if len(line) + len(heap) > self._max_queued:
            self._drop_stale()

    def _drop_stale(self) -> None:
        self._line = deque(sorted(self._newest.values()))
        self._heap = []
        self._max_queued = 2 * len(self._line) + _FEW_ENTRIES

    def _push_again(self, node: TreeNode) -> None:
        if self.is_candidate(node):
            self._push(node)

    def resized(self, capacity: int) -> None:
        """Adapt the policy to a new number of blocks: the size of the tier, or a tenant's quota."""
        for node in self.policy.resized(capacity):
            self._push_again(node)

    def forget(self, node: TreeNode) -> None:
        """Remove a node that has left the tree from the queue."""
        entry = self._newest.pop(node.uid, None)
        if entry is not None and self._line and self._line[0] is entry:
            self._line.popleft()  # the common case: an evicted node was the first
        if self.memory is not None:
            self.memory.forget(node)

    def leaf_to_go(self, max_blocks: int, rule: WriteRule) -> Segment | None:
        """Return the next blocks to evict in simple cases; faster than `victims`.

        A case is simple if all of these conditions are met: the next run to evict has no children,
        all of its blocks are ready on this tier, none of them is on the other tier, the policy of
        `rule` is not WRITE_BACK, and the eviction policy does not record evictions.

        Args:
            max_blocks: largest number of blocks to return, at least 1.
            rule: says when blocks are copied to the tier below.

        Returns:
            The run, the index of the first block within the run, and the index after the last
                block. None if the case is not simple; `planner.plan_eviction` may still find blocks
                to evict.
        """
        if rule.policy is WritePolicy.WRITE_BACK or self.memory is not None:
            return None
        entry = self._top()
        if entry is None or entry[2].children:
            return None
        node = entry[2]
        copies, other = (node.host, node.device) if self.tier is HOST else (node.device, node.host)
        if copies is None or copies.uniform is not _READY or (other and other.num_present):
            return None
        stop = node.num_blocks
        return node, stop - max_blocks if max_blocks < stop else 0, stop

    def victims(self, count: int) -> list[Victim]:
        """Return the blocks that would be evicted next, in the order of eviction; evict none.

        Each `Victim` is a range of blocks of one index node. The last blocks of a node are evicted
        before its first ones.

        Args:
            count: largest number of blocks in the result. If fewer can be evicted, the result has
                all of these.
        """
        victims: list[Victim] = []
        tier = self.tier
        chosen: list[Entry] = []  # removed from the queue now, put back at the end of the call
        virtual: list[Entry] = []  # parents with all children chosen already
        gone_children: dict[int, int] = {}
        while count > 0 and (entry := self._first(virtual)) is not None:
            node = entry[2]
            copies = node.copies[tier]
            present = copies.num_present
            if copies.uniform is _READY:  # the usual case
                stop = copies.num_blocks
                start = stop - count if count < stop else 0
                victims.append(Victim(node, start, stop))
                count -= stop - start
                present = start
            else:
                for start, stop in copies.ready_runs(count):
                    victims.append(Victim(node, start, stop))
                    count -= stop - start
                    present -= stop - start
            if present and count <= 0:
                break  # only some of the node's blocks are victims, so it stays the first
            if virtual and virtual[0] is entry:
                heapq.heappop(virtual)
            else:
                chosen.append(self._pop(entry))
            parent = node.parent
            if present or count <= 0 or parent is None or parent.parent is None:
                continue
            gone = gone_children[parent.uid] = gone_children.get(parent.uid, 0) + 1
            is_next = gone == parent.present_children[tier] and parent.holders == 0
            if is_next and parent.num_present(tier):
                if self.memory is not None:
                    self.memory.spares(parent)
                heapq.heappush(virtual, (self.rank(parent), -parent.uid, parent))
        for entry in chosen:
            heapq.heappush(self._heap, entry)
        return victims

    def _first(self, virtual: list[Entry]) -> Entry | None:
        """Return the first entry of the queue and of `virtual`, or None if both are empty.

        `virtual` is a heap of nodes whose children have all been chosen for eviction already.
        """
        entry = self._top()
        if virtual and (entry is None or virtual[0] < entry):
            return virtual[0]
        return entry

    def _top(self) -> Entry | None:
        line, heap, newest = self._line, self._heap, self._newest
        while line or heap:
            entry = line[0] if line else heap[0]
            if heap and heap[0] < entry:
                entry = heap[0]
            node = entry[2]
            if newest.get(node.uid) is not entry:
                self._pop(entry)
            elif not self.is_candidate(node):
                self._pop(entry)
                del newest[node.uid]
            elif self.memory is not None and self.memory.spares(node):
                self._pop(entry)
                del newest[node.uid]
                self._push(node)
            else:
                return entry
        return None

    def _pop(self, entry: Entry) -> Entry:
        if self._line and self._line[0] is entry:
            return self._line.popleft()
        return heapq.heappop(self._heap)

    def findings(self, nodes: list[TreeNode]) -> list[str]:
        """Return violated invariants, one sentence each.

        `nodes` are all nodes whose blocks this queue must be able to evict.
        """
        wrong = []
        unheld = sum(n.copies[self.tier].num_present for n in nodes if n.holders == 0)
        if unheld != self.num_unheld:
            wrong.append(f"{self.tier.name}: {unheld} unheld copies, but {self.num_unheld} counted")
        queued = {number for _, number, _ in (*self._line, *self._heap)}
        for node in nodes:
            if not self.is_candidate(node):
                continue
            entry = self._newest.get(node.uid)
            if entry is None or entry[1] not in queued or entry[0] != self.rank(node):
                wrong.append(
                    f"{self.tier.name}: node {node.uid} could be evicted, but is not queued"
                )
        known = {node.uid for node in nodes}
        if lost := [uid for uid in self._newest if uid not in known]:
            wrong.append(f"{self.tier.name}: {len(lost)} nodes are queued that left the tree")
        heap = self._heap
        if any(heap[(at - 1) // 2] > heap[at] for at in range(1, len(heap))):
            wrong.append(f"{self.tier.name}: the queue is not a heap")
        if any(before > after for before, after in pairwise(self._line)):
            wrong.append(f"{self.tier.name}: the line is not in order")
        return wrong


class EvictionPolicy:
    """Base class of the policies that decide which blocks are evicted first.

    A policy gives each node of the index (a run of blocks) a rank. Blocks of the node with the
    lowest rank are evicted first. Under every policy, a parent is evicted after its children.

    Attributes:
        has_memory: True if the policy records evictions; only then are `spares`, `queued`,
            `evicted` and `forget` called.
    """

    has_memory = False

    def rank(self, node: TreeNode) -> int:
        """Return the rank of a node without leases; the node with the lowest rank is evicted first.

        Soft pins are not part of this rank: `EvictionOrder` adds SOFT_PIN to the rank of a node
        with a soft pin.

        Returns:
            The rank, from 0 to SOFT_PIN - 1.

        Raises:
            NotImplementedError: the subclass does not define this method.
        """
        raise NotImplementedError

    def spares(self, node: TreeNode) -> bool:  # noqa: ARG002
        """Decide if `node`, the next one to evict, stays cached longer; True if it does.

        True means that the policy has raised the node's rank (its place in the order of eviction),
        so that another node may now be the next. A second call for the same node returns False,
        unless a request has matched the node in between.
        """
        return False

    def queued(self, node: TreeNode) -> list[TreeNode]:  # noqa: ARG002
        """Record that `node` can be evicted now.

        Returns:
            The other nodes that the policy now evicts earlier or later than before.
        """
        return []

    def evicted(self, node: TreeNode) -> None:
        """Record that blocks of `node` were evicted."""

    def forget(self, node: TreeNode) -> None:
        """Delete what is recorded about a node that has left the tree."""

    def resized(self, capacity: int) -> list[TreeNode]:  # noqa: ARG002
        """Adapt the policy to a tier of `capacity` blocks.

        Return the nodes whose position in the order of eviction has changed.
        """
        return []


class Lru(EvictionPolicy):
    """Eviction policy that evicts the least recently used leaf first."""

    def rank(self, node: TreeNode) -> int:
        return node.last_used


class Lfu(EvictionPolicy):
    """Eviction policy: the leaf with the fewest matches first, then the least recently used."""

    def rank(self, node: TreeNode) -> int:
        return (node.hits << _AGE_BITS) + node.last_used


class S3Fifo(EvictionPolicy):
    """Eviction policy S3-FIFO (Yang et al., 2023), with a small queue and a main queue of nodes.

    A new node enters the small queue. A node that was matched before, or evicted recently, enters
    the main queue. A node that was matched while it was queued moves to the end of the main queue
    instead of being evicted.

    Args:
        capacity: number of blocks of the tier.

    Attributes:
        max_small: largest number of blocks in the small queue.
    """

    has_memory = True

    def __init__(self, capacity: int) -> None:
        self.max_small = self._max_ghosts = 1
        self._places: dict[int, _Place] = {}
        # At most `max_small` blocks, oldest node first.
        self._small: OrderedDict[int, TreeNode] = OrderedDict()
        self._small_blocks = 0
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._count = 0
        self.resized(capacity)

    def resized(self, capacity: int) -> list[TreeNode]:
        self.max_small = max(int(capacity * _SMALL_SHARE), 1)
        self._max_ghosts = max(capacity, 1)
        while len(self._ghosts) > self._max_ghosts:
            self._ghosts.popitem(last=False)
        return self._overflow()

    def rank(self, node: TreeNode) -> int:
        place = self._places.get(node.uid)
        if place is None:  # a parent that has just lost its last child and was not queued yet
            return _Queue.MAIN << _AGE_BITS
        return (place.queue << _AGE_BITS) + place.number

    def queued(self, node: TreeNode) -> list[TreeNode]:
        if node.uid in self._places:
            return []
        came_back = self._ghosts.pop(_ghost(node), 0) is None
        place = self._enter(node, _Queue.MAIN if came_back or node.hits else _Queue.SMALL)
        if place.queue is _Queue.MAIN:
            return []
        self._small[node.uid] = node
        self._small_blocks += place.blocks
        return self._overflow()

    def _overflow(self) -> list[TreeNode]:
        """Move the oldest nodes out of the small queue, to be evicted before all others."""
        fallen = []
        while self._small_blocks > self.max_small and len(self._small) > 1:
            uid, oldest = self._small.popitem(last=False)
            self._small_blocks -= self._places[uid].blocks
            self._places[uid].queue = _Queue.OVERFLOW
            fallen.append(oldest)
        return fallen

    def spares(self, node: TreeNode) -> bool:
        """Move the node to the end of the main queue if it was matched while it was queued.

        Returns:
            True if the node was moved.
        """
        place = self._places.get(node.uid)
        if place is None or node.hits <= place.seen_hits:
            return False
        self._leave_small(node.uid)
        self._enter(node, _Queue.MAIN)
        return True

    def evicted(self, node: TreeNode) -> None:
        place = self._places.get(node.uid)
        if place is None or place.queue is _Queue.MAIN:
            return
        self._ghosts[_ghost(node)] = None
        if len(self._ghosts) > self._max_ghosts:
            self._ghosts.popitem(last=False)

    def forget(self, node: TreeNode) -> None:
        self._leave_small(node.uid)
        self._places.pop(node.uid, None)

    def _enter(self, node: TreeNode, queue: _Queue) -> _Place:
        self._count += 1
        place = _Place(queue, self._count, node.num_blocks, node.hits)
        self._places[node.uid] = place
        return place

    def _leave_small(self, uid: int) -> None:
        if self._small.pop(uid, None) is not None:
            self._small_blocks -= self._places[uid].blocks


class _Queue(IntEnum):
    OVERFLOW = 0
    MAIN = 1
    SMALL = 2


@dataclass(slots=True)
class _Place:
    queue: _Queue
    number: int  # in the order of arrival
    blocks: int
    seen_hits: int


def _ghost(node: TreeNode) -> int:
    """Return a hash that stays the same if the node's blocks are evicted and cached again."""
    return hash((node.space.name, node.start, node.key))


class EvictionKind(Enum):
    """An eviction policy, by its name in the settings."""

    LRU = "lru"
    LFU = "lfu"
    S3FIFO = "s3fifo"


# The policies of the device and of the host.
EvictionKinds = tuple[EvictionKind, EvictionKind]


def make_policy(kind: EvictionKind, capacity: int) -> EvictionPolicy:
    """Return a new eviction policy for a tier, or for a tenant's quota on a tier.

    Args:
        kind: the kind of policy.
        capacity: number of blocks of the tier or quota.
    """
    match kind:
        case EvictionKind.LRU:
            return Lru()
        case EvictionKind.LFU:
            return Lfu()
        case EvictionKind.S3FIFO:
            return S3Fifo(capacity)
        case _:
            assert_never(kind)
