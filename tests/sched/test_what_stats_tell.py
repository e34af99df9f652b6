"""What a service counts about its cache: how long blocks live, and what they saved."""

from __future__ import annotations

import pytest

from tests.world import world


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
