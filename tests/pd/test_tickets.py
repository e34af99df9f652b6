"""Tickets: acknowledged, of any tenant, waited for without hammering, and optional where a policy
says so."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tests.latch import finish, turns, until
from tests.pd import nodes
from tests.pd.nodes import claim, publish, settings, tokens
from tests.sessions import begin_request, claim_request, open_stream, publish_request
from tests.storage.values import TurnedClock
from tests.world import World, fingerprint
from tierkv.cache.keys import Names, Prompt, pack
from tierkv.errors import BadRequestError, HandoffError
from tierkv.pd.claims import ClaimPolicy
from tierkv.pd.tickets import Standing
from tierkv.storage.memory import MemoryStore
from tierkv.storage.protocol import PutItem


@asynccontextmanager
async def pair(
    clock: TurnedClock | None = None, **cache: Any
) -> AsyncIterator[tuple[World, World]]:
    chosen = settings(claimed_ttl_s=30)
    async with nodes.pair(chosen, chosen, clock=clock, **cache) as both:
        yield both


async def test_the_producer_hears_who_claimed_its_ticket() -> None:
    async with pair() as (prefill, decode):
        await publish(prefill, tokens(9))
        released: list[str] = []
        handoff = prefill.service.require_handoff()
        assert handoff.ledger.state_of("ticket") is Standing.WHOLE
        handoff.ledger.hold("ticket", lambda _: released.append("pin"))
        await turns(20)
        await claim(decode, tokens(9))
        await until(
            lambda: handoff.ledger.state_of("ticket") is Standing.ACKNOWLEDGED,
            "an acknowledgement",
        )
        assert released == ["pin"]
        assert handoff.ledger.num_holds == 0


async def test_a_ticket_nobody_claims_lets_go_of_what_it_held() -> None:
    async with pair() as (prefill, _):
        await publish(prefill, tokens(9))
        handoff = prefill.service.handoff
        assert handoff is not None
        released: list[str] = []
        handoff.ledger.hold("ticket", lambda _: released.append("pin"))
    assert released == ["pin"]  # at the latest when the node ends


async def test_an_acknowledged_ticket_stays_for_a_while_and_then_says_so() -> None:
    clock = TurnedClock()
    async with pair(clock) as (prefill, decode):
        await publish(prefill, tokens(9))
        await claim(decode, tokens(9))
        assert (await decode.service.ticket_state("ticket")).state is Standing.ACKNOWLEDGED
        await claim(decode, tokens(9))  # by another node, should the first one have died
        clock.now += settings(claimed_ttl_s=30).claimed_ttl_s + 1
        with pytest.raises(HandoffError, match="claimed by tierkv") as error:
            await claim(decode, tokens(9), deadline_s=1.0)
        assert error.value.reason == "already_claimed"
        status = await decode.service.ticket_state("ticket")
        assert (status.state, status.claimer) == (Standing.ACKNOWLEDGED, "tierkv")
        clock.now += 2 * 86_400
        assert (await decode.the_store.list("tierkv", limit=100)).values == ()


async def test_states_are_told_without_waiting() -> None:
    clock = TurnedClock()
    async with pair(clock) as (prefill, decode):
        service = decode.service
        assert (await service.ticket_state("ticket")).state is Standing.NOT_YET
        await publish(prefill, tokens(9))
        status = await service.ticket_state("ticket")
        assert (status.state, status.num_tokens, status.num_blocks) == (Standing.WHOLE, 9, 3)
        decode.the_store.fail_next(1)
        assert (await service.ticket_state("ticket")).state is Standing.UNAVAILABLE
        clock.now += settings(claimed_ttl_s=30).ticket_ttl_s + 1
        assert (await service.ticket_state("ticket")).state is Standing.EXPIRED
        await service.acknowledge("ticket")
        assert await service.forget_ticket("ticket")
        assert not await service.forget_ticket("ticket")
        assert (await service.ticket_state("ticket")).state is Standing.NOT_YET
        with pytest.raises(HandoffError):
            await service.acknowledge("ticket")


async def test_a_ticket_is_for_any_tenant_that_both_nodes_serve() -> None:
    tenant = fingerprint(tenant="them")
    async with pair() as (prefill, decode):
        names = [node.service.open_fingerprint(tenant) for node in (prefill, decode)]
        prompt = Prompt.of(tokens(9), 4, space=names[0])
        request = await finish(begin_request(prefill.service, "p", prompt, max_new_tokens=0))
        prefill.compute(request, tokens(9))
        await finish(prefill.service.scheduler.commit(request, pack(tokens(9))))
        await finish(publish_request(prefill.service, request, "ticket", [1]))
        prefill.service.scheduler.end(request)
        with pytest.raises(HandoffError, match="tenant") as error:  # the service's own is another
            await claim(decode, tokens(9))
        assert error.value.reason == "incompatible"
        claimed, ticket = await finish(
            claim_request(decode.service, "c", "ticket", prompt, max_new_tokens=0)
        )
        await finish(claimed.gate.all_layers(100.0))
        assert ticket is not None
        assert ticket.fingerprint == tenant.readable()
        decode.check_kv(claimed, tokens(9), 9)
        await decode.ended(claimed)


async def test_who_recomputes_all_asks_storage_for_nothing() -> None:
    async with pair() as (prefill, decode):
        await publish(prefill, tokens(9))
        before = decode.the_store.num_operations
        request, ticket = await finish(
            claim_request(
                decode.service,
                "claim",
                "ticket",
                decode.prompt(tokens(9)),
                max_new_tokens=1,
                policy=ClaimPolicy.RECOMPUTE_ALL,
            )
        )
        assert (ticket, request.cached_tokens) == (None, 0)
        assert decode.the_store.num_operations == before
        await decode.ended(request)


@pytest.mark.parametrize("policy", [ClaimPolicy.WHOLE, ClaimPolicy.RECOMPUTE])
async def test_a_ticket_for_another_prompt_is_refused_whatever_the_policy(
    policy: ClaimPolicy,
) -> None:
    async with pair() as (prefill, decode):
        await publish(prefill, tokens(9))
        with pytest.raises(HandoffError) as error:
            await claim(decode, tokens(10), policy=policy)
        assert error.value.reason == "other_prompt"


async def test_waiting_for_a_ticket_is_not_hammering() -> None:
    async with pair() as (prefill, decode):
        before, began = decode.the_store.num_operations, time.monotonic()
        waiting = asyncio.create_task(claim(decode, tokens(9), deadline_s=100.0))
        await asyncio.sleep(0.7)
        looks = 1 + int(time.monotonic() - began)  # the first, and one each second
        assert decode.the_store.num_operations - before <= 2 * looks  # the ticket, the open ticket
        await publish(prefill, tokens(9))
        await finish(waiting)


@pytest.mark.promise("Everything a ticket stores has a time to live.")
async def test_a_ticket_leaves_nothing_but_what_has_a_time_to_live() -> None:
    clock = TurnedClock()
    async with pair(clock) as (prefill, decode):
        await publish(prefill, tokens(9))
        await claim(decode, tokens(9))
        page = await decode.the_store.list("tierkv", limit=100)
        assert all(value.expires_at is not None for value in page.values)
        kinds = {value.name.split(":")[1] for value in page.values}
        assert kinds == {prefill.service.fingerprint.short, "ticket", "ack"}
        assert Names("tierkv", "").open_ticket("ticket") not in {v.name for v in page.values}
        clock.now += 2 * 86_400
        assert (await decode.the_store.list("tierkv", limit=100)).values == ()


async def copied(node: World, source: str, target: str) -> None:
    """Put what lies under one name under another, as a mistake or a restored backup does."""
    value = await finish(node.the_store.get(source, max_bytes=1 << 20))
    assert value is not None
    await finish(node.the_store.put([PutItem(target, (value,), ttl_s=60, keep_existing=False)]))


@pytest.mark.promise("A ticket under another ticket's name counts as damaged.")
async def test_a_ticket_under_another_tickets_name_is_damaged() -> None:
    async with pair() as (prefill, decode):
        names = Names("tierkv", "")
        await publish(prefill, tokens(9), "other")
        await copied(prefill, names.ticket("other"), names.ticket("ticket"))
        with pytest.raises(HandoffError, match="other") as refused:
            await claim(decode, tokens(9))
        assert refused.value.reason == "damaged"
        state = await finish(decode.service.ticket_state("ticket"))
        assert state.state is Standing.DAMAGED
        assert (
            await finish(decode.the_store.get(names.acknowledgement("other"), max_bytes=99)) is None
        )
        await publish(prefill, tokens(9))  # which replaces what is damaged
        await claim(decode, tokens(9))


@pytest.mark.parametrize("has_ttl", [True, False])
async def test_a_lease_under_another_producers_name_says_nothing_and_an_old_one_still_does(
    monkeypatch: pytest.MonkeyPatch, *, has_ttl: bool
) -> None:
    async with pair() as (prefill, decode):
        names, store = Names("tierkv", ""), prefill.the_store
        capabilities = replace(store.capabilities, has_ttl=has_ttl)
        monkeypatch.setattr(MemoryStore, "capabilities", property(lambda _: capabilities))
        assert prefill.service.handoff is not None
        assert decode.service.handoff is not None
        ours, theirs = prefill.service.handoff.tickets.lease, decode.service.handoff.tickets.lease
        with ours.held():
            await finish(ours.written())
            assert await finish(theirs.is_alive(ours.incarnation))
            await copied(prefill, names.producer(ours.incarnation), names.producer("another"))
            assert not await finish(theirs.is_alive("another"))
        old = f"{time.time() + 60:.3f}".encode()  # as nodes wrote it before it named its producer
        await finish(store.put([PutItem(names.producer("old"), (old,), ttl_s=60)]))
        assert await finish(theirs.is_alive("old"))
        past = f"{time.time() - 60:.3f}".encode()  # a store that drops nothing has it yet
        await finish(store.put([PutItem(names.producer("past"), (past,), ttl_s=60)]))
        assert await finish(theirs.is_alive("past")) == has_ttl


@pytest.mark.parametrize("ticket_id", ["\ud800", "chat-\udcff", "a" * 100_000 + "\udfff"])
async def test_an_id_that_is_no_text_is_refused_by_every_call_and_leaves_nothing(
    ticket_id: str,
) -> None:
    async with pair() as (prefill, decode):
        request = await prefill.admit(tokens(9))
        await prefill.prefill(request, tokens(9))
        service, prompt = decode.service, decode.prompt(tokens(9))
        with pytest.raises(BadRequestError, match="is not valid UTF-8"):
            await finish(publish_request(prefill.service, request, ticket_id, [1]))
        with pytest.raises(BadRequestError, match="is not valid UTF-8"):
            open_stream(prefill.service, request, ticket_id)
        prefill.service.scheduler.end(request)
        for policy in ClaimPolicy:
            with pytest.raises(BadRequestError, match="is not valid UTF-8"):
                await finish(
                    claim_request(
                        service, "claim", ticket_id, prompt, max_new_tokens=1, policy=policy
                    )
                )
        for call in (
            service.ticket_state(ticket_id),
            service.forget_ticket(ticket_id),
            service.acknowledge(ticket_id),
            service.check_ticket_is_free(ticket_id, prompt),
        ):
            with pytest.raises(BadRequestError, match="is not valid UTF-8"):
                await finish(call)
        await prefill.settle()
        await decode.settle()
        await publish(prefill, tokens(9))
        await claim(decode, tokens(9))


async def test_an_acknowledgement_is_of_the_ticket_that_was_claimed_and_of_no_later_one() -> None:
    async with pair() as (prefill, decode):
        await publish(prefill, tokens(9))
        await claim(decode, tokens(9))
        assert prefill.service.handoff is not None
        tickets = prefill.service.handoff.tickets
        ticket = await finish(tickets.read("ticket"))
        assert ticket is not None
        assert await finish(tickets.is_claimed(ticket))
        later = msgspec.structs.replace(ticket, created_at=ticket.created_at + 1)
        assert not await finish(tickets.is_claimed(later))


async def test_a_hand_off_that_begins_again_is_not_taken_for_the_one_before_it() -> None:
    async with pair() as (prefill, decode):
        await publish(prefill, tokens(9))
        await claim(decode, tokens(9))
        assert prefill.service.handoff is not None
        tickets = prefill.service.handoff.tickets
        with tickets.lease.held():
            await finish(tickets.begin(tickets.new_open("ticket", prefill.prompt(tokens(9)))))
            state = await finish(decode.service.ticket_state("ticket"))
            assert state.state is Standing.OPEN
