"""Storms of requests that grow a token at a time, yield, come back, are cancelled and aborted, on a
device that is too small for them: all of them end, and in simulated time a node where one would not
fails at once, with who waits where."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.sessions import begin_request, resume_request
from tests.simulated import simulate, simulated_world
from tests.world import GQA, World
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.keys import Prompt, pack
from tierkv.cache.node import Tier
from tierkv.errors import OutOfBlocksError, RequestAbortedError, TierKVError
from tierkv.gpu.protocol import Direction
from tierkv.sched.request import Request, RequestState

JOBS = 40


class Storm:
    def __init__(self, here: World, rng: random.Random) -> None:
        self.here, self.rng = here, rng
        self.whole = self.yields = 0

    async def job(self, number: int) -> None:
        rng, service = self.rng, self.here.service
        await asyncio.sleep(rng.random() * 0.05)
        family = rng.randrange(3) * 1000
        ids = list(range(family, family + rng.randrange(1, 20)))
        space = service.space_of_tenant(rng.choice("ab")) if rng.random() < 0.6 else ""
        prompt = Prompt.of(ids, GQA.block_size, space=space)
        try:
            request = await begin_request(
                service,
                str(number),
                prompt,
                max_new_tokens=rng.randrange(3),
                priority=rng.randrange(4),
            )
        except RequestAbortedError:
            return
        while (left := await self.grow(request, ids, rng.randrange(12))) is not None:
            ids, request = left
            if rng.random() < 0.4:
                break
        if request.state is RequestState.RUNNING:
            service.scheduler.end(request)
            self.whole += 1

    async def grow(
        self, request: Request, ids: list[int], count: int
    ) -> tuple[list[int], Request] | None:
        """Generate so many tokens one by one; None if the request is over."""
        service, rng = self.here.service, self.rng
        try:
            await request.gate.all_layers(100.0)
            self.here.compute(request, ids, request.cached_tokens)
            await service.scheduler.commit(request, pack(ids))
            for _ in range(count):
                await service.scheduler.growth.extend(request, 1)
                ids = [*ids, rng.randrange(50)]
                self.here.compute(request, ids, len(ids) - 1)
                await service.scheduler.commit(request, pack(ids))
                await asyncio.sleep(rng.random() * 0.002)
        except OutOfBlocksError:
            self.yields += 1
            return await self.come_back(request, ids)
        except TierKVError:  # aborted, or a load of it failed
            service.scheduler.end(request)
            return None
        except asyncio.CancelledError:
            service.scheduler.end(request)
            raise
        return ids, request

    async def come_back(self, request: Request, ids: list[int]) -> tuple[list[int], Request] | None:
        service = self.here.service
        service.scheduler.preempt(request)
        try:
            again = await resume_request(service, request, max_new_tokens=1)
        except TierKVError:
            if request.state is RequestState.PREEMPTED:
                service.scheduler.abandon(request)
            return None
        except asyncio.CancelledError:
            if request.state is RequestState.PREEMPTED:
                service.scheduler.abandon(request)
            raise
        return ids, again

    async def weather(self) -> None:
        """What else may happen to a node."""
        rng, here = self.rng, self.here
        for _ in range(60):
            await asyncio.sleep(rng.random() * 0.01)
            what = rng.choice(["abort", "store", "fail", "size", "pin", "reset", "speed", "quota"])
            if what == "abort":
                here.service.abort(str(rng.randrange(JOBS)))
            elif what == "store":
                here.the_store.delay_s = rng.choice([0.0, 0.01, 0.4])
            elif what == "fail":
                here.latch.fail_next(rng.choice(list(Direction)), 1)
            elif what == "pin":
                prompt = Prompt.of(list(range(rng.randrange(1, 20))), GQA.block_size)
                here.service.pin(str(rng.randrange(2)), prompt, 0.02, is_soft=rng.random() < 0.3)
            elif what == "reset":
                here.service.reset()
            elif what == "speed":
                here.service.note_prefill(1000, rng.choice([0.01, 1.0]))
            else:
                await self.change(what)

    async def change(self, what: str) -> None:
        rng, service = self.rng, self.here.service
        if what == "quota":
            for space in service.index.spaces.all():
                if space.name:
                    service.set_quota(space.name, rng.choice([(12, 12), (14, None), (None, None)]))
            return
        try:
            async with asyncio.timeout(0.02):
                await service.resize(rng.choice(list(Tier)), rng.randrange(12, 17))
        except TimeoutError:
            pass


async def run(seed: int) -> Storm:
    rng = random.Random(seed)
    async with simulated_world(
        random.Random(seed),
        device_blocks=16,
        host_blocks=16,
        host_write=rng.choice(list(WritePolicy)),
        storage_write=rng.choice(list(WritePolicy)),
        background_copy_bytes=4 * GQA.block_bytes,
        fetch_deadline_s=0.3,
        max_tenants=2,
    ) as here:
        storm = Storm(here, rng)
        weather = asyncio.ensure_future(storm.weather())
        jobs = [asyncio.ensure_future(storm.job(number)) for number in range(JOBS)]
        for victim in rng.sample(jobs, 6):
            asyncio.get_running_loop().call_later(rng.random() * 0.2, victim.cancel)
        async with asyncio.timeout(300):
            done = await asyncio.gather(*jobs, return_exceptions=True)
        weather.cancel()
        await asyncio.wait([weather])
        strange = [one for one in done if isinstance(one, Exception)]
        assert not strange, strange
        for name in "01":
            here.service.unpin(name)
        here.the_store.delay_s = 0.0
        await here.settle()
        assert here.service.stats().waiting_requests == 0
    return storm


@pytest.mark.promise("Every request of a storm ends.")
@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 10))]
)
def test_all_requests_of_a_storm_end(seed: int) -> None:
    storm = simulate(run(seed))
    assert storm.whole, "some came through"
