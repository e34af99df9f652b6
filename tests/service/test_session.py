"""The life of a request as a Session decides it, whoever drives it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from tests.latch import PATIENCE_S, ManualEvent, cancelled_at, finish, until
from tests.world import BLOCK, World, world
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.keys import pack
from tierkv.errors import (
    DuplicateRequestError,
    HandoffError,
    OwnershipError,
    TierKVError,
    TransferError,
)
from tierkv.gpu.protocol import Direction
from tierkv.pd.claims import ClaimPolicy
from tierkv.pd.settings import HandoffSettings
from tierkv.sched.request import RequestSpec
from tierkv.service.session import Session

PROMPT = list(range(2 * BLOCK + 1))


def session(on: World, tokens: Sequence[int] = PROMPT, *, name: str = "r") -> Session:
    return Session(on.service, RequestSpec(name, on.prompt(tokens), 0))


async def computed(
    on: World, tokens: Sequence[int] = PROMPT, *, uses_cache: bool = True
) -> Session:
    """A session of which all tokens are committed."""
    one = Session(on.service, RequestSpec("r", on.prompt(tokens), 0, uses_cache=uses_cache))
    request = await finish(one.admit())
    on.compute(request, tokens, request.cached_tokens)
    await finish(one.commit(pack(list(tokens))))
    return one


async def over(one: Session, on: World) -> None:
    on.the_store.release()
    await finish(asyncio.wait([one.over]))
    await on.settle()


async def test_an_end_gives_the_blocks_back_when_nothing_publishes_them_any_more() -> None:
    async with world(with_store=True) as on:
        one = await computed(on)
        on.the_store.hold()
        publishing = one.publish("t", [7])
        one.end()
        assert one.is_ending
        assert not one.has_ended
        assert on.service.scheduler.running_requests
        with pytest.raises(OwnershipError, match="ending"):
            await one.commit(pack(PROMPT))
        on.the_store.release()
        published = await finish(publishing.published())
        assert published.ticket.first_tokens == (7,)
        assert one.has_ended
        assert not on.service.scheduler.running_requests
        one.end()
        await on.settle()


async def test_a_request_that_ends_while_it_waits_for_its_blocks_gets_none() -> None:
    async with world(with_store=True) as on:
        one = session(on)
        on.the_store.hold()
        admitting = asyncio.create_task(one.admit())
        await on.the_store.until_held(1)
        one.end()
        on.the_store.release()
        with pytest.raises(OwnershipError, match="has ended"):
            await finish(admitting)
        assert not on.service.scheduler.running_requests
        await on.settle()


async def test_an_abort_gives_up_what_is_being_published() -> None:
    async with world(with_store=True) as on:
        one = await computed(on)
        on.the_store.hold()
        publishing = one.publish("t", [7])
        await on.the_store.until_held(1)
        one.abort()
        with pytest.raises(OwnershipError, match="before it was published"):
            await finish(publishing.published())
        await over(one, on)


async def test_a_prompt_is_published_once_per_ticket_and_a_call_that_says_otherwise_is_told() -> (
    None
):
    async with world(with_store=True) as on:
        one = await computed(on)
        first = one.publish("t", [7])
        assert one.publish("t", [7]) is first
        await finish(one.published(first, [7], {}))
        with pytest.raises(DuplicateRequestError):
            await finish(one.published(one.publish("t", [8]), [8], {}))
        one.end()


async def test_a_publish_that_failed_may_be_asked_for_again() -> None:
    async with world(with_store=True) as on:
        one = await computed(on)
        on.the_store.fail_next(1000)
        with pytest.raises(TierKVError):
            await finish(one.publish("t", [7]).published())
        on.the_store.fail_next(0)
        assert (await finish(one.publish("t", [7]).published())).num_blocks == 3
        one.end()


async def test_a_preemption_waits_for_publishes_and_is_refused_while_the_prompt_streams() -> None:
    async with world(with_store=True) as on:
        one = await computed(on)
        assert await finish(one.stream("s"))
        with pytest.raises(OwnershipError, match="while it is computed"):
            await one.preempt()
        on.the_store.hold()
        one.publish("s", [7])
        preempting = asyncio.create_task(one.preempt())
        await on.the_store.until_held(1)
        assert not preempting.done()
        on.the_store.release()
        await finish(preempting)
        assert one.is_preempted
        request = await finish(one.resume(max_new_tokens=0))
        await finish(request.gate.all_layers(PATIENCE_S))
        on.check_kv(request, PROMPT, request.cached_tokens)
        one.end()
        await on.settle()


async def test_a_request_that_ends_while_it_waits_to_be_resumed_gives_all_back_at_once() -> None:
    async with world(device_blocks=4) as on:
        one = await computed(on)
        await one.preempt()
        other = session(on, range(100, 100 + 4 * BLOCK), name="other")
        await finish(other.admit())
        resuming = asyncio.create_task(one.resume(max_new_tokens=0))
        await until(lambda: on.service.scheduler.num_waiting == 1, "a request in line")
        one.end()
        with pytest.raises(OwnershipError, match="has ended"):
            await finish(resuming)
        assert one.has_ended
        other.end()
        await on.settle()


@pytest.mark.parametrize("late", [False, True])
async def test_a_resume_that_is_cancelled_anywhere_leaves_the_request_preempted(
    *, late: bool
) -> None:
    for at in range(1, 20):
        async with world(with_store=True) as on:
            one = await computed(on)
            await one.preempt()
            was_there = await cancelled_at(at, one.resume(max_new_tokens=0), late=late)
            assert one.is_preempted or one.running().request_id == "r"
            one.end()
            await on.settle()
        if not was_there:
            return


async def failed(on: World, tokens: Sequence[int] = PROMPT) -> Session:
    """A session of whose cached tokens, on the host alone, the load has failed."""
    await on.run(tokens)
    on.latch.fail_next(Direction.LOAD)
    await finish(on.service.sleep())
    await finish(on.service.wake())
    one = session(on, tokens)
    request = await finish(one.admit())
    assert request.matched.host_tokens
    with pytest.raises(TransferError):
        await finish(one.loaded(PATIENCE_S))
    return one


async def test_what_did_not_load_is_named_and_the_request_goes_on_without_it() -> None:
    async with world(host_write=WritePolicy.WRITE_THROUGH) as on:
        one = await failed(on)
        before = one.request
        await finish(one.recover("it broke", timeout_s=PATIENCE_S))
        assert one.failed_blocks == range(2)
        assert one.load_problem == "it broke"
        assert one.request is not before
        on.compute(one.request, PROMPT)
        await finish(one.commit(pack(PROMPT)))
        on.check_kv(one.request, PROMPT, len(PROMPT))
        one.end()
        await on.settle()


async def test_after_a_recovery_the_prompt_may_be_streamed_again() -> None:
    async with world(host_write=WritePolicy.WRITE_THROUGH, with_store=True) as on:
        one = await failed(on)
        assert await finish(one.stream("t"))
        await finish(one.recover("it broke", timeout_s=PATIENCE_S))
        assert not one.is_streaming
        assert await finish(one.stream("t"))
        assert one.is_streaming
        one.end()
        await over(one, on)


async def test_the_blocks_that_a_recovery_leaves_wait_for_the_kernels_that_still_use_them() -> None:
    async with world(host_write=WritePolicy.WRITE_THROUGH, device_blocks=6) as on:
        one = await failed(on)
        used, kernel = set(one.request.block_table.tolist()), ManualEvent()
        await finish(one.recover("it broke", timeout_s=PATIENCE_S, after=[kernel]))
        assert not used & set(one.request.block_table.tolist())
        assert on.free_device_blocks == 0
        kernel.finish()
        one.end()
        await on.settle()


async def claimed(one: Session, policy: ClaimPolicy) -> None:
    await one.claim("t", policy)
    await one.loaded_or_recovered(PATIENCE_S)


@pytest.mark.parametrize("policy", [ClaimPolicy.WHOLE, ClaimPolicy.RECOMPUTE])
async def test_a_claimed_prompt_that_does_not_load_is_computed_only_if_the_policy_says_so(
    policy: ClaimPolicy,
) -> None:
    async with world(with_store=True) as on:
        producer = await computed(on)
        await finish(producer.publish("t", [7]).published())
        producer.end()
        await on.settle()
        await finish(on.service.forget())
        on.latch.fail_next(Direction.LOAD)
        one = session(on)
        if policy is ClaimPolicy.WHOLE:
            with pytest.raises(HandoffError) as refused:
                await finish(claimed(one, policy))
            assert refused.value.reason == "load_failed"
        else:
            await finish(claimed(one, policy))
            assert one.load_problem is not None
            on.compute(one.request, PROMPT, one.request.cached_tokens)
            on.check_kv(one.request, PROMPT, len(PROMPT))
        one.end()
        await on.settle()


@pytest.mark.parametrize("way", [Session.end, Session.abort])
async def test_a_stream_tells_who_waits_why_a_prompt_will_not_come(
    way: Callable[..., None],
) -> None:
    async with world(with_store=True) as on:
        one = session(on)
        await finish(one.admit())
        assert await finish(one.stream("t"))
        way(one, reason="the engine was not heard of")
        await finish(asyncio.wait([one.over]))
        with pytest.raises(HandoffError, match="the engine was not heard of"):
            await finish(session(on, name="c").claim("t", ClaimPolicy.WHOLE, 5.0))
        await on.settle()


async def test_a_store_that_hangs_keeps_a_stream_from_beginning_for_its_deadline_only() -> None:
    async with world(with_store=True, handoff=HandoffSettings(lookup_deadline_s=0.1)) as on:
        one = session(on)
        await finish(one.admit())
        on.the_store.hold()
        assert await finish(one.stream("t"))
        one.abort()
        await over(one, on)


async def test_two_calls_at_once_begin_one_stream() -> None:
    async with world(with_store=True) as on:
        one = session(on)
        await finish(one.admit())
        on.the_store.hold()
        calls = [asyncio.create_task(one.stream("t")) for _ in range(2)]
        await on.the_store.until_held(2)
        on.the_store.release()
        assert [await finish(call) for call in calls] == [True, True]
        assert on.service.require_handoff().tickets.lease.num_held <= 1
        one.end()
        await over(one, on)
        assert not on.service.verify()


async def test_a_publish_of_a_stream_that_is_not_computed_is_refused() -> None:
    async with world(with_store=True) as on:
        one = session(on)
        await finish(one.admit())
        assert await finish(one.stream("t"))
        with pytest.raises(OwnershipError, match=f"0 of {len(PROMPT)}"):
            one.publish("t", [7])
        one.abort()
        await over(one, on)
