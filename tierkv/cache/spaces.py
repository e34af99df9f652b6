"""The roots of the tree, one for each fingerprint's space, and the queues of what may go."""

from __future__ import annotations

from collections.abc import Iterator

from tierkv.cache.copies import TierCopies
from tierkv.cache.eviction import EvictionOrder
from tierkv.cache.keys import Prompt
from tierkv.cache.node import Node, Tier
from tierkv.cache.policies import EvictionKind, EvictionPolicy, make_policy
from tierkv.cache.space import DEFAULT, Quota, Space
from tierkv.errors import BadRequestError


class Spaces:
    """order: the eviction queues of all spaces together. A space with a quota has its own, too."""

    def __init__(
        self, root_digest: bytes, policies: tuple[EvictionPolicy, EvictionPolicy] | None
    ) -> None:
        device, host = policies or (None, None)
        self.order = (EvictionOrder(Tier.DEVICE, device), EvictionOrder(Tier.HOST, host))
        self._own_orders: dict[str, tuple[EvictionOrder, EvictionOrder]] = {}
        self._roots: dict[str, Node] = {}
        self.root = self.open_space(Space(DEFAULT, root_digest))

    def open_space(self, space: Space, kind: EvictionKind = EvictionKind.LRU) -> Node:
        """Let prompts of `space.name` in; returns its root. kind: how it evicts within a quota."""
        if space.name in self._roots:
            raise BadRequestError(f"fingerprint {space.name!r} is open already")
        root = Node(0, None, space, TierCopies(0))
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
        elif own := self._own_orders.get(space.name):
            for order in own:
                order.resized(quota[order.tier] or 0)
        else:
            self._open_own_orders(space, kind)
            pending = list(self._roots[space.name].children.values())
            while pending:
                node = pending.pop()
                pending.extend(node.children.values())
                for order in self._own_orders[space.name]:
                    if not node.holders:
                        order.num_unheld += node.num_present(order.tier)
                    order.offer(node)

    def _open_own_orders(self, space: Space, kind: EvictionKind) -> None:
        self._own_orders[space.name] = (
            EvictionOrder(Tier.DEVICE, make_policy(kind, space.quota[0] or 0)),
            EvictionOrder(Tier.HOST, make_policy(kind, space.quota[1] or 0)),
        )

    def root_of(self, prompt: Prompt) -> Node:
        """Raises BadRequestError if no space of that name is open."""
        return self._roots.get(prompt.space) or self.root_named(prompt.space)

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
        own = [(order, space) for space in self.spaces() if (order := self.own_order(space, tier))]
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
