"""What each eviction policy lets go first, and that pins and leaves come before any of them."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from tierkv.cache import invariants
from tierkv.cache.eviction import (
    EvictionKind,
    EvictionPolicy,
    Lru,
    S3Fifo,
    make_policy,
)
from tierkv.cache.index import Index
from tierkv.cache.keys import Prompt
from tierkv.cache.node import BlockPool, Space, Tier, TreeNode


class Cached:
    """Prompts of single-token blocks on the device."""

    def __init__(self, policy: EvictionPolicy, capacity: int = 100) -> None:
        self.index = Index(1, policies=(policy, Lru()))
        self.pools = {Tier.DEVICE: BlockPool("device", capacity), Tier.HOST: BlockPool("host", 0)}

    def use(self, *tokens: int) -> TreeNode:
        prompt = Prompt.of(tokens, 1)
        match = self.index.match(prompt)
        lease = self.index.hold(match.node, match.num_blocks)
        self.index.count_hit(lease)
        slots = self.pools[Tier.DEVICE].allocate(prompt.num_blocks - match.num_blocks)
        self.index.insert(Tier.DEVICE, lease, prompt, prompt.num_blocks, slots)
        node = lease.node
        self.index.release(lease)
        return node

    def evict(self, count: int) -> None:
        for victim in self.index.spaces.order[Tier.DEVICE].victims(count):
            slots = self.index.drop(Tier.DEVICE, *victim)
            self.pools[Tier.DEVICE].release(slots)

    def has(self, *tokens: int) -> bool:
        return self.index.match(Prompt.of(tokens, 1)).num_blocks == len(tokens)

    def check(self) -> None:
        nobody: dict[Tier, list[int]] = {tier: [] for tier in Tier}
        assert invariants.findings(self.index, self.pools, nobody) == []


@pytest.mark.parametrize("kind", EvictionKind)
def test_a_soft_pin_outweighs_any_number_of_hits(kind: EvictionKind) -> None:
    cache = Cached(make_policy(kind, 100))
    cache.index.pin_softly(cache.use(1), 1)
    cache.use(2).hits = 10**9
    cache.use(2)
    cache.evict(1)
    assert cache.has(1)
    assert not cache.has(2)


@pytest.mark.promise("Every eviction policy evicts leaves before parents.")
@pytest.mark.parametrize("kind", EvictionKind)
def test_whatever_the_policy_leaves_go_before_their_parents(kind: EvictionKind) -> None:
    cache = Cached(make_policy(kind, 100))
    rng = np.random.default_rng(5)
    for _ in range(60):
        cache.use(*rng.integers(0, 3, rng.integers(1, 7)).tolist())
    while victims := cache.index.spaces.order[Tier.DEVICE].victims(3):
        for victim in victims:
            assert not victim.node.children or victim.node.present_children[Tier.DEVICE] == 0
            slots = cache.index.drop(Tier.DEVICE, *victim)
            cache.pools[Tier.DEVICE].release(slots)
        cache.check()


def test_a_run_used_again_and_again_does_not_pile_up_in_the_queue_nor_drive_others_out() -> None:
    cache = Cached(Lru())
    nodes = [cache.use(number) for number in range(20)]
    index, busiest = cache.index, nodes.pop(0)
    before = sys.getrefcount(busiest)
    for _ in range(10_000):
        index.release(index.hold(busiest, 1))
    assert sys.getrefcount(busiest) - before < 200, "what is queued of it refers to it"
    cache.check()
    assert [v.node for v in index.spaces.order[Tier.DEVICE].victims(20)] == [*nodes, busiest]


def test_a_soft_pin_follows_its_blocks_through_splits() -> None:
    cache = Cached(Lru())
    pinned = cache.index.pin_softly(cache.use(1, 2, 3, 4), 3)
    cache.use(1, 2, 9)  # splits the pinned run
    for number in range(10, 20):
        cache.use(number)
    cache.evict(12)
    assert cache.has(1, 2, 3)
    assert not cache.has(1, 2, 3, 4)
    cache.index.unpin_softly(pinned)
    cache.check()
    assert all(node.soft_pins == 0 for node in cache.index.spaces.nodes())


def test_s3fifo_lets_its_newcomers_overflow_at_once_when_the_tier_shrinks() -> None:
    cache = Cached(make_policy(EvictionKind.S3FIFO, 100), capacity=100)
    for number in range(8):
        cache.use(number)
    cache.use(1000)
    order = cache.index.spaces.order[Tier.DEVICE]
    assert {order.rank(node) >> 48 for node in cache.index.spaces.nodes()} == {2}, (
        "within their share"
    )
    order.resized(20)
    cache.check()
    assert [order.rank(node) >> 48 for node in cache.index.spaces.nodes()].count(2) == 2


def test_a_quota_that_changes_changes_the_share_of_newcomers() -> None:
    index = Index(1)
    space = Space("tenant", bytes(32), quota=(100, None))
    index.spaces.open(space, (EvictionKind.S3FIFO, EvictionKind.S3FIFO))
    order = index.spaces.own_order(space, Tier.DEVICE)
    assert order is not None
    assert isinstance(order.policy, S3Fifo)
    assert order.policy.max_small == 10
    index.spaces.set_quota(space, (50, None))
    assert order.policy.max_small == 5
