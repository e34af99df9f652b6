"""Which unheld copies go first: least recently used, leaves before their parents."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from tierkv.cache.node import Node, Tier
from tierkv.cache.states import CopyState


@dataclass(frozen=True, slots=True)
class Victim:
    """Ready copies of run blocks [start, stop) of an unheld node, to go in the order listed."""

    node: Node
    start: int
    stop: int


class LruOrder:
    """One tier's candidates: unheld nodes none of whose children has a copy on this tier.

    A lazy heap: `offer` pushes whenever a node may have become a candidate, and entries that are
    no longer true are skipped when they come up. O(log n) each; nothing ever scans the tree.
    """

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.num_unheld = 0  # copies in nodes without holders: all of them can be evicted
        self._heap: list[tuple[int, int, Node]] = []
        self._pushed: dict[int, int] = {}  # uid -> last_used of its newest entry

    def is_candidate(self, node: Node) -> bool:
        return (
            node.holders == 0
            and node.parent is not None
            and node.copies[self.tier].num_present > 0
            and node.present_children[self.tier] == 0
        )

    def offer(self, node: Node) -> None:
        if self.is_candidate(node) and self._pushed.get(node.uid) != node.last_used:
            self._pushed[node.uid] = node.last_used
            heapq.heappush(self._heap, (node.last_used, node.uid, node))
            if len(self._heap) > 2 * len(self._pushed) + 64:  # mostly entries that have gone stale
                self._heap = [e for e in self._heap if self._pushed.get(e[1]) == e[0]]
                heapq.heapify(self._heap)

    def victims(self, count: int) -> list[Victim]:
        """The next `count` copies to go, the oldest leaf's last blocks first. Changes nothing.

        Fewer if there are fewer. A parent is listed after all its children are, wholly.
        """
        chosen: list[Victim] = []
        taken: list[tuple[int, int, Node]] = []
        virtual: list[tuple[int, int, Node]] = []  # parents whose last child is chosen already
        gone_children: dict[int, int] = {}
        while count > 0 and (self._heap or virtual):
            if virtual and (not self._heap or virtual[0] < self._heap[0]):
                entry = heapq.heappop(virtual)
            else:
                entry = heapq.heappop(self._heap)
                if self._pushed.get(entry[1]) != entry[0] or not self.is_candidate(entry[2]):
                    if self._pushed.get(entry[1]) == entry[0]:
                        del self._pushed[entry[1]]
                    continue
                taken.append(entry)
            node = entry[2]
            present = np.flatnonzero(node.copies[self.tier].states == CopyState.READY)
            going = present[max(len(present) - count, 0) :]
            count -= len(going)
            for start, stop in _runs(going):
                chosen.append(Victim(node, start, stop))
            parent = node.parent
            if len(going) == len(present) and parent is not None and parent.parent is not None:
                gone = gone_children[parent.uid] = gone_children.get(parent.uid, 0) + 1
                is_next = gone == parent.present_children[self.tier] and parent.holders == 0
                if is_next and parent.copies[self.tier].num_present:
                    heapq.heappush(virtual, (parent.last_used, parent.uid, parent))
        for entry in taken:
            heapq.heappush(self._heap, entry)
        return chosen

    def findings(self, nodes: list[Node]) -> list[str]:
        """What is wrong, in words, if `nodes` are all the nodes of the tree."""
        wrong = []
        unheld = sum(n.copies[self.tier].num_present for n in nodes if n.holders == 0)
        if unheld != self.num_unheld:
            wrong.append(f"{self.tier.name}: {unheld} unheld copies, but {self.num_unheld} counted")
        queued = {(last_used, uid) for last_used, uid, _ in self._heap}
        wrong.extend(
            f"{self.tier.name}: node {node.uid} could be evicted, is not queued"
            for node in nodes
            if self.is_candidate(node) and (node.last_used, node.uid) not in queued
        )
        return wrong


def _runs(sorted_ids: np.ndarray[tuple[int], np.dtype[np.intp]]) -> list[tuple[int, int]]:
    """Consecutive ids as (start, stop), the last run first."""
    if not len(sorted_ids):
        return []
    breaks = np.flatnonzero(np.diff(sorted_ids) != 1) + 1
    parts = np.split(sorted_ids, breaks)
    return [(int(part[0]), int(part[-1]) + 1) for part in reversed(parts)]
