"""Which unheld copies go first: leaves before their parents, and among leaves the policy says."""

from __future__ import annotations

import heapq
from collections import deque
from itertools import pairwise
from typing import Final, NamedTuple

from tierkv.cache.node import HOST, Node, Segment, Tier
from tierkv.cache.policies import EvictionPolicy, Lru
from tierkv.cache.states import CopyState
from tierkv.cache.write_policy import WritePolicy, WriteRule

SOFT_PIN: Final = 1 << 120  # added to a rank: softly pinned runs go when nothing else is left

# Rank, a number that no other entry has, the run. Told apart by that number, never by identity:
# where the room is compiled, a tuple is no object until somebody wants one.
Entry = tuple[int, int, Node]
_FEW_ENTRIES: Final = 64
_READY: Final = CopyState.READY
_WRITE_BACK: Final = WritePolicy.WRITE_BACK


class Victim(NamedTuple):
    """Ready copies of run blocks [start, stop) of an unheld node, to go in the order listed."""

    node: Node
    start: int
    stop: int


class EvictionOrder:
    """One tier's candidates: unheld nodes none of whose children has a copy on this tier.

    A lazy queue: `offer` adds an entry whenever a node may have become a candidate, and entries
    that are no longer true are skipped when they come up. What comes in the order of its rank, as
    nearly all does by LRU, waits in `_line`, O(1) each; the rest in `_heap`, O(log n). Nothing ever
    scans the tree.
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
        self._rank = self.policy.rank
        self.memory = self.policy if self.policy.has_memory else None
        self._spares = self.policy.spares if self.policy.has_second_chances else None

    def is_candidate(self, node: Node) -> bool:
        if node.holders:
            return False
        if self.tier is HOST:
            copies = node.host
            return copies is not None and copies.num_present > 0 and not node.children_on_host
        # Never a root, which has no copies.
        return node.device.num_present > 0 and not node.children_on_device

    def rank(self, node: Node) -> int:
        rank = self._rank(node)
        return rank + SOFT_PIN if node.soft_pins else rank

    def offer(self, node: Node) -> None:
        """Queue `node` if it can go."""
        if not self.is_candidate(node):
            return
        if self.memory is None:
            self._push(node)
            return
        fallen = self.memory.queued(node)
        self._push(node)
        for other in fallen:
            self._push_again(other)

    def _push(self, node: Node) -> None:
        rank, uid = self._rank(node), node.uid
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

    def _push_again(self, node: Node) -> None:
        """Its rank has changed."""
        if self.is_candidate(node):
            self._push(node)

    def resized(self, capacity: int) -> None:
        """The tier, or the quota that this is the order of, has `capacity` blocks from now on."""
        for node in self.policy.resized(capacity):
            self._push_again(node)

    def forget(self, node: Node) -> None:
        """`node` has left the tree."""
        entry = self._newest.pop(node.uid, None)
        if entry is not None and self._line and self._line[0][1] == entry[1]:
            self._line.popleft()  # as what is evicted was the first
        if self.memory is not None:
            self.memory.forget(node)

    def leaf_to_go(self, most: int, rule: WriteRule) -> Segment | None:
        """What goes next, at most `most` blocks of it, if there is nothing to plan about it: the
        last blocks of a leaf with no copies on the other tier, by a rule that copies nothing that
        goes. None if something else, or nothing, goes next, and by a policy with memory: for that
        a run whose children went one by one is one to be queued, in a plan it goes with them."""
        if rule.policy is _WRITE_BACK or self.memory is not None:
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
        """The next `count` copies to go, the first leaf's last blocks first. Changes nothing.

        Fewer if there are fewer. A parent is listed after all its children are, wholly.
        """
        victims: list[Victim] = []
        tier = self.tier
        chosen: list[Entry] = []  # taken off the heap, to go back in the end
        virtual: list[Entry] = []  # parents whose last child is chosen already
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
            if virtual and virtual[0][1] == entry[1]:
                heapq.heappop(virtual)
            else:
                chosen.append(self._pop(entry))
            parent = node.parent
            if present or count <= 0 or parent is None or parent.parent is None:
                continue
            gone = gone_children[parent.uid] = gone_children.get(parent.uid, 0) + 1
            is_next = gone == parent.present_children[tier] and parent.holders == 0
            if is_next and parent.num_present(tier):
                if self._spares is not None:
                    self._spares(parent)
                heapq.heappush(virtual, (self.rank(parent), -parent.uid, parent))
        for entry in chosen:
            heapq.heappush(self._heap, entry)
        return victims

    def _first(self, virtual: list[Entry]) -> Entry | None:
        """The entry to go next, one of `virtual` perhaps."""
        entry = self._top()
        if virtual and (entry is None or virtual[0] < entry):
            return virtual[0]
        return entry

    def _top(self) -> Entry | None:
        """The first entry of the heap; what is no longer true is dropped on the way."""
        line, heap, newest = self._line, self._heap, self._newest
        while line or heap:
            entry = line[0] if line else heap[0]
            if heap and heap[0] < entry:
                entry = heap[0]
            node = entry[2]
            known = newest.get(node.uid)
            if known is None or known[1] != entry[1]:
                self._pop(entry)
            elif not self.is_candidate(node):
                self._pop(entry)
                del newest[node.uid]
            elif self._spares is not None and self._spares(node):
                self._pop(entry)
                del newest[node.uid]
                self._push(node)
            else:
                return entry
        return None

    def _pop(self, entry: Entry) -> Entry:
        """Take off the first entry, which is `entry`."""
        if self._line and self._line[0][1] == entry[1]:
            return self._line.popleft()
        return heapq.heappop(self._heap)

    def findings(self, nodes: list[Node]) -> list[str]:
        """What is wrong, in words, if `nodes` are all the nodes of the tree."""
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
