"""Leaves that go without a plan: what is cached afterwards is what plans would have left."""

from __future__ import annotations

import random

import pytest

from tierkv.cache import invariants
from tierkv.cache.eviction import EvictionKind, Lru, WritePolicy, WriteRule, make_policy
from tierkv.cache.index import Index
from tierkv.cache.keys import Prompt, pack
from tierkv.cache.node import BlockPool, CopyState, Tier

CAPACITY = 40
NOBODY: dict[Tier, list[int]] = {tier: [] for tier in Tier}


def hits(kind: EvictionKind, seed: int, rule: WriteRule | None) -> list[int]:
    """Of each of 400 prompts of single-token blocks that share beginnings. rule: leaves go by it
    without a plan as long as some do, None: all go by plans."""
    index = Index(1, policies=(make_policy(kind, CAPACITY), Lru()))
    pools = {Tier.DEVICE: BlockPool("device", CAPACITY), Tier.HOST: BlockPool("host", 0)}
    pool, order, rng = pools[Tier.DEVICE], index.spaces.order[Tier.DEVICE], random.Random(seed)
    found = []
    for _ in range(400):
        tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 9))]
        prompt = Prompt(pack(tokens), 1)
        match = index.match(prompt)
        lease = index.hold(match.node, match.num_blocks)
        index.count_hit(lease)
        needed = prompt.num_blocks - match.num_blocks
        freed = []
        missing = needed - pool.num_free
        while rule and missing > 0 and (leaf := order.leaf_to_go(missing, rule)) is not None:
            freed.append(index.drop(Tier.DEVICE, *leaf))
            missing -= len(freed[-1])
        freed += [index.drop(Tier.DEVICE, *victim) for victim in order.victims(missing)]
        slots = pool.exchange(freed, needed)
        assert index.insert(Tier.DEVICE, lease, prompt, prompt.num_blocks, slots) == ()
        index.release(lease)
        found.append(match.num_blocks)
    assert invariants.findings(index, pools, NOBODY) == []
    return found


@pytest.mark.parametrize("kind", EvictionKind)
@pytest.mark.parametrize("seed", range(3))
def test_with_every_policy_the_same_is_found_as_with_plans(seed: int, kind: EvictionKind) -> None:
    assert hits(kind, seed, WriteRule(WritePolicy.SELECTIVE)) == hits(kind, seed, None)


def test_a_block_ready_below_one_that_still_comes_is_a_finding() -> None:
    """A match takes the last block's word for all before it."""
    index, pool = Index(1), BlockPool("device", 8)
    for tokens in ((1, 2, 3), (1, 2, 4)):  # a run of two blocks with two below it
        prompt = Prompt.of(tokens, 1)
        match = index.match(prompt)
        lease = index.hold(match.node, match.num_blocks)
        slots = pool.allocate(3 - match.num_blocks)
        index.insert(Tier.DEVICE, lease, prompt, 3, slots)
    pools = {Tier.DEVICE: pool, Tier.HOST: BlockPool("host", 0)}
    assert invariants.findings(index, pools, NOBODY) == []
    [upper] = index.spaces.root.children.values()
    upper.device.uniform = CopyState.INCOMING
    wrong = invariants.findings(index, pools, NOBODY)
    assert len(wrong) == 2, "both runs below are named"
    assert all("without a ready parent block there" in text for text in wrong)
