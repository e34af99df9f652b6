"""What a service does that none of its parts does alone: refuse early, free everywhere, let go."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.latch import finish, turns
from tests.sched.test_fetch import filled
from tests.sessions import begin_request, claim_request, publish_request
from tests.world import GQA, World, fingerprint, tokens, world
from tierkv.cache.eviction import EvictionKind, WritePolicy
from tierkv.cache.keys import Prompt, pack
from tierkv.clock import SystemClock
from tierkv.errors import (
    BadRequestError,
    ConfigError,
    DuplicateRequestError,
    RequestAbortedError,
    RequestTooLargeError,
    ShuttingDownError,
)
from tierkv.gpu.cpu import CpuDevice
from tierkv.pd.settings import HandoffSettings
from tierkv.sched.request import Request, RequestSpec
from tierkv.sched.settings import CacheSettings
from tierkv.sched.worth import FetchPolicy
from tierkv.service import Service
from tierkv.service.session import Session
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.storage.protocol import Store

THROUGH = WritePolicy.WRITE_THROUGH


async def run_for(here: World, tenant: str, prompt: list[int]) -> int:
    """How many tokens a tenant's request found."""
    space = here.service.space_of_tenant(tenant) if tenant else ""
    whole = Prompt.of(prompt, GQA.block_size, space=space)
    request = await finish(begin_request(here.service, f"{tenant} runs", whole, max_new_tokens=0))
    await here.prefill(request, prompt)
    await here.ended(request)
    return request.cached_tokens


async def num_values(store: Store) -> int:
    return (await store.usage("tierkv:")).num_values


async def test_freeing_storage_takes_every_tenants_values_from_every_store() -> None:
    common, own = (MemoryStore(MemorySettings(), SystemClock()) for _ in range(2))
    async with world(store=common, host_write=THROUGH, storage_write=THROUGH) as here:
        await here.service.attach_storage(own, tenant=here.service.space_of_tenant("own"))
        for tenant in ("", "other", "own"):
            await run_for(here, tenant, tokens(16))
        blocks = 4
        before = await num_values(common), await num_values(own)
        assert before == (2 * blocks, blocks)
        assert (await here.service.free(clears_storage=True)).removed_values == 3 * blocks
        assert (await num_values(common), await num_values(own)) == (0, 0)
        for tenant in ("", "other", "own"):
            assert await run_for(here, tenant, tokens(16)) == 0


async def test_freeing_clears_a_tenants_store_where_there_is_no_common_one() -> None:
    own = MemoryStore(MemorySettings(), SystemClock())
    async with world(host_write=THROUGH, storage_write=THROUGH) as here:
        await here.service.attach_storage(own, tenant=here.service.space_of_tenant("own"))
        await run_for(here, "own", tokens(16))
        assert (await here.service.free(clears_storage=True)).removed_values == 4
        assert await num_values(own) == 0


async def test_what_was_freed_is_stored_again_though_a_request_held_it_all_the_while() -> None:
    async with world(with_store=True, host_write=THROUGH, storage_write=THROUGH) as here:
        await here.run(tokens(16))
        holds = await here.admit(tokens(16))
        assert (await here.service.free(clears_storage=True)).removed_values == 4
        here.service.scheduler.end(holds)
        await here.run(tokens(16))
        assert await here.the_store.exists(here.names(tokens(16))) == 4


Refused = Callable[[World], Awaitable[object]]


@pytest.mark.parametrize(
    ("asks", "error"),
    [
        (lambda here: here.admit(tokens(18), name="runs"), DuplicateRequestError),
        (lambda here: here.admit(tokens(18), name="big", new=1000), RequestTooLargeError),
        (lambda here: here.admit(tokens(18), name="late"), ShuttingDownError),
    ],
    ids=["of an id that runs", "too large", "of a node that drains"],
)
async def test_what_cannot_be_admitted_is_refused_before_storage_is_asked(
    asks: Refused, error: type[Exception]
) -> None:
    async with world(store=await filled(tokens(18))) as here:
        runs = await here.admit([7], name="runs")
        if error is ShuttingDownError:
            here.service.drain()
        asked = here.the_store.num_operations
        with pytest.raises(error):
            await asks(here)
        assert here.the_store.num_operations == asked
        await here.ended(runs)


async def test_a_store_in_the_place_of_one_that_hung_is_asked_by_the_first_request() -> None:
    async with world(
        store=await filled(tokens(18)), fetch_policy=FetchPolicy.BEST_EFFORT, fetch_deadline_s=0.2
    ) as here:
        here.service.note_prefill(100, 1.0)
        here.the_store.hold()
        for number in range(3):
            assert (await here.run(tokens(18, 100 * number + 100))).total_tokens == 0
        await here.service.attach_storage(await filled(tokens(18)))
        here.the_store.release()
        assert (await here.run(tokens(18))).storage_tokens == 17


