"""S3-FIFO for runs of blocks: a small queue for newcomers, a main one, and a memory of who went.

After Yang et al., "FIFO queues are all you need for cache eviction" (SOSP 2023), with runs for
objects: a newcomer goes to the small queue, which is a tenth of the tier; who is not matched there
goes early and quietly, who is moves to the main queue, where a match saves a run once. Who comes
back soon after it went starts in the main queue.

    rank   0 small, beyond its share     goes first, oldest first
           1 main                        oldest first, once round for each that was matched
           2 small, within its share     goes when there is nothing else
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from tierkv.cache.node import Node

_AGE_BITS: Final = 48
_SMALL_SHARE = 0.1  # of the tier, as in the paper


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


class S3Fifo:
    """An EvictionPolicy. capacity: blocks of the tier."""

    has_memory = True
    has_second_chances = True

    def __init__(self, capacity: int) -> None:
        self._max_small = self._max_ghosts = 1
        self._places: dict[int, _Place] = {}
        self._small: OrderedDict[int, Node] = OrderedDict()  # within their share, oldest first
        self._small_blocks = 0
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._count = 0
        self.resized(capacity)

    def resized(self, capacity: int) -> list[Node]:
        self._max_small = max(int(capacity * _SMALL_SHARE), 1)
        self._max_ghosts = max(capacity, 1)
        while len(self._ghosts) > self._max_ghosts:
            self._ghosts.popitem(last=False)
        return self._overflow()

    def rank(self, node: Node) -> int:
        place = self._places.get(node.uid)
        if place is None:  # never queued: a parent whose children have just gone
            return _Queue.MAIN << _AGE_BITS
        return (place.queue << _AGE_BITS) + place.number

    def queued(self, node: Node) -> list[Node]:
        if node.uid in self._places:
            return []
        came_back = self._ghosts.pop(_ghost(node), 0) is None
        place = self._enter(node, _Queue.MAIN if came_back or node.hits else _Queue.SMALL)
        if place.queue is _Queue.MAIN:
            return []
        self._small[node.uid] = node
        self._small_blocks += place.blocks
        return self._overflow()

    def _overflow(self) -> list[Node]:
        """The oldest of the small queue, until the others are within its share."""
        fallen = []
        while self._small_blocks > self._max_small and len(self._small) > 1:
            uid, oldest = self._small.popitem(last=False)
            self._small_blocks -= self._places[uid].blocks
            self._places[uid].queue = _Queue.OVERFLOW
            fallen.append(oldest)
        return fallen

    def spares(self, node: Node) -> bool:
        """Whether a run that would go next was matched since it was placed; then it is at the end
        of the main queue now."""
        place = self._places.get(node.uid)
        if place is None or node.hits <= place.seen_hits:
            return False
        self._leave_small(node.uid)
        self._enter(node, _Queue.MAIN)
        return True

    def evicted(self, node: Node) -> None:
        place = self._places.get(node.uid)
        if place is None or place.queue is _Queue.MAIN:
            return
        self._ghosts[_ghost(node)] = None
        if len(self._ghosts) > self._max_ghosts:
            self._ghosts.popitem(last=False)

    def forget(self, node: Node) -> None:
        self._leave_small(node.uid)
        self._places.pop(node.uid, None)

    def _enter(self, node: Node, queue: _Queue) -> _Place:
        self._count += 1
        place = _Place(queue, self._count, node.num_blocks, node.hits)
        self._places[node.uid] = place
        return place

    def _leave_small(self, uid: int) -> None:
        if self._small.pop(uid, None) is not None:
            self._small_blocks -= self._places[uid].blocks


def _ghost(node: Node) -> int:
    """What tells a run that went when it comes back: where it starts, and its first block."""
    return hash((node.space.name, node.start, node.key))
