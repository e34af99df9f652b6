"""Where the host, or a tenant's share of it, has not room for all, the first blocks go: a prompt's
beginning is of use without the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.latch import finish
from tests.sessions import begin_request, resume_request
from tests.world import GQA, World, fingerprint, world
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.keys import Prompt, pack
from tierkv.sched.request import Request

NONE, THROUGH = WritePolicy.NONE, WritePolicy.WRITE_THROUGH
ACME = replace(fingerprint(), tenant="acme")
IDS = list(range(40))  # ten blocks


async def computed(here: World, space: str, name: str = "one") -> Request:
    prompt = Prompt.of(IDS, GQA.block_size, space=space)
    request = await finish(begin_request(here.service, name, prompt, max_new_tokens=0))
    await here.prefill(request, IDS)
    return request


async def test_what_was_preempted_keeps_as_much_as_the_host_takes() -> None:
    async with world(device_blocks=10, host_blocks=7, host_write=NONE) as here:
        request = await computed(here, "")
        here.service.scheduler.preempt(request)
        await here.settle()
        others = await here.admit(list(range(1000, 1040)), uses_cache=False)
        await here.ended(others)
        again = await finish(resume_request(here.service, request, max_new_tokens=0))
        assert again.matched.host_tokens == 7 * GQA.block_size
        await finish(again.gate.all_layers(100.0))
        here.check_kv(again, IDS, again.cached_tokens)
        await here.ended(again)


@pytest.mark.parametrize("quota", [1, 6, 10, 11])
async def test_a_tenant_fetches_a_prompt_without_more_of_the_host_than_its_quota(
    quota: int,
) -> None:
    async with world(host_write=NONE, storage_write=THROUGH, with_store=True) as here:
        acme = here.service.open_fingerprint(ACME)
        here.service.scheduler.end(await computed(here, acme))
        await here.settle()
        here.service.reset()
        here.service.set_quota(acme, (None, quota))
        request = await computed(here, acme, "two")
        # The rest of it comes in portions; of the last block one token is computed.
        assert request.matched.storage_tokens // GQA.block_size == 9
        await here.ended(request)
        assert here.service.index.spaces.root_named(acme).space.used[1] <= quota


async def test_a_prompt_longer_than_a_tenants_host_quota_is_stored_as_far_as_that_goes() -> None:
    async with world(host_write=NONE, storage_write=THROUGH, with_store=True) as here:
        acme = here.service.open_fingerprint(ACME, quota=(None, 6))
        here.service.scheduler.end(await computed(here, acme))
        await here.settle()
        assert here.storage_stats.flushed_blocks == 6
        request = await finish(
            begin_request(
                here.service, "two", Prompt.of(IDS, GQA.block_size, space=acme), max_new_tokens=0
            )
        )
        await finish(here.service.scheduler.commit(request, pack(IDS)))
        await here.ended(request)
