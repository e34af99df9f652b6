"""Who listens hears of every copy that comes or goes; who does not listen costs nothing."""

from __future__ import annotations

import asyncio

import pytest

from tests.latch import finish
from tests.pd.nodes import publish
from tests.sched.test_fetch import filled
from tests.sessions import publish_request
from tests.world import tokens, world
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.keys import pack
from tierkv.gpu.protocol import Direction
from tierkv.sched import events as sched_events
from tierkv.sched.events import CacheEvent, CacheEventKind

THROUGH, NONE = WritePolicy.WRITE_THROUGH, WritePolicy.NONE


def blocks(events: list[CacheEvent], kind: CacheEventKind, tier: str) -> list[int]:
    return sorted(
        block
        for event in events
        if (event.kind, event.tier) == (kind, tier)
        for block in range(event.start, event.stop)
    )


async def test_stored_loaded_and_evicted_are_told_for_each_tier() -> None:
    async with world(
        device_blocks=8, with_store=True, host_write=THROUGH, storage_write=THROUGH
    ) as here:
        with here.service.events.subscribe() as subscription:
            await here.run(tokens(18))
            events = subscription.drain()
            for tier in ("device", "host", "storage"):
                assert blocks(events, CacheEventKind.STORED, tier) == [0, 1, 2, 3, 4], tier
            await here.run(tokens(32, 500))
            events = subscription.drain()
            assert blocks(events, CacheEventKind.EVICTED, "device") == [0, 1, 2, 3, 4]
            await here.run(tokens(18))
            events = subscription.drain()
            assert blocks(events, CacheEventKind.LOADED, "device") == [0, 1, 2, 3]
            here.service.reset()
            events = subscription.drain()
            assert 0 in blocks(events, CacheEventKind.EVICTED, "host")


async def test_a_slow_listener_loses_the_oldest_and_is_told_how_many() -> None:
    async with world(device_blocks=16, host_write=NONE) as here:
        with here.service.events.subscribe(capacity=3) as slow:
            with here.service.events.subscribe() as fast:
                for base in range(0, 500, 100):
                    await here.run(tokens(8, base))
                events = fast.drain()
            last = slow.drain()
            assert slow.num_dropped == 2
            assert [event.number for event in last] == [event.number for event in events[2:]]
        assert not here.service.events.has_listeners


async def test_each_run_is_an_event_with_a_number_of_its_own() -> None:
    async with world(device_blocks=16, host_write=NONE) as here:
        await here.run(tokens(16))
        await here.run(tokens(8) + tokens(8, 500))  # cuts the first prompt's run in two
        with here.service.events.subscribe() as subscription:
            here.service.pin("x", here.prompt(tokens(16)), 100.0)
            [leaf] = [
                n for n in here.service.index.spaces.nodes() if n.tokens.startswith(pack([8]))
            ]
            here.service.events.publish(CacheEventKind.STORED, "storage", leaf, 0, 4)
            first, second = [await finish(anext(subscription)) for _ in range(2)]
            assert (first.start, first.stop, second.start, second.stop) == (0, 2, 2, 4)
            assert second.number == first.number + 1
            keys = tuple(key.digest for key in here.keys(tokens(16)))
            assert first.digests + second.digests == keys
        here.service.unpin("x")


async def test_what_was_stored_after_a_question_is_not_lost_by_its_answer() -> None:
    async with world(device_blocks=16, host_write=NONE) as here:
        with here.service.events.subscribe() as subscription:
            await here.run(tokens(16))
            events, index = here.service.events, here.service.index
            runs = events.runs(index.match(here.prompt(tokens(16))).node, 0, 4)
            second = runs[0].digests[1]
            events.publish_stored(runs, events.now())
            early = events.asking()
            events.publish_stored(runs, events.now())  # written once more
            early(second)
            told = subscription.drain()
            assert blocks(told, CacheEventKind.STORED, "storage") == [0, 1, 2, 3]
            assert blocks(told, CacheEventKind.EVICTED, "storage") == []
            await here.run(tokens(8, 500))
            events.asking()(second)  # and all that follows it
            told = subscription.drain()
            assert blocks(told, CacheEventKind.EVICTED, "storage") == [1, 2, 3]


async def test_what_is_stored_is_told_to_one_who_listens_after_all_others_have_left() -> None:
    async with world(with_store=True, host_write=THROUGH, storage_write=THROUGH) as here:
        with here.service.events.subscribe():
            held = await here.computed(tokens(16))
            await here.settle()
        here.service.reset()  # until storage is asked again, nothing counts as stored
        with here.service.events.subscribe() as later:
            await here.ended(held)
            await here.run(tokens(16))
            assert blocks(later.drain(), CacheEventKind.STORED, "storage") == [0, 1, 2, 3]


