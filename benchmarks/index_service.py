"""What a request costs where an engine calls: admit, commit and end of a whole service.

The device is the CPU with planes of a byte a token, so hardly a byte is moved; what is measured is
deciding and book-keeping, on the event loop: CPU time of its thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import uvloop

from benchmarks.workload import Pieces
from tests.sessions import begin_request
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.keys import Fingerprint, Prompt
from tierkv.cache.layout import layered
from tierkv.gpu.cpu import CpuDevice
from tierkv.pd.settings import HandoffSettings
from tierkv.sched.settings import CacheSettings
from tierkv.service import Service


async def _run(service: Service, prompts: Sequence[bytes]) -> tuple[float, int]:
    seconds, blocks = 0.0, 0
    size = service.settings.block_size
    for at, packed in enumerate(prompts):
        started = time.thread_time()
        prompt = Prompt.of(packed, size)
        request = await begin_request(service, str(at), prompt, max_new_tokens=0)
        await service.scheduler.commit(request, packed)
        service.scheduler.end(request)
        seconds += time.thread_time() - started
        blocks += prompt.num_blocks
    return seconds, blocks


async def _serve(prompts: Sequence[bytes], block_size: int, capacity: int) -> tuple[float, float]:
    layout = layered(block_size, [("latent", "uint8", 1)], num_layers=1)
    settings = CacheSettings(
        block_size=block_size,
        device_blocks=capacity,
        host_blocks=16,
        host_write=WritePolicy.NONE,
    )
    service = Service(CpuDevice(), Fingerprint("bench", layout), settings, HandoffSettings(), None)
    async with service.running():
        seconds, blocks = await _run(service, prompts)
        assert service.verify() == [], "the books are right"
    return seconds / blocks, seconds / len(prompts)


def run_service(
    requests: Sequence[Sequence[int]], pieces: Pieces, block_size: int, capacity: int
) -> tuple[float, float]:
    """Seconds per block and per request; requests that do not fit are left out."""
    most = capacity * block_size * 4
    prompts = [one for one in pieces.prompts(requests) if len(one) <= most]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(prompts, block_size, capacity))
