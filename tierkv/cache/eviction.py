"""The order of eviction: leaves before their parents, and leaves in the order of a policy.

The write rule of a tier is here too: blocks that are not written early are written as they are
evicted.
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

_AGE_BITS: Final = 48  # of a rank, for the tick of the last use: 2.8e14 uses
_SMALL_SHARE = 0.1  # of the tier, as in the paper
SOFT_PIN: Final = 1 << 120  # added to a rank: softly pinned runs go when nothing else is left
# Rank, a number that no other entry has, the run.
Entry = tuple[int, int, TreeNode]
_FEW_ENTRIES: Final = 64
_READY: Final = CopyState.READY


class WritePolicy(Enum):
    NONE = "none"  # never
    WRITE_THROUGH = "write_through"  # as soon as the block is whole
    SELECTIVE = "write_through_selective"  # once it has been matched `after_hits` times
    WRITE_BACK = "write_back"  # when it is evicted; its slot is reused only after the copy is done


@dataclass(frozen=True, slots=True)
class WriteRule:
    policy: WritePolicy
    after_hits: int = 2

    def __post_init__(self) -> None:
        if self.after_hits < 1:
            raise ConfigError(f"after_hits must be at least 1, not {self.after_hits}")

    def writes_now(self, hits: int) -> bool:
        """Return whether a block with `hits` matches should have been copied down by now."""
        if self.policy is WritePolicy.SELECTIVE:
            return hits >= self.after_hits
        return self.policy is WritePolicy.WRITE_THROUGH

    @property
    def writes_early(self) -> bool:
        """True if some blocks are copied down before eviction."""
        return self.policy in (WritePolicy.WRITE_THROUGH, WritePolicy.SELECTIVE)

    @property
    def writes_on_eviction(self) -> bool:
        return self.policy is WritePolicy.WRITE_BACK


class Victim(NamedTuple):
    """Ready copies of run blocks [start, stop) of an unheld node, to be evicted in this order."""

    node: TreeNode
    start: int
    stop: int


class EvictionOrder:
    """One tier's candidates: unheld nodes without a child that has a copy on this tier.

    The queue is lazy: `offer` adds an entry whenever a node may have become a candidate, and
    entries that are no longer true are skipped when they come up. Entries that arrive in the order
    of their rank, nearly all by LRU, wait in `_line`, O(1) each; the rest in `_heap`, O(log n).
    Nothing scans the tree.
    """

    def __init__(self, tier: Tier, policy: EvictionPolicy | None = None) -> None:
        self.tier = tier
        self.policy = policy or Lru()
        self.num_unheld = 0  # copies in nodes without holders: all of them can be evicted
        self._line: deque[Entry] = deque()  # ascending
        self._heap: list[Entry] = []
        self._newest: dict[int, Entry] = {}  # by uid: the only entry of a run that counts
        self._most_queued = _FEW_ENTRIES  # entries before the stale ones among them are dropped
        self._num_pushed = 0
        # Not asked of LRU: it has neither, and the question takes time.
        self._rank = None if type(self.policy) is Lru else self.policy.rank
        self.memory = self.policy if self.policy.has_memory else None

    def is_candidate(self, node: TreeNode) -> bool:
        if self.tier is HOST:
            copies, children = node.host, node.children_on_host
        else:
            copies, children = node.device, node.children_on_device
        # Never a root, which has no copies.
        return not (node.holders or children or copies is None or not copies.num_present)

    def rank(self, node: TreeNode) -> int:
        rank = self.policy.rank(node)
        return rank + SOFT_PIN if node.soft_pins else rank

    def offer(self, node: TreeNode) -> None:
        """Queue `node` if it can go."""
        if self.is_candidate(node):
            self.queue(node)

    def queue(self, node: TreeNode) -> None:
        """Queue a candidate."""
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
        if len(line) + len(heap) > self._most_queued:
            self._drop_stale()

    def _drop_stale(self) -> None:
        """Keep only the entries that count; until there are twice as many, all are left alone."""
        self._line = deque(sorted(self._newest.values()))
        self._heap = []
        self._most_queued = 2 * len(self._line) + _FEW_ENTRIES

    def _push_again(self, node: TreeNode) -> None:
        """Queue `node` again after a change of its rank."""
        if self.is_candidate(node):
            self._push(node)

    def resized(self, capacity: int) -> None:
        """Note the new capacity of the tier or quota, in blocks."""
        for node in self.policy.resized(capacity):
            self._push_again(node)

    def forget(self, node: TreeNode) -> None:
        """Forget a node that has left the tree."""
        entry = self._newest.pop(node.uid, None)
        if entry is not None and self._line and self._line[0] is entry:
            self._line.popleft()  # as what is evicted was the first
        if self.memory is not None:
            self.memory.forget(node)

    def leaf_to_go(self, most: int, rule: WriteRule) -> Segment | None:
        """Return the next blocks to evict, at most `most`, if evicting them needs no plan.

        That is the case for the last blocks of a leaf without copies on the other tier, by a rule
        that copies nothing at eviction, and by a policy without memory: a policy with memory queues
        a run whose children were evicted one by one, where a plan evicts both together.

        Returns:
            The blocks, or None if anything else, or nothing, is next.
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
        return node, stop - most if most < stop else 0, stop

    def victims(self, count: int) -> list[Victim]:
        """Return the next `count` copies to evict, the first leaf's last blocks first.

        Nothing changes.
        """
        victims: list[Victim] = []
        tier = self.tier
        chosen: list[Entry] = []  # taken out of the queue, to go back in the end
        virtual: list[Entry] = []  # parents with all children chosen already
        gone_children: dict[int, int] = {}
        while count > 0 and (entry := self._first(virtual)) is not None:
            node = entry[2]
            copies = node.copies[tier]
            present = copies.num_present
            if copies.uniform is _READY:  # as nearly all are
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
                break  # a part of it goes: it stays the first
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
        """Return the entry to evict next, which may be one of `virtual`."""
        entry = self._top()
        if virtual and (entry is None or virtual[0] < entry):
            return virtual[0]
        return entry

    def _top(self) -> Entry | None:
        """Return the first entry of the queue; outdated entries before it are dropped."""
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
        """Take off the first entry, which is `entry`."""
        if self._line and self._line[0] is entry:
            return self._line.popleft()
        return heapq.heappop(self._heap)

    def findings(self, nodes: list[TreeNode]) -> list[str]:
        """Return what is wrong, in words, if `nodes` are all the nodes of the tree."""
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
                wrong.append(f"{self.tier.name}: node {node.uid} could be evicted, is not queued")
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
    """The order in which leaves are evicted.

    Ranks are integers, and the lowest is evicted first. Asking changes nothing that another answer
    depends on. Leaves are evicted before their parents whatever the policy.

    Attributes:
        has_memory: whether `spares`, `queued`, `evicted` and `forget` are called.
    """

    has_memory = False

    def rank(self, node: TreeNode) -> int:
        """Return the rank of a run without holders, by its last use."""
        raise NotImplementedError

    def spares(self, node: TreeNode) -> bool:  # noqa: ARG002
        """Return True if the next run to evict has changed its rank.

        Another run may then be next. A second call for the same run without a match between them
        returns False.
        """
        return False

    def queued(self, node: TreeNode) -> list[TreeNode]:  # noqa: ARG002
        """Note that `node` can be evicted; return the runs with a changed rank."""
        return []

    def evicted(self, node: TreeNode) -> None:
        """Note that blocks of `node` were evicted."""

    def forget(self, node: TreeNode) -> None:
        """Forget a node that has left the tree."""

    def resized(self, capacity: int) -> list[TreeNode]:  # noqa: ARG002
        """Note that the tier has `capacity` blocks; return the runs with a changed rank."""
        return []


