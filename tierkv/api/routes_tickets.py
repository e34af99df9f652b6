"""The routes of tickets: how a hand-off stands, as storage knows it."""

from __future__ import annotations

from dataclasses import replace

from aiohttp import web

from tierkv.api import bodies
from tierkv.api.access import Access
from tierkv.api.refusals import UnknownIdError
from tierkv.api.route import Route
from tierkv.api.routes_base import Routes, principal_of
from tierkv.api.types_node import TicketAnswer, TicketState
from tierkv.cache.fingerprint import differences
from tierkv.errors import HandoffError, StoreUnavailableError
from tierkv.pd.handoff import Handoff
from tierkv.pd.ticket import OpenTicket, Ticket

_PATH = "/v1/tickets/{id}"


class TicketRoutes(Routes):
    def routes(self) -> list[Route]:
        return [
            Route(
                method="GET",
                path=_PATH,
                handler=self.look,
                access=Access.WRITE,
                summary="Tell how a ticket stands, without waiting for it.",
                answer=TicketAnswer,
            ),
            Route(
                method="DELETE",
                path=_PATH,
                handler=self.forget,
                access=Access.WRITE,
                summary="Forget a ticket; its blocks stay until their time is over.",
                answer=TicketAnswer,
            ),
            Route(
                method="POST",
                path=f"{_PATH}/ack",
                handler=self.acknowledge,
                access=Access.WRITE,
                summary="Say that a ticket was claimed, so that its producer holds nothing for it.",
                answer=TicketAnswer,
            ),
        ]

    async def look(self, request: web.Request) -> web.Response:
        async with self._node.call():
            return bodies.answer(request, await self._state(request))

    async def forget(self, request: web.Request) -> web.Response:
        async with self._node.call():
            answer = await self._state(request)
            name = self._ticket_name(request)
            tickets = self._handoff().tickets
            await tickets.forget(name)
            await tickets.forget_open(name)
        return bodies.answer(request, answer)

    async def acknowledge(self, request: web.Request) -> web.Response:
        async with self._node.call():
            tickets = self._handoff().tickets
            ticket = await tickets.read(self._ticket_name(request))
            if ticket is None:
                raise self._unknown(request)
            await tickets.acknowledge(ticket)
            answer = await self._state(request)
        return bodies.answer(request, answer)

    def _handoff(self) -> Handoff:
        handoff = self._node.service.handoff
        if handoff is None:
            raise StoreUnavailableError("this node has no storage tier, and so no tickets")
        return handoff

    def _ticket_name(self, request: web.Request) -> str:
        _, ticket_id = self._key(request)
        return self._node.ticket_name(ticket_id, principal_of(request).tenant)

    def _unknown(self, request: web.Request) -> UnknownIdError:
        return UnknownIdError(f"there is no ticket {request.match_info['id']!r}")

    async def _state(self, request: web.Request) -> TicketAnswer:
        """Raises UnknownIdError and StoreUnavailableError."""
        handoff = self._handoff()
        name = self._ticket_name(request)
        ticket_id = request.match_info["id"]
        try:
            ticket = await handoff.tickets.read(name)
            coming = None if ticket else await handoff.tickets.read_open(name)
        except HandoffError as error:
            return TicketAnswer(ticket_id=ticket_id, state=TicketState.DAMAGED, detail=str(error))
        if ticket is None and coming is None:
            raise self._unknown(request)
        if ticket is None:
            assert coming is not None, "one of the two is there"
            state = TicketState.FAILED if coming.failure else TicketState.OPEN
            return _answer(ticket_id, coming, state, detail=coming.failure)
        return await self._state_of(request, handoff, ticket, name)

    async def _state_of(
        self, request: web.Request, handoff: Handoff, ticket: Ticket, name: str
    ) -> TicketAnswer:
        ticket_id, node = request.match_info["id"], self._node
        space = node.space(principal_of(request).tenant)
        ours = node.service.fingerprint_of(space).readable()
        if ours != ticket.fingerprint:
            detail = ", ".join(differences(ours, ticket.fingerprint))
            return _answer(ticket_id, ticket, TicketState.INCOMPATIBLE, detail=detail)
        if node.clock.wall() > ticket.expires_at:
            return _answer(ticket_id, ticket, TicketState.EXPIRED)
        claimed = await handoff.tickets.read_acknowledgement(name)
        if claimed is not None and claimed.created_at == ticket.created_at:
            return _answer(ticket_id, ticket, TicketState.CLAIMED, claimer=claimed.claimer)
        keys = ticket.keys()
        present = await handoff.count_present([replace(key, space=space) for key in keys])
        is_whole = present == len(ticket.digests)
        state = TicketState.WHOLE if is_whole else TicketState.INCOMPLETE
        return _answer(ticket_id, ticket, state, present=present)


def _answer(
    ticket_id: str,
    ticket: Ticket | OpenTicket,
    state: TicketState,
    *,
    detail: str = "",
    present: int | None = None,
    claimer: str | None = None,
) -> TicketAnswer:
    return TicketAnswer(
        ticket_id=ticket_id,
        state=state,
        detail=detail,
        num_tokens=ticket.num_tokens,
        num_blocks=len(ticket.digests),
        present_blocks=present,
        producer=ticket.producer,
        claimer=claimer,
        expires_at=ticket.expires_at,
    )
