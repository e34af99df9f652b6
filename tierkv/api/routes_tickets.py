"""The routes of tickets: how a hand-off stands, as storage knows it."""

from __future__ import annotations

from dataclasses import replace

from aiohttp import web

from tierkv.api.access import Access
from tierkv.api.refusals import UnknownIdError
from tierkv.api.route import Route
from tierkv.api.routes_base import Routes, principal_of
from tierkv.api.types_node import TicketAnswer, TicketState
from tierkv.errors import StoreUnavailableError
from tierkv.pd.handoff import Handoff
from tierkv.pd.status import Standing

_PATH = "/v1/tickets/{id}"
_STATES = {
    Standing.OPEN: TicketState.OPEN,
    Standing.PRODUCER_FAILED: TicketState.FAILED,
    Standing.PRODUCER_LOST: TicketState.LOST,
    Standing.WHOLE: TicketState.WHOLE,
    Standing.ACKNOWLEDGED: TicketState.CLAIMED,
    Standing.EXPIRED: TicketState.EXPIRED,
    Standing.INCOMPATIBLE: TicketState.INCOMPATIBLE,
    Standing.DAMAGED: TicketState.DAMAGED,
}


class TicketRoutes(Routes):
    @Route("GET", _PATH, Access.WRITE, answer=TicketAnswer)
    async def look(self, request: web.Request) -> TicketAnswer:
        """Tell how a ticket stands, without waiting for it."""
        async with self._node.call():
            return await self._state(request)

    @Route("DELETE", _PATH, Access.WRITE, answer=TicketAnswer)
    async def forget(self, request: web.Request) -> TicketAnswer:
        """Forget a ticket; its blocks stay until their time is over."""
        async with self._node.call():
            answer = await self._state(request)
            await self._node.service.forget_ticket(self._ticket_name(request))
        return answer

    @Route("POST", f"{_PATH}/ack", Access.WRITE, answer=TicketAnswer)
    async def acknowledge(self, request: web.Request) -> TicketAnswer:
        """Say that a ticket was claimed, so that its producer holds nothing for it."""
        async with self._node.call():
            tickets = self._handoff().tickets
            ticket = await tickets.read(self._ticket_name(request))
            if ticket is None:
                raise self._unknown(request)
            await tickets.acknowledge(ticket)
            return await self._state(request)

    def _handoff(self) -> Handoff:
        handoff = self._node.service.handoff
        if handoff is None:
            raise StoreUnavailableError("this node has no storage tier, and so no tickets")
        return handoff

    def _ticket_name(self, request: web.Request) -> str:
        return self._ticket(request, request.match_info["id"])

    def _unknown(self, request: web.Request) -> UnknownIdError:
        return UnknownIdError(f"there is no ticket {request.match_info['id']!r}")

    async def _state(self, request: web.Request) -> TicketAnswer:
        """Raises UnknownIdError and StoreUnavailableError."""
        handoff, name = self._handoff(), self._ticket_name(request)
        found = await self._node.service.ticket_state(name)
        if found.state is Standing.NOT_YET:
            raise self._unknown(request)
        if found.state is Standing.UNAVAILABLE:
            raise StoreUnavailableError(found.detail)
        state, present = _STATES[found.state], None
        if state is TicketState.WHOLE:
            present = await self._count_present(request, handoff, name)
            state = TicketState.WHOLE if present == found.num_blocks else TicketState.INCOMPLETE
        return TicketAnswer(
            ticket_id=request.match_info["id"],
            state=state,
            detail=found.detail,
            num_tokens=found.num_tokens,
            num_blocks=found.num_blocks,
            present_blocks=present,
            producer=found.producer,
            claimer=found.claimer,
            expires_at=found.expires_at,
        )

    async def _count_present(self, request: web.Request, handoff: Handoff, name: str) -> int:
        space = self._node.space(principal_of(request).tenant)
        ticket = await handoff.tickets.read(name)
        keys = ticket.keys() if ticket else []
        return await handoff.count_present([replace(key, space=space) for key in keys])
