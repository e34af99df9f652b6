"""What can be said of a ticket right now, without waiting for it."""

from __future__ import annotations

from enum import Enum

import msgspec

from tierkv.errors import HandoffError, StoreUnavailableError
from tierkv.pd.lease import ProducerLease
from tierkv.pd.ticket import OpenTicket, Ticket
from tierkv.pd.tickets import Tickets


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


async def look(tickets: Tickets, lease: ProducerLease, ticket_id: str) -> TicketStatus:
    """A few small reads. Raises BadRequestError if the id is no text, and nothing else: what goes
    wrong is a state, too."""
    try:
        return await _look(tickets, lease, ticket_id)
    except HandoffError as error:
        return TicketStatus(ticket_id=ticket_id, state=Standing(error.reason), detail=str(error))
    except StoreUnavailableError as error:
        return TicketStatus(ticket_id=ticket_id, state=Standing.UNAVAILABLE, detail=str(error))


async def _look(  # noqa: PLR0911 - a table of states
    tickets: Tickets, lease: ProducerLease, ticket_id: str
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
    if not await lease.is_alive(opened.incarnation):
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
