"""A decode node gets exactly what a prefill node published, or one reason why not."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest

from tests.latch import finish, turns, until
from tests.layouts import LAYOUTS
from tests.pd.nodes import TOKENS, claim, claimed, computed, pair, publish, refused, settings
from tests.sessions import publish_request
from tests.storage.values import TurnedClock, put_one
from tests.world import World, fingerprint, kv_of, tokens, world
from tierkv.cache.keys import Fingerprint, Names, pack
from tierkv.cache.layout import attention_layout
from tierkv.errors import HandoffError, OwnershipError, StoreCorruptError, StoreDownError
from tierkv.gpu.cpu import CpuEvent
from tierkv.gpu.protocol import Direction
from tierkv.pd import claims
from tierkv.pd.claims import ClaimPolicy
from tierkv.pd.handoff import NUM_GROUPS, Staging, groups_of
from tierkv.pd.settings import HandoffSettings
from tierkv.pd.tickets import OpenTicket, Ticket
from tierkv.sched.copies import GROUP_BLOCKS
from tierkv.sched.request import Request
from tierkv.storage import codec
from tierkv.storage.codec import HEADER_BYTES
from tierkv.storage.protocol import GetItem, GetOutcome, GetStatus, PutItem, PutOutcome, PutStatus

# What storage does is what these tests are about; test_direct*.py is about the rest.
# For claims of what is not there: others must not fail because a machine stood still.
SOON_S = 1.0


@asynccontextmanager
async def running(handoff: HandoffSettings | None = None) -> AsyncIterator[tuple[World, Request]]:
    """A node with a store, and a request of nine tokens that are computed."""
    async with world(with_store=True, handoff=handoff) as here:
        request = await computed(here, tokens(9))
        yield here, request
        await here.ended(request)


async def test_many_claims_at_once_get_one_fetch() -> None:
    async with pair(device_blocks=64) as (prefill, decode):
        await publish(prefill, tokens(16))

        async def one(number: int) -> None:
            decode.service.scheduler.end(await claimed(decode, tokens(16), name=f"c{number}"))

        async with asyncio.TaskGroup() as group:
            for number in range(6):
                group.create_task(one(number))
        assert decode.storage_stats.fetched_blocks == 4
        await decode.settle()


async def test_a_claim_waits_on_while_a_store_that_has_answered_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_answers = num_refusals = 0
    is_away = False
    async with pair() as (prefill, decode):
        get = decode.the_store.get

        async def maybe(name: str, *, max_bytes: int) -> bytes | None:
            nonlocal num_answers, num_refusals
            if is_away:
                num_refusals += 1
                raise StoreDownError("it is left alone")
            num_answers += 1
            return await get(name, max_bytes=max_bytes)

        monkeypatch.setattr(decode.the_store, "get", maybe)
        claiming = asyncio.create_task(claim(decode, tokens(9)))
        await until(lambda: num_answers > 3, "several looks")
        is_away = True
        await until(lambda: num_refusals > 1, "refused looks")
        is_away = False
        await publish(prefill, tokens(9))
        await finish(claiming)


@pytest.mark.promise("A ticket is written after every block.")
async def test_the_ticket_is_written_after_every_block() -> None:
    async with pair() as (prefill, decode):
        request = await computed(prefill, tokens(9))
        name = Names("tierkv", "").ticket("ticket")
        prefill.the_store.hold()
        async with asyncio.TaskGroup() as group:
            publishing = group.create_task(publish_request(prefill.service, request, "ticket", [1]))
            states = set()
            while not publishing.done():
                await until(lambda: publishing.done() or prefill.the_store.num_held > 0)
                blocks = await decode.the_store.exists(prefill.names(tokens(9)))
                states.add((blocks, await decode.the_store.exists([name])))
                prefill.the_store.let_through()
            assert {blocks for blocks, has_ticket in states if has_ticket} <= {3}
            assert {(0, 0), (3, 0)} <= states
        prefill.the_store.release()
        assert await decode.the_store.exists([name, *prefill.names(tokens(9))]) == 4
        prefill.service.scheduler.end(request)


async def test_what_is_published_is_what_the_kernels_of_the_commit_have_written() -> None:
    async with pair() as (prefill, decode), asyncio.TaskGroup() as group:
        prompt, kernels = tokens(9), CpuEvent()
        request = await prefill.admit(prompt)
        await finish(prefill.service.scheduler.commit(request, pack(prompt), after=(kernels,)))
        publishing = group.create_task(publish_request(prefill.service, request, "ticket", [1]))
        await turns(200)
        prefill.compute(request, prompt)
        kernels.reach()
        await publishing
        await prefill.ended(request)
        await claim(decode, prompt)


async def test_publishing_again_writes_only_the_ticket() -> None:
    async with pair() as (prefill, _):
        first = await publish(prefill, tokens(18), "a")
        second = await publish(prefill, tokens(18), "b")
        assert (first.present_blocks, second.present_blocks) == (0, 5)
        assert second.flushed_bytes == 0


@pytest.mark.promise("A store that fails for a moment only delays a publish.")
@pytest.mark.parametrize("failures", [1, 3])
async def test_a_store_that_fails_for_a_moment_costs_a_publish_only_that(failures: int) -> None:
    async with pair() as (prefill, decode):
        request = await computed(prefill, tokens(9))
        prefill.the_store.fail_next(failures)
        await finish(publish_request(prefill.service, request, "t", [1]))
        await prefill.ended(request)
        await claim(decode, tokens(9), "t")


async def test_a_store_with_an_open_breaker_is_not_asked_again_by_a_publish(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_asked = 0

    async def exists(_: Sequence[str]) -> int:
        nonlocal num_asked
        num_asked += 1
        raise StoreDownError("it is left alone")

    async with running() as (here, request):
        monkeypatch.setattr(here.the_store, "exists", exists)
        with pytest.raises(HandoffError, match="left alone"):
            await finish(publish_request(here.service, request, "t", [1]))
        assert num_asked == 1


async def test_a_block_that_the_store_refuses_is_offered_once_and_there_is_no_ticket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running() as (here, request):
        refused, num_refused = here.names(tokens(9))[1], 0
        store, put = here.the_store, here.the_store.put

        async def all_but_one(items: Sequence[PutItem]) -> list[PutOutcome]:
            nonlocal num_refused
            num_refused += sum(item.name == refused for item in items)
            done = iter(await put([item for item in items if item.name != refused]))
            full = PutOutcome(PutStatus.FULL, "full")
            return [full if item.name == refused else next(done) for item in items]

        monkeypatch.setattr(store, "put", all_but_one)
        with pytest.raises(HandoffError, match="did not accept"):
            await finish(publish_request(here.service, request, "t", [1]))
        assert num_refused == 1
        assert not await store.exists([Names("tierkv", "").ticket("t")])


async def test_a_store_that_refuses_blocks_is_not_offered_all_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt, num_offered = tokens(240), 0

    async def put(items: Sequence[PutItem]) -> list[PutOutcome]:
        nonlocal num_offered
        num_offered += len(items)
        return [PutOutcome(PutStatus.FULL, "full")] * len(items)

    async with pair() as (prefill, _):
        request = await computed(prefill, prompt)
        monkeypatch.setattr(prefill.the_store, "put", put)
        with pytest.raises(HandoffError, match="did not accept"):
            await finish(publish_request(prefill.service, request, "t", [1]))
        sizes = [len(group) for group in groups_of(0, 60)]
        assert num_offered <= sum(sizes[:NUM_GROUPS]) < 60
        await prefill.ended(request)


async def test_a_publish_has_a_deadline() -> None:  # fault 12
    async with running(HandoffSettings(publish_deadline_s=0.3)) as (here, request):
        here.the_store.hold()
        with pytest.raises(HandoffError, match="within") as error:
            await finish(publish_request(here.service, request, "ticket", [1]))
        assert error.value.reason == "storage_unavailable"
        here.the_store.release()


async def test_a_publish_whose_copy_fails_says_so() -> None:
    async with running() as (here, request):
        here.latch.fail_next(Direction.OFFLOAD, 2)  # the host's own copy, and the publish's
        with pytest.raises(HandoffError, match="caught fire"):
            await finish(publish_request(here.service, request, "ticket", [1]))
        await finish(publish_request(here.service, request, "ticket", [1]))


async def test_staging_slots_stay_lent_until_the_copy_of_a_cancelled_publish_has_ended() -> None:
    async with running() as (here, request):
        handoff = here.service.require_handoff()
        here.latch.hold(Direction.OFFLOAD)
        publishing = asyncio.create_task(publish_request(here.service, request, "t", [1]))
        await here.latch.until_held()
        publishing.cancel()
        await asyncio.wait([publishing])
        await turns(20)
        assert any("staging" in finding for finding in handoff.findings())
        here.latch.release()
        await until(lambda: handoff.findings() == [], "free slots")


@pytest.mark.parametrize("state", ["not computed", "half computed", "ended"])
async def test_only_a_running_request_whose_prompt_is_computed_can_be_published(state: str) -> None:
    """Anything else would put bytes under keys that are not theirs, for every node to read."""
    async with world(with_store=True) as here:
        request = await here.admit(tokens(9))
        if state != "not computed":
            here.compute(request, tokens(9))
            computed = tokens(9) if state == "ended" else tokens(4)
            await finish(here.service.scheduler.commit(request, pack(computed)))
        if state == "ended":
            here.service.scheduler.end(request)
        with pytest.raises(OwnershipError):
            await finish(publish_request(here.service, request, "ticket", [1]))
        assert await here.the_store.exists(here.names(tokens(9))[2:]) == 0
        if state != "ended":
            here.service.scheduler.end(request)
        await here.settle()


# Why a claim cannot be served


async def test_a_ticket_whose_time_is_over_is_expired() -> None:
    clock = TurnedClock()
    async with pair(clock=clock) as (prefill, decode):
        await publish(prefill, tokens(9))
        clock.now += settings().ticket_ttl_s + 1
        assert (await refused(decode, tokens(9))).reason == "expired"
        clock.now += 3600
        assert (await refused(decode, tokens(9), deadline_s=SOON_S)).reason == "not_yet"


async def test_a_damaged_ticket_or_something_else_in_its_place_is_damaged() -> None:
    async with pair() as (prefill, decode):
        await publish(prefill, tokens(9))
        name = Names("tierkv", "").ticket("ticket")
        content = await decode.the_store.get(name, max_bytes=1 << 20) or b""
        flipped = []
        for byte in (0, 4, 6, 20, 30, -1):
            flipped.append(bytearray(content))
            flipped[-1][byte] ^= 4
        for damaged in (*flipped, b"", b"x", b"TKVT" + bytes(40)):
            await put_one(decode.the_store, name, bytes(damaged), keep_existing=False)
            problem = await refused(decode, tokens(9))
            assert problem.reason == "damaged"
            assert "ticket" in str(problem)


OTHER_SIZE = attention_layout(
    num_layers=3, num_kv_heads=2, head_dim=4, dtype="float32", item_bytes=4, block_size=8
)
OTHERS = {
    "model": Fingerprint("other", LAYOUTS["gqa"]),
    "revision": fingerprint(revision="v2"),
    "weight_dtype": fingerprint(weight_dtype="float16"),
    "adapter": fingerprint(adapter="lora"),
    "tenant": fingerprint(tenant="someone else"),
    "layout": dataclasses.replace(fingerprint(), layout=LAYOUTS["mla"]),
    "block_size": dataclasses.replace(fingerprint(), layout=OTHER_SIZE),
    "key_format": dataclasses.replace(fingerprint(), key_format=99),
}


@pytest.mark.promise("A ticket of another prompt or model is refused with the difference.")
@pytest.mark.parametrize("field", OTHERS)
async def test_a_node_that_cannot_use_the_kv_names_the_field(field: str) -> None:
    async with pair(who=OTHERS[field]) as (prefill, decode):
        await publish(prefill, tokens(9))
        problem = await refused(decode, tokens(9))
        assert problem.reason == "incompatible"
        assert f"{field} (here " in str(problem)
        assert "someone else" not in str(problem)


@pytest.mark.promise("A ticket of another prompt or model is refused with the difference.")
@pytest.mark.parametrize(
    "other",
    [tokens(8), tokens(10), tokens(9, 1), [*tokens(8), 99], [99, *tokens(9)[1:]]],
    ids=["shorter", "longer", "other", "other tail", "other start"],
)
async def test_a_ticket_for_another_prompt_is_refused_whatever_the_policy(
    other: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: nobody has claimed it, so no other hand-off can take its place."""
    monkeypatch.setattr(claims, "_GRACE_S", 3600.0)
    async with pair() as (prefill, decode):
        await publish(prefill, tokens(9))
        for policy in (ClaimPolicy.WHOLE, ClaimPolicy.RECOMPUTE):
            problem = await refused(decode, other, deadline_s=1000.0, policy=policy)
            assert problem.reason == "other_prompt"
            assert "of 9 tokens" in str(problem)


