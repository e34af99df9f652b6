"""What storage has of a prompt comes in order, without a gap, once; faults only make it less."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace as replace_fields
from typing import Any

import pytest

from tests.gated_reads import GatedReads
from tests.latch import finish, turns, until
from tests.storage.values import put_one
from tests.world import World, tokens, world
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.node import Tier
from tierkv.clock import SystemClock
from tierkv.gpu.protocol import Direction
from tierkv.sched import copies
from tierkv.sched.budget import Budget
from tierkv.sched.copies import GROUP_BLOCKS, PIECE_BLOCKS, count_stored, keys_beyond
from tierkv.sched.fetch import NO_ROOM
from tierkv.storage.base import StoreWrapper
from tierkv.storage.codec import HEADER_BYTES
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.storage.protocol import Capabilities, GetStatus

THROUGH = WritePolicy.WRITE_THROUGH
PATIENT_S = 20.0


async def filled(*prompts: list[int], num_blocks: int = 64) -> MemoryStore:
    """A store that another node, of so many blocks, has filled with these prompts."""
    store = MemoryStore(MemorySettings(), SystemClock())
    room: dict[str, Any] = {"device_blocks": num_blocks, "host_blocks": num_blocks}
    async with world(store=store, host_write=THROUGH, storage_write=THROUGH, **room) as other:
        for prompt in prompts:
            await other.run(prompt)
            assert await store.exists(other.names(prompt)) == len(other.names(prompt))
    return store


async def test_fetched_blocks_are_matched_again_and_can_be_evicted() -> None:  # fault 3
    async with world(
        store=await filled(tokens(16)), device_blocks=5, host_blocks=5, host_write=THROUGH
    ) as here:
        await here.run(tokens(16))
        before = here.storage_stats.fetched_blocks
        assert (await here.run(tokens(16))).storage_tokens == 0
        assert here.storage_stats.fetched_blocks == before
        for base in range(100, 600, 100):
            await here.run(tokens(16, base))
        match = here.service.index.match(here.prompt(tokens(16)))
        assert match.num_blocks == 0
        assert (await here.run(tokens(16))).storage_tokens == 15


@pytest.mark.parametrize("pressure", [7, 8])
async def test_device_blocks_that_others_were_fetched_behind_go_to_the_host_before_they_go(
    pressure: int,
) -> None:
    """Both may be of one run, of which the device has the beginning and the host the end."""
    async with world(store=await filled(tokens(24)), device_blocks=8) as here:
        await here.run(tokens(8), uses_cache=False)
        fetched = await finish(
            here.service.fetcher.fetch(here.prompt(tokens(24)), Budget(PATIENT_S))
        )
        fetched.release()
        await here.settle()
        for base in (100, 200):
            await here.run(tokens(4 * pressure, base), uses_cache=False)
        assert (await here.service.lookup(here.prompt(tokens(24)))).host_tokens == 24
        assert (await here.run(tokens(24))).host_tokens == 23  # checks every byte


@pytest.mark.promise("Equal prompts share one fetch.")
async def test_identical_prompts_at_the_same_time_share_one_fetch() -> None:
    async with world(store=await filled(tokens(18)), device_blocks=64) as here:
        here.the_store.hold()

        async def one(number: int) -> int:
            request = await here.computed([*tokens(16), 100 + number])
            here.service.scheduler.end(request)
            return request.cached_tokens

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(number)) for number in range(5)]
            await here.the_store.until_held(1)
            await turns(20)
            here.the_store.release()
        assert [task.result() for task in tasks] == [16] * 5
        assert here.storage_stats.fetched_blocks == 4
        await here.settle()


async def test_a_cancelled_fetcher_does_not_take_the_fetch_from_the_others() -> None:
    async with world(store=await filled(tokens(18))) as here:
        here.the_store.hold()
        async with asyncio.TaskGroup() as group:
            first = group.create_task(here.admit(tokens(18)))
            await here.the_store.until_held(1)
            second = group.create_task(here.admit(tokens(18)))
            await turns(10)
            first.cancel()
            await turns(10)
            assert here.service.verify() == []
            here.the_store.release()
        request = second.result()
        await here.prefill(request, tokens(18))
        assert request.cached_tokens == 17
        await here.ended(request)
        assert here.storage_stats.fetched_blocks == 5


@pytest.mark.promise("A damaged block ends a fetch before it and is deleted.")
@pytest.mark.parametrize("at", range(5))
async def test_a_damaged_block_ends_the_run_before_it_and_is_deleted(at: int) -> None:
    async with world(store=await filled(tokens(18))) as here:
        name = here.names(tokens(18))[at]
        content = await here.the_store.get(name, max_bytes=1 << 20)
        assert content is not None
        broken = bytearray(content)
        broken[HEADER_BYTES + 3] ^= 1
        await put_one(here.the_store, name, bytes(broken), keep_existing=False)
        matched = await here.run(tokens(18))
        assert matched.storage_tokens == at * 4
        assert here.storage_stats.damaged_blocks == 1
        assert await here.the_store.exists([name]) == 0


async def test_a_store_that_does_not_leave_the_buffers_holds_slots_but_no_request() -> None:
    async with world(store=await filled(tokens(18)), fetch_deadline_s=0.3) as here:
        here.the_store.hold_firmly()
        request = await here.admit(tokens(18))
        assert request.cached_tokens == 0
        assert not here.service.fetcher.num_in_flight, "others may ask for the same blocks"
        assert here.service.verify() == []
        await here.prefill(request, tokens(18))
        here.service.scheduler.end(request)
        assert here.service.tiers.work.num_tasks, "the store is not done"
        here.the_store.release()
        await here.settle()


async def test_what_arrived_before_the_store_got_stuck_is_used() -> None:
    prompt = [token % 50 for token in range(320)]  # 80 blocks: three groups
    async with world(
        store=await filled(prompt, num_blocks=90),
        device_blocks=90,
        host_blocks=90,
        fetch_deadline_s=2.0,
    ) as here:
        async with asyncio.TaskGroup() as group:
            admitting = group.create_task(here.admit(prompt))
            await until(lambda: here.storage_stats.fetched_blocks >= 32)
            here.the_store.hold_firmly()
        request = admitting.result()
        assert request.cached_tokens >= 128
        assert here.service.verify() == []
        await here.prefill(request, prompt)  # checks every byte
        here.service.scheduler.end(request)
        here.the_store.release()
        await here.settle()
        again = await here.run(prompt)
        assert again.total_tokens == 319


class DearQuestions(StoreWrapper):
    """Asking costs as much as reading, and is counted."""

    num_asked = 0

    @property
    def capabilities(self) -> Capabilities:
        return replace_fields(super().capabilities, has_cheap_questions=False)

    async def exists(self, names: Sequence[str]) -> int:
        self.num_asked += 1
        return await super().exists(names)

    async def present(self, names: Sequence[str]) -> list[bool]:
        self.num_asked += 1
        return await super().present(names)


@pytest.mark.parametrize("is_dear", [True, False])
@pytest.mark.parametrize("hole", [*range(5), None])
async def test_a_hole_ends_the_run_before_it_also_where_a_store_is_read_instead_of_asked(
    hole: int | None, *, is_dear: bool
) -> None:
    inner = await filled(tokens(18))
    dear = DearQuestions(inner)
    async with world(store=dear if is_dear else inner) as here:
        if hole is not None:
            await inner.delete([here.names(tokens(18))[hole]])
        matched = await here.run(tokens(18))  # checks every byte
        assert matched.storage_tokens == (17 if hole is None else hole * 4)
        assert dear.num_asked == 0


async def test_a_host_without_room_gives_a_shorter_run() -> None:
    async with world(store=await filled(tokens(34)), host_blocks=3) as here:
        prompt = here.prompt(tokens(34))
        fetched = await finish(here.service.fetcher.fetch(prompt, Budget(10.0)))
        assert 0 < len(fetched.tokens) <= 12
        assert fetched.first_problem is NO_ROOM
        fetched.release()
        await here.run(tokens(34))  # checks every byte


async def test_a_fetch_waits_for_copies_that_hold_the_hosts_slots_on_their_way() -> None:
    store = await filled(tokens(16))
    async with world(store=store, device_blocks=8, host_blocks=4, host_write=THROUGH) as here:
        here.latch.hold(Direction.OFFLOAD)
        other = await here.computed(tokens(16, 100))
        await here.latch.until_held()
        assert here.service.stats().host.free == 0
        waits = asyncio.ensure_future(here.admit(tokens(16)))
        await turns(30)
        assert not waits.done()
        here.service.scheduler.end(other)
        here.latch.release()
        request = await finish(waits)
        assert request.cached_tokens == 15, "the host had room as soon as the copies had ended"
        await here.prefill(request, tokens(16))
        await here.ended(request)


async def test_a_tail_of_which_a_part_is_cached_here_is_fetched_whole() -> None:
    async with world(store=await filled(tokens(11))) as here:
        await here.run(tokens(9), uses_cache=False)  # two blocks and one token of the tail
        request = await here.admit([*tokens(11)])
        assert request.cached_tokens == 10
        assert request.matched.storage_tokens == 2  # the last is computed, for its logits
        await here.prefill(request, tokens(11))
        await here.ended(request)


async def test_what_came_from_the_store_is_not_written_there_again() -> None:
    async with world(
        store=await filled(tokens(18)), host_write=THROUGH, storage_write=THROUGH
    ) as here:
        here.the_store.hold_writes()
        await here.run(tokens(18))
        held = here.service.tiers.copies.storing.bytes_in_flight
        here.the_store.release()
        assert held == 0


async def test_what_was_fetched_stays_and_counts_as_storages_on_a_full_node_that_writes_back() -> (
    None
):
    prompt, back = tokens(99, 10_000), WritePolicy.WRITE_BACK
    store = await filled(prompt)
    async with world(
        store=store,
        device_blocks=32,
        host_blocks=64,
        host_write=back,
        storage_write=back,
    ) as here:
        for turn in range(3):
            for number in range(8):  # fills both tiers with what must be written first
                await here.run(tokens(96, 100_000 * (turn + 1) + 1_000 * number))
            assert (await here.run(prompt)).storage_tokens == 98


async def test_a_prompt_that_ends_in_anothers_stored_tail_is_fetched_whole_without_a_problem() -> (
    None
):
    async with world(store=await filled(tokens(19))) as here:
        fetched = await here.service.fetcher.fetch(here.prompt(tokens(18)), Budget(PATIENT_S))
        assert (fetched.tokens, fetched.first_problem) == (range(18), None)
        fetched.release()


async def test_a_store_that_hangs_and_is_detached_lets_the_request_compute() -> None:
    async with world(store=await filled(tokens(18)), fetch_deadline_s=1.0) as here:
        here.the_store.hold()
        waits = asyncio.ensure_future(here.admit(tokens(18), name="waits"))
        await finish(here.the_store.until_held(1))
        here.service.detach_storage()
        request = await finish(waits)
        assert request.cached_tokens == 0
        await here.prefill(request, tokens(18))
        here.service.scheduler.end(request)
        here.the_store.release()
        await here.settle()


async def test_another_store_is_not_believed_to_have_what_the_one_before_had() -> None:
    async with world(with_store=True, host_write=THROUGH, storage_write=THROUGH) as here:
        await here.run(tokens(16))
        names = here.names(tokens(16))
        assert await here.the_store.exists(names) == 4
        here.service.detach_storage()
        other = MemoryStore(MemorySettings(), SystemClock())
        await finish(here.service.attach_storage(other))
        await here.run(tokens(16))
        await here.settle()
        assert await other.exists(names) == 4


# Two groups of blocks on their way at a time; the index takes them in order, without a hole.


PROMPT = [token % 50 for token in range(4 * (2 * GROUP_BLOCKS + 16))]  # three groups


@asynccontextmanager
async def fetching() -> AsyncGenerator[tuple[World, GatedReads, asyncio.Task[int]], None]:
    """A request is admitted whose blocks are all in the store; the result is its cached tokens."""
    store = GatedReads(await filled(PROMPT, num_blocks=90))
    async with world(store=store, device_blocks=90, host_blocks=90, fetch_deadline_s=100.0) as here:

        async def admit() -> int:
            request = await here.admit(PROMPT)
            await here.prefill(request, PROMPT)  # checks every byte
            here.service.scheduler.end(request)
            return request.cached_tokens

        async with asyncio.TaskGroup() as group:
            yield here, store, group.create_task(admit())
        await here.settle()


def blocks_on_host(here: World) -> int:
    return here.service.index.match(here.prompt(PROMPT)).num_blocks


async def test_the_next_group_is_asked_for_before_one_has_arrived_and_waits_for_it() -> None:
    async with fetching() as (here, store, admitted):
        await store.until_asked(2)
        await turns(50)
        assert len(store.gates) == 2, "and no more"
        store.gates[1].set_result(GetStatus.HIT)
        await until(lambda: here.storage_stats.fetched_blocks == GROUP_BLOCKS)
        assert blocks_on_host(here) == 0
        assert here.service.verify() == []
        store.gates[0].set_result(GetStatus.HIT)
        await store.until_asked(3)
        assert blocks_on_host(here) == 2 * GROUP_BLOCKS
        store.gates[2].set_result(GetStatus.HIT)
        assert await admitted == len(PROMPT) - 1


@pytest.mark.parametrize("status", [GetStatus.MISS, GetStatus.FAILED])
async def test_nothing_is_kept_behind_a_group_that_did_not_come(status: GetStatus) -> None:
    async with fetching() as (here, store, admitted):
        await store.until_asked(2)
        store.gates[1].set_result(GetStatus.HIT)
        store.gates[0].set_result(status)
        assert await admitted == 0
        assert not len(here.service.tiers.slots.lent(Tier.HOST))
        assert len(store.gates) == 2, "nobody asks for what could not be used"


async def test_blocks_of_a_store_that_was_lost_during_the_fetch_do_not_count_as_stored() -> None:
    prompt = tokens(16)
    async with world(store=await filled(prompt)) as here:
        here.the_store.hold()
        async with asyncio.TaskGroup() as group:
            # With keys that are promised, the first operation is the read itself.
            work = here.service.fetcher.fetch(
                here.prompt(prompt), Budget(PATIENT_S), promised=here.keys(prompt)
            )
            fetching = group.create_task(work)
            await here.the_store.until_held(1)
            here.service.tiers.copies.note_nothing_stored()
            here.the_store.release()
        node = here.service.index.match(here.prompt(prompt)).node
        assert node.end == 4
        assert not node.stored_in(0, node.num_blocks).any()
        fetching.result().release()
        await here.settle()


# What storage has of a long prompt is asked for in pieces, with the answer that one piece has.


@pytest.mark.parametrize("hole", [None, *range(7)])
@pytest.mark.parametrize("num_near", [0, 8])
async def test_pieces_of_any_size_count_up_to_the_first_hole(
    hole: int | None, num_near: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = list(range(26))  # six blocks and a tail
    async with world(store=await filled(prompt)) as here:
        if num_near:
            await here.run(prompt[:num_near])
        if hole is not None:
            await here.the_store.delete([here.names(prompt)[hole]])
        storage, index = here.service.tiers.copies.storage, here.service.index
        assert storage is not None
        asked, near = here.prompt(prompt), num_near // 4
        expected = 7 if hole is None or hole < near else hole
        for piece_blocks in range(1, 9):
            monkeypatch.setattr(copies, "PIECE_BLOCKS", piece_blocks)
            found = await count_stored(storage, keys_beyond(index, asked, index.match(asked)))
            assert near + found == expected


class CountingStore(MemoryStore):
    num_asked = 0

    async def exists(self, names: Sequence[str]) -> int:
        self.num_asked += len(names)
        return await super().exists(names)


async def test_of_a_prompt_that_was_never_stored_only_one_piece_is_asked_for() -> None:
    store = CountingStore(MemorySettings(), SystemClock())
    async with world(store=store) as here:
        prompt = here.prompt(list(range(4 * 5 * PIECE_BLOCKS)))
        found = await finish(here.service.lookup(prompt))
        assert (found.num_tokens, found.storage_tokens) == (prompt.num_tokens, 0)
        assert store.num_asked == PIECE_BLOCKS


@pytest.mark.parametrize("is_gone", [True, False])
async def test_the_slot_for_a_shared_tail_is_free_again_if_its_fetch_brings_nothing(
    is_gone: bool,
) -> None:
    store = await filled(tokens(11))
    async with world(store=store, host_blocks=8) as here:
        if is_gone:  # it stays in the list of tails, where another prompt finds it
            await store.delete(here.names(tokens(11))[-1:])
        prompt = [*tokens(10), 500]
        request = await here.admit(prompt)
        assert request.cached_tokens == (8 if is_gone else 10)
        await here.prefill(request, prompt)  # checks every byte
        await here.ended(request)
        assert here.service.stats().host.free == (6 if is_gone else 5)
        assert not here.service.fetcher.groups._reserved, "it counts towards quotas"  # noqa: SLF001
