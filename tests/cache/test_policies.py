"""What each eviction policy lets go first, and that pins come before any of them."""

from __future__ import annotations

import sys

import pytest

from tests.cache.cached import Cached
from tierkv.cache.eviction import EvictionKind, WritePolicy, WriteRule, make_policy
from tierkv.cache.keys import Prompt
from tierkv.cache.node import Space, Tier
from tierkv.errors import ConfigError


@pytest.mark.parametrize("kind", EvictionKind)
def test_a_soft_pin_outweighs_any_number_of_hits(kind: EvictionKind) -> None:
    cache = Cached(policy=make_policy(kind, 100))
    cache.index.pin_softly(cache.put([1]), 1)
    cache.put([2]).hits = 10**9
    cache.put([2], is_request=True)
    cache.evict(1)
    assert (cache.num_matched([1]), cache.num_matched([2])) == (1, 0)


def test_a_run_used_again_and_again_does_not_pile_up_in_the_queue_nor_drive_others_out() -> None:
    cache = Cached()
    nodes = [cache.put([number]) for number in range(20)]
    index, busiest = cache.index, nodes.pop(0)
    before = sys.getrefcount(busiest)
    for _ in range(10_000):
        index.release(index.hold(busiest, 1))
    assert sys.getrefcount(busiest) - before < 200, "what is queued of it refers to it"
    assert cache.findings() == []
    assert [v.node for v in index.spaces.order[Tier.DEVICE].victims(20)] == [*nodes, busiest]


def test_s3fifo_lets_its_newcomers_overflow_at_once_when_a_quota_shrinks() -> None:
    cache, space = Cached(), Space("tenant", bytes(32), quota=(100, None))
    spaces = cache.index.spaces
    spaces.open(space, (EvictionKind.S3FIFO, EvictionKind.S3FIFO))
    nodes = [cache.put(Prompt.of([number], 1, space="tenant")) for number in range(9)]
    order = spaces.own_order(space, Tier.DEVICE)
    assert order is not None
    assert {order.rank(node) >> 48 for node in nodes} == {2}, "within their share"
    spaces.set_quota(space, (20, None))
    assert cache.findings() == []
    assert [order.rank(node) >> 48 for node in nodes].count(2) == 2


# When a copy goes down a tier


@pytest.mark.parametrize("hits", range(5))
@pytest.mark.parametrize("after_hits", range(1, 4))
def test_each_policy_writes_when_it_says(hits: int, after_hits: int) -> None:
    writes = {policy: WriteRule(policy, after_hits).writes_now(hits) for policy in WritePolicy}
    assert writes == {
        WritePolicy.NONE: False,
        WritePolicy.WRITE_THROUGH: True,
        WritePolicy.SELECTIVE: hits >= after_hits,
        WritePolicy.WRITE_BACK: False,
    }


def test_only_write_back_writes_on_eviction_and_a_rule_needs_at_least_one_hit() -> None:
    assert [p for p in WritePolicy if WriteRule(p).writes_on_eviction] == [WritePolicy.WRITE_BACK]
    with pytest.raises(ConfigError, match="at least 1"):
        WriteRule(WritePolicy.SELECTIVE, 0)
