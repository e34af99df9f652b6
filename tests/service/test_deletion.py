"""A full deletion beside requests, copies, fetches and publishes that began before it."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from tests.faulty import FaultyStore
from tests.latch import finish, turns, until
from tests.pd.nodes import publish
from tests.sessions import publish_request
from tests.world import World, fingerprint, tokens, world
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.keys import pack
from tierkv.errors import HandoffError, StoreUnavailableError
from tierkv.pd.settings import HandoffSettings
from tierkv.sched.request import Matched
from tierkv.service.service import Freed
from tierkv.storage.protocol import GetStatus, PutStatus

THROUGH = WritePolicy.WRITE_THROUGH
PROMPT = tokens(18)
NOTHING = Matched()


async def num_values(store: FaultyStore) -> int:
    return (await store.usage("tierkv:")).num_values


async def test_a_deletion_waits_for_a_flush_and_removes_what_it_wrote() -> None:
    async with world(with_store=True, host_write=THROUGH, storage_write=THROUGH) as here:
        here.the_store.hold_writes(firmly=True)
        request = await here.admit(PROMPT)
        await here.prefill(request, PROMPT)
        here.service.scheduler.end(request)
        await here.the_store.until_held(1)
        async with asyncio.TaskGroup() as group:
            deleting = group.create_task(here.service.free(clears_storage=True))
            await until(lambda: here.service.deletions.bars_reads, "the deletion")
            asked = here.the_store.num_reads
            await turns(200)
            assert here.the_store.num_reads == asked, "nothing is looked for meanwhile"
            assert not deleting.done()
            here.the_store.release()
        await here.settle()  # a copy to the host may have held blocks until now
        assert await here.service.forget() == 0
        assert await num_values(here.the_store) == 0


@pytest.mark.promise("Blocks and tickets from before a full deletion are never found again.")
async def test_what_a_request_holds_through_a_deletion_is_never_found_again() -> None:
    """The tail and the blocks that it computes after the deletion included."""
    more = tokens(12, 500)
    async with world(with_store=True, host_write=THROUGH, storage_write=THROUGH) as here:
        request = await here.admit(PROMPT, new=len(more))
        await here.prefill(request, PROMPT)
        freed = await here.service.free(clears_storage=True)
        assert freed.held_copies >= 4
        assert here.service.verify() == []
        here.compute(request, PROMPT + more, len(PROMPT))
        await finish(here.service.scheduler.commit(request, pack(PROMPT + more)))
        beside = await here.run(PROMPT + more)  # which is stored, as its blocks are new
        assert beside == NOTHING
        here.check_kv(request, PROMPT + more, len(PROMPT + more))
        await here.ended(request)
        assert (await here.run(PROMPT + more)).device_tokens > 0
        assert await finish(here.service.free(clears_storage=True)) != Freed(0, 0)
        assert await num_values(here.the_store) == 0
        assert here.service.stats().device.used == 0


async def test_what_a_request_of_before_a_deletion_computes_after_it_is_not_found() -> None:
    async with world(with_store=True) as here:
        request = await here.admit(PROMPT)
        await here.service.free(clears_storage=True)
        await here.commit(request, PROMPT)
        assert (await here.service.lookup(here.prompt(PROMPT))).device_tokens == 0
        await here.ended(request)
        assert await here.run(PROMPT) == NOTHING


async def test_what_is_fetched_while_it_is_deleted_is_not_found() -> None:
    async with world(with_store=True, host_write=THROUGH, storage_write=THROUGH) as here:
        await here.run(PROMPT)
        await here.service.forget()
        here.the_store.hold()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(here.run(PROMPT))
            await here.the_store.until_held(1)
            deleting = group.create_task(here.service.free(clears_storage=True))
            await until(lambda: here.service.deletions.bars_reads, "the deletion")
            here.the_store.release()
        assert deleting.result().removed_values > 0
        assert running.result() == NOTHING


@pytest.mark.promise("Blocks and tickets from before a full deletion are never found again.")
async def test_a_publish_of_before_the_deletion_leaves_no_ticket_and_no_value() -> None:
    settings = HandoffSettings(streams=False)
    async with world(with_store=True, handoff=settings) as here:
        here.the_store.hold_writes(firmly=True)
        async with asyncio.TaskGroup() as group:
            publishing = group.create_task(failed_publish(here))
            await here.the_store.until_held(1)
            deleting = group.create_task(here.service.free(clears_storage=True))
            await until(lambda: here.service.deletions.bars_reads, "the deletion")
            here.the_store.release()
        assert "deleted" in publishing.result()
        assert deleting.done()
        assert await num_values(here.the_store) == 0


async def test_what_was_computed_before_the_deletion_is_not_published_after_it() -> None:
    async with world(with_store=True) as here:
        request = await here.admit(PROMPT)
        await here.prefill(request, PROMPT)
        await here.service.free(clears_storage=True)
        with pytest.raises(HandoffError, match="deleted"):
            await finish(publish_request(here.service, request, "ticket", [42]))
        await here.ended(request)
        assert await num_values(here.the_store) == 0


async def failed_publish(here: World) -> str:
    request = await here.admit(PROMPT)
    await here.prefill(request, PROMPT)
    with pytest.raises(HandoffError) as failure:
        await finish(publish_request(here.service, request, "ticket", [42]))
    await here.ended(request)
    return str(failure.value)


async def test_tickets_of_deleted_prompts_go_and_those_of_other_models_stay() -> None:
    async with world(with_store=True) as here:
        await publish(here, PROMPT, "ours")
        async with world(store=here.the_store.inner, who=fingerprint(revision="other")) as other:
            await publish(other, PROMPT, "theirs")
            await here.service.free(clears_storage=True)
            assert await here.service.forget_ticket("ours") is False
            assert await other.service.forget_ticket("theirs") is True


async def test_a_deletion_that_the_store_does_not_carry_out_says_so_and_bars_the_old_values() -> (
    None
):
    async with world(with_store=True, host_write=THROUGH, storage_write=THROUGH) as here:
        await here.run(PROMPT)
        here.the_store.fail_next(1)
        with pytest.raises(StoreUnavailableError):
            await here.service.free(clears_storage=True)
        assert await num_values(here.the_store) > 0
        again = await here.run(PROMPT)
        assert again == NOTHING
        assert "has failed: repeat it" in await failed_publish(here)
        await here.service.free(clears_storage=True)
        assert await num_values(here.the_store) == 0
        await here.run(PROMPT)
        await here.service.forget()
        assert (await here.run(PROMPT)).storage_tokens > 0


async def test_nothing_that_was_queued_before_a_deletion_is_written_after_it() -> None:
    async with world(with_store=True) as here:
        await here.run(PROMPT)
        storage, tickets = here.service.tiers.copies.storage, here.service.handoff
        assert storage is not None
        assert tickets is not None
        before, keys = storage.deletions.generation, here.keys(PROMPT)
        slots = np.arange(len(keys), dtype=np.int32)
        opened = tickets.tickets.new_open("ticket", here.prompt(PROMPT))
        await here.service.free(clears_storage=True)
        outcomes = await storage.flush(keys, slots, generation=before)
        assert {one.status for one in outcomes} == {PutStatus.FAILED}
        await storage.tails.note(keys[-1:], generation=before)
        with pytest.raises(StoreUnavailableError):
            await tickets.tickets.put(opened, generation=before)
        assert await num_values(here.the_store) == 0


async def test_a_read_that_began_before_the_deletion_brings_nothing() -> None:
    async with world(with_store=True, host_write=THROUGH, storage_write=THROUGH) as here:
        await here.run(PROMPT)
        await here.service.forget()
        storage, keys = here.service.tiers.copies.storage, here.keys(PROMPT)
        assert storage is not None
        here.the_store.hold()
        slots = np.arange(len(keys), dtype=np.int32)
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(storage.fetch(keys, slots))
            await here.the_store.until_held(1)
            group.create_task(here.service.free(clears_storage=True))
            await until(lambda: here.service.deletions.bars_reads, "the deletion")
            here.the_store.release()
        assert {one.status for one in reading.result()} == {GetStatus.MISS}
