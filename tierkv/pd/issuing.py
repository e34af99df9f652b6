"""The producer's steps of a ticket: begun, written, given up.

Of several prompts that come under one id, the first one has it, as far as the store keeps the first
of several values.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import msgspec

from tierkv.errors import DuplicateRequestError, HandoffError, StoreUnavailableError
from tierkv.pd.lease import ProducerLease
from tierkv.pd.ticket import OpenTicket, Ticket
from tierkv.pd.tickets import FAILED, PROGRESS, WHOLE, Tickets


async def check_free(
    tickets: Tickets, lease: ProducerLease, ticket_id: str, digests: Sequence[bytes]
) -> None:
    """Raise DuplicateRequestError if somebody may still claim another prompt than the one of these
    blocks under this id: it is whole and nobody claimed it, or is being computed. The same prompt
    may be handed over again. What cannot be read is in nobody's way."""
    with suppress(HandoffError, StoreUnavailableError):
        # In the order opposite to that in which they are written: one of the two is seen.
        for found in (
            await _coming(tickets, lease, ticket_id),
            await _unclaimed(tickets, ticket_id),
        ):
            if found is None or tickets.has_expired(found) or found.digests == tuple(digests):
                continue
            raise DuplicateRequestError(
                f"the ticket id is in use by {found.producer}, for another prompt of "
                f"{found.num_tokens} tokens that nobody has claimed yet"
            )


async def begin(tickets: Tickets, lease: ProducerLease, ticket: OpenTicket) -> None:
    """Say that a ticket will come, in the place of what an earlier hand-off of its id left. Raises
    DuplicateRequestError if another prompt was faster, and StoreUnavailableError."""
    if await _is_there(tickets, ticket.ticket_id):
        await check_free(tickets, lease, ticket.ticket_id, ticket.digests)
        await tickets.forget_ended(ticket.ticket_id)
    await _take(tickets, lease, ticket)
    await tickets.tell(ticket.ticket_id, f"{PROGRESS}0")


async def complete(tickets: Tickets, lease: ProducerLease, ticket: Ticket) -> None:
    """Write the ticket of a prompt of which every block is stored. Raises as `begin` does."""
    await _take(tickets, lease, ticket)
    await tickets.tell(ticket.ticket_id, WHOLE)


async def give_up(tickets: Tickets, ticket: OpenTicket, failure: str) -> None:
    """Tell those who wait why there will be no ticket, unless another producer has begun it
    meanwhile. Raises StoreUnavailableError, and HandoffError if what is there is damaged."""
    found = await tickets.read_open(ticket.ticket_id)
    if found is None or found == ticket:
        await tickets.put(msgspec.structs.replace(ticket, failure=failure))
        await tickets.tell(ticket.ticket_id, FAILED)


async def _take(tickets: Tickets, lease: ProducerLease, ticket: Ticket | OpenTicket) -> None:
    """Put it where nothing is, which the store knows best, or what is in nobody's way."""
    if not await tickets.put(ticket, only_new=True):
        await check_free(tickets, lease, ticket.ticket_id, ticket.digests)
        await tickets.put(ticket)


async def _is_there(tickets: Tickets, ticket_id: str) -> bool:
    try:
        return await tickets.read(ticket_id) is not None
    except HandoffError:  # damaged
        return True


async def _unclaimed(tickets: Tickets, ticket_id: str) -> Ticket | None:
    ticket = await tickets.read(ticket_id)
    return None if ticket is None or await tickets.is_claimed(ticket) else ticket


async def _coming(tickets: Tickets, lease: ProducerLease, ticket_id: str) -> OpenTicket | None:
    """The open ticket, if somebody still computes its prompt."""
    opened = await tickets.read_open(ticket_id)
    if opened is None or opened.failure or not await lease.is_alive(opened.incarnation):
        return None
    return opened
