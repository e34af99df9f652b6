"""Tenants come and go by name; what each may have is settable while requests run."""

from __future__ import annotations

import asyncio

import pytest

from tests.latch import finish, turns, until
from tests.sessions import resume_request
from tests.world import World, fingerprint, tokens, world
from tierkv.cache.eviction import EvictionKind, WritePolicy
from tierkv.cache.keys import Prompt, pack
from tierkv.cache.node import Tier
from tierkv.errors import (
    BadRequestError,
    ConfigError,
    OutOfBlocksError,
    OwnershipError,
    RequestTooLargeError,
)
from tierkv.sched.request import Request

NONE = WritePolicy.NONE


async def admit(here: World, tenant: str, prompt: list[int], name: str = "") -> Request:
    return await here.admit(prompt, name=name, space=here.service.space_of_tenant(tenant))


async def run(here: World, tenant: str, prompt: list[int]) -> int:
    request = await admit(here, tenant, prompt)
    await finish(here.service.scheduler.commit(request, pack(prompt)))
    await here.ended(request)
    return request.cached_tokens


async def test_a_tenant_is_opened_on_first_use_and_shares_nothing() -> None:
    async with world(who=fingerprint(tenant="own")) as here:
        acme = here.service.space_of_tenant("acme")
        assert here.service.space_of_tenant("acme") == acme
        assert here.service.space_of_tenant("own") == ""
        assert await run(here, "acme", tokens(16)) == 0
        assert await run(here, "other", tokens(16)) == 0
        assert await run(here, "acme", tokens(16)) == 15


async def test_of_too_many_the_one_not_asked_for_longest_is_closed() -> None:
    async with world(max_tenants=2, host_write=NONE) as here:
        await run(here, "a", tokens(8))
        await run(here, "b", tokens(8))
        assert await run(here, "a", tokens(8)) == 7
        await run(here, "c", tokens(8))
        assert len(here.service.index.spaces.all()) == 3
        assert await run(here, "a", tokens(8)) == 7
        assert await run(here, "b", tokens(8)) == 0


async def test_closing_frees_the_blocks_and_is_refused_while_in_use() -> None:
    async with world(host_write=NONE) as here:
        space = here.service.space_of_tenant("a")
        await run(here, "a", tokens(16))
        used = here.free_device_blocks
        here.service.pin("kept", Prompt.of(tokens(16), 4, space=space), 1000.0)
        with pytest.raises(BadRequestError, match="hold some"):
            here.service.close_fingerprint(space)
        here.service.unpin("kept")
        assert here.service.close_fingerprint(space) == 4
        assert here.free_device_blocks == used + 4
        assert here.service.verify() == []
        with pytest.raises(BadRequestError, match="is not open"):
            await here.admit([1], space=space)
        for name in (space, ""):
            with pytest.raises(BadRequestError):
                here.service.close_fingerprint(name)
        assert await run(here, "a", tokens(16)) == 0


async def test_quotas_come_from_the_settings_and_change_at_run_time() -> None:
    async with world(host_write=NONE, tenant_device_blocks=6) as here:
        space = here.service.space_of_tenant("a")
        assert here.service.quota_of(space) == (6, None)
        await run(here, "a", tokens(16))
        await run(here, "", tokens(16, 300))
        await run(here, "a", tokens(16, 100))
        assert here.service.index.spaces.root_named(space).space.used[Tier.DEVICE] <= 6
        here.service.set_quota(space, (2, None))
        assert here.service.index.spaces.root_named(space).space.used[Tier.DEVICE] == 2
        assert here.service.verify() == []
        assert await run(here, "", tokens(16, 300)) == 15  # the others' are where they were
        with pytest.raises(RequestTooLargeError):
            await admit(here, "a", tokens(16))
        here.service.set_quota(space, (None, None))
        await run(here, "a", tokens(40))
        with pytest.raises(ConfigError):
            here.service.set_quota(space, (-1, None))
        with pytest.raises(BadRequestError):
            here.service.set_quota("nobody", (1, None))


async def test_an_operator_is_told_the_field_that_differs_and_a_tenant_is_not() -> None:
    async with world(who=fingerprint(revision="1")) as here:
        here.service.open_fingerprint(fingerprint(revision="2"))
        prompt = here.prompt(tokens(8))
        [other] = [s.name for s in here.service.index.spaces.all() if s.name]
        await here.ended(await here.computed(tokens(8), space=other))
        quiet = here.service.explain(prompt)
        assert (quiet.reason, quiet.detail) == (
            "fingerprint differs",
            "cached under another fingerprint",
        )
        told = here.service.explain(prompt, names_fields=True)
        assert told.detail == "revision (here '1', there '2')"


async def test_a_quota_lowered_below_what_one_waits_for_refuses_it() -> None:
    async with world(device_blocks=16) as here:
        tenant = here.service.space_of_tenant("acme")
        running = await here.admit(tokens(40))
        waits = asyncio.ensure_future(admit(here, "acme", tokens(40)))
        await until(lambda: here.service.scheduler.num_waiting == 1)
        here.service.set_quota(tenant, (8, None))
        here.service.scheduler.end(running)
        with pytest.raises(RequestTooLargeError, match="quota"):
            await waits
        await here.settle()