async def test_blocks_that_a_publish_stores_or_misses_are_told() -> None:
    async with world(with_store=True, host_write=NONE, storage_write=NONE) as here:
        prompt, index = here.prompt(tokens(18)), here.service.index
        await here.run(tokens(18))

        with here.service.events.subscribe() as subscription:
            await publish(here, tokens(18), "first")
            told = subscription.drain()
            assert blocks(told, CacheEventKind.STORED, "storage") == [0, 1, 2, 3]
            await here.the_store.delete(here.names(tokens(18))[2:])
            handoff = here.service.handoff
            assert handoff is not None
            request = await here.admit(tokens(18))
            assert await handoff.find_stored(handoff.blocks_of(request), 4) == 2
            await here.ended(request)
            node = index.match(prompt).node
            assert node.stored_in(0, 4).tolist() == [True, True, False, False]
            assert blocks(subscription.drain(), CacheEventKind.EVICTED, "storage") == [2, 3]
            await publish(here, tokens(18), "second")
            assert index.match(prompt).node.stored_in(0, 4).all()
            assert blocks(subscription.drain(), CacheEventKind.STORED, "storage") == [2, 3]


async def test_a_published_tail_is_not_told_as_the_block_that_a_request_made_of_it() -> None:
    async with world(with_store=True, host_write=NONE, storage_write=NONE) as here:
        with here.service.events.subscribe() as subscription:
            request = await here.computed(tokens(18), new=2)
            await here.commit(request, tokens(20), 18)
            await finish(publish_request(here.service, request, "ticket", [18]))
            told = blocks(subscription.drain(), CacheEventKind.STORED, "storage")
            assert told == [0, 1, 2, 3]
            await here.ended(request)


async def test_what_is_written_to_a_store_that_was_detached_meanwhile_is_not_told() -> None:
    async with world(with_store=True, host_write=THROUGH, storage_write=THROUGH) as here:
        with here.service.events.subscribe() as subscription:
            here.the_store.hold_writes(firmly=True)
            request = await here.computed(tokens(16))
            here.service.scheduler.end(request)
            await here.the_store.until_held(1)
            here.service.detach_storage()
            here.the_store.release()
            await here.settle()
            events = subscription.drain()
        assert blocks(events, CacheEventKind.STORED, "storage") == []


async def test_of_too_many_stored_blocks_the_oldest_are_told_to_be_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sched_events, "MAX_STORED", 6)
    monkeypatch.setattr(sched_events, "_GO_AT_ONCE", 3)
    async with world(with_store=True, host_write=THROUGH, storage_write=THROUGH) as here:
        with here.service.events.subscribe() as subscription:
            await here.run(tokens(16))
            await here.run(tokens(16, 500))
            events = subscription.drain()
        gone = [event for event in events if event.kind is CacheEventKind.EVICTED]
        keys = [key.digest for key in here.keys(tokens(16))]
        assert [digest for event in gone for digest in event.digests] == keys[:3]


@pytest.mark.parametrize(
    ("stored", "asked"), [(18, 18), (11, 10)], ids=["its own blocks", "another prompt's tail"]
)
async def test_what_is_fetched_is_told_as_stored_on_the_host(stored: int, asked: int) -> None:
    async with world(store=await filled(tokens(stored))) as here:
        with here.service.events.subscribe() as subscription:
            assert (await here.run(tokens(asked))).storage_tokens == asked - 1
            told = [event for event in subscription.drain() if event.tier == "host"]
        assert blocks(told, CacheEventKind.STORED, "host") == [*range(-(-stored // 4))]
        keys = [key.digest for key in here.keys(tokens(stored))]  # a tail as the other left it
        assert [digest for event in told for digest in event.digests] == keys


async def test_a_block_that_a_fetch_finds_on_its_way_from_the_device_is_not_told_to_be_there() -> (
    None
):
    prompt = list(range(16))
    through = WritePolicy.WRITE_THROUGH
    async with world(store=await filled(prompt), host_write=through) as here:
        with here.service.events.subscribe() as events:
            here.the_store.hold()
            fetching = asyncio.ensure_future(here.admit([*prompt, 1]))
            await here.the_store.until_held(1)
            here.latch.hold(Direction.OFFLOAD)
            computes = await here.computed(prompt, uses_cache=False)
            await here.latch.until_held()
            here.latch.fail_next(Direction.OFFLOAD, 1)
            here.the_store.release()
            fetched = await finish(fetching)
            here.latch.release()
            await here.ended(fetched, computes)
            told = [one.tier for one in events.drain() if one.kind is CacheEventKind.STORED]
        assert here.service.stats().host.used == 0, "the one copy that was begun has failed"
        assert set(told) == {"device", "storage"}
