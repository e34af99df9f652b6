"""The host tier grows while a node runs, into memory that is pinned chunk by chunk."""

from __future__ import annotations

import pytest

from tests.gpu.cuda import cupy_or_skip
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.node import Tier
from tierkv.pd.settings import HandoffSettings

pytest.importorskip("cupy", reason="CuPy is not installed")
from tests.gpu.cuda_world import LAYOUT, cuda_world

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

SIZE = LAYOUT.block_size
BLOCKS = 20  # of a prompt; all but the last have a whole block of tokens
MOST = 600  # host blocks of 1 MiB: three chunks of pinned memory


def prompt(number: int) -> list[int]:
    return [1000 * number + at for at in range(BLOCKS * SIZE - 1)]


async def test_blocks_pass_through_the_part_by_which_the_host_has_grown() -> None:
    cupy_or_skip()
    async with cuda_world(
        store=None,
        handoff=HandoffSettings(),
        device_blocks=BLOCKS + 4,
        host_blocks=BLOCKS,
        host_max_blocks=MOST,
        host_write=WritePolicy.WRITE_THROUGH,
    ) as on:
        await on.run(prompt(0))
        assert on.service.stats().host.capacity == BLOCKS
        await on.service.resize(Tier.HOST, MOST)
        for number in range(1, MOST // BLOCKS):  # of which the device keeps the last
            await on.run(prompt(number))
        used = MOST - on.service.tiers.slots.pools[Tier.HOST].num_free
        assert used > 512, "slots of the third chunk are used"
        for number in range(MOST // BLOCKS - 1):
            matched = await on.run(prompt(number))  # every byte is checked
            assert matched.host_tokens >= (BLOCKS - 2) * SIZE, number
        await on.service.resize(Tier.HOST, BLOCKS)
        assert on.service.stats().host.capacity == BLOCKS
        await on.run(prompt(1))
