"""A lookup says what an admission finds: whole blocks, tails, and shared beginnings, by tier."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.latch import finish
from tests.sched.test_fetch import filled
from tests.world import World, world
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.node import Tier
from tierkv.observe import Lookup
from tierkv.pd.settings import HandoffSettings
from tierkv.sched.budget import Budget
from tierkv.sched.request import Matched, RequestSpec

THROUGH = WritePolicy.WRITE_THROUGH
SHAPES = [1, 3, 4, 5, 8, 11]  # blocks of 4


async def found(on: World, prompt: list[int]) -> Matched:
    """What a request finds that computes nothing: a lookup counts the last token, too."""
    service, asked = on.service, on.prompt(prompt)
    fetched = None
    if service.tiers.copies.storage is not None:
        fetched = await finish(service.fetcher.fetch(asked, Budget(100.0)))
    spec = RequestSpec("found", asked, 0, needs_logits=False)
    request = await finish(service.scheduler.admit(spec, fetched))
    await request.gate.all_layers(100.0)
    on.check_kv(request, prompt, request.cached_tokens)
    service.scheduler.end(request)
    await on.settle()
    return request.matched


def said(lookup: Lookup) -> Matched:
    assert lookup.storage_tokens is not None
    return Matched(lookup.device_tokens, lookup.host_tokens, lookup.storage_tokens)


def asking(length: int, shared: int) -> list[int]:
    """A prompt of `length` tokens, of which the first `shared` are 0, 1, 2, ..."""
    return [token if token < shared else 900 + token for token in range(length)]


@pytest.mark.parametrize("cached", SHAPES)
async def test_on_the_device(cached: int) -> None:
    async with world() as on:
        for length in SHAPES:
            for shared in (0, length - 1, length):
                on.service.reset()
                await on.run(list(range(cached)))
                prompt = asking(length, shared)
                lookup = await on.service.lookup(on.prompt(prompt))
                assert said(lookup) == await found(on, prompt)
                assert lookup.device_tokens == min(cached, shared)


@pytest.mark.parametrize("cached", SHAPES)
async def test_on_the_host(cached: int) -> None:
    async with world(host_write=THROUGH) as on:
        await on.run(list(range(cached)))
        for node in list(on.service.index.spaces.nodes()):
            if not node.children:
                on.service.tiers.eviction.evict_below(Tier.DEVICE, node, 0)
        for shared in (0, cached - 1, cached):
            prompt = asking(cached + 2, shared)
            lookup = await on.service.lookup(on.prompt(prompt))
            assert lookup.device_tokens + lookup.host_tokens == shared
            assert said(lookup) == await found(on, prompt)


@pytest.mark.parametrize("stored", SHAPES)
async def test_in_storage(stored: int) -> None:
    store = await filled(list(range(stored)))
    for length in SHAPES:
        for shared in {length - 1, length, min(stored, length)}:
            prompt = asking(length, shared)
            async with world(store=store) as on:
                lookup = await on.service.lookup(on.prompt(prompt))
                assert said(lookup) == await found(on, prompt), f"{length} tokens, {shared} shared"


@pytest.mark.parametrize("seed", range(8))
async def test_of_what_is_cached_here_and_what_is_stored(seed: int) -> None:
    rng = random.Random(seed)
    stored = [asking(rng.randrange(1, 22), rng.randrange(20)) for _ in range(3)]
    near = [asking(rng.randrange(1, 22), rng.randrange(20)) for _ in range(2)]
    store = await filled(*stored)
    for _ in range(6):
        prompt = asking(rng.randrange(1, 24), rng.randrange(24))
        async with world(store=store, host_write=THROUGH) as on:
            for one in near:
                await on.run(one)
            lookup = await on.service.lookup(on.prompt(prompt))
            assert said(lookup) == await found(on, prompt)


async def test_what_goes_while_storage_is_asked_is_told_as_it_was() -> None:
    async with world(with_store=True, storage_write=WritePolicy.NONE) as on:
        await on.run(list(range(10)))
        on.the_store.hold()
        asking_now = asyncio.ensure_future(on.service.lookup(on.prompt(list(range(12)))))
        await finish(on.the_store.until_held(1))
        on.service.reset()
        on.the_store.release()
        assert said(await finish(asking_now)) == Matched(10, 0, 0)


async def test_a_store_that_does_not_answer_in_time_is_left_out_of_a_lookup() -> None:
    async with world(with_store=True, handoff=HandoffSettings(lookup_deadline_s=0.05)) as on:
        await on.run(asking(8, 8))
        on.the_store.hold()
        lookup = await on.service.lookup(on.prompt(asking(15, 15)))
        assert lookup == Lookup(15, 8, 0, None)
        on.the_store.release()
