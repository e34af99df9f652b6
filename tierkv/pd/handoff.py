"""Publish on the prefill node: to storage, and from the host tier for who can read it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial

import numpy as np

from tierkv.cache.copies import CopyState, Mask
from tierkv.cache.keys import Prompt, StoredKey
from tierkv.cache.node import Tier
from tierkv.cache.pool import Ids
from tierkv.errors import (
    DuplicateRequestError,
    HandoffError,
    OwnershipError,
    StoreUnavailableError,
    TransferError,
)
from tierkv.gpu.protocol import Event
from tierkv.pd.direct.address import DirectAddress
from tierkv.pd.ledger import HandoffStats, TicketLedger
from tierkv.pd.source import PeerSource
from tierkv.pd.staging import NUM_GROUPS, Staging, groups_of
from tierkv.pd.ticket import ClaimProblem, Ticket
from tierkv.pd.tickets import Tickets, check_id, check_written
from tierkv.sched.request import Request
from tierkv.sched.tiers import Tiers
from tierkv.tasks import abandonable, task_group
from tierkv.transfer.storage_io import StorageIO

log = logging.getLogger("tierkv.handoff")


class PublishWait(Enum):
    """What a prefill waits for before it answers."""

    PUBLISHED = "published"  # storage has all of it: a decode node will find it
    NOTHING = "nothing"  # the first token: publishing goes on, and its failure is the claimer's


@dataclass(frozen=True, slots=True)
class Published:
    """What a publish did: blocks of the prompt, of which so many were in storage already, and so
    many were stored while the prefill still computed."""

    ticket: Ticket
    num_blocks: int
    present_blocks: int
    flushed_bytes: int
    early_blocks: int = 0


class Handoff:
    """Publishes prompts: puts blocks, tail and ticket into storage. `running()` keeps this node's
    tickets, its ledger of them and its liveness lease open."""

    def __init__(  # noqa: PLR0913 - collaborators
        self,
        tiers: Tiers,
        storage: StorageIO,
        staging: Staging,
        tickets: Tickets,
        *,
        ledger: TicketLedger,
        source: PeerSource,
        stats: HandoffStats,
    ) -> None:
        self._tiers = tiers
        self._storage = storage
        self._staging = staging
        self.tickets = tickets
        self.ledger = ledger
        self.source = source
        self.stats = stats

    def findings(self) -> list[str]:
        """What is left over although nothing runs."""
        wrong = []
        if self._staging.num_free_groups != NUM_GROUPS:
            wrong.append("nothing runs, but staging slots are still lent")
        if self.tickets.lease.num_held:
            wrong.append(f"nothing runs, but {self.tickets.lease.num_held} tickets are open")
        return wrong + self.source.findings()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Leaving says at once that this node's open tickets will not come."""
        async with (
            self.tickets.notifier.running(),
            self.tickets.lease.running(),
            self.source.running(),
            self.ledger.running(),
        ):
            yield

    async def publish(  # noqa: PLR0913 - what a ticket says, and by when
        self,
        request: Request,
        ticket_id: str,
        first_tokens: Sequence[int],
        *,
        after: Sequence[Event] = (),
        sampling: Mapping[str, str] | None = None,
        deadline_s: float,
        stored_blocks: int = 0,
    ) -> Published:
        """Store every block of the request's prompt, tail included, and then the ticket.

        The request is running and its prompt is computed; it must not end before this returns.
        after: events of the kernels that wrote the blocks. sampling: see Ticket. stored_blocks: the
        first so many were stored a moment ago; it is looked whether they still are.
        Raises HandoffError if storage did not take it all in `deadline_s`, OwnershipError if the
        request has ended or is not computed, DuplicateRequestError if the ticket is another
        prompt's by now, and BadRequestError if its id is no text; none exists then.
        """
        check_id(ticket_id)
        prompt = request.spec.prompt
        request.check_running()
        if request.computed_tokens < prompt.num_tokens:
            raise OwnershipError(
                f"only {request.computed_tokens} of {prompt.num_tokens} prompt tokens are computed"
            )
        keys = self.tickets.keys_of(prompt)
        before = self._storage.stats.flushed_bytes
        try:
            async with asyncio.timeout(deadline_s):
                # Of those that were just stored all are there, unless the store lost some: one
                # question instead of a search for the first that is missing.
                present = await self.count_present(keys[: stored_blocks or None])
                self._show(request, 0, present)
                await self.store(request, keys, present, len(keys), after)
                with self._offered(ticket_id, prompt) as address:
                    opened = self.tickets.new_open(ticket_id, prompt, address)
                    ticket = self.tickets.new(opened, first_tokens, sampling)
                    await self.tickets.complete(ticket)
        except TimeoutError as error:
            self.stats.failed_publishes += 1
            raise HandoffError(
                ClaimProblem.UNAVAILABLE.value,
                f"the prompt could not be published within {deadline_s:g} s",
            ) from error
        except (StoreUnavailableError, TransferError) as error:
            self.stats.failed_publishes += 1
            raise HandoffError(ClaimProblem.UNAVAILABLE.value, str(error)) from error
        except DuplicateRequestError:
            self.stats.failed_publishes += 1
            raise
        self.ledger.published(ticket)
        self.stats.published_prompts += 1
        self.stats.published_blocks += len(keys)
        self._tiers.work.start(self._storage.tails.note(keys[-1:]), "tierkv-note-tail")
        flushed = self._storage.stats.flushed_bytes - before
        return Published(ticket, len(keys), present, flushed)

    @contextmanager
    def _offered(self, ticket_id: str, prompt: Prompt) -> Iterator[DirectAddress | None]:
        """Where the prompt's blocks can be read; no more if its ticket is not written."""
        is_known = self.ledger.view(ticket_id) is not None
        try:
            yield self.source.offer(ticket_id, prompt, self.ledger)
        except BaseException:
            if not is_known:
                self.ledger.failed(ticket_id, "its ticket was not written")
            raise

    def _show(self, request: Request, start: int, stop: int) -> None:
        """Have the host keep these blocks too, if it has room, where a claimer can read them."""
        if self.source.wants_host_copies:
            lease, room = request.lease, self._tiers.eviction.available(Tier.HOST)
            end = min(stop, lease.num_blocks, request.spec.prompt.num_blocks, start + room)
            self._tiers.copies.save(lease.node, end, first=start)

    async def count_present(self, keys: Sequence[StoredKey]) -> int:
        """Raises StoreUnavailableError."""
        return await self._storage.count_present(keys)

    async def store(
        self,
        request: Request,
        keys: Sequence[StoredKey],
        start: int,
        stop: int,
        after: Sequence[Event],
    ) -> None:
        """Store blocks [start, stop) of the request, which are computed.

        Raises StoreUnavailableError, TransferError.
        """
        after = (*after, *request.written)
        self._show(request, start, stop)
        groups = groups_of(start, stop)
        problems: list[StoreUnavailableError | TransferError] = []

        async def work() -> None:
            for blocks in groups:
                if problems:
                    return
                group = partial(self._stage_and_flush, request, keys, blocks, after)
                try:
                    await abandonable(self._tiers.work.started, group, "tierkv-publish-group")
                except (StoreUnavailableError, TransferError) as problem:
                    problems.append(problem)

        # One group is copied from the device, and its checksums made, while another is sent.
        async with task_group() as tasks:
            for _ in range(NUM_GROUPS - 1):
                tasks.create_task(work(), name="tierkv-publish")
            await work()
        if problems:
            raise problems[0]

    async def _stage_and_flush(
        self, request: Request, keys: Sequence[StoredKey], blocks: range, after: Sequence[Event]
    ) -> None:
        """Flush these blocks, a group's size at most. Those that the host has are flushed from
        there, the others through staging slots. All of them are held until the store is done with
        them, be the request there or not."""
        async with self._staging.group() as group, self._held(request):
            cached, cached_slots = self._on_host(request, blocks)
            slots = np.where(cached, cached_slots, group.slots[: len(blocks)])
            group.movement = self._tiers.mover.offload(
                slots[~cached], request.block_table[blocks.start : blocks.stop][~cached], after
            )
            await group.movement.done()
            # The tail is listed when the ticket is there: nobody waits for that.
            outcomes = await self._storage.flush(
                keys[blocks.start : blocks.stop], slots, notes_tails=False
            )
        check_written(self._storage, outcomes)

    @asynccontextmanager
    async def _held(self, request: Request) -> AsyncIterator[None]:
        lease = self._tiers.index.hold_as_is(request.lease.node)
        try:
            yield
        finally:
            self._tiers.index.release(lease)
            self._tiers.work.capacity_changed()

    def _on_host(self, request: Request, blocks: range) -> tuple[Mask, Ids]:
        """Which of the request's blocks have a whole copy on the host, and its slot."""
        lease, index = request.lease, self._tiers.index
        ready, slots = np.zeros(len(blocks), np.bool_), np.zeros(len(blocks), np.int32)
        # What is computed since the request began has no run in the index yet; a tail has none.
        count = min(blocks.stop, lease.num_blocks, request.spec.prompt.num_blocks) - blocks.start
        if count > 0:
            which = (Tier.HOST, lease.node, blocks.start, blocks.start + count)
            ready[:count] = [state is CopyState.READY for state in index.states(*which)]
            slots[:count] = index.slots(*which)
        return ready, slots
