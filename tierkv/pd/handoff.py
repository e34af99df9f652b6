"""Publish on the prefill node: to storage, and from the host tier for who can read it; at once, or
while the prompt is being computed, so that little is left to do when it is; and slots to stage it.

prefill   | chunk | chunk | chunk | last |
stream      open    blocks  blocks  blocks, tail, ticket
claimer             fetch   fetch   fetch        claimed
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import TypeVar

import numpy as np

from tierkv import tracing
from tierkv.cache.keys import Prompt, StoredKey
from tierkv.cache.node import CopyState, Ids, Mask, Tier
from tierkv.errors import (
    DuplicateRequestError,
    HandoffError,
    OwnershipError,
    StoreDownError,
    StoreRefusedError,
    StoreUnavailableError,
    TierKVError,
    TransferError,
)
from tierkv.gpu.protocol import Event
from tierkv.pd.direct.address import DirectAddress
from tierkv.pd.source import PeerSource
from tierkv.pd.tickets import (
    PROGRESS,
    HandoffProblem,
    HandoffStats,
    OpenTicket,
    Ticket,
    TicketLedger,
    Tickets,
    check_id,
    check_written,
)
from tierkv.sched.copies import GROUP_BLOCKS
from tierkv.sched.request import Request
from tierkv.sched.tiers import Tiers
from tierkv.tasks import abandonable, both, task_group
from tierkv.transfer.mover import Movement
from tierkv.transfer.storage_io import StorageIO

NUM_GROUPS = 2  # one is filled from the device while another goes to storage
STAGING_BLOCKS = GROUP_BLOCKS * NUM_GROUPS
_FIRST_BLOCKS = 8
_PATIENCE_S = 2.0  # of two probes of a store that is left alone
_AGAIN_S = 0.2

T = TypeVar("T")


def groups_of(start: int, stop: int) -> Iterator[range]:
    """[start, stop) in parts of GROUP_BLOCKS, and a shorter one first: the store has something to
    do as soon as that is staged, and the next one is while it is stored."""
    if start < stop:
        yield range(start, min(start + _FIRST_BLOCKS, stop))
    for at in range(start + _FIRST_BLOCKS, stop, GROUP_BLOCKS):
        yield range(at, min(at + GROUP_BLOCKS, stop))


class Group:
    """Host slots lent to one step of one publish or claim."""

    def __init__(self, slots: Ids) -> None:
        self.slots = slots
        self.movement: Movement | None = None  # what writes to the slots right now


class Staging:
    """The slots [first_slot, first_slot + STAGING_BLOCKS), behind those of the host pool, lent in
    the order of asking: to as many at a time as there are slots for."""

    def __init__(self, first_slot: int) -> None:
        self._free = list(range(first_slot, first_slot + STAGING_BLOCKS))
        self._waiting: deque[tuple[int, asyncio.Future[list[int]]]] = deque()

    @asynccontextmanager
    async def group(self, num_blocks: int) -> AsyncIterator[Group]:
        """Slots for so many blocks, GROUP_BLOCKS at the most. If the body is cancelled while a copy
        into the slots is on its way, they become free when that copy has ended."""
        slots = await self._take(num_blocks)
        group = Group(np.array(slots, np.int32))
        try:
            yield group
        finally:
            movement, group.movement = group.movement, None
            if movement is None or movement.has_ended:
                self._give(slots)
            else:
                movement.when_ended(lambda: self._give(slots))

    @property
    def num_free_groups(self) -> int:
        return len(self._free) // GROUP_BLOCKS

    async def _take(self, count: int) -> list[int]:
        turn: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._waiting.append((count, turn))
        self._lend()
        try:
            return await turn
        except asyncio.CancelledError:
            # Its turn may have come with the cancel; and who is behind it may want fewer.
            self._give([] if turn.cancelled() else turn.result())
            raise

    def _give(self, slots: Sequence[int]) -> None:
        self._free = sorted([*self._free, *slots])
        self._lend()

    def _lend(self) -> None:
        while self._waiting:
            count, turn = self._waiting[0]
            if not turn.cancelled():
                if count > len(self._free):
                    return
                turn.set_result(self._free[:count])
                del self._free[:count]
            self._waiting.popleft()


log = logging.getLogger(__name__)


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


async def _patiently(work: Callable[[], Awaitable[T]]) -> T:
    """What `work` returns; once more where the store fails, for a while: one that is slower from
    one moment to the next fails, and is left alone for a second, until it is known how slow it is.
    Raises StoreUnavailableError, if it fails more than _PATIENCE_S after it first did, or after it
    last took long to do so, as one does that is slow but not dead."""
    time, until = asyncio.get_running_loop().time, math.inf
    while True:
        began = time()
        try:
            return await work()
        except (StoreRefusedError, StoreDownError):
            raise  # it answers, and says no; or is gone, and claimers compute without it by then
        except StoreUnavailableError:
            is_slow = time() - began > _PATIENCE_S / 2
            until = time() + _PATIENCE_S if is_slow else min(until, time() + _PATIENCE_S)
            if time() >= until:
                raise
        await asyncio.sleep(_AGAIN_S)


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
        stored_blocks: int | None = None,
        announced: Callable[[], Awaitable[object]] | None = None,
    ) -> Published:
        """Store every block of the request's prompt, tail included, and then the ticket.

        The request is running and its prompt is computed; it must not end before this returns.
        after: events of the kernels that wrote the blocks. sampling: see Ticket. stored_blocks: the
        first so many were stored a moment ago, and no more are known to be; while the others are
        stored, it is looked whether these still are. announced: waits for what is written before
        the ticket.
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
        keys = await self.tickets.hashed_keys_of(prompt)
        before = self._storage.stats.flushed_bytes
        try:
            with tracing.span("publish", blocks=len(keys), ticket_id=ticket_id):
                async with asyncio.timeout(deadline_s):

                    async def store_all() -> tuple[int, Ticket, int]:
                        nonlocal stored_blocks
                        known, stored_blocks = stored_blocks, None  # the next attempt looks
                        generation = self._generation_of(request)
                        present = await self._store_rest(request, keys, known, after)
                        if announced is not None:
                            await announced()
                        with self._offered(ticket_id, prompt) as address:
                            opened = self.tickets.new_open(ticket_id, prompt, address)
                            ticket = self.tickets.new(opened, first_tokens, sampling)
                            await self.tickets.complete(ticket, generation=generation)
                        return present, ticket, generation

                    present, ticket, generation = await _patiently(store_all)
        except TimeoutError as error:
            self.stats.failed_publishes += 1
            raise HandoffError(
                HandoffProblem.UNAVAILABLE.value,
                f"the prompt could not be published within {deadline_s:g} s",
            ) from error
        except (StoreUnavailableError, TransferError) as error:
            self.stats.failed_publishes += 1
            raise HandoffError(HandoffProblem.UNAVAILABLE.value, str(error)) from error
        except DuplicateRequestError:
            self.stats.failed_publishes += 1
            raise
        self.ledger.published(ticket)
        self.stats.published_prompts += 1
        self.stats.published_blocks += len(keys)
        note = self._storage.tails.note(keys[-1:], generation=generation)
        self._tiers.work.start(note, "tierkv-note-tail")
        flushed = self._storage.stats.flushed_bytes - before
        return Published(ticket, len(keys), present, flushed)

    def _generation_of(self, request: Request) -> int:
        """Return the generation of the request's blocks; see `Deletions`. Raises
        StoreRefusedError if they were deleted since the request was admitted."""
        if self._tiers.index.spaces.is_retired(request.lease.node):
            raise StoreRefusedError("the cache was deleted while the prompt was computed")
        return self._storage.deletions.generation

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

    async def _store_rest(
        self,
        request: Request,
        keys: Sequence[StoredKey],
        known: int | None,
        after: Sequence[Event],
    ) -> int:
        """Store what is missing of `keys`, of which the first `known` are believed to be stored;
        None: nobody has asked. How many were there. Raises as `store`."""
        if known is None:
            present = known = await self.count_present(keys)
        elif known:
            present, _ = await both(
                self.count_present(keys[:known]),
                self.store(request, keys, known, len(keys), after),
            )
            known, keys = present, keys[:known]
        else:
            present = 0
        self._show(request, 0, present)
        await self.store(request, keys, known, len(keys), after)
        return present

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
        async with self._staging.group(len(blocks)) as group, self._held(request):
            cached, cached_slots = self._on_host(request, blocks)
            slots = np.where(cached, cached_slots, group.slots)
            group.movement = self._tiers.mover.offload(
                slots[~cached], request.block_table[blocks.start : blocks.stop][~cached], after
            )
            await group.movement.done()
            # The tail is listed when the ticket is there: nobody waits for that.
            generation = self._generation_of(request)
            outcomes = await self._storage.flush(
                keys[blocks.start : blocks.stop], slots, notes_tails=False, generation=generation
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


_LAST_WORD_S = 0.5


@dataclass(frozen=True, slots=True)
class _Finish:
    first_tokens: tuple[int, ...]
    after: tuple[Event, ...]
    sampling: dict[str, str]


class PublishStream:
    """One prompt on its way out. Whoever computes it calls `advance`, and at the end `finish` or
    `fail`; a task runs `run`, and ends the request only after that has returned.

    What goes wrong before the prompt is computed is only a delay: `finish` publishes all that is
    not stored then.
    """

    def __init__(
        self,
        handoff: Handoff,
        request: Request,
        ticket_id: str,
        *,
        deadline_s: float,
    ) -> None:
        """deadline_s: for what is left to do when the prompt is computed. Raises BadRequestError if
        the ticket's id is no text."""
        check_id(ticket_id)
        self._handoff = handoff
        self._request = request
        self._ticket_id = ticket_id
        self._deadline_s = deadline_s
        self._computed_blocks = 0
        self._after: tuple[Event, ...] = ()
        self._finish: _Finish | None = None
        self._failure: str | None = None
        self._changed = asyncio.Event()
        self._scope: asyncio.Timeout | None = None
        self._end_at: float | None = None

    def advance(self, num_tokens: int, after: Sequence[Event] = ()) -> None:
        """The first `num_tokens` tokens are committed. after: events of the kernels that wrote
        the last of them."""
        blocks = num_tokens // self._request.spec.prompt.block_size
        self._computed_blocks = min(blocks, self._request.spec.prompt.num_blocks)
        self._after = tuple(after)
        self._changed.set()

    def finish(
        self,
        first_tokens: Sequence[int],
        after: Sequence[Event] = (),
        sampling: Mapping[str, str] | None = None,
    ) -> None:
        """The whole prompt is committed; write the rest and the ticket. sampling: see Ticket."""
        self._finish = _Finish(tuple(first_tokens), tuple(after), dict(sampling or {}))
        self._end_in(self._deadline_s)

    def fail(self, reason: str) -> None:
        """There will be no ticket; whoever waits for it is told `reason`."""
        self._failure = reason
        self._end_in(_LAST_WORD_S)

    def _end_in(self, delay_s: float) -> None:
        self._changed.set()
        self._end_at = asyncio.get_running_loop().time() + delay_s
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(self._end_at)

    async def run(self) -> Published:
        """Raises HandoffError, also after `fail`, and DuplicateRequestError if another prompt took
        the ticket's id in the same moment."""
        handoff, prompt = self._handoff, self._request.spec.prompt
        tickets = handoff.tickets
        keys = await tickets.hashed_keys_of(prompt)
        open_ticket = tickets.new_open(
            self._ticket_id,
            prompt,
            handoff.source.offer(self._ticket_id, prompt, handoff.ledger),
        )
        handoff.ledger.opened(open_ticket)
        with tickets.lease.held():
            try:
                published = await self._publish(open_ticket, keys)
            except TierKVError as error:
                handoff.ledger.failed(self._ticket_id, str(error))
                await self._close(open_ticket, str(error))
                raise
            except asyncio.CancelledError:
                handoff.ledger.failed(self._ticket_id, "cancelled")
                raise
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORD_S):
                await tickets.forget_open(self._ticket_id)
        return published

    async def _publish(self, open_ticket: OpenTicket, keys: Sequence[StoredKey]) -> Published:
        # What is said of the ticket and what is stored go side by side: over a store that takes
        # half a second to answer, one after the other they took as long as a claim waits.
        async with task_group() as tasks:
            opening = tasks.create_task(self._open(open_ticket), name="tierkv-open-ticket")
            try:
                return await self._publish_beside(opening, keys)
            except BaseException:
                opening.cancel()
                raise

    async def _publish_beside(
        self, opening: asyncio.Task[None], keys: Sequence[StoredKey]
    ) -> Published:
        present, ready = 0, None
        try:
            async with asyncio.timeout_at(self._end_at) as self._scope:
                present, ready = await self._store_ahead(keys)
        except TimeoutError:
            pass  # the store hangs: the last attempt has a deadline of its own
        finally:
            self._scope = None
        if self._failure is not None:
            self._handoff.stats.failed_publishes += 1
            raise HandoffError(HandoffProblem.PRODUCER_FAILED.value, self._failure)
        finish = self._finish
        assert finish is not None, "it goes on until finished or failed"
        published = await self._handoff.publish(
            self._request,
            self._ticket_id,
            finish.first_tokens,
            after=finish.after,
            sampling=finish.sampling,
            deadline_s=self._deadline_s,
            stored_blocks=ready,
            announced=lambda: asyncio.wait([opening]),
        )
        if ready is None:
            return published
        self._handoff.stats.early_blocks += ready - present
        return replace(published, present_blocks=present, early_blocks=ready - present)

    async def _open(self, open_ticket: OpenTicket) -> None:
        handoff = self._handoff
        try:
            await handoff.tickets.begin(open_ticket)
        except StoreUnavailableError as error:
            log.warning("ticket %s is not announced: %s", self._ticket_id, error)
        except DuplicateRequestError:
            handoff.stats.failed_publishes += 1
            raise

    async def _store_ahead(self, keys: Sequence[StoredKey]) -> tuple[int, int | None]:
        """Store full blocks as they come; how many were there, and how many are now, None if the
        store did not say."""
        handoff, most = self._handoff, self._request.spec.prompt.num_blocks
        present, ready = 0, None
        try:
            present = ready = min(await handoff.count_present(keys), most)
            while self._is_going_on:
                if ready >= self._computed_blocks:
                    self._tell(ready)
                    await self._change()
                    continue
                stop = min(ready + GROUP_BLOCKS, self._computed_blocks)
                await handoff.store(self._request, keys, ready, stop, self._after)
                ready = stop
        except (StoreUnavailableError, TransferError) as error:
            log.warning("ticket %s waits for the end of its prefill: %s", self._ticket_id, error)
            while self._is_going_on:
                await self._change()
        return present, ready

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    @property
    def _is_going_on(self) -> bool:
        return self._finish is None and self._failure is None

    def _tell(self, ready: int) -> None:
        self._handoff.ledger.progressed(self._ticket_id, ready)
        self._handoff.tickets.hint(self._ticket_id, f"{PROGRESS}{ready}")

    async def _close(self, open_ticket: OpenTicket, failure: str) -> None:
        """Tell those who wait why there will be no ticket, if the store takes it."""
        with suppress(TimeoutError, StoreUnavailableError, HandoffError):
            async with asyncio.timeout(_LAST_WORD_S):
                await self._handoff.tickets.give_up(open_ticket, failure or "it failed")