@pytest.mark.parametrize("at", range(3))
async def test_a_damaged_block_is_damaged(at: int) -> None:
    async with pair() as (prefill, decode):
        await publish(prefill, tokens(9))
        name = prefill.names(tokens(9))[at]
        content = bytearray(await decode.the_store.get(name, max_bytes=1 << 20) or b"")
        content[HEADER_BYTES + 1] ^= 1
        await put_one(decode.the_store, name, bytes(content), keep_existing=False)
        assert (await refused(decode, tokens(9))).reason == "damaged"
        # Deleted by now, so the prefill node can publish it again.
        await publish(prefill, tokens(9))
        await claim(decode, tokens(9), name="again", new=0)


async def test_a_store_that_does_not_answer_is_unavailable_first_and_last() -> None:  # fault 12
    async with pair() as (prefill, decode):
        await publish(prefill, tokens(9))
        decode.the_store.fail_next(10_000)
        assert (await refused(decode, tokens(9), deadline_s=SOON_S)).reason == "storage_unavailable"
        decode.the_store.fail_next(0)
        await claim(decode, tokens(9), new=0)


async def test_a_claim_of_what_is_not_there_says_so_though_the_store_hangs_at_its_last_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with pair() as (_, decode):
        get, last = decode.the_store.get, Names("tierkv", "").acknowledgement("ticket")

        async def hang_at_last(name: str, *, max_bytes: int) -> bytes | None:
            if name == last:
                await asyncio.Event().wait()
            return await get(name, max_bytes=max_bytes)

        monkeypatch.setattr(decode.the_store, "get", hang_at_last)
        assert (await refused(decode, tokens(9), deadline_s=0.5)).reason == "not_yet"