async def test_what_a_tenant_was_given_is_its_own_still_after_others_took_its_place() -> None:
    async with world(max_tenants=1, host_write=NONE, tenant_device_blocks=6) as here:
        space = here.service.space_of_tenant("a")
        here.service.set_quota(space, (3, None))
        await run(here, "b", tokens(8))
        assert space not in here.service.roots(), "it is closed"
        assert here.service.tenants.known_space_of("a") == space
        assert here.service.quota_of(space) == (3, None)
        assert here.service.space_of_tenant("a") == space
        assert here.service.quota_of(space) == (3, None)
        with pytest.raises(RequestTooLargeError, match="quota"):
            await admit(here, "a", tokens(16))
        assert here.service.quota_of(here.service.space_of_tenant("b")) == (6, None)
        here.service.space_of_tenant("a")
        here.service.close_fingerprint(space)  # by an operator, for good
        assert here.service.quota_of(here.service.space_of_tenant("a")) == (6, None)
        await run(here, "a", tokens(12))


@pytest.mark.parametrize("host_eviction", [EvictionKind.LRU, EvictionKind.LFU])
async def test_within_a_quota_each_tier_evicts_by_its_own_policy(
    host_eviction: EvictionKind,
) -> None:
    async with world(
        host_write=WritePolicy.WRITE_THROUGH,
        device_eviction=EvictionKind.LRU,
        host_eviction=host_eviction,
        tenant_host_blocks=4,
    ) as here:
        for prompt in (tokens(8), tokens(8), tokens(8, 100), tokens(8, 200)):
            await run(here, "acme", prompt)
            await here.settle()
        space = here.service.space_of_tenant("acme")
        index = here.service.index
        matched_block = index.match(Prompt.of(tokens(4), 4, space=space)).node
        assert matched_block.end == matched_block.hits == 1
        is_left = matched_block.num_present(Tier.HOST) == 1
        assert is_left == (host_eviction is EvictionKind.LFU)


async def test_the_quota_of_a_tenant_that_is_closed_can_be_read_and_changed() -> None:
    async with world(max_tenants=1, host_write=NONE) as here:
        space = here.service.space_of_tenant("a")
        assert here.service.tenants.known_space_of("b") is None
        here.service.set_quota(space, (3, None))
        await run(here, "b", tokens(8))
        here.service.set_quota(space, (2, 5))
        assert space not in here.service.roots(), "that opens nothing"
        assert here.service.quota_of(space) == (2, 5)
        here.service.space_of_tenant("a")
        assert here.service.index.spaces.root_named(space).space.quota == (2, 5)
        here.service.close_fingerprint(space)
        assert here.service.tenants.known_space_of("a") is None
        with pytest.raises(BadRequestError):
            here.service.quota_of(space)


@pytest.mark.parametrize("ends", ["running", "resumed", "abandoned", "aborted"])
async def test_a_tenant_whose_request_runs_or_is_preempted_is_not_closed_for_others(
    ends: str,
) -> None:
    async with world(max_tenants=1, host_write=NONE) as here:
        space = here.service.space_of_tenant("a")
        request = await admit(here, "a", tokens(8), "one")
        await here.service.scheduler.commit(request, pack(tokens(8)))
        if ends != "running":
            here.service.scheduler.preempt(request)
            await here.settle()
        with pytest.raises(OutOfBlocksError):
            here.service.space_of_tenant("b")
        with pytest.raises(BadRequestError, match="have not ended"):
            here.service.close_fingerprint(space)
        if ends == "running":
            here.service.scheduler.end(request)
        elif ends == "resumed":
            resumed = await finish(resume_request(here.service, request, max_new_tokens=0))
            assert resumed.cached_tokens == 8
            here.service.scheduler.end(resumed)
        elif ends == "abandoned":
            here.service.scheduler.abandon(request)
        else:
            assert here.service.abort("one")
            assert not here.service.abort("one")
            with pytest.raises(OwnershipError, match="preempted"):
                await resume_request(here.service, request, max_new_tokens=0)
        await here.settle()
        here.service.space_of_tenant("b")
        assert space not in here.service.roots()


@pytest.mark.parametrize("tier", Tier)
async def test_a_quota_that_lets_much_go_lets_others_go_on_meanwhile(tier: Tier) -> None:
    write = WritePolicy.WRITE_THROUGH if tier is Tier.HOST else NONE
    async with world(host_write=write, device_blocks=4096, host_blocks=4096) as here:
        space = here.service.space_of_tenant("a")
        for base in range(3):
            await run(here, "a", tokens(1200 * 4, base * 10_000))
        await run(here, "b", tokens(8))
        used = here.service.index.spaces.root_named(space).space.used
        assert used[tier] == 3600
        here.service.set_quota(space, (5, None) if tier is Tier.DEVICE else (None, 5))
        after_one_turn = used[tier]
        assert 5 < after_one_turn < 3600
        await here.settle()
        assert used[tier] == 5
        other = Prompt.of(tokens(8), 4, space=here.service.space_of_tenant("b"))
        assert (await here.service.lookup(other)).device_tokens == 8


