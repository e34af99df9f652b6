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
from tests.pd.nodes import claim, claimed, computed, publish, refused, settings, ticket_of
from tests.sessions import begin_request, claim_request, open_stream, publish_request
from tests.storage.values import TurnedClock
from tests.world import World, fingerprint, tokens
from tierkv.cache.keys import Names, Prompt
from tierkv.errors import BadRequestError, HandoffError
from tierkv.pd import tickets
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
        ledger, released = prefill.service.require_handoff().ledger, list[str]()
        for ticket in ("ticket", "nobody's"):
            await publish(prefill, tokens(9), ticket)
            ledger.hold(ticket, lambda _, ticket=ticket: released.append(ticket))  # type: ignore[misc]
        assert ledger.state_of("ticket") is Standing.WHOLE
        await turns(20)
        await claim(decode, tokens(9))
        await until(
            lambda: ledger.state_of("ticket") is Standing.ACKNOWLEDGED, "an acknowledgement"
        )
        assert (released, ledger.num_holds) == (["ticket"], 1)
    assert released == ["ticket", "nobody's"]  # at the latest when the node ends


async def test_a_ticket_that_the_ledger_has_no_room_for_holds_nothing_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tickets, "_MAX_KEPT", 1)
    released: list[str] = []
    async with pair() as (prefill, _):
        ledger = prefill.service.require_handoff().ledger
        ledger.hold("first", released.append)
        for ticket in ("first", "second"):
            await publish(prefill, ticket=ticket)
        assert ledger.state_of("first") is None
        assert (released, ledger.num_holds) == ([""], 0)


async def no_hint(*_: object) -> None:
    """It is lost."""


async def test_the_acknowledgement_of_an_earlier_ticket_is_not_that_of_a_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tickets, "_CHECK_EVERY_S", 0.01)
    async with pair() as (prefill, decode):
        ledger = prefill.service.require_handoff().ledger
        for name in ("first", "second"):
            await publish(prefill)
            num_reads = prefill.the_store.num_reads
            await until(lambda: prefill.the_store.num_reads > num_reads + 3, "checks")  # noqa: B023
            assert ledger.state_of("ticket") is Standing.WHOLE
            await claim(decode, name=name)
            await until(lambda: ledger.state_of("ticket") is Standing.ACKNOWLEDGED, "its claim")


async def test_a_check_of_an_earlier_ticket_does_not_end_the_one_that_took_its_id_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released: list[str] = []
    async with pair() as (prefill, decode):
        handoff = prefill.service.require_handoff()
        ledger, theirs = handoff.ledger, decode.service.require_handoff().tickets
        monkeypatch.setattr(theirs.notifier, "notify", no_hint)
        await publish(prefill)
        await turns(20)  # the ledger waits for a hint
        await claim(decode)
        await until(lambda: decode.service.tiers.work.num_tasks == 0, "the acknowledgement")
        await publish(prefill)
        ledger.hold("ticket", released.append)
        num_reads, ours = prefill.the_store.num_reads, handoff.tickets
        for _ in range(2):  # of the tickets that the ledger knew before, and of those of now
            await ours.notifier.notify(ours.names.producer(ours.lease.incarnation), "another")
            await turns(20)
        await until(lambda: prefill.the_store.num_reads > num_reads, "a check")
        assert (ledger.state_of("ticket"), released) == (Standing.WHOLE, [])


async def test_without_a_hint_every_ticket_is_looked_up_in_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tickets, "_CHECK_EVERY_S", 0.01)
    monkeypatch.setattr(tickets, "_MAX_CHECKED", 1)
    async with pair() as (prefill, decode):
        ledger = prefill.service.require_handoff().ledger
        monkeypatch.setattr(decode.service.require_handoff().tickets.notifier, "notify", no_hint)
        for ticket in ("a", "b"):
            await publish(prefill, ticket=ticket)
        await claim(decode, ticket="b")
        await until(lambda: ledger.state_of("b") is Standing.ACKNOWLEDGED, "its turn")
        assert ledger.state_of("a") is Standing.WHOLE


async def test_an_acknowledged_ticket_stays_for_a_while_and_then_says_so() -> None:
    clock = TurnedClock()
    async with pair(clock) as (prefill, decode):
        await publish(prefill, tokens(9))
        await claim(decode, tokens(9))
        assert (await decode.service.ticket_state("ticket")).state is Standing.ACKNOWLEDGED
        await claim(decode, tokens(9))  # by another node, should the first one have died
        clock.now += settings(claimed_ttl_s=30).claimed_ttl_s + 1
        error = await refused(decode, tokens(9), deadline_s=1.0)
        assert error.reason == "already_claimed"
        assert "claimed by tierkv" in str(error)
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
        await prefill.prefill(request, tokens(9))
        await finish(publish_request(prefill.service, request, "ticket", [1]))
        prefill.service.scheduler.end(request)
        error = await refused(decode, tokens(9))  # the service's own tenant is another
        assert error.reason == "incompatible"
        assert "tenant" in str(error)
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
        request = await claimed(decode, tokens(9), policy=ClaimPolicy.RECOMPUTE_ALL)
        assert request.cached_tokens == 0
        assert decode.the_store.num_operations == before
        await decode.ended(request)


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
        error = await refused(decode, tokens(9))
        assert error.reason == "damaged"
        assert "other" in str(error)
        state = await finish(decode.service.ticket_state("ticket"))
        assert state.state is Standing.DAMAGED
        assert not await finish(decode.the_store.exists([names.acknowledgement("other")]))
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
        ours, theirs = (
            prefill.service.require_handoff().tickets.lease,
            decode.service.require_handoff().tickets.lease,
        )
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
        request = await computed(prefill, tokens(9))
        service, prompt = decode.service, decode.prompt(tokens(9))
        with pytest.raises(BadRequestError, match="is not valid UTF-8"):
            open_stream(prefill.service, request, ticket_id)
        for call in (
            publish_request(prefill.service, request, ticket_id, [1]),
            *(claimed(decode, tokens(9), ticket_id, policy=policy) for policy in ClaimPolicy),
            service.ticket_state(ticket_id),
            service.forget_ticket(ticket_id),
            service.acknowledge(ticket_id),
            service.check_ticket_is_free(ticket_id, prompt),
        ):
            with pytest.raises(BadRequestError, match="is not valid UTF-8"):
                await finish(call)
        await prefill.ended(request)
        await decode.settle()
        await publish(prefill, tokens(9))
        await claim(decode, tokens(9))


async def test_an_acknowledgement_is_of_the_ticket_that_was_claimed_and_of_no_later_one() -> None:
    async with pair() as (prefill, decode):
        await publish(prefill, tokens(9))
        await claim(decode, tokens(9))
        tickets, ticket = prefill.service.require_handoff().tickets, await ticket_of(prefill)
        assert await finish(tickets.is_claimed(ticket))
        later = msgspec.structs.replace(ticket, created_at=ticket.created_at + 1)
        assert not await finish(tickets.is_claimed(later))


async def test_a_hand_off_that_begins_again_is_not_taken_for_the_one_before_it() -> None:
    async with pair() as (prefill, decode):
        await publish(prefill, tokens(9))
        await claim(decode, tokens(9))
        tickets = prefill.service.require_handoff().tickets
        with tickets.lease.held():
            await finish(tickets.begin(tickets.new_open("ticket", prefill.prompt(tokens(9)))))
            state = await finish(decode.service.ticket_state("ticket"))
            assert state.state is Standing.OPEN
