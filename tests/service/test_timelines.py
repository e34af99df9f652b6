"""What a service tells of its last requests: their moments, and why they missed what they did."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from tests.latch import finish, until
from tests.pd.nodes import TOKENS, pair, publish
from tests.sched.test_fetch import filled
from tests.service.test_session import computed
from tests.world import BLOCK, World, tokens, world
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.keys import pack
from tierkv.errors import TierKVError
from tierkv.gpu.protocol import Direction
from tierkv.observe import Moment, Timelines
from tierkv.pd.claims import ClaimPolicy
from tierkv.sched.admission import MISS_REASONS
from tierkv.sched.request import RequestSpec
from tierkv.service.session import Session

PROMPT = list(range(3 * BLOCK))


async def served(on: World, tokens: Sequence[int], *, uses_cache: bool = True) -> None:
    (await computed(on, tokens, uses_cache=uses_cache)).end()
    await on.settle()


def missed(on: World) -> dict[str, int]:
    """The reasons that there are, and that they are all of what was not found."""
    counts = on.service.stats().requests
    found = counts.device_hit_tokens + counts.host_hit_tokens
    found += counts.storage_hit_tokens + counts.direct_hit_tokens
    assert sum(counts.missed_tokens.values()) == counts.prompt_tokens - found
    assert tuple(counts.missed_tokens) == MISS_REASONS
    return {reason: tokens for reason, tokens in counts.missed_tokens.items() if tokens}


@pytest.mark.promise("Each missed token counts under one reason.")
async def test_each_missed_token_is_counted_under_one_reason() -> None:
    async with world(device_blocks=4, host_write=WritePolicy.NONE) as on:
        await served(on, PROMPT)
        assert missed(on) == {"never_stored": 3 * BLOCK}
        await served(on, PROMPT)
        assert missed(on) == {"never_stored": 3 * BLOCK, "last_token": 1}
        await served(on, PROMPT, uses_cache=False)
        assert missed(on)["not_asked"] == 3 * BLOCK
        await served(on, [token + 500 for token in range(4 * BLOCK)])  # takes all room there is
        await served(on, PROMPT)
        assert missed(on)["evicted"] == 3 * BLOCK
        last = on.service.timelines.since(0)[-1]
        assert last.missed == "evicted"
        assert last.missed_since is not None
        assert last.missed_since.tier == "device"


async def test_blocks_that_another_request_computes_are_missed_as_in_flight() -> None:
    async with world() as on:
        first = await on.admit(PROMPT)
        second = await on.admit(PROMPT)
        assert missed(on) == {"never_stored": 3 * BLOCK, "in_flight": 3 * BLOCK}
        for request in (first, second):
            on.service.scheduler.end(request)


@pytest.mark.promise("A request's times are split into match, fetch, ticket and queue.")
async def test_the_moments_of_a_request_come_in_order_and_loads_are_told_of() -> None:
    async with world(with_store=True) as on:
        await served(on, PROMPT)
        await until(lambda: on.service.index.match(on.prompt(PROMPT)).device_blocks == 3)
        await on.service.sleep()  # to the host
        await on.service.wake()
        on.latch.hold(Direction.LOAD)
        one = Session(on.service, RequestSpec("again", on.prompt(PROMPT), 0))
        await finish(one.admit())
        line = on.service.timelines.since(0)[-1]
        assert line.request_id == "again"
        until_now = [Moment.BEGAN, Moment.MATCHED, Moment.FETCHED, Moment.ADMITTED]
        assert list(line.moments) == until_now
        on.latch.release()
        await until(lambda: Moment.LOADED in line.moments, "the load")
        assert line.matched.host_tokens == 3 * BLOCK - 1
        on.compute(one.request, PROMPT, 0)
        await finish(one.commit(pack(PROMPT)))
        one.end()
        assert set(line.moments) == set(Moment) - {Moment.TICKET}
        times = [line.moments[moment] for moment in Moment if moment is not Moment.TICKET]
        assert times == sorted(times)
        await on.settle()


async def test_a_claim_tells_the_wait_for_its_ticket_apart_from_the_fetch() -> None:
    async with pair() as (prefill, decode):
        spec = RequestSpec("claim", decode.prompt(TOKENS), 1, needs_logits=False)
        one = Session(decode.service, spec)
        claiming = asyncio.create_task(one.claim("ticket", ClaimPolicy.WHOLE, 20.0))
        await until(lambda: decode.service.timelines.find(1) is not None)
        began = time.monotonic()
        await publish(prefill)
        await finish(claiming)
        line = decode.service.timelines.find(1)
        assert line is not None
        moments = [Moment.BEGAN, Moment.TICKET, Moment.MATCHED, Moment.FETCHED, Moment.ADMITTED]
        times = [line.moments[moment] for moment in moments]
        assert times == sorted(times)
        assert times[1] > began
        one.end()
        await decode.settle()


async def test_a_request_that_comes_to_nothing_says_why() -> None:
    async with world(device_blocks=2) as on:
        one = Session(on.service, RequestSpec("large", on.prompt(PROMPT), 0))
        with pytest.raises(TierKVError):
            await one.admit()
        [line] = on.service.timelines.since(0)
        assert "blocks" in line.problem
        assert Moment.ADMITTED not in line.moments
        assert Moment.ENDED in line.moments
        kept = await on.admit([7])
        waits = asyncio.create_task(
            Session(on.service, RequestSpec("gone", on.prompt(PROMPT[: 2 * BLOCK]), 0)).admit()
        )
        await until(lambda: on.service.scheduler.num_waiting == 1)
        waits.cancel()
        await asyncio.wait([waits])
        assert on.service.timelines.since(0)[-1].problem == "the caller disconnected"
        on.service.scheduler.end(kept)


async def test_only_the_last_requests_are_kept_and_fewer_of_their_prompts() -> None:
    async with world() as on:
        lines = Timelines(max_requests=3, max_bytes=2 * 4 * len(PROMPT))
        for number in range(5):
            lines.begin(RequestSpec(f"r{number}", on.prompt(PROMPT), 0))
        assert [one.request_id for one in lines.since(0)] == ["r2", "r3", "r4"]
        assert [one.prompt is None for one in lines.since(0)] == [True, False, False]
        assert lines.find(1) is None
        seen = lines.version
        lines.mark(lines.since(0)[1], Moment.ENDED)
        assert [one.request_id for one in lines.since(seen)] == ["r3"]


# What lookup and explain say while something is on its way, and what they say of others.


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
