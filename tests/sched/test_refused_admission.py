"""What cannot be had changes nothing: neither what is cached nor what is counted."""

from __future__ import annotations

import asyncio

from tests.latch import finish, turns
from tests.sessions import begin_request
from tests.world import fingerprint, tokens, world
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.keys import Prompt, pack


async def test_a_tenant_that_waits_for_others_keeps_its_own_blocks_meanwhile() -> None:
    async with world(device_blocks=20, host_write=WritePolicy.NONE) as here:
        service = here.service
        space = service.open_fingerprint(fingerprint(tenant="a"), quota=(10, None))
        own = Prompt.of(tokens(20), 4, space=space)
        request = await begin_request(service, "first", own, max_new_tokens=0)
        await service.scheduler.commit(request, pack(tokens(20)))
        service.scheduler.end(request)
        other = await here.admit(tokens(60, 1000))  # the rest of the device
        bigger = Prompt.of(tokens(32, 500), 4, space=space)
        waits = asyncio.ensure_future(begin_request(service, "second", bigger, max_new_tokens=0))
        await turns(20)
        assert not waits.done()
        assert service.index.match(own).num_blocks == 5, "nothing of its own went in vain"
        service.scheduler.end(other)
        request = await finish(waits)
        assert service.index.match(own).num_blocks == 2, "only now, to stay within its quota"
        service.scheduler.end(request)
        await here.settle()