@pytest.mark.parametrize(
    ("num_tokens", "seconds"), [(0, 1.0), (-5, 1.0), (10, 0.0), (10, -1.0), (10, float("nan"))]
)
async def test_a_speed_that_cannot_be_is_not_believed(num_tokens: int, seconds: float) -> None:
    async with world() as here:
        here.service.note_prefill(num_tokens, seconds)
        assert not here.service.estimator.prefill.is_known


async def test_a_claim_that_is_aborted_in_the_moment_in_which_it_has_its_blocks_keeps_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world(with_store=True) as here:
        publishes = await here.admit(tokens(16))
        await here.prefill(publishes, tokens(16))
        await finish(publish_request(here.service, publishes, "ticket", [1]))
        here.service.scheduler.end(publishes)
        admit = here.service.scheduler.admit

        async def aborted_as_it_ends(*spec: object, **rest: object) -> Request:
            request = await admit(*spec, **rest)  # type: ignore[arg-type]
            assert here.service.abort("goes")
            return request

        monkeypatch.setattr(here.service.scheduler, "admit", aborted_as_it_ends)
        with pytest.raises(RequestAbortedError):
            await finish(
                claim_request(
                    here.service, "goes", "ticket", here.prompt(tokens(16)), max_new_tokens=1
                )
            )
        assert here.service.stats().running_requests == 0
        await here.settle()


async def test_a_tenant_whose_claim_waits_for_its_ticket_is_not_closed() -> None:
    async with world(with_store=True) as here:
        space = here.service.space_of_tenant("waits")
        prompt = Prompt.of(tokens(16), GQA.block_size, space=space)
        claims = asyncio.ensure_future(
            claim_request(
                here.service, "waits", "no ticket", prompt, max_new_tokens=1, deadline_s=100.0
            )
        )
        await turns(10)
        with pytest.raises(BadRequestError, match="have not ended"):
            here.service.close_fingerprint(space)
        assert here.service.abort("waits")
        with pytest.raises(RequestAbortedError):
            await finish(claims)
        here.service.close_fingerprint(space)


async def test_a_node_that_does_not_stream_offers_no_stream() -> None:
    async with world(with_store=True, handoff=HandoffSettings(streams=False)) as here:
        session = Session(here.service, RequestSpec("r", here.prompt(tokens(16)), 0))
        await session.admit()
        assert not await session.stream("ticket")
        assert not session.is_streaming
        session.end()


async def test_a_store_that_does_not_answer_is_in_no_tickets_way() -> None:
    async with world(with_store=True, handoff=HandoffSettings(lookup_deadline_s=0.01)) as here:
        here.the_store.hold()
        async with asyncio.timeout(10.0):
            await here.service.check_ticket_is_free("ticket", here.prompt(tokens(16)))
        here.the_store.release()


async def test_blocks_are_stored_after_as_many_hits_as_storage_asks_for_not_the_host() -> None:
    async with world(
        with_store=True,
        host_write=THROUGH,
        host_after_hits=1,
        storage_write=WritePolicy.SELECTIVE,
        storage_after_hits=3,
    ) as here:
        stored = []
        for _ in range(4):
            await here.run(tokens(16))
            stored.append(await here.the_store.exists(here.names(tokens(16))))
        assert stored == [0, 0, 0, 3]  # of the fourth block the last token is computed again


async def test_within_its_quota_a_tenant_evicts_by_the_devices_policy() -> None:
    async with world(
        host_write=WritePolicy.NONE,
        device_eviction=EvictionKind.LFU,
        tenant_device_blocks=6,
        device_blocks=32,
    ) as here:
        for _ in range(3):
            await run_for(here, "one", tokens(9))
        await run_for(here, "one", tokens(9, 100))
        await run_for(here, "one", tokens(12, 200))  # takes what was matched least often
        assert await run_for(here, "one", tokens(9)) == 8


def test_a_layout_of_another_block_size_than_the_settings_is_refused() -> None:
    with pytest.raises(ConfigError, match="make them equal"):
        Service(
            CpuDevice(),
            fingerprint(),
            CacheSettings(block_size=2 * GQA.block_size),
            HandoffSettings(),
            None,
        )


async def test_a_service_ends_only_when_its_last_request_has() -> None:
    has_ended = asyncio.Event()

    async def live(started: asyncio.Future[tuple[World, Request]]) -> None:
        async with world() as here:
            started.set_result((here, await here.admit(tokens(8))))
        has_ended.set()

    started: asyncio.Future[tuple[World, Request]] = asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as group:
        group.create_task(live(started))
        here, request = await finish(started)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not has_ended.is_set()
        assert here.service.is_draining
        with pytest.raises(ShuttingDownError):
            await here.admit(tokens(8), name="late")
        here.compute(request, tokens(8))
        await here.service.scheduler.commit(request, pack(tokens(8)))
        here.service.scheduler.end(request)
        await finish(has_ended.wait())