async def test_without_a_store_there_is_no_handoff_and_it_says_so() -> None:
    async with world() as here:
        assert (await refused(here, tokens(9))).reason == "storage_unavailable"
        request = await here.admit(tokens(9))
        with pytest.raises(HandoffError, match=r"storage\.url"):
            await publish_request(here.service, request, "ticket", [1])
        here.service.scheduler.end(request)


@pytest.mark.promise("A zeroed tail or swapped blocks change the tokens of a node.")
def test_swapped_blocks_and_a_zeroed_tail_would_be_noticed() -> None:
    """Negative controls: the comparison used above tells what token equality would not."""
    rows = kv_of(tokens(8), LAYOUTS["gqa"])
    for plane in rows:
        swapped = np.concatenate([plane[4:], plane[:4]])
        assert not np.array_equal(swapped, plane)
        zeroed = plane.copy()
        zeroed[7] = 0
        assert not np.array_equal(zeroed, plane)


RECORD: dict[str, object] = {
    "ticket_id": "t",
    "fingerprint": {},
    "block_size": 4,
    "num_tokens": 9,
    "digests": (b"a" * 32, b"b" * 32, b"c" * 32),
    "first_tokens": (1, 2),
    "created_at": 1.5,
    "expires_at": 2.5,
    "producer": "node",
}