async def test_what_goes_from_the_device_for_a_lower_quota_keeps_its_host_copies() -> None:
    async with world(host_write=WritePolicy.WRITE_THROUGH) as here:
        space = here.service.space_of_tenant("a")
        await run(here, "a", tokens(32))
        for host_quota, host_tokens in ((None, 24), (3, 4)):  # of the three the device has two
            here.service.set_quota(space, (2, host_quota))
            await here.settle()
            where = await here.service.lookup(Prompt.of(tokens(32), 4, space=space))
            assert (where.device_tokens, where.host_tokens) == (8, host_tokens)


async def with_many_runs(here: World, tenant: str) -> str:
    """500 runs of one block, which take four turns to forget."""
    for number in range(500):
        request = await admit(here, tenant, tokens(4, 10 * number))
        await finish(here.service.scheduler.commit(request, pack(tokens(4, 10 * number))))
        here.service.scheduler.end(request)
    return here.service.space_of_tenant(tenant)


async def test_a_tenant_with_many_blocks_is_closed_for_others_while_they_go_on() -> None:
    async with world(max_tenants=1, host_write=NONE, device_blocks=512) as here:
        space = await with_many_runs(here, "a")
        here.service.space_of_tenant("b")
        assert space in here.service.roots(), "its blocks go in a task"
        assert await run(here, "b", tokens(8)) == 0
        await here.settle()
        assert space not in here.service.roots()
        assert here.service.stats().device.used == 2
        assert await run(here, "a", tokens(4)) == 0


async def test_a_tenant_that_comes_back_while_it_is_closed_for_others_stays() -> None:
    async with world(max_tenants=1, host_write=NONE, device_blocks=512) as here:
        space = await with_many_runs(here, "a")
        here.service.space_of_tenant("b")
        await turns(2)  # some of its blocks are gone
        assert here.service.space_of_tenant("a") == space
        await here.settle()
        assert space in here.service.roots()
        assert 0 < here.service.stats().device.used < 500
        await run(here, "a", tokens(8))
        await run(here, "c", tokens(8))
        await here.settle()
        assert len(here.service.roots()) == 3, "one too many, for those that were asked for"


@pytest.mark.parametrize("comes", ["nobody", "a request", "another close"])
async def test_a_fingerprint_with_many_blocks_is_retired_while_others_go_on(comes: str) -> None:
    async with world(host_write=NONE, device_blocks=512) as here:
        space = await with_many_runs(here, "a")
        retiring = asyncio.ensure_future(here.service.retire_fingerprint(space))
        await turns(2)
        assert not retiring.done()
        assert 0 < here.service.stats().device.used < 500
        if comes == "nobody":
            assert await retiring == 500
            assert space not in here.service.roots()
            assert here.service.stats().device.used == 0
        elif comes == "a request":
            request = await admit(here, "a", tokens(8))
            with pytest.raises(BadRequestError, match="have not ended"):
                await retiring
            here.service.scheduler.end(request)
        else:
            here.service.close_fingerprint(space)
            with pytest.raises(BadRequestError, match="is not open"):
                await retiring
        await here.settle()


# What cannot be had changes nothing: neither what is cached nor what is counted.


async def test_a_tenant_that_waits_for_others_keeps_its_own_blocks_meanwhile() -> None:
    async with world(device_blocks=20, host_write=WritePolicy.NONE) as here:
        service, space = here.service, here.service.space_of_tenant("a")
        service.set_quota(space, (10, None))
        await run(here, "a", tokens(20))
        own = Prompt.of(tokens(20), 4, space=space)
        other = await here.admit(tokens(60, 1000))  # the rest of the device
        waits = asyncio.ensure_future(admit(here, "a", tokens(32, 500)))
        await turns(20)
        assert not waits.done()
        assert service.index.match(own).num_blocks == 5, "nothing of its own went in vain"
        service.scheduler.end(other)
        request = await finish(waits)
        assert service.index.match(own).num_blocks == 2, "only now, to stay within its quota"
        await here.ended(request)


async def test_those_that_are_being_closed_count_as_closed_for_who_comes_next() -> None:
    async with world(max_tenants=2, host_write=NONE, device_blocks=512) as here:
        first = await with_many_runs(here, "a")
        second, third = (here.service.space_of_tenant(name) for name in ("b", "c"))
        assert first in here.service.roots(), "it goes in a task"
        here.service.close_fingerprint(second)
        fourth = here.service.space_of_tenant("d")
        assert third in here.service.roots(), "there was room for one more"
        fifth = here.service.space_of_tenant("e")
        await here.settle()
        assert here.service.roots().keys() == {"", fourth, fifth}
