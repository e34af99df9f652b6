"""Of two prompts that take one ticket id at the same moment, one has it and the other is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.latch import finish, turns
from tests.pd.nodes import computed, settings
from tests.redis_server import PATIENT, RedisServer, module_redis  # noqa: F401 - a fixture
from tests.sessions import claim_request, open_stream, publish_request
from tests.storage.values import TurnedClock
from tests.world import World, world
from tierkv.clock import SystemClock
from tierkv.errors import DuplicateRequestError
from tierkv.pd.handoff import Published
from tierkv.pd.tickets import OpenTicket, Standing, Ticket
from tierkv.storage.factory import open_store
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.storage.protocol import Store

PROMPTS = ([1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11])


@pytest.fixture(params=["memory", "file", "redis"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Store]]:
    """Three ways to one store."""
    if request.param == "memory":
        yield [MemoryStore(MemorySettings(), SystemClock())] * 3
        return
    url = tmp_path.as_uri()
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("module_redis")
        url = server.url
    yield [open_store(url, PATIENT, SystemClock()) for _ in range(3)]


@asynccontextmanager
async def three(stores: list[Store]) -> AsyncIterator[tuple[World, World, World]]:
    async with (
        world(store=stores[0], handoff=settings()) as first,
        world(store=stores[1], handoff=settings()) as second,
        world(store=stores[2], handoff=settings()) as claimer,
    ):
        yield first, second, claimer
        for node in (first, second, claimer):
            await node.settle()


async def hand_over(
    node: World,
    prompt: list[int],
    ticket: str,
    begin: asyncio.Barrier | None = None,
    *,
    streams: bool,
) -> Published | DuplicateRequestError:
    """Both are let through by the check; what follows decides."""
    await node.service.check_ticket_is_free(ticket, node.prompt(prompt))
    request = await computed(node, prompt)
    if begin is not None:
        await begin.wait()
    try:
        if not streams:
            return await publish_request(node.service, request, ticket, [prompt[0]])
        stream = open_stream(node.service, request, ticket)
        stream.advance(len(prompt))
        stream.finish([prompt[0]])
        return await stream.run()
    except DuplicateRequestError as error:
        return error
    finally:
        node.service.scheduler.end(request)


async def finds(claimer: World, ticket: str, prompt: list[int]) -> None:
    """The ticket is that prompt's, and has been claimed."""
    request, claimed = await claim_request(
        claimer.service, f"claim {ticket}", ticket, claimer.prompt(prompt), max_new_tokens=0
    )
    assert claimed is not None
    assert claimed.first_tokens == (prompt[0],)
    await claimer.ended(request)


@pytest.mark.parametrize("streams", [(False, False), (True, True), (True, False)])
async def test_of_two_prompts_that_take_one_id_at_the_same_moment_one_has_it(
    stores: list[Store], streams: tuple[bool, bool]
) -> None:
    async with three(stores) as (first, second, claimer):
        for round_ in range(10):
            ticket, begin = f"{streams}-{round_}", asyncio.Barrier(2)
            async with asyncio.TaskGroup() as group:
                works = [
                    group.create_task(hand_over(node, prompt, ticket, begin, streams=one))
                    for node, prompt, one in zip((first, second), PROMPTS, streams, strict=True)
                ]
            outcomes = [work.result() for work in works]
            winners = [i for i, one in enumerate(outcomes) if isinstance(one, Published)]
            assert len(winners) == 1, outcomes
            failed = [node.service.stats().handoff.failed_publishes for node in (first, second)]
            assert sum(failed) == round_ + 1
            await finds(claimer, ticket, PROMPTS[winners[0]])


@pytest.mark.parametrize("streams", [False, True])
async def test_who_comes_when_another_prompts_ticket_is_whole_leaves_it_alone(
    stores: list[Store], streams: bool
) -> None:
    async with three(stores) as (first, second, claimer):
        ticket, late = f"late {streams}", asyncio.Barrier(2)
        task = asyncio.create_task(hand_over(second, PROMPTS[1], ticket, late, streams=streams))
        while late.n_waiting == 0:  # the check let it through: nothing is there yet
            await turns(1)
        published = await hand_over(first, PROMPTS[0], ticket, streams=True)
        assert isinstance(published, Published)
        await late.wait()
        assert isinstance(await task, DuplicateRequestError)
        await finds(claimer, ticket, PROMPTS[0])
        # A hand-off that is over is in nobody's way.
        again = await hand_over(second, PROMPTS[1], ticket, streams=streams)
        assert isinstance(again, Published)