@pytest.mark.parametrize(
    "change",
    [
        {"expires_at": math.nan},  # it would never expire
        {"created_at": math.inf},
        {"digests": (b"a" * 32, b"b" * 31, b"c" * 32)},
        {"digests": (b"a" * 32, b"b" * 32)},  # fewer than its tokens have blocks
        {"num_tokens": 12, "block_size": -4},
    ],
)
def test_a_ticket_that_cannot_be_is_damaged_though_its_checksum_fits(
    change: dict[str, object],
) -> None:
    assert Ticket.decode(codec.seal(b"TKVT", 1, RECORD)).num_tokens == 9
    with pytest.raises(StoreCorruptError, match="version 2, not 1: run the same version"):
        Ticket.decode(codec.seal(b"TKVT", 2, RECORD))
    with pytest.raises(StoreCorruptError):
        Ticket.decode(codec.seal(b"TKVT", 1, RECORD | change))


def test_a_ticket_is_not_read_as_an_open_ticket() -> None:
    record = RECORD | {"incarnation": "i"}
    assert OpenTicket.decode(codec.seal(b"TKVO", 1, record)).incarnation == "i"
    with pytest.raises(StoreCorruptError):
        OpenTicket.decode(codec.seal(b"TKVT", 1, record))


async def test_who_wants_few_slots_does_not_overtake_who_wants_many() -> None:
    staging, order = Staging(0), list[int]()

    async def take(count: int) -> None:
        async with staging.group(count):
            order.append(count)

    async with staging.group(GROUP_BLOCKS), staging.group(GROUP_BLOCKS - 8):
        tasks = [asyncio.create_task(take(count)) for count in (GROUP_BLOCKS, 8)]
        await turns(3)
        assert not order
        tasks[0].cancel()
        await finish(tasks[1])
    assert order == [8]
    assert staging.num_free_groups == NUM_GROUPS


async def test_a_store_that_fails_one_read_is_asked_again_by_who_wants_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_failed = 0
    async with pair() as (prefill, decode):
        await publish(prefill)
        get_into = decode.the_store.get_into

        async def fail_once(items: Sequence[GetItem]) -> list[GetOutcome]:
            nonlocal num_failed
            if num_failed:
                return await get_into(items)
            num_failed = len(items)
            return [GetOutcome(GetStatus.FAILED, reason="a read that failed")] * len(items)

        monkeypatch.setattr(decode.the_store, "get_into", fail_once)
        request = await claimed(decode)
        assert num_failed
        assert request.cached_tokens == len(TOKENS)
        await decode.ended(request)
