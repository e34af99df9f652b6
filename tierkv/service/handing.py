"""The hand-off as the service offers it: with its deadlines, and an error without storage; and
publishes that outlive whoever asked for them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from tierkv.cache.keys import Prompt
from tierkv.errors import HandoffError, ShuttingDownError, TierKVError
from tierkv.gpu.protocol import Event
from tierkv.pd import ledger
from tierkv.pd.claims import ClaimPolicy, Claims
from tierkv.pd.handoff import Handoff, Published
from tierkv.pd.ledger import TicketStatus, TicketView
from tierkv.pd.settings import HandoffSettings
from tierkv.pd.stream import PublishStream
from tierkv.pd.ticket import ClaimProblem, Ticket
from tierkv.sched.request import Request, RequestSpec
from tierkv.sched.tiers import Tiers
from tierkv.tasks import expected, task_group

log = logging.getLogger("tierkv.handoff")


class Handing:
    """Every call that needs the store raises HandoffError without one."""

    def __init__(
        self, settings: HandoffSettings, tiers: Tiers, handoff: Handoff, claims: Claims
    ) -> None:
        self._settings = settings
        self._tiers = tiers
        self._handoff = handoff
        self._claims = claims

    @property
    def handoff(self) -> Handoff | None:
        """None without a storage tier to hand over through."""
        return self._handoff if self._tiers.copies.storage is not None else None

    @property
    def claims(self) -> Claims | None:
        return self._claims if self._tiers.copies.storage is not None else None

    def _the_handoff(self) -> Handoff:
        if self._tiers.copies.storage is None:
            raise _no_storage()
        return self._handoff

    async def publish(
        self,
        request: Request,
        ticket_id: str,
        first_tokens: Sequence[int],
        *,
        after: Sequence[Event] = (),
        sampling: Mapping[str, str] | None = None,
    ) -> Published:
        """Store the request's computed prompt, and a ticket for it; see Handoff.publish."""
        deadline_s = self._settings.publish_deadline_s
        return await self._the_handoff().publish(
            request,
            ticket_id,
            first_tokens,
            after=after,
            sampling=sampling,
            deadline_s=deadline_s,
        )

    def stream(self, request: Request, ticket_id: str) -> PublishStream | None:
        """Publish the request's prompt while it is computed; None if the settings say otherwise.
        See PublishStream."""
        handoff = self._the_handoff()
        if not self._settings.streams:
            return None
        deadline_s = self._settings.publish_deadline_s
        return PublishStream(handoff, request, ticket_id, deadline_s=deadline_s)

    async def claim(
        self,
        spec: RequestSpec,
        ticket_id: str,
        policy: ClaimPolicy,
        deadline_s: float | None,
        sampling: Mapping[str, str] | None = None,
    ) -> tuple[Request, Ticket | None]:
        """See Service.claim."""
        self._the_handoff()
        if deadline_s is None:
            deadline_s = self._settings.claim_deadline_s
        return await self._claims.claim(
            spec, ticket_id, policy=policy, deadline_s=deadline_s, sampling=sampling or {}
        )

    async def ticket_state(self, ticket_id: str) -> TicketStatus:
        """How a ticket stands, of whatever node it is; without waiting for it."""
        handoff = self._the_handoff()
        return await ledger.look(handoff.tickets, ticket_id)

    async def check_ticket_is_free(self, ticket_id: str, prompt: Prompt) -> None:
        """See Tickets.check_free. A store that does not answer in time is in nobody's way."""
        handoff = self._the_handoff()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.lookup_deadline_s):
                digests = [key.digest for key in handoff.tickets.keys_of(prompt)]
                await handoff.tickets.check_free(ticket_id, digests)

    async def forget_ticket(self, ticket_id: str) -> bool:
        """Delete a ticket, whole or open; whether there was one. Raises StoreUnavailableError."""
        return await self._the_handoff().tickets.forget(ticket_id)

    async def acknowledge(self, ticket_id: str) -> None:
        """Say that a ticket was claimed, for an engine that did not claim it through `claim`.
        Raises HandoffError if there is none, and StoreUnavailableError."""
        tickets = self._the_handoff().tickets
        ticket = await tickets.read(ticket_id)
        if ticket is None:
            raise HandoffError(ClaimProblem.NOT_YET.value, f"there is no ticket {ticket_id[:80]!r}")
        await tickets.acknowledge(ticket)

    def issued_tickets(self) -> list[TicketView]:
        """What became of the last tickets of this node, the newest first."""
        return self._handoff.ledger.views


@dataclass(slots=True, eq=False)
class Publishing:
    """One prompt on its way out under one ticket.

    stream: where it goes out while it is computed; None once all of it is computed.
    refused: why the task was cancelled, if it was.
    """

    task: asyncio.Task[Published | TierKVError]
    stream: PublishStream | None = None
    refused: TierKVError | None = None

    @property
    def has_failed(self) -> bool:
        if not self.task.done():
            return False
        return self.task.cancelled() or isinstance(self.task.result(), TierKVError)

    async def published(self) -> Published:
        """The outcome; a cancel ends the wait alone. Raises HandoffError, StoreUnavailableError,
        DuplicateRequestError, or why it was given up."""
        await asyncio.wait([self.task])
        if self.task.cancelled():
            raise self.refused or ShuttingDownError("this node was stopped while publishing")
        outcome = self.task.result()
        if isinstance(outcome, TierKVError):
            raise outcome
        return outcome

    def give_up(self, why: TierKVError) -> None:
        """There will be no ticket; who waits for the outcome gets `why`."""
        self.refused = self.refused or why
        self.task.cancel()


class Publishings:
    """The publishes under way, each in a task of its own. Leaving `running` waits for them."""

    def __init__(self) -> None:
        self._open: set[Publishing] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with task_group() as self._tasks:
            yield

    def start(
        self, work: Coroutine[None, None, Published], stream: PublishStream | None = None
    ) -> Publishing:
        """Run `work`, waited for or not. An expected failure is its outcome, not the service's."""
        task = self._tasks.create_task(_outcome(work), name="tierkv-publish")
        publishing = Publishing(task, stream)
        self._open.add(publishing)

        # Not in the task: one that is cancelled before its first step never runs its `finally`.
        def ended(_: asyncio.Task[Published | TierKVError]) -> None:
            self._open.discard(publishing)
            work.close()

        task.add_done_callback(ended)
        return publishing

    def give_up(self) -> None:
        """Give all up; no ticket will exist for them."""
        for publishing in list(self._open):
            publishing.give_up(ShuttingDownError("this node was stopped while publishing"))


async def _outcome(work: Coroutine[None, None, Published]) -> Published | TierKVError:
    outcome = await expected(work)
    if isinstance(outcome, TierKVError):
        log.warning("a prompt was not published: %s", outcome)
    return outcome


def _no_storage() -> HandoffError:
    return HandoffError(
        ClaimProblem.UNAVAILABLE.value,
        "this node has no storage tier: set storage.url to hand prompts over",
    )
