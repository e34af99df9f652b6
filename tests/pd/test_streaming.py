"""Blocks go out while the prompt is computed, are claimed before the ticket is there, and every way
in which that can end is told apart."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from tests.latch import PATIENCE_S, CancelPoint, finish, turns, until
from tests.pd.nodes import pair, settings
from tests.sessions import claim_request, open_stream
from tests.storage.values import TurnedClock
from tests.world import BLOCK, World, background_tasks, tokens, world
from tierkv.cache.keys import Names, Prompt, pack
from tierkv.clock import SystemClock
from tierkv.errors import HandoffError, StoreUnavailableError
from tierkv.gpu.protocol import Direction
from tierkv.pd import claims
from tierkv.pd.claims import Ahead, ClaimPolicy, LoadsAhead
from tierkv.pd.handoff import Published, PublishStream
from tierkv.pd.tickets import Standing, Ticket, Tickets
from tierkv.sched.request import Matched, Request, RequestSpec
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.storage.protocol import PutItem, PutOutcome
from tierkv.tasks import background

# What storage does is what these tests are about; test_direct*.py is about the rest.


@dataclass
class Prefill:
    """A prompt that a test computes step by step, on its way out."""

    node: World
    request: Request
    stream: PublishStream
    prompt: list[int]
    task: asyncio.Task[Published]

    async def compute(self, count: int) -> None:
        """The first `count` tokens."""
        done = self.request.computed_tokens
        self.node.compute(self.request, self.prompt[:count], done)
        await finish(self.node.service.scheduler.commit(self.request, pack(self.prompt[:count])))
        self.stream.advance(count)

    async def stored(self, blocks: int) -> None:
        names = self.node.names(self.prompt)[:blocks]

        async def look() -> None:
            while await self.node.the_store.exists(names) < blocks:
                await turns(3)

        await finish(look())

    async def rest(self) -> None:
        """All that is left of it, and its first token."""
        await self.compute(len(self.prompt))
        self.stream.finish([42])


@asynccontextmanager
async def prefilling(node: World, prompt: list[int], ticket: str = "t") -> AsyncIterator[Prefill]:
    request = await node.admit(prompt, name=f"prefill of {ticket}")
    stream = open_stream(node.service, request, ticket)
    here = Prefill(node, request, stream, prompt, asyncio.create_task(stream.run()))
    try:
        yield here
    except BaseException:  # a failed test would wait here for the rest of its stream
        here.task.cancel()
        raise
    finally:
        await asyncio.wait([here.task])
        node.service.scheduler.end(request)
        if not here.task.cancelled():
            here.task.exception()  # the test looks at it, or not
    await node.settle()


async def claim(node: World, prompt: list[int], ticket: str = "t", **options: Any) -> Request:
    request, _ = await claim_request(
        node.service, f"claim of {ticket}", ticket, node.prompt(prompt), max_new_tokens=1, **options
    )
    try:
        await request.gate.all_layers(100.0)
    except BaseException:
        node.service.scheduler.end(request)
        raise
    return request


async def whole(node: World, claiming: Awaitable[Request], prompt: list[int]) -> None:
    """Every byte of the prompt is claimed; nothing is left afterwards."""
    request = await finish(claiming)
    node.check_kv(request, prompt, len(prompt))
    await node.ended(request)


async def dies(node: World) -> None:
    """A producer of 21 tokens has stored eight, and says nothing more, as one that was killed."""
    async with prefilling(node, tokens(21)) as here:
        await here.compute(8)
        await here.stored(2)
        here.task.cancel()


@pytest.mark.promise("A claim loads blocks before the ticket is written.")
async def test_blocks_are_fetched_and_loaded_before_the_ticket_is_there() -> None:
    prompt = tokens(42)
    async with pair() as (prefill, decode):
        claiming = asyncio.create_task(claim(decode, prompt))
        async with prefilling(prefill, prompt) as here:
            await here.compute(20)
            await until(lambda: decode.storage_stats.fetched_blocks == 5, "an early fetch")
            await until(lambda: decode.service.stats().loaded_bytes > 0, "an early load")
            assert not claiming.done()
            assert await prefill.the_store.exists([Names("tierkv", "").ticket("t")]) == 0
            await here.rest()
        assert here.task.result().early_blocks >= 5
        await whole(decode, claiming, prompt)


async def test_what_came_for_a_claim_before_its_ticket_counts_as_from_storage() -> None:
    prompt = tokens(42)
    async with pair() as (prefill, decode):
        assert (await decode.run(tokens(9))).total_tokens == 0  # its first 8 tokens stay here
        claiming = asyncio.create_task(claim(decode, prompt))
        async with prefilling(prefill, prompt) as here:
            for count in (20, 28, 42):
                await here.compute(count)
                await here.stored(count // BLOCK)
                most = count // BLOCK - 2
                await until(lambda: decode.storage_stats.fetched_blocks >= most, "a fetch")  # noqa: B023
            here.stream.finish([42])
        request = await finish(claiming)
        assert request.matched == Matched(device_tokens=8, storage_tokens=34)
        decode.service.scheduler.end(request)
        again = await claim(decode, prompt)
        assert again.matched == Matched(device_tokens=40, host_tokens=2)
        await decode.ended(again)


async def test_a_prefill_that_gives_up_says_why_at_once() -> None:
    async with pair() as (prefill, decode):
        claiming = asyncio.create_task(claim(decode, tokens(21)))
        async with prefilling(prefill, tokens(21)) as here:
            await here.compute(8)
            here.stream.fail("the model caught fire")
        with pytest.raises(HandoffError, match="caught fire") as error:
            await finish(claiming)
        assert error.value.reason == "producer_failed"
        with pytest.raises(HandoffError, match="caught fire"):
            here.task.result()
        ledger = prefill.service.require_handoff().ledger
        assert ledger.state_of("t") is Standing.PRODUCER_FAILED
        await decode.settle()


@pytest.mark.promise("A dead producer is reported as lost at once, a slow one never.")
async def test_a_producer_that_dies_in_the_middle_is_lost_not_late() -> None:
    clock = TurnedClock()
    async with pair(clock=clock) as (prefill, decode):
        claiming = asyncio.create_task(claim(decode, tokens(21)))
        await dies(prefill)
        clock.now += settings().producer_lease_s + 1
        with pytest.raises(HandoffError, match="no longer renews its lease") as error:
            await finish(claiming)
        assert error.value.reason == "producer_lost"
        await decode.settle()


@pytest.mark.promise("A dead producer is reported as lost at once, a slow one never.")
async def test_a_node_that_ends_by_an_error_says_no_more_that_it_lives() -> None:
    store = MemoryStore(MemorySettings(), SystemClock())

    async def live(names: list[str]) -> None:
        async with world(store=store, handoff=settings()) as node:
            tickets = node.service.require_handoff().tickets
            names.append(tickets.names.producer(tickets.lease.incarnation))
            with tickets.lease.held():
                await finish(tickets.lease.written())
            assert await store.exists(names) == 1
            raise RuntimeError("a bug")

    names: list[str] = []
    with pytest.raises(RuntimeError, match="a bug"):
        await live(names)
    async with store.running():
        assert await store.exists(names) == 0


@pytest.mark.promise("A dead producer is reported as lost at once, a slow one never.")
async def test_a_producer_that_only_takes_long_is_not_yet() -> None:
    async with pair() as (prefill, decode):
        async with prefilling(prefill, tokens(21)) as here:
            await here.compute(8)
            await here.stored(2)
            with pytest.raises(HandoffError, match="has published") as error:
                await claim(decode, tokens(21), deadline_s=1.0)
            assert error.value.reason == "not_yet"
            await here.rest()
        await whole(decode, claim(decode, tokens(21)), tokens(21))


async def test_another_producer_may_take_over_where_one_died() -> None:
    async with pair(clock=TurnedClock()) as (prefill, decode):
        claiming = asyncio.create_task(claim(decode, tokens(21)))
        await dies(prefill)
        async with prefilling(prefill, tokens(21)) as again:
            await again.rest()
        await whole(decode, claiming, tokens(21))


@pytest.mark.parametrize("failures", [1, 5])
async def test_a_store_that_fails_in_the_middle_only_delays(failures: int) -> None:
    prompt = tokens(42)
    async with pair() as (prefill, decode):
        claiming = asyncio.create_task(claim(decode, prompt))
        async with prefilling(prefill, prompt) as here:
            await here.compute(8)
            await here.stored(2)
            prefill.the_store.fail_next(failures)
            await here.compute(16)
            await until(lambda: prefill.the_store.num_operations > 3)
            prefill.the_store.fail_next(0)
            await here.rest()
        await whole(decode, claiming, prompt)


async def test_blocks_that_the_store_lost_in_the_middle_are_stored_again() -> None:
    prompt = tokens(42)
    async with pair() as (prefill, decode):
        async with prefilling(prefill, prompt) as here:
            await here.compute(24)
            await here.stored(6)
            await prefill.the_store.delete(prefill.names(prompt)[:6])  # as a restart does
            await here.rest()
        await whole(decode, claim(decode, prompt), prompt)


async def test_a_ticket_that_is_written_at_the_second_try_costs_no_second_copy_of_its_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt, num_tries, complete = tokens(42), 0, Tickets.complete

    async def at_the_second_try(self: Tickets, ticket: Ticket, **how: Any) -> None:
        nonlocal num_tries
        num_tries += 1
        if num_tries == 1:
            raise StoreUnavailableError("it is away for a moment")
        await complete(self, ticket, **how)

    async with pair() as (prefill, decode):
        offered: Counter[str] = Counter()
        put = prefill.the_store.put

        async def counted(items: Sequence[PutItem]) -> list[PutOutcome]:
            offered.update(item.name for item in items)
            return await put(items)

        monkeypatch.setattr(Tickets, "complete", at_the_second_try)
        monkeypatch.setattr(prefill.the_store, "put", counted)
        async with prefilling(prefill, prompt) as here:
            await here.compute(24)
            await here.stored(6)
            await here.rest()
        assert num_tries == 2
        assert {offered[name] for name in prefill.names(prompt)} == {1}
        await whole(decode, claim(decode, prompt), prompt)


async def test_a_store_that_stays_away_fails_the_publish_and_leaves_no_ticket() -> None:
    async with pair() as (prefill, decode):
        async with prefilling(prefill, tokens(21)) as here:
            await here.compute(8)
            prefill.the_store.fail_next(10_000)
            await here.rest()
        with pytest.raises(HandoffError) as error:
            here.task.result()
        assert error.value.reason == "storage_unavailable"
        prefill.the_store.fail_next(0)
        assert await prefill.the_store.exists([Names("tierkv", "").ticket("t")]) == 0
        await decode.settle()


async def test_a_copy_that_fails_in_the_middle_is_tried_again_at_the_end() -> None:
    async with pair() as (prefill, decode):
        async with prefilling(prefill, tokens(21)) as here:
            prefill.latch.fail_next(Direction.OFFLOAD)
            await here.compute(8)
            await until(lambda: prefill.latch.count(Direction.OFFLOAD) == 1)
            await here.rest()
        await whole(decode, claim(decode, tokens(21)), tokens(21))


@pytest.mark.parametrize("late", [False, True])
async def test_a_claim_cancelled_at_any_await_leaves_nothing_behind(late: bool) -> None:
    prompt = tokens(21)
    async with pair() as (prefill, decode):
        tasks = background_tasks()
        for at in range(200):
            decode.service.reset()
            point = CancelPoint(at, late=late)
            async with prefilling(prefill, prompt, f"t{at}") as here:
                claiming = asyncio.create_task(point.run(claim(decode, prompt, f"t{at}")))
                await turns(5)
                await here.compute(12)
                await turns(5)
                await here.rest()
            try:
                request = await finish(claiming)
            except asyncio.CancelledError:
                pass
            else:
                decode.check_kv(request, prompt, 21)
                decode.service.scheduler.end(request)
            await decode.settle()
            assert decode.service.stats().running_requests == 0
            if not point.was_reached:
                break
        else:
            pytest.fail("the claim has no end")
        assert background_tasks() <= tasks
        assert not decode.service.index.num_held_leases


async def test_claims_that_wait_hold_no_blocks_that_others_need() -> None:
    prompt = tokens(40)
    async with pair(device_blocks=12, host_blocks=12) as (prefill, decode):
        async with prefilling(prefill, prompt) as here:
            claiming = asyncio.create_task(claim(decode, prompt))
            await here.compute(32)
            await until(lambda: decode.storage_stats.fetched_blocks >= 8, "an early fetch")
            matched = await decode.run(tokens(44, 1000))
            assert matched.total_tokens == 0
            await here.rest()
        await whole(decode, claiming, prompt)


async def test_a_claim_loads_nothing_ahead_while_other_requests_wait_for_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(claims, "MIN_BYTES", 1)
    prompt = tokens(160)  # two groups of blocks
    async with pair(device_blocks=100, host_blocks=64) as (prefill, decode):
        async with prefilling(prefill, prompt) as here:
            await here.rest()
        running = await decode.admit(tokens(160, 1000), uses_cache=False)
        other = asyncio.create_task(decode.admit(tokens(280, 5000), uses_cache=False))
        await until(lambda: decode.service.stats().waiting_requests == 1, "one that waits")
        decode.the_store.delay_s = 0.02  # the first group has time to be loaded
        claiming = asyncio.create_task(claim(decode, prompt))
        await until(lambda: decode.service.stats().waiting_requests == 2, "the claim behind it")
        assert decode.service.stats().loaded_bytes == 0
        decode.service.scheduler.end(running)
        decode.service.scheduler.end(await finish(other))
        await whole(decode, claiming, prompt)


async def test_a_load_ahead_waits_until_it_has_enough_new_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded: list[int] = []

    async def load_ahead(prompt: Prompt) -> None:
        loaded.append(prompt.num_blocks)

    async with world() as node:
        monkeypatch.setattr(claims, "MIN_BYTES", 4 * node.layout.block_bytes)
        monkeypatch.setattr(node.service.scheduler, "load_ahead", load_ahead)
        spec = RequestSpec("claim", node.prompt(tokens(48)), 0)
        loads = LoadsAhead(spec, node.service.scheduler, lambda _: True)
        running = asyncio.create_task(loads.run())
        for count in (3, 4, 6, 8, 11, 12):
            loads.arrived(count)
            await turns(3)
        assert loaded == [4, 8, 12]
        running.cancel()
        await asyncio.wait([running])


async def test_a_claim_that_waits_for_its_ticket_keeps_no_keys_of_its_prompt() -> None:
    """They are as large as the prompt, and many claims may wait."""
    async with pair() as (_, decode):
        prompt = decode.prompt(tokens(42))
        decode.the_store.hold()
        claiming = asyncio.create_task(
            claim_request(decode.service, "claim", "t", prompt, max_new_tokens=1)
        )
        await until(lambda: prompt.keys is not None, "its keys")
        decode.the_store.release()
        await until(lambda: prompt.keys is None, "keys that are forgotten")
        claiming.cancel()
        await asyncio.wait([claiming])


async def test_a_claim_may_come_before_an_id_that_is_over_is_begun_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grace_s = claims._GRACE_S  # noqa: SLF001 - half a second, which a slow machine needs
    monkeypatch.setattr(claims, "_GRACE_S", PATIENCE_S)
    async with pair() as (prefill, decode):
        for base in (0, 500):
            prompt = tokens(13, base)
            claiming = asyncio.create_task(claim(decode, prompt, "same"))
            await turns(50)  # it looks, and finds what the last one left
            async with prefilling(prefill, prompt, "same") as here:
                await here.rest()
            await whole(decode, claiming, prompt)
        monkeypatch.setattr(claims, "_GRACE_S", grace_s)
        with pytest.raises(HandoffError) as error:
            await claim(decode, tokens(13, 900), "same")
        assert error.value.reason == "other_prompt"


async def test_an_id_that_is_begun_again_while_a_claim_looks_at_what_it_was_is_no_other_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(claims, "_GRACE_S", PATIENCE_S)
    async with pair() as (prefill, decode):
        async with prefilling(prefill, tokens(13), "same") as here:
            await here.rest()
        await decode.ended(await finish(claim(decode, tokens(13), "same")))

        prompt, looks, may_go_on = tokens(13, 500), asyncio.Event(), asyncio.Event()
        is_claimed = Tickets.is_claimed

        async def once_the_next_one_has_begun(self: Tickets, ticket: Ticket) -> bool:
            looks.set()
            await may_go_on.wait()
            return await is_claimed(self, ticket)

        with monkeypatch.context() as patch:
            patch.setattr(Tickets, "is_claimed", once_the_next_one_has_begun)
            claiming = asyncio.create_task(claim(decode, prompt, "same"))
            await finish(looks.wait())
        async with prefilling(prefill, prompt, "same") as here:
            await here.compute(8)
            await here.stored(2)
            may_go_on.set()
            await turns(50)
            await here.rest()
        await whole(decode, claiming, prompt)


async def test_with_a_policy_that_may_compute_a_lost_producer_is_no_failure() -> None:
    clock = TurnedClock()
    async with pair(clock=clock) as (prefill, decode):
        await dies(prefill)
        clock.now += settings().producer_lease_s + 1
        request = await finish(claim(decode, tokens(21), policy=ClaimPolicy.RECOMPUTE))
        assert decode.service.stats().handoff.claims_without_ticket == 1
        assert request.cached_tokens == 8  # what was whole is used all the same
        await decode.prefill(request, tokens(21))
        await decode.ended(request)


@pytest.mark.parametrize("guess", [None, 99])
async def test_what_is_told_of_a_prompt_during_a_fetch_is_fetched_after_it_and_once(
    guess: int | None,
) -> None:
    asked: list[int] = []
    went_on, may_end = asyncio.Event(), asyncio.Event()

    async def bring(prompt: Prompt) -> bool:
        asked.append(prompt.num_blocks)
        went_on.set()
        if len(asked) == 1:
            await may_end.wait()
        return len(asked) > 1

    ahead = Ahead(Prompt(pack(tokens(40)), BLOCK), bring)
    async with background({"ahead": ahead.run()}):
        ahead.ready(guess)  # the prompt has ten
        await went_on.wait()
        ahead.ready(8)  # the producer says so
        may_end.set()
        await until(lambda: asked == [10, 8], "a fetch of what was told")
        for _ in range(3):
            ahead.ready(guess)
            await turns(3)
        assert asked == [10, 8, 10]
