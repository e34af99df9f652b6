"""Hit counts of the index under LRU are exactly those of a simulator that knows no tree."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence

import pytest

from tierkv.cache import invariants
from tierkv.cache.eviction import WritePolicy, WriteRule
from tierkv.cache.index import Index
from tierkv.cache.keys import Prompt, pack
from tierkv.cache.node import BlockPool, Tier


def simulate(requests: Sequence[Sequence[int]], capacity: int) -> list[int]:
    """Hits of each request: one ordered dict of prefixes, the least recently used first.

    Of one request the deepest block counts as used first, so it is the first to go.
    """
    cached: OrderedDict[int, None] = OrderedDict()
    hits = []
    for request in requests:
        prefixes, prefix = [], 0
        for one in request[:capacity]:
            prefix = hash((prefix, one))
            prefixes.append(prefix)
        count = 0
        while count < len(prefixes) and prefixes[count] in cached:
            count += 1
        for prefix in reversed(prefixes[:count]):
            cached.move_to_end(prefix)
        while len(cached) + len(prefixes) - count > capacity:
            cached.popitem(last=False)
        for prefix in reversed(prefixes):
            cached[prefix] = None
            cached.move_to_end(prefix)
        hits.append(count)
    return hits


def run_index(requests: Sequence[Sequence[int]], capacity: int) -> tuple[list[int], list[str]]:
    """Hits of each request, one token a block, and what is wrong in the end."""
    index, pool = Index(1), BlockPool("device", capacity)
    order = index.spaces.order[Tier.DEVICE]
    hits: list[int] = []
    for request in requests:
        prompt = Prompt(pack(list(request[:capacity])), 1)
        match = index.match(prompt)
        lease = index.hold(match.node, match.num_blocks)
        needed = prompt.num_blocks - match.num_blocks
        # One by one, as requests take them, for every other request; else by plan.
        while len(hits) % 2 and needed > pool.num_free:
            leaf = order.leaf_to_go(needed - pool.num_free, WriteRule(WritePolicy.SELECTIVE))
            assert leaf is not None, "all that goes are leaves"
            pool.release(index.drop(Tier.DEVICE, *leaf))
        for victim in order.victims(needed - pool.num_free):
            pool.release(index.drop(Tier.DEVICE, *victim))
        slots = pool.allocate(needed)
        index.insert(Tier.DEVICE, lease, prompt, prompt.num_blocks, slots)
        index.release(lease)
        hits.append(match.num_blocks)
    nobody: dict[Tier, list[int]] = {tier: [] for tier in Tier}
    pools = {Tier.DEVICE: pool, Tier.HOST: BlockPool("host", 0)}
    return hits, invariants.findings(index, pools, nobody)


def sessions(count: int, seed: int) -> list[list[int]]:
    """Conversations that grow by turns and share system prompts."""
    rng = random.Random(seed)
    running: list[list[int]] = []
    requests = []
    for number in range(count):
        if not running or rng.random() < 0.3:
            start = rng.randrange(4) * 100
            running.append(list(range(start, start + rng.randrange(1, 8))))
        session = rng.choice(running[-30:])
        session += [10_000 + number * 8 + i for i in range(rng.randrange(1, 8))]
        requests.append(session[: rng.randrange(1, 60)])
    return requests


@pytest.mark.parametrize("capacity", [1, 2, 17, 100, 400, 3000])
@pytest.mark.parametrize("seed", range(3))
def test_hits_on_made_up_conversations_are_the_simulators(seed: int, capacity: int) -> None:
    requests = sessions(600, seed)
    hits, wrong = run_index(requests, capacity)
    assert wrong == []
    assert hits == simulate(requests, capacity)
