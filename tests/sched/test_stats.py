"""What a service counts about its cache: how long blocks live, and what they saved."""

from __future__ import annotations

import pytest

from tests.world import world
from tierkv.cache.eviction import WritePolicy
from tierkv.sched.events import CacheEventKind


async def test_each_forgotten_block_has_a_lifetime() -> None:
    async with world(device_blocks=8, host_blocks=4) as here:
        size = 6 * here.service.settings.block_size
        for number in range(6):
            await here.run(range(1000 * number, 1000 * number + size))
        await here.settle()
        tiers = here.service.stats().tiers
        assert tiers.forgotten_blocks > 12
        assert sum(tiers.lifetimes.counts) == tiers.forgotten_blocks
        before = tiers.forgotten_blocks
        here.service.reset()
        after = here.service.stats().tiers
        assert sum(after.lifetimes.counts) == after.forgotten_blocks > before


@pytest.mark.parametrize("host_write", [WritePolicy.NONE, WritePolicy.WRITE_THROUGH])
async def test_evictions_are_counted_as_they_are_told(host_write: WritePolicy) -> None:
    """Of prompts with common beginnings: leaves go, and what is above them by a plan."""
    async with world(device_blocks=12, host_blocks=9, host_write=host_write) as here:
        size = here.service.settings.block_size
        told = {"device": 0, "host": 0}
        copies = dict[bytes, set[str]]()  # of each block, on which tiers it is
        gone = 0
        with here.service.events.subscribe(capacity=10_000) as events:
            for number in range(40):
                tokens = [*range(2 * size), *range(1000 * (number % 7), 1000 * (number % 7) + size)]
                await here.run(tokens + [number] * (number % 5) * size)
                await here.settle()
            for one in events.drain():
                for digest in one.digests:
                    of_block = copies.setdefault(digest, set())
                    if one.kind is CacheEventKind.EVICTED:
                        told[one.tier] += 1
                        of_block.discard(one.tier)
                        gone += not of_block
                    else:
                        of_block.add(one.tier)
        stats = here.service.stats().tiers
        assert (stats.evicted_device_blocks, stats.evicted_host_blocks) == tuple(told.values())
        assert stats.forgotten_blocks == gone > 20
        assert sum(stats.lifetimes.counts) == gone


async def test_tokens_that_were_found_count_as_the_time_that_computing_them_takes() -> None:
    async with world() as here:
        tokens = list(range(100, 100 + 4 * here.service.settings.block_size))
        await here.run(tokens)
        found = (await here.run(tokens)).total_tokens
        for _ in range(2):  # once, however often it is asked
            here.service.note_prefill(1000, 2.0)
            assert here.service.stats().requests.recompute_avoided_s == pytest.approx(0.002 * found)
        found += (await here.run(tokens)).total_tokens
        assert here.service.stats().requests.recompute_avoided_s == pytest.approx(0.002 * found)
