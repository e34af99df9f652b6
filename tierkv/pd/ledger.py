"""What became of the tickets that this node published: claimed by whom, or out of time."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec

from tierkv.clock import Clock
from tierkv.errors import StoreUnavailableError
from tierkv.pd.status import Standing
from tierkv.pd.ticket import OpenTicket, Ticket
from tierkv.pd.tickets import Tickets, acknowledged_hint
from tierkv.tasks import background

_MOST_KEPT = 4096
_MOST_LOOKS = 64  # at a time: acknowledgements of which no hint came
_LOOK_EVERY_S = 5.0


class TicketView(msgspec.Struct, frozen=True, kw_only=True):
    """One ticket of this node, as it knows. claimer: who acknowledged it. Times in Unix seconds.

    ready_blocks: so many of num_blocks are stored. failure: why it will not come.
    """

    ticket_id: str
    state: Standing
    num_tokens: int
    num_blocks: int
    ready_blocks: int
    created_at: float
    expires_at: float
    claimer: str = ""
    claimed_at: float | None = None
    failure: str = ""


class Ledger:
    """The last tickets of this node. What is held for a ticket (`hold`) is let go once it is
    acknowledged, has failed or has expired."""

    def __init__(self, tickets: Tickets, clock: Clock, *, incarnation: str) -> None:
        self._tickets = tickets
        self._clock = clock
        self._topic = tickets.names.producer(incarnation)
        self._views: OrderedDict[str, TicketView] = OrderedDict()
        self._holds: dict[str, list[Callable[[], None]]] = {}
        self._came = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        try:
            async with background({"tierkv-ticket-ledger": self._keep_looking()}):
                yield
        finally:
            for ticket_id in list(self._holds):
                self._let_go(ticket_id)

    @property
    def views(self) -> list[TicketView]:
        """The newest first."""
        return list(reversed(self._views.values()))

    def view(self, ticket_id: str) -> TicketView | None:
        return self._views.get(ticket_id)

    @property
    def num_holds(self) -> int:
        return len(self._holds)

    def hold(self, ticket_id: str, release: Callable[[], None]) -> None:
        """Call `release` once nobody needs any more what was pinned for the ticket."""
        self._holds.setdefault(ticket_id, []).append(release)

    def opened(self, ticket: OpenTicket) -> None:
        self._put(ticket, Standing.OPEN, ready_blocks=0)

    def progressed(self, ticket_id: str, ready_blocks: int) -> None:
        self._change(ticket_id, ready_blocks=ready_blocks)

    def failed(self, ticket_id: str, failure: str) -> None:
        self._change(ticket_id, state=Standing.PRODUCER_FAILED, failure=failure)
        self._let_go(ticket_id)

    def published(self, ticket: Ticket) -> None:
        self._put(ticket, Standing.WHOLE, ready_blocks=len(ticket.digests))
        self._came.set()

    def _put(self, ticket: Ticket | OpenTicket, state: Standing, *, ready_blocks: int) -> None:
        self._views[ticket.ticket_id] = TicketView(
            ticket_id=ticket.ticket_id,
            state=state,
            num_tokens=ticket.num_tokens,
            num_blocks=len(ticket.digests),
            ready_blocks=ready_blocks,
            created_at=ticket.created_at,
            expires_at=ticket.expires_at,
        )
        self._views.move_to_end(ticket.ticket_id)
        while len(self._views) > _MOST_KEPT:
            oldest, _ = self._views.popitem(last=False)
            self._let_go(oldest)

    def _change(self, ticket_id: str, **fields: object) -> None:
        if ticket_id in self._views:
            self._views[ticket_id] = msgspec.structs.replace(self._views[ticket_id], **fields)

    def _let_go(self, ticket_id: str) -> None:
        for release in self._holds.pop(ticket_id, ()):
            release()

    def _waiting(self) -> list[TicketView]:
        return [view for view in self._views.values() if view.state is Standing.WHOLE]

    async def _keep_looking(self) -> None:
        """Look for an acknowledgement when it is told, for all now and then: hints can be lost."""
        while True:
            while not self._waiting():
                self._came.clear()
                await self._came.wait()
            with self._tickets.notifier.listen(self._topic) as listener:
                while waiting := self._waiting():
                    hint = await listener.next(_LOOK_EVERY_S)
                    told = [v for v in waiting if hint == acknowledged_hint(v.ticket_id)]
                    for view in told or waiting[:_MOST_LOOKS]:
                        await self._look(view)

    async def _look(self, view: TicketView) -> None:
        ticket_id = view.ticket_id
        if self._clock.wall() > view.expires_at:
            self._change(ticket_id, state=Standing.EXPIRED)
            self._let_go(ticket_id)
            return
        try:
            found = await self._tickets.read_acknowledgement(ticket_id)
        except StoreUnavailableError:
            return
        if found is not None and found.created_at == view.created_at:
            self._change(
                ticket_id,
                state=Standing.ACKNOWLEDGED,
                claimer=found.claimer,
                claimed_at=found.claimed_at,
            )
            self._let_go(ticket_id)
        elif ticket_id in self._views:
            self._views.move_to_end(ticket_id)  # others have their turn
