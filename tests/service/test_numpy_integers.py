"""Engines count with NumPy: its integers are as good as Python's, whatever form the cache has."""

from __future__ import annotations

import numpy as np

from tests.latch import finish
from tests.sessions import resume_request
from tests.world import world
from tierkv.cache.node import Tier

TOKENS = list(range(9))


async def test_numpys_integers_are_counts_of_tokens_and_blocks() -> None:
    some: int = np.int64(5)  # type: ignore[assignment]
    async with world(device_blocks=24, host_blocks=24) as node:
        request = await node.admit(TOKENS, new=some)
        await node.prefill(request, TOKENS)
        await finish(node.service.scheduler.growth.extend(request, 4 * some))
        assert len(request.block_table) == 8
        node.service.scheduler.preempt(request)
        resumed = await finish(resume_request(node.service, request, max_new_tokens=some))
        node.service.scheduler.end(resumed)
        await finish(node.service.sleep())
        await finish(node.service.wake(4 * some))
        await finish(node.service.resize(Tier.DEVICE, 2 * some))
        assert node.service.stats().device.capacity == 10
        await node.settle()