async def test_who_begins_while_another_prompts_ticket_is_completed_is_told_and_leaves_it(
    stores: list[Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with three(stores) as (first, second, claimer):
        ticket = "in between"
        published: list[Published | DuplicateRequestError] = []
        handoff = second.service.require_handoff()
        put = handoff.tickets.put

        async def put_late(one: Ticket | OpenTicket, **more: Any) -> bool:
            if not published:
                published.append(await hand_over(first, PROMPTS[0], ticket, streams=False))
            return await put(one, **more)

        monkeypatch.setattr(handoff.tickets, "put", put_late)
        late = await hand_over(second, PROMPTS[1], ticket, streams=True)
        assert isinstance(late, DuplicateRequestError)
        assert isinstance(published[0], Published)
        standing = await claimer.service.ticket_state(ticket)
        assert (standing.state, standing.num_tokens) == (Standing.WHOLE, len(PROMPTS[0]))


async def test_a_producer_that_gives_up_does_not_close_what_another_has_begun(
    stores: list[Store],
) -> None:
    async with three(stores) as (first, second, claimer):
        prompt = PROMPTS[0]
        requests = [await node.admit(prompt) for node in (first, second)]
        streams = [
            open_stream(node.service, request, "t")
            for node, request in zip((first, second), requests, strict=True)
        ]
        tasks, begun = [], 0.0
        for stream in streams:
            tasks.append(asyncio.create_task(stream.run()))
            begun = await opened(claimer, begun)
        slow, helper = streams
        slow.fail("it was too slow")
        await asyncio.wait([tasks[0]])
        assert tasks[0].exception() is not None
        assert (await claimer.service.ticket_state("t")).state is Standing.OPEN
        second.compute(requests[1], prompt)
        await finish(second.service.scheduler.commit(requests[1], second.prompt(prompt).tokens))
        helper.advance(len(prompt))
        helper.finish([prompt[0]])
        await finish(tasks[1])
        await finds(claimer, "t", prompt)
        for node, held in zip((first, second), requests, strict=True):
            await node.ended(held)


@pytest.mark.parametrize("is_dead", [False, True])
async def test_the_id_of_a_prompt_that_will_not_come_is_free_for_another(is_dead: bool) -> None:
    stores: list[Store] = [MemoryStore(MemorySettings(), SystemClock())] * 3
    async with three(stores) as (first, second, claimer):
        request = await first.admit(PROMPTS[0])
        stream = open_stream(first.service, request, "t")
        task = asyncio.create_task(stream.run())
        await opened(claimer, 0.0)
        if is_dead:
            task.cancel()
        else:
            stream.fail("it was too slow")
        await asyncio.wait([task])
        if is_dead:
            tickets = first.service.require_handoff().tickets
            await first.the_store.delete([tickets.names.producer(tickets.lease.incarnation)])
        assert isinstance(await hand_over(second, PROMPTS[1], "t", streams=False), Published)
        await finds(claimer, "t", PROMPTS[1])
        await first.ended(request)


async def test_the_id_of_a_ticket_that_has_expired_is_free_for_another_prompt() -> None:
    clock = TurnedClock()
    stores: list[Store] = [MemoryStore(MemorySettings(), clock)] * 3
    async with three(stores) as (first, second, claimer):
        assert isinstance(await hand_over(first, PROMPTS[0], "t", streams=False), Published)
        clock.now += settings().ticket_ttl_s + 1  # the store still has the ticket
        assert (await claimer.service.ticket_state("t")).state is Standing.EXPIRED
        assert isinstance(await hand_over(second, PROMPTS[1], "t", streams=False), Published)
        await finds(claimer, "t", PROMPTS[1])


async def opened(node: World, after: float) -> float:
    """When the ticket was begun, as soon as that is another time than `after`."""
    async with asyncio.timeout(20):
        while True:
            state = await node.service.ticket_state("t")
            if state.state is Standing.OPEN and (state.created_at or 0.0) != after:
                return state.created_at or 0.0
            await turns(3)
