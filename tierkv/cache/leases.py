"""What may not be evicted, leases, and what goes last, soft pins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tierkv.cache.node import Node
from tierkv.cache.states import CopyState
from tierkv.cache.tree import Tree
from tierkv.errors import OwnershipError


@dataclass(slots=True, eq=False)
class Lease:
    """Forbids eviction of blocks [0, num_blocks) on the path to `node`, on every tier."""

    node: Node
    num_blocks: int
    is_released: bool = False


_READY: Final = CopyState.READY


class Leases(Tree):
    """A lease ends on the node that ends where it does, which is split off for it."""

    num_held_leases = 0

    def hold(self, node: Node, num_blocks: int) -> Lease:
        """Forbid eviction of the path up to `num_blocks`, and mark it as used now.

        A run that goes on beyond is split, so that its rest stays free to go.
        """
        if node.end != num_blocks:
            node = self._ending_at(node, num_blocks)
        self._hold(node)
        self._use(node)
        self.num_held_leases += 1
        return Lease(node, num_blocks)

    def hold_as_is(self, node: Node) -> Lease:
        """Forbid eviction of the path to `node`'s end for a movement: no split, not a use."""
        self._hold(node)
        self.num_held_leases += 1
        return Lease(node, node.end)

    def release(self, lease: Lease) -> None:
        """End a lease. Raises OwnershipError if it has ended already."""
        if lease.is_released:
            raise OwnershipError("a lease was released twice")
        lease.is_released = True
        self.num_held_leases -= 1
        node = lease.node
        self._unhold(node)
        if node.device.uniform is not _READY:  # else there is nothing to prune
            self.prune(node)

    def _move(self, lease: Lease, node: Node, *, is_new: bool = False) -> None:
        """Let `lease` end where `node` does from now on, a use of that.

        is_new: a run made for it, which has its holder already and is one of its parent's.
        """
        before, lease.node, lease.num_blocks = lease.node, node, node.end
        end = node.parent if is_new else node
        if end is not before and end is not None:
            self._hold(end)
            self._unhold(before)
            self.prune(before)
        self._use(node)

    def _use(self, node: Node) -> None:
        """The path to `node` is used now: what is above is told when its holder ends."""
        self._tick += 1
        node.last_used = self._tick

    def count_hit(self, lease: Lease) -> None:
        for part in lease.node.path():
            part.hits += 1

    def _ending_at(self, node: Node, num_blocks: int) -> Node:
        """The node of the path to `node` that ends at `num_blocks`, after a split if need be."""
        while node.parent is not None and node.start >= num_blocks:
            node = node.parent
        if num_blocks < node.end:
            node = self._split(node, num_blocks - node.start)
        return node

    # Soft pins

    def pin_softly(self, node: Node, num_blocks: int) -> Node:
        """Let the path up to `num_blocks` go after everything that is not pinned; returns what
        `unpin_softly` takes."""
        node = self._ending_at(node, num_blocks)
        self._pin(node, +1)
        return node

    def unpin_softly(self, node: Node) -> None:
        """Undo one `pin_softly`. What went meanwhile is no error."""
        self._pin(node, -1)

    def _pin(self, node: Node, step: int) -> None:
        for part in node.path():
            part.soft_pins += step
            self._offer(part)
