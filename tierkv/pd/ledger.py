"""What became of the tickets that this node published: claimed by whom, or out of time."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum

import msgspec

from tierkv.clock import Clock
from tierkv.errors import HandoffError, StoreUnavailableError
from tierkv.pd.settings import DirectPath
from tierkv.pd.tickets import OpenTicket, Ticket, Tickets, acknowledged_hint
from tierkv.tasks import background


@dataclass(slots=True)
class HandoffStats:
    """Counts since the start.

    early_blocks: stored before their prompt was computed, of published_blocks. failed_publishes:
    prompts whose ticket did not come. claims_without_ticket: those that a policy let compute.
    shown_blocks: of this node's tiers, that claimers were told of. device_blocks: that this node
    read from others' devices, to its own. memory_blocks, network_blocks: that it read from others'
    host tiers, on the same machine or not; what storage gave is in its own counts.
    damaged_direct_blocks: had changed meanwhile, and came from storage.
    """

    published_prompts: int = 0
    published_blocks: int = 0
    early_blocks: int = 0
    failed_publishes: int = 0
    claimed_prompts: int = 0
    claims_without_ticket: int = 0
    refused_claims: int = 0
    shown_blocks: int = 0
    device_blocks: int = 0
    memory_blocks: int = 0
    network_blocks: int = 0
    damaged_direct_blocks: int = 0
    failed_direct_reads: int = 0

    def read_from_host_tier(self, path: DirectPath, num_blocks: int) -> None:
        """So many blocks of another node's host tier came this way."""
        if path is DirectPath.MEMORY:
            self.memory_blocks += num_blocks
        else:
            self.network_blocks += num_blocks


class Standing(Enum):
    """How a ticket stands, from anybody's view."""

    NOT_YET = "not_yet"  # nothing is known of it
    OPEN = "open"  # its prompt is being computed
    WHOLE = "whole"  # every block was stored, it can be claimed
    ACKNOWLEDGED = "acknowledged"  # somebody claimed it; it may still be there for a while
    EXPIRED = "expired"
    DAMAGED = "damaged"
    INCOMPATIBLE = "incompatible"  # of a node whose KV cannot be used here
    PRODUCER_FAILED = "producer_failed"
    PRODUCER_LOST = "producer_lost"
    UNAVAILABLE = "storage_unavailable"


class TicketStatus(msgspec.Struct, frozen=True, kw_only=True):
    """detail: one sentence where there is something to say. Times in Unix seconds.

    What is not known of a ticket is None; num_blocks counts the tail.
    """

    ticket_id: str
    state: Standing
    detail: str = ""
    producer: str | None = None
    num_tokens: int | None = None
    num_blocks: int | None = None
    created_at: float | None = None
    expires_at: float | None = None
    claimer: str | None = None
    claimed_at: float | None = None


async def look(tickets: Tickets, ticket_id: str) -> TicketStatus:
    """A few small reads. Raises BadRequestError if the id is no text, and nothing else: what goes
    wrong is a state, too."""
    try:
        return await _look(tickets, ticket_id)
    except HandoffError as error:
        return TicketStatus(ticket_id=ticket_id, state=Standing(error.reason), detail=str(error))
    except StoreUnavailableError as error:
        return TicketStatus(ticket_id=ticket_id, state=Standing.UNAVAILABLE, detail=str(error))


async def _look(  # noqa: PLR0911 - a table of states
    tickets: Tickets, ticket_id: str
) -> TicketStatus:
    ticket = await tickets.read(ticket_id)
    claimed = await tickets.read_acknowledgement(ticket_id)
    if claimed is not None and (ticket is None or claimed.created_at == ticket.created_at):
        status = TicketStatus(ticket_id=ticket_id, state=Standing.ACKNOWLEDGED)
        if ticket is not None:
            status = _of(ticket, Standing.ACKNOWLEDGED)
        return msgspec.structs.replace(
            status, claimer=claimed.claimer, claimed_at=claimed.claimed_at
        )
    if ticket is not None:
        problem = tickets.problem_of(ticket)
        if problem is not None:
            return _of(ticket, Standing(problem.reason), str(problem))
        return _of(ticket, Standing.WHOLE)
    opened = await tickets.read_open(ticket_id)
    if opened is None:
        return TicketStatus(ticket_id=ticket_id, state=Standing.NOT_YET)
    if opened.failure:
        return _of(opened, Standing.PRODUCER_FAILED, opened.failure)
    if not await tickets.lease.is_alive(opened.incarnation):
        return _of(opened, Standing.PRODUCER_LOST)
    return _of(opened, Standing.OPEN)


def _of(ticket: Ticket | OpenTicket, state: Standing, detail: str = "") -> TicketStatus:
    return TicketStatus(
        ticket_id=ticket.ticket_id,
        state=state,
        detail=detail,
        producer=ticket.producer,
        num_tokens=ticket.num_tokens,
        num_blocks=len(ticket.digests),
        created_at=ticket.created_at,
        expires_at=ticket.expires_at,
    )


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


class TicketLedger:
    """The last tickets of this node. What is held for a ticket (`hold`) is let go once it is
    acknowledged, has failed or has expired."""

    def __init__(self, tickets: Tickets, clock: Clock) -> None:
        self._tickets = tickets
        self._clock = clock
        self._topic = tickets.names.producer(tickets.lease.incarnation)
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
