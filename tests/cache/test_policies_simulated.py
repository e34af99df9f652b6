"""Every policy against a straight-line simulator of what its docstring says, hit by hit.

A prompt is one block, so that a run is one object, as in the papers; who goes is found by looking
at everybody.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.cache.cached import Cached
from tierkv.cache.eviction import EvictionKind, make_policy
from tierkv.cache.node import Tier

Simulator = Callable[[list[int], int], list[bool]]


def lru(trace: list[int], capacity: int) -> list[bool]:
    return _lowest_goes(trace, capacity, lambda used, _: used)


def lfu(trace: list[int], capacity: int) -> list[bool]:
    return _lowest_goes(trace, capacity, lambda used, hits: hits * 10**9 + used)


def _lowest_goes(trace: list[int], capacity: int, value: Callable[[int, int], int]) -> list[bool]:
    used: dict[int, int] = {}
    hits: dict[int, int] = {}
    found = []
    for now, key in enumerate(trace):
        found.append(key in used)
        hits[key] = hits[key] + 1 if key in used else 0
        if key not in used and len(used) == capacity:
            del used[min(used, key=lambda other: value(used[other], hits[other]))]
        used[key] = now
    return found


def s3fifo(trace: list[int], capacity: int) -> list[bool]:
    over: list[int] = []  # newcomers beyond the small queue's share
    small: list[int] = []
    main: list[int] = []
    ghosts: list[int] = []
    matched: set[int] = set()
    found = []
    for key in trace:
        found.append(key in [*over, *small, *main])
        if found[-1]:
            matched.add(key)
            continue
        while len(over) + len(small) + len(main) == capacity:
            queue = over or main or small
            goes = queue.pop(0)
            if goes in matched:
                matched.remove(goes)
                main.append(goes)
            elif queue is not main:
                ghosts = [*ghosts, goes][-capacity:]
        if key in ghosts:
            ghosts.remove(key)
            main.append(key)
            continue
        small.append(key)
        while len(small) > max(capacity // 10, 1):
            over.append(small.pop(0))
    return found


SIMULATORS: dict[EvictionKind, Simulator] = {
    EvictionKind.LRU: lru,
    EvictionKind.LFU: lfu,
    EvictionKind.S3FIFO: s3fifo,
}


def hits_of_index(kind: EvictionKind, trace: list[int], capacity: int) -> list[bool]:
    cache, found = Cached(policy=make_policy(kind, capacity)), []
    for key in trace:
        found.append(cache.num_matched([key]) == 1)
        if not found[-1] and cache.pools[Tier.DEVICE].stats().used == capacity:
            cache.evict(1)
        cache.put([key], is_request=True)
    return found


@pytest.mark.promise("Each eviction policy evicts what its simulator evicts.")
@pytest.mark.parametrize("capacity", [1, 2, 5, 10, 23, 40])
@pytest.mark.parametrize("kind", EvictionKind)
def test_hits_are_those_of_a_straight_line_simulator(kind: EvictionKind, capacity: int) -> None:
    rng = random.Random(capacity)
    weights = [1 / (rank + 1) for rank in range(80)]
    trace = rng.choices(range(80), weights, k=500)
    trace += [key for start in range(3) for key in range(100, 130)]  # a scan, three times
    trace += rng.choices(range(40, 120), weights, k=300)  # other keys are the hot ones then
    found = hits_of_index(kind, trace, capacity)
    assert found == SIMULATORS[kind](trace, capacity)
    assert capacity == 1 or any(found)
