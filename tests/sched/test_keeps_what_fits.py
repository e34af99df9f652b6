"""A device that is emptied or shrunk loses no more than the host has no room for."""

from __future__ import annotations

from tests.latch import finish
from tests.world import world
from tierkv.cache.node import Tier
from tierkv.cache.write_policy import WritePolicy

NONE, THROUGH = WritePolicy.NONE, WritePolicy.WRITE_THROUGH


def tokens(count: int, base: int = 0) -> list[int]:
    return list(range(base, base + count))


async def test_a_sleep_keeps_the_first_blocks_of_a_run_that_the_host_has_not_room_for() -> None:
    async with world(device_blocks=16, host_blocks=6, host_write=NONE) as here:
        await here.run(tokens(40))
        await finish(here.service.sleep())
        assert here.service.index.match(here.prompt(tokens(40))).host_blocks == 6
        await finish(here.service.wake())
        assert (await here.run(tokens(40))).host_tokens == 24  # every byte is checked


async def test_a_shrink_keeps_the_first_blocks_of_a_run_that_the_host_has_not_room_for() -> None:
    async with world(device_blocks=16, host_blocks=6, host_write=NONE) as here:
        await here.run(tokens(40))
        await finish(here.service.resize(Tier.DEVICE, 2))
        await here.settle()
        assert here.service.index.match(here.prompt(tokens(40))).num_blocks == 6


async def test_a_sleep_that_keeps_nothing_forgets_no_copy_that_the_host_has() -> None:
    async with world(device_blocks=16, host_blocks=5, host_write=THROUGH) as here:
        await here.run(tokens(20))
        await here.run(tokens(40))  # its second half finds no room there
        assert here.service.index.match(here.prompt(tokens(40))).device_blocks == 10
        await finish(here.service.sleep(keeps_blocks=False))
        assert here.service.index.match(here.prompt(tokens(40))).host_blocks == 5
        await finish(here.service.wake())
        assert (await here.run(tokens(40))).host_tokens == 20