class Lru(EvictionPolicy):
    """Least recently used first."""

    def rank(self, node: TreeNode) -> int:
        return node.last_used


class Lfu(EvictionPolicy):
    """Least often matched first, the least recently used among equals."""

    def rank(self, node: TreeNode) -> int:
        return (node.hits << _AGE_BITS) + node.last_used


class S3Fifo(EvictionPolicy):
    """S3-FIFO (Yang et al., 2023): a small queue, a main queue, and a memory of evicted runs.

    A run that was not matched is evicted from the small queue; a matched one moves to the main
    queue.

    Args:
        capacity: blocks of the tier.

    Attributes:
        max_small: blocks of the small queue.
    """

    has_memory = True

    def __init__(self, capacity: int) -> None:
        self.max_small = self._max_ghosts = 1
        self._places: dict[int, _Place] = {}
        self._small: OrderedDict[int, TreeNode] = OrderedDict()  # within their share, oldest first
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
        if place is None:  # never queued: a parent that has just lost its last child
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
        """Move the oldest runs of the small queue until the rest is within its share.

        Return those moved.
        """
        fallen = []
        while self._small_blocks > self.max_small and len(self._small) > 1:
            uid, oldest = self._small.popitem(last=False)
            self._small_blocks -= self._places[uid].blocks
            self._places[uid].queue = _Queue.OVERFLOW
            fallen.append(oldest)
        return fallen

    def spares(self, node: TreeNode) -> bool:
        """Return whether the next run was matched since it was placed.

        Such a run moves to the end of the main queue.
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
    """Return a hash of the run's start and first block, by which an evicted run is recognised."""
    return hash((node.space.name, node.start, node.key))


class EvictionKind(Enum):
    """An eviction policy, as a configuration names it."""

    LRU = "lru"
    LFU = "lfu"
    S3FIFO = "s3fifo"


# Of the device and of the host.
EvictionKinds = tuple[EvictionKind, EvictionKind]


def make_policy(kind: EvictionKind, capacity: int) -> EvictionPolicy:
    """Return the eviction policy for a tier, or for a tenant's quota of the tier.

    Args:
        kind: The policy's kind.
        capacity: Number of blocks of the tier or quota.
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
