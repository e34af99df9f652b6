"""Eviction policies: which of the runs that could go, goes first. One number per run decides."""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum
from typing import Final, Protocol

from tierkv.cache.node import Node
from tierkv.cache.s3fifo import S3Fifo

_AGE_BITS: Final = 48  # of a rank, for the tick of the last use: 2.8e14 uses


class EvictionPolicy(Protocol):
    """What it promises: ranks are integers, the lowest goes first; asking changes nothing that
    another answer depends on. That leaves go before their parents is not its business."""

    @property
    def has_memory(self) -> bool:
        """Whether `queued`, `evicted` and `forget` are to be called."""

    @property
    def has_second_chances(self) -> bool:
        """Whether `spares` is to be asked."""

    def spares(self, node: Node) -> bool:
        """Asked of the run that would go next: True if its rank has changed now, so that another
        one may. Asked again without a match between, it says False."""

    def rank(self, node: Node) -> int:
        """Of a run nobody holds, since its last use."""

    def queued(self, node: Node) -> list[Node]:
        """`node` can go from now on. Returns the runs whose rank that has changed."""

    def evicted(self, node: Node) -> None:
        """Blocks of `node` went."""

    def forget(self, node: Node) -> None:
        """`node` is no more."""

    def resized(self, capacity: int) -> list[Node]:
        """The tier has `capacity` blocks from now on. Returns the runs whose rank that has
        changed."""


class _Stateless:
    has_memory = False
    has_second_chances = False

    def spares(self, node: Node) -> bool:  # noqa: ARG002 - the protocol's
        return False

    def queued(self, node: Node) -> list[Node]:  # noqa: ARG002 - the protocol's
        return []

    def evicted(self, node: Node) -> None:
        pass

    def forget(self, node: Node) -> None:
        pass

    def resized(self, capacity: int) -> list[Node]:  # noqa: ARG002 - the protocol's
        return []


class Lru(_Stateless):
    """Least recently used first."""

    def rank(self, node: Node) -> int:
        return node.last_used


class Lfu(_Stateless):
    """Least often matched first, the least recently used among equals."""

    def rank(self, node: Node) -> int:
        return (node.hits << _AGE_BITS) + node.last_used


class Slru(_Stateless):
    """Segmented LRU: what was never matched goes before what was, so that one long scan cannot
    wash out what is shared. The protected segment is bounded; its oldest fall back.

    max_protected: blocks of it.
    """

    has_memory = True

    def __init__(self, max_protected: int) -> None:
        self.max_protected = max_protected
        self._protected: OrderedDict[int, tuple[Node, int]] = OrderedDict()
        self._blocks = 0
        self._demoted: dict[int, int] = {}  # uid -> hits at its demotion

    def rank(self, node: Node) -> int:
        return (int(node.uid in self._protected) << _AGE_BITS) + node.last_used

    def queued(self, node: Node) -> list[Node]:
        if node.hits <= self._demoted.get(node.uid, 0):
            return []
        self._remove(node.uid)
        self._protected[node.uid] = (node, node.num_blocks)
        self._blocks += node.num_blocks
        return self._fall_back()

    def _fall_back(self) -> list[Node]:
        """The oldest, until the others are within their share."""
        fallen = []
        while self._blocks > self.max_protected and len(self._protected) > 1:
            uid, (oldest, _) = next(iter(self._protected.items()))
            self._remove(uid)
            self._demoted[uid] = oldest.hits
            fallen.append(oldest)
        return fallen

    def forget(self, node: Node) -> None:
        self._remove(node.uid)
        self._demoted.pop(node.uid, None)

    def resized(self, capacity: int) -> list[Node]:
        self.max_protected = _protected_of(capacity)
        return self._fall_back()

    def _remove(self, uid: int) -> None:
        _, blocks = self._protected.pop(uid, (None, 0))
        self._blocks -= blocks


class CostAware(_Stateless):
    """Greedy-dual: value = floor + matches x recompute cost per byte; the least valuable goes, and
    its value becomes the floor, which is how the others age.

    A block's recompute cost is linear in its tokens plus attention over all tokens before it, so
    per byte a block deep in a prompt is dearer: 1 + position / `linear_blocks`.
    """

    has_memory = True
    _SCALE = 1 << 20

    def __init__(self, linear_blocks: int = 2048) -> None:
        self.linear_blocks = linear_blocks
        self._floor = 0
        self._at: dict[int, tuple[int, int]] = {}  # uid -> last use, and the floor then

    def rank(self, node: Node) -> int:
        used, floor = self._at.get(node.uid, (-1, 0))
        if used != node.last_used:
            floor = self._floor
            self._at[node.uid] = (node.last_used, floor)
        cost = self._SCALE + self._SCALE * node.start // self.linear_blocks
        return floor + (1 + node.hits) * cost

    def evicted(self, node: Node) -> None:
        self._floor = max(self._floor, self.rank(node))

    def forget(self, node: Node) -> None:
        self._at.pop(node.uid, None)


class EvictionKind(Enum):
    """What a configuration says."""

    LRU = "lru"
    LFU = "lfu"
    SLRU = "slru"
    S3FIFO = "s3fifo"
    COST = "cost"


_PROTECTED_SHARE = 0.8  # of a tier, as in the paper that named SLRU (Karedla et al., 1994)


def _protected_of(capacity: int) -> int:
    return int(capacity * _PROTECTED_SHARE)


def make_policy(kind: EvictionKind, capacity: int) -> EvictionPolicy:
    """A policy for one tier of `capacity` blocks."""
    if kind is EvictionKind.LRU:
        return Lru()
    if kind is EvictionKind.LFU:
        return Lfu()
    if kind is EvictionKind.SLRU:
        return Slru(_protected_of(capacity))
    if kind is EvictionKind.S3FIFO:
        return S3Fifo(capacity)
    return CostAware()
