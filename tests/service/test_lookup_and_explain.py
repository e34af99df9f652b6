"""What lookup and explain say while something is on its way, and what they say of others."""

from __future__ import annotations

import asyncio

from tests.latch import finish, turns
from tests.sched.test_fetch import filled
from tests.world import tokens, world
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.keys import pack
from tierkv.gpu.protocol import Direction
from tierkv.pd.settings import HandoffSettings

NONE, THROUGH = WritePolicy.NONE, WritePolicy.WRITE_THROUGH


async def test_blocks_on_their_way_to_the_device_are_looked_up_as_the_devices() -> None:
    async with world(host_write=THROUGH) as here:
        await here.run(tokens(16))
        await here.service.sleep()
        await here.service.wake()
        lookup = await here.service.lookup(here.prompt(tokens(16)))
        assert (lookup.device_tokens, lookup.host_tokens) == (0, 16)
        here.latch.hold(Direction.LOAD)
        request = await here.admit(tokens(17))
        assert here.service.explain(here.prompt(tokens(16))).runs[0].where == "loading"
        lookup = await here.service.lookup(here.prompt(tokens(16)))
        assert (lookup.device_tokens, lookup.host_tokens) == (16, 0)
        here.latch.release()
        await here.ended(request)


async def test_what_is_fetched_for_one_prompt_is_in_flight_for_that_one_alone() -> None:
    async with world(store=await filled(tokens(18), tokens(18, 500))) as here:
        here.the_store.hold()
        fetches = asyncio.ensure_future(here.admit(tokens(18)))
        await finish(here.the_store.until_held(1))
        fetched = here.service.explain(here.prompt(tokens(18)))
        assert (fetched.reason, fetched.tier, fetched.first_miss) == ("in flight", "storage", 0)
        other = here.service.explain(here.prompt(tokens(18, 500)))
        assert (other.reason, other.tier) == ("never stored", None)
        here.the_store.release()
        here.service.scheduler.end(await finish(fetches))
        await here.settle()


async def test_what_is_computed_for_one_prompt_is_in_flight_for_who_shares_it_alone() -> None:
    async with world(host_write=NONE) as here:
        request = await here.admit(tokens(16))
        shares = here.service.explain(here.prompt([*tokens(8), *tokens(8, 300)]))
        assert (shares.reason, shares.tier, shares.first_miss) == ("in flight", None, 0)
        assert here.service.explain(here.prompt(tokens(16, 500))).reason == "never stored"
        here.compute(request, tokens(8))
        await here.service.scheduler.commit(request, pack(tokens(8)))
        shares = here.service.explain(here.prompt([*tokens(8), *tokens(8, 300)]))
        assert (shares.reason, shares.first_miss) == ("never stored", 2)
        await here.ended(request)


async def test_a_store_that_does_not_answer_holds_no_explanation_up() -> None:
    patient = HandoffSettings(lookup_deadline_s=60.0)
    async with world(store=await filled(tokens(18)), handoff=patient) as here:
        prompt = here.prompt(tokens(18))
        told = await finish(here.service.explain_with_storage(prompt, deadline_s=100.0))
        assert (told.reason, told.runs[-1].where) == ("only in storage", "storage")
        here.the_store.hold()
        async with asyncio.timeout(10.0):
            told = await here.service.explain_with_storage(prompt, deadline_s=0.01)
        assert (told.reason, told.runs) == ("never stored", ())
        here.the_store.release()
        await turns(5)
