"""Priorities, limits and quotas: who is admitted, who waits, and whose blocks go."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from tests.latch import finish, turns
from tests.world import World, fingerprint, tokens, world
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.keys import Prompt
from tierkv.cache.node import Tier
from tierkv.errors import OutOfBlocksError, RequestTooLargeError
from tierkv.sched.fair_queue import MAX_PASSED_OVER
from tierkv.sched.request import Request

NONE = WritePolicy.NONE
ACME = dataclasses.replace(fingerprint(), tenant="acme")


async def order_of(here: World, wanted: list[tuple[str, int, str]], running: Request) -> list[str]:
    """The order in which requests (name, priority, space) of the whole device are admitted."""
    found: list[str] = []

    async def one(number: int, name: str, priority: int, space: str) -> None:
        ids = tokens(16, 1000 * (number + 1))
        request = await here.admit(ids, space=space, priority=priority)
        found.append(name)
        await turns(2)
        here.service.scheduler.end(request)

    async with asyncio.TaskGroup() as group:
        for number, (name, priority, space) in enumerate(wanted):
            group.create_task(one(number, name, priority, space))
            await turns(2)
        here.service.scheduler.end(running)
    return found


@pytest.mark.promise("Higher priority goes first, and the lowest does not starve.")
@pytest.mark.promise("Tenants take turns however many requests one sends.")
@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        pytest.param(
            [("low", 0, ""), ("high", 5, ""), ("low too", 0, ""), ("high too", 5, "")],
            ["high", "high too", "low", "low too"],
            id="the higher priority goes first, and equals in order",
        ),
        pytest.param(
            [("patient", 0, ""), *((str(n), 9, "") for n in range(MAX_PASSED_OVER + 10))],
            # Only those that came later count, and all of them did.
            [*map(str, range(MAX_PASSED_OVER)), "patient"],
            id="the lowest is not passed over for ever",
        ),
        pytest.param(
            [*((f"many {n}", 0, "") for n in range(4)), ("one", 0, "acme"), ("two", 0, "acme")],
            ["many 0", "one", "many 1", "two", "many 2", "many 3"],
            id="tenants take turns however many one of them sends",
        ),
    ],
)
async def test_who_is_admitted_next(
    wanted: list[tuple[str, int, str]], expected: list[str]
) -> None:
    async with world(device_blocks=4) as here:
        spaces = {"": "", "acme": here.service.open_fingerprint(ACME)}
        running = await here.admit(tokens(16))
        found = await order_of(here, [(one, at, spaces[of]) for one, at, of in wanted], running)
        assert found[: len(expected)] == expected
        await here.settle()


@pytest.mark.promise("Tenants share no block, also not through storage.")
async def test_two_tenants_share_nothing_not_even_through_storage() -> None:
    async with world(with_store=True, storage_write=WritePolicy.WRITE_THROUGH) as here:
        acme = here.service.open_fingerprint(ACME)
        await here.run(tokens(10))
        request = await here.computed(tokens(10), space=acme)
        assert request.cached_tokens == 0
        await here.ended(request)
        again = await here.admit([*tokens(10), 1], space=acme)
        assert again.cached_tokens == 10
        await here.ended(again)


@pytest.mark.promise("A tenant over its quota evicts only its own blocks.")
async def test_over_its_quota_a_tenant_evicts_its_own_blocks_only() -> None:
    async with world(device_blocks=12, host_write=NONE) as here:
        acme = here.service.open_fingerprint(ACME, quota=(4, None))
        await here.run(tokens(16))  # the oldest of all, and not touched
        for number in range(4):
            ids = tokens(8, 100 * (number + 1))
            await here.ended(await here.computed(ids, space=acme))
        space = here.service.index.spaces.root_of(Prompt.of([1], 4, space=acme)).space
        assert space.used[Tier.DEVICE] == 4
        assert here.service.index.match(here.prompt(tokens(16))).device_blocks == 4
        assert here.free_device_blocks == 4  # free, but not for acme
        with pytest.raises(RequestTooLargeError, match="quota of 4"):
            await here.admit(tokens(20, 900), space=acme)


async def test_an_explanation_says_what_is_where_and_why_the_rest_is_not() -> None:
    async with world(device_blocks=4, host_write=NONE) as here:
        acme = here.service.open_fingerprint(ACME)
        fresh = here.service.explain(here.prompt(tokens(8)))
        assert (fresh.reason, fresh.first_miss, fresh.runs) == ("never stored", 0, ())
        await here.run(tokens(16))
        whole = here.service.explain(here.prompt(tokens(16)))
        assert (whole.reason, whole.first_miss) == ("nothing is missing", None)
        assert [(run.start, run.stop, run.where) for run in whole.runs] == [(0, 4, "device")]
        other = here.service.explain(Prompt.of(tokens(8), 4, space=acme))
        assert other.reason == "fingerprint differs"
        await here.run(tokens(8, 100))  # two of the four go
        evicted = here.service.explain(here.prompt(tokens(16)))
        assert (evicted.reason, evicted.tier, evicted.first_miss) == ("evicted", "device", 2)
        assert evicted.at is not None
        assert evicted.at > 0
        assert evicted.ago_s is not None
        assert 0 <= evicted.ago_s < 60
        assert fresh.ago_s is whole.ago_s is None


async def test_a_prompt_shorter_than_a_block_is_explained_across_fingerprints_too() -> None:
    async with world(host_write=NONE) as here:
        acme = here.service.open_fingerprint(ACME)
        await here.run(tokens(7))
        for count in (3, 7):  # the first tokens of a block; a block and a tail
            other = here.service.explain(Prompt.of(tokens(count), 4, space=acme), names_fields=True)
            assert (other.reason, other.first_miss) == ("fingerprint differs", 0)
            assert "tenant" in other.detail
        longer = here.service.explain(Prompt.of([0, 99], 4, space=acme))
        assert longer.reason == "never stored"


# Who waits holds up those it should and nobody else: quotas, growth, pins.


async def test_a_tenant_whose_quota_is_full_holds_up_itself_only() -> None:
    async with world(device_blocks=12, host_write=NONE) as on:
        acme = on.service.open_fingerprint(ACME, quota=(4, None))
        first = await on.admit(tokens(12), space=acme)
        async with asyncio.TaskGroup() as group:
            second = group.create_task(on.admit(tokens(8, 100), space=acme))
            third = group.create_task(on.admit(tokens(4, 200), space=acme))
            await turns(5)
            other = await on.admit(tokens(16))  # there is room for it
            assert not second.done()
            assert not third.done(), "a small one of the same tenant overtook"
            on.service.scheduler.end(first)
        await on.ended(other, second.result(), third.result())


async def test_one_that_grows_into_its_quota_holds_up_its_tenant_only() -> None:
    async with world(device_blocks=16, host_write=NONE) as on:
        acme = on.service.open_fingerprint(ACME, quota=(4, None))
        one = await on.admit(tokens(8), space=acme)
        two = await on.admit(tokens(8, 100), space=acme)
        async with asyncio.TaskGroup() as group:
            grows = group.create_task(on.service.scheduler.growth.extend(one, 4))
            await turns(5)
            small = group.create_task(on.admit(tokens(4, 200), space=acme))
            other = await on.admit(tokens(16))  # there is room for it
            await turns(5)
            assert not grows.done()
            assert not small.done()
            on.service.scheduler.end(two)
            await finish(grows)
            assert len(one.block_table) == 3
        await on.ended(one, other, small.result())


async def test_what_a_tenant_got_without_waiting_counts_when_turns_are_taken() -> None:
    async with world(device_blocks=16, host_write=NONE) as on:
        acme = on.service.open_fingerprint(ACME)
        big = await on.admit(tokens(32), space=acme)  # at once: nobody waits
        small = await on.admit(tokens(4, 100))
        on.service.pause()
        order: list[str] = []

        async def run(name: str, base: int, space: str) -> None:
            request = await on.admit(tokens(4, base), space=space)
            order.append(name)
            on.service.scheduler.end(request)

        async with asyncio.TaskGroup() as group:
            for at, name in enumerate(("ours 1", "acme", "ours 2", "ours 3")):
                space = acme if name == "acme" else ""
                group.create_task(run(name, 1000 * (at + 1), space))
                await turns(2)
            on.service.unpause()
        assert order == ["ours 1", "ours 2", "ours 3", "acme"]
        await on.ended(big, small)


async def test_a_device_full_of_pins_lets_requests_in_as_they_end() -> None:
    async with world(device_blocks=4, host_write=NONE) as on:
        await on.run(tokens(16))
        assert on.service.pin("all", on.prompt(tokens(16)), 1000.0) == 4
        waits = asyncio.ensure_future(on.admit(tokens(8, 100)))
        await turns(20)
        assert not waits.done()
        assert on.service.verify() == []
        on.service.unpin("all")
        request = await finish(waits)
        assert on.service.pin("all", on.prompt(tokens(8)), 0.02) == 2
        await on.prefill(request, tokens(8, 100))
        waits = asyncio.ensure_future(on.admit(tokens(8, 200)))
        await finish(waits)  # the pin's time is up
        await on.ended(request, waits.result())


async def test_the_only_one_that_runs_does_not_wait_for_pins_to_grow() -> None:
    async with world(device_blocks=4, host_write=NONE) as on:
        await on.run(tokens(8))
        on.service.pin("half", on.prompt(tokens(8)), 1000.0)
        request = await on.admit(tokens(8, 100))
        with pytest.raises(OutOfBlocksError):
            await finish(on.service.scheduler.growth.extend(request, 4))
        await on.ended(request)


async def test_one_whose_quota_is_raised_while_it_grows_waits_for_the_device_like_any_other() -> (
    None
):
    async with world(device_blocks=8, host_write=NONE) as on:
        acme = on.service.open_fingerprint(ACME, quota=(3, None))
        one = await on.admit(tokens(8), space=acme)
        two = await on.admit(tokens(4, 100), space=acme)
        other = await on.admit(tokens(16, 200))
        async with asyncio.TaskGroup() as group:
            grows = group.create_task(on.service.scheduler.growth.extend(one, 4))
            await turns(5)
            small = await on.admit(tokens(4, 300))  # the last free block
            on.service.set_quota(acme, (None, None))
            await turns(5)
            late = group.create_task(on.admit(tokens(4, 400)))
            await turns(5)
            on.service.scheduler.end(small)
            await finish(grows)
            assert not late.done(), "the block was for the one that grows"
            on.service.scheduler.end(other)
        await on.ended(one, two, late.result())
