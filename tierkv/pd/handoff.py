"""Publishing of prompts by the prefill node, and the host slots that stage their blocks.

Publishing a prompt writes its blocks to storage and then a ticket, the record that all blocks are
stored. Decode nodes that claim the prompt may also read blocks from this node's host tier. A
publish without a stream begins after the prefill. A stream stores the blocks during the prefill, so
that little is left to do after it; over time:

    prefill node computes | chunk | chunk  | chunk  | last chunk           |
    stream stores         |       | blocks | blocks | blocks, tail, ticket |
    decode node fetches   |       |        | blocks | blocks               | claimed
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Protocol, TypeVar

import numpy as np

from tierkv import tracing
from tierkv.cache.index import Lease
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
from tierkv.sched.events import EventPoint
from tierkv.sched.request import Request
from tierkv.sched.tiers import Tiers
from tierkv.tasks import abandonable, both, task_group
from tierkv.transfer.mover import Movement
from tierkv.transfer.storage_io import StorageIO

NUM_GROUPS = 2  # one group is copied from the device while the other is written to storage
STAGING_BLOCKS = GROUP_BLOCKS * NUM_GROUPS
_FIRST_BLOCKS = 8
_PATIENCE_S = 2.0  # time for two probes of a store by an open circuit breaker
_AGAIN_S = 0.2

T = TypeVar("T")


def groups_of(start: int, stop: int) -> Iterator[range]:
    """Divide blocks [start, stop) into groups of blocks that are stored together.

    The first group is smaller, so that the store gets work while the next group is copied.

    Args:
        start: index of the first block.
        stop: index after the last block.

    Yields:
        The range of each group: GROUP_BLOCKS blocks, fewer in the first and the last.
    """
    if start < stop:
        yield range(start, min(start + _FIRST_BLOCKS, stop))
    for at in range(start + _FIRST_BLOCKS, stop, GROUP_BLOCKS):
        yield range(at, min(at + GROUP_BLOCKS, stop))


class Group:
    """The staging slots of one group of blocks that moves between device and storage.

    Attributes:
        slots: ids of the host slots, int32 [n].
        movement: the copy that writes to or reads from the slots now; None for none.
    """

    def __init__(self, slots: Ids) -> None:
        self.slots = slots
        self.movement: Movement | None = None


class Staging:
    """The staging slots: STAGING_BLOCKS host slots with ids after those of the host tier.

    Callers get slots in the order of their calls, and wait until enough are free.

    Args:
        first_slot: id of the first staging slot.
    """

    def __init__(self, first_slot: int) -> None:
        self._free = list(range(first_slot, first_slot + STAGING_BLOCKS))
        self._waiting: deque[tuple[int, asyncio.Future[list[int]]]] = deque()

    @asynccontextmanager
    async def group(self, num_blocks: int) -> AsyncIterator[Group]:
        """Wait for `num_blocks` free staging slots, and reserve them inside the `async with`.

        If a copy still uses the slots on leaving the `async with`, they are released when the copy
        has ended.

        Args:
            num_blocks: number of slots, at most GROUP_BLOCKS.
        """
        slots = await self._acquire(num_blocks)
        group = Group(np.array(slots, np.int32))
        try:
            yield group
        finally:
            movement, group.movement = group.movement, None
            if movement is None or movement.has_ended:
                self._release(slots)
            else:
                movement.when_ended(lambda: self._release(slots))

    @property
    def num_free_groups(self) -> int:
        return len(self._free) // GROUP_BLOCKS

    async def _acquire(self, count: int) -> list[int]:
        granted: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._waiting.append((count, granted))
        self._lend()
        try:
            return await granted
        except asyncio.CancelledError:
            # The slots may have come with the cancel, and the next in line may want fewer slots.
            self._release([] if granted.cancelled() else granted.result())
            raise

    def _release(self, slots: Sequence[int]) -> None:
        self._free = sorted([*self._free, *slots])
        self._lend()

    def _lend(self) -> None:
        while self._waiting:
            count, granted = self._waiting[0]
            if not granted.cancelled():
                if count > len(self._free):
                    return
                granted.set_result(self._free[:count])
                del self._free[:count]
            self._waiting.popleft()


log = logging.getLogger(__name__)


class PublishWait(Enum):
    """The event for which a prefill request waits before it returns its answer."""

    PUBLISHED = "published"  # the ticket is written: a decode node will find the prompt
    NOTHING = "nothing"  # the first token: publishing goes on, and claimers learn if it fails


@dataclass(frozen=True, slots=True)
class Published:
    """The result of a publish.

    Attributes:
        ticket: the written ticket.
        num_blocks: number of blocks of the prompt.
        present_blocks: number of blocks that storage had before the publish.
        flushed_bytes: number of bytes written to storage.
        early_blocks: number of blocks that were stored while the prompt was being computed.
    """

    ticket: Ticket
    num_blocks: int
    present_blocks: int
    flushed_bytes: int
    early_blocks: int = 0


class PromptBlocks(Protocol):
    """The computed blocks of one prompt, with the operations that a publish needs."""

    @property
    def prompt(self) -> Prompt:
        """The prompt to publish."""

    @property
    def keys(self) -> Sequence[StoredKey]:
        """The keys under which the blocks are stored, in order, the tail's included."""

    @property
    def lease(self) -> Lease | None:
        """The lease on the prompt's blocks in the index; None if no block is in the index."""

    def check_whole(self) -> None:
        """Check that all blocks of the prompt are computed and in this node's memory.

        If the check succeeds, the blocks stay in memory until the publish has ended.

        Raises:
            HandoffError: a block is no longer in this node's memory.
            OwnershipError: the request has ended, or its prompt is not computed.
        """

    def offer(self, ticket_id: str, ledger: TicketLedger) -> DirectAddress | None:
        """Let claiming nodes read the blocks from this node's memory instead of storage.

        Args:
            ticket_id: id of the ticket.
            ledger: notices the end of the ticket, which ends the offer.

        Returns:
            The address at which claiming nodes ask for the blocks; None if other nodes cannot read
                this node's memory.
        """

    def show(self, start: int, stop: int) -> None:
        """Start to copy blocks to the host tier, if it has room, for claiming nodes to read.

        Args:
            start: index of the first block.
            stop: index after the last block.
        """

    def on_host(self, blocks: range, after: Sequence[Event]) -> AbstractAsyncContextManager[Ids]:
        """Provide host slots that hold copies of `blocks`, for the duration of an `async with`.

        Args:
            blocks: positions in the prompt of computed blocks, at most GROUP_BLOCKS.
            after: events of the kernels that wrote the blocks.

        Returns:
            A context manager that yields the ids of the slots, int32 [len(blocks)].

        Raises:
            TransferError: the copy to the host failed.
        """

    async def store_rest(self) -> None:
        """Store the prompt's blocks of all cache groups except the one whose blocks `keys` names.

        Raises:
            StoreUnavailableError: the store did not accept a value.
        """


class RequestBlocks:
    """The blocks of a running request, as they are published for another node.

    All blocks are on the device; copies of some are also on the host.

    Args:
        request: the running request.
        tiers: the tiers of the node.
        staging: host slots for copies of blocks that the host tier lacks.
        keys: keys under which the prompt's blocks are stored.
        source: makes blocks readable by other nodes, from this node's memory.
    """

    def __init__(
        self,
        request: Request,
        tiers: Tiers,
        staging: Staging,
        *,
        keys: Sequence[StoredKey],
        source: PeerSource,
    ) -> None:
        self.prompt = request.spec.prompt
        self.keys = keys
        self._request = request
        self._tiers = tiers
        self._staging = staging
        self._source = source

    @property
    def lease(self) -> Lease:
        return self._request.lease

    def check_whole(self) -> None:
        self._request.check_running()
        computed, whole = self._request.computed_tokens, self.prompt.num_tokens
        if computed < whole:
            raise OwnershipError(
                f"only {computed} of {whole} prompt tokens are computed: compute the whole "
                "prompt before it is published"
            )

    def offer(self, ticket_id: str, ledger: TicketLedger) -> DirectAddress | None:
        return self._source.offer(ticket_id, self.prompt, ledger)

    def show(self, start: int, stop: int) -> None:
        if self._source.wants_host_copies:
            lease, room = self._request.lease, self._tiers.eviction.available(Tier.HOST)
            end = min(stop, lease.num_blocks, self.prompt.num_blocks, start + room)
            self._tiers.copies.save(lease.node, end, first=start)

    @asynccontextmanager
    async def on_host(self, blocks: range, after: Sequence[Event]) -> AsyncIterator[Ids]:
        """Yield host slots that hold the given blocks, one slot per block, int32 [n].

        Blocks on the host are yielded in their own slots. The other blocks are first copied from
        the device to staging slots. The bytes in the slots do not change inside the `async with`,
        even if the request ends.

        Args:
            blocks: positions of the blocks in the prompt.
            after: events to wait for before blocks are copied from the device.
        """
        request, after = self._request, (*after, *self._request.written)
        async with self._staging.group(len(blocks)) as group:
            lease = self._tiers.index.hold_as_is(request.lease.node)
            try:
                cached, cached_slots = self._cached(blocks)
                slots = np.where(cached, cached_slots, group.slots)
                device = request.block_table[blocks.start : blocks.stop][~cached]
                group.movement = self._tiers.mover.offload(slots[~cached], device, after)
                await group.movement.done()
                yield slots
            finally:
                self._tiers.index.release(lease)
                self._tiers.work.capacity_changed()

    async def store_rest(self) -> None:
        """Return at once, because `keys` already names all blocks of the prompt."""

    def _cached(self, blocks: range) -> tuple[Mask, Ids]:
        """Return which blocks have a copy on the host, bool [n], and their slots, int32 [n].

        The slots of the other blocks are not valid.
        """
        lease, index = self._request.lease, self._tiers.index
        ready, slots = np.zeros(len(blocks), np.bool_), np.zeros(len(blocks), np.int32)
        # Blocks computed since the request began have no run in the index yet; a tail has none.
        count = min(blocks.stop, lease.num_blocks, self.prompt.num_blocks) - blocks.start
        if count > 0:
            which = (Tier.HOST, lease.node, blocks.start, blocks.start + count)
            ready[:count] = [state is CopyState.READY for state in index.states(*which)]
            slots[:count] = index.slots(*which)
        return ready, slots


async def _patiently(work: Callable[[], Awaitable[T]]) -> T:
    """Return the result of `work`, which uses the store; repeat it for 2 seconds while it fails.

    StoreRefusedError and StoreDownError are raised at once. The 2 seconds begin again after each
    attempt that took more than 1 second, because the store is then slow but works.
    """
    time, until = asyncio.get_running_loop().time, math.inf
    while True:
        began = time()
        try:
            return await work()
        except (StoreRefusedError, StoreDownError):
            raise  # repeating is useless, or takes longer than claimers wait
        except StoreUnavailableError:
            is_slow = time() - began > _PATIENCE_S / 2
            until = time() + _PATIENCE_S if is_slow else min(until, time() + _PATIENCE_S)
            if time() >= until:
                raise
        await asyncio.sleep(_AGAIN_S)


class Handoff:
    """The publisher of prompts: it writes their blocks and tickets to storage.

    Inside `running()`, the node renews its liveness lease while tickets are open, and records the
    states of its tickets.

    Args:
        tiers: the tiers of the node.
        storage: the storage tier.
        staging: host slots for blocks on their way to storage.
        tickets: writes the tickets.
        ledger: the states of this node's tickets.
        source: offers blocks to claiming nodes.
        stats: counts of the node's hand-offs.
    """

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
        """Check the bookkeeping of hand-offs; return a sentence for each error.

        Call this only when no publish runs.
        """
        wrong = []
        if self._staging.num_free_groups != NUM_GROUPS:
            wrong.append("no publish runs, but staging slots are still lent")
        if self.tickets.lease.num_held:
            wrong.append(f"no publish runs, but {self.tickets.lease.num_held} tickets are open")
        return wrong + self.source.findings()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Allow publishes inside the `async with` block.

        At the end of the block, this node's liveness lease ends, and claimers that wait for its
        open tickets stop waiting.
        """
        async with (
            self.tickets.notifier.running(),
            self.tickets.lease.running(),
            self.source.running(),
            self.ledger.running(),
        ):
            yield

    def blocks_of(self, request: Request) -> RequestBlocks:
        """Return the object from which a publish reads the blocks of a running request."""
        keys = self.tickets.keys_of(request.spec.prompt)
        return RequestBlocks(request, self._tiers, self._staging, keys=keys, source=self.source)

    async def publish(  # noqa: PLR0913 - what a ticket says, and by when
        self,
        blocks: PromptBlocks,
        ticket_id: str,
        first_tokens: Sequence[int],
        *,
        after: Sequence[Event] = (),
        sampling: Mapping[str, str] | None = None,
        deadline_s: float,
        stored_blocks: int | None = None,
        announced: Callable[[], Awaitable[object]] | None = None,
    ) -> Published:
        """Store every block of the prompt, the tail included, and then the ticket.

        Args:
            blocks: the prompt's blocks, which must not be released until the call returns.
            ticket_id: id of the ticket.
            first_tokens: ids of the generated tokens that follow the prompt.
            after: events of the kernels that wrote the blocks.
            sampling: names and values of the sampling parameters of `first_tokens`; None to state
                none.
            deadline_s: seconds that storing may take.
            stored_blocks: number of leading blocks that the caller has just stored. The call looks
                up these blocks in storage, and stores the other blocks at the same time. None if
                unknown: the call first looks up all blocks.
            announced: waits until the open ticket is written; None if there is none.

        Returns:
            The ticket and counts.

        Raises:
            HandoffError: storage did not accept everything within `deadline_s`; there is no ticket.
            OwnershipError: the request has ended, or its prompt is not computed.
            DuplicateRequestError: the ticket's id is in use for another prompt.
            BadRequestError: the ticket's id cannot be encoded as UTF-8.
        """
        check_id(ticket_id)
        blocks.check_whole()
        prompt, keys = blocks.prompt, blocks.keys
        await self.tickets.hashed_keys_of(prompt)
        before = self._storage.stats.flushed_bytes
        try:
            with tracing.span("publish", blocks=len(keys), ticket_id=ticket_id):
                async with asyncio.timeout(deadline_s):

                    async def store_all() -> tuple[int, Ticket, int]:
                        nonlocal stored_blocks
                        known, stored_blocks = stored_blocks, None  # the next attempt asks storage
                        generation = self._generation_of(blocks)
                        await blocks.store_rest()
                        present = await self._store_rest(blocks, known, after)
                        if announced is not None:
                            await announced()
                        with self._offered(ticket_id, blocks) as address:
                            opened = self.tickets.new_open(ticket_id, prompt, address)
                            ticket = self.tickets.new(opened, first_tokens, sampling)
                            await self.tickets.complete(ticket, generation=generation)
                        return present, ticket, generation

                    present, ticket, generation = await _patiently(store_all)
        except TimeoutError as error:
            self.stats.failed_publishes += 1
            raise HandoffError(
                HandoffProblem.UNAVAILABLE.value,
                f"the prompt was not published within {deadline_s:g} s: check the "
                "store's speed, or raise handoff.publish_deadline_s",
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
        if keys:
            note = self._storage.tails.note(keys[-1:], generation=generation)
            self._tiers.work.start(note, "tierkv-note-tail")
        flushed = self._storage.stats.flushed_bytes - before
        return Published(ticket, len(keys), present, flushed)

    def _generation_of(self, blocks: PromptBlocks) -> int:
        """Return the number of deletions of all stored values so far, which `flush` checks.

        Raise StoreRefusedError if `blocks` were computed before the last deletion.
        """
        lease = blocks.lease
        if lease is not None and self._tiers.index.spaces.is_retired(lease.node):
            raise StoreRefusedError(
                "the stored values were deleted while the prompt was computed: compute it again"
            )
        return self._storage.deletions.generation

    @contextmanager
    def _offered(self, ticket_id: str, blocks: PromptBlocks) -> Iterator[DirectAddress | None]:
        is_known = self.ledger.state_of(ticket_id) is not None
        try:
            yield blocks.offer(ticket_id, self.ledger)
        except BaseException:
            if not is_known:
                self.ledger.failed(ticket_id, "its ticket was not written")
            raise

    async def _store_rest(
        self, blocks: PromptBlocks, known: int | None, after: Sequence[Event]
    ) -> int:
        """Store the blocks of a prompt that storage lacks; return how many leading ones it had.

        `known` is the number of leading blocks that storage is expected to have; None if that is
        unknown. `after` has the events of the kernels that write the blocks.
        """
        stop = len(blocks.keys)
        if known is None:
            present = known = await self.find_stored(blocks, stop)
        elif known:
            present, _ = await both(
                self.find_stored(blocks, known), self.store(blocks, known, stop, after)
            )
            known, stop = present, known
        else:
            present = 0
        blocks.show(0, present)
        await self.store(blocks, known, stop, after)
        return present

    async def count_present(self, keys: Sequence[StoredKey]) -> int:
        """Return the number of `keys` in storage before the first one that storage lacks.

        Raises:
            StoreUnavailableError: the store does not answer.
        """
        return await self._storage.count_present(keys)

    async def find_stored(self, blocks: PromptBlocks, stop: int) -> int:
        """Ask storage how many leading blocks of a prompt are stored, and record that in the index.

        Args:
            blocks: the prompt's blocks.
            stop: index after the last block to ask for.

        Returns:
            The number of blocks in storage before the first one that storage lacks.

        Raises:
            StoreUnavailableError: the store did not answer in time.
        """
        began = self._tiers.events.now()
        present = await self.count_present(blocks.keys[:stop])
        self._note_stored(blocks, 0, present, began)
        end, lease = _end_in_index(blocks, stop), blocks.lease
        if lease is not None and present < end:
            self._tiers.copies.note_not_stored(lease.node, present, end)
        return present

    def _note_stored(self, blocks: PromptBlocks, start: int, stop: int, began: EventPoint) -> None:
        end, lease = _end_in_index(blocks, stop), blocks.lease
        if lease is not None and start < end:
            self._tiers.copies.note_stored(lease.node, start, end, began)

    async def store(
        self, blocks: PromptBlocks, start: int, stop: int, after: Sequence[Event]
    ) -> None:
        """Write the computed blocks [start, stop) to storage.

        Args:
            blocks: the prompt's blocks.
            start: index of the first block.
            stop: index after the last block.
            after: events of the kernels that write the blocks.

        Raises:
            StoreUnavailableError: the store did not accept a block.
            TransferError: a block could not be copied to the host.
        """
        blocks.show(start, stop)
        groups = groups_of(start, stop)
        problems: list[StoreUnavailableError | TransferError] = []

        async def work() -> None:
            for some in groups:
                if problems:
                    return
                group = partial(self._flush, blocks, some, after)
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

    async def _flush(self, blocks: PromptBlocks, some: range, after: Sequence[Event]) -> None:
        async with blocks.on_host(some, after) as slots:
            # The tail is listed after the ticket is written, outside of any wait.
            generation, began = self._generation_of(blocks), self._tiers.events.now()
            outcomes = await self._storage.flush(
                blocks.keys[some.start : some.stop],
                slots,
                notes_tails=False,
                generation=generation,
            )
            check_written(self._storage, outcomes)
            self._note_stored(blocks, some.start, some.stop, began)


def _end_in_index(blocks: PromptBlocks, stop: int) -> int:
    lease = blocks.lease
    return 0 if lease is None else min(stop, lease.num_blocks, blocks.prompt.num_blocks)


_LAST_WORD_S = 0.5


class PublishStream:
    """A publish that stores the blocks of a prompt while the prompt is being computed.

    The code that computes the prompt calls `advance` repeatedly, and finally `finish` or `fail`.
    Meanwhile `run` stores the blocks in a task; its owner must protect the blocks from eviction
    until `run` has ended. If storing fails before the prompt is computed, `run` stores all missing
    blocks after `finish`.
    """

    def __init__(
        self,
        handoff: Handoff,
        blocks: PromptBlocks,
        ticket_id: str,
        *,
        deadline_s: float,
    ) -> None:
        """Create the stream; `run` starts it.

        Args:
            handoff: the node's publisher.
            blocks: the prompt's blocks, which may be computed later.
            ticket_id: id of the ticket.
            deadline_s: seconds within which the last blocks and the ticket must be stored, counted
                from the end of the computing of the prompt.

        Raises:
            BadRequestError: the ticket's id cannot be encoded as UTF-8.
        """
        check_id(ticket_id)
        self._handoff = handoff
        self._blocks = blocks
        self._ticket_id = ticket_id
        self._deadline_s = deadline_s
        self._computed_blocks = 0
        self._after: tuple[Event, ...] = ()
        self._finish: Callable[..., Awaitable[Published]] | None = None  # publishes what is left
        self._failure: str | None = None
        self._changed = asyncio.Event()
        self._scope: asyncio.Timeout | None = None
        self._end_at: float | None = None

    def advance(self, num_tokens: int, after: Sequence[Event] = ()) -> None:
        """Record that the prompt's first `num_tokens` tokens are computed and can be stored.

        Args:
            num_tokens: number of leading prompt tokens whose KV is in the blocks, or is being
                written by submitted kernels.
            after: events of the kernels that write the KV of the new tokens. The blocks are not
                read before these events are done.
        """
        prompt = self._blocks.prompt
        self._computed_blocks = min(num_tokens // prompt.block_size, prompt.num_blocks)
        self._after = tuple(after)
        self._changed.set()

    def finish(
        self,
        first_tokens: Sequence[int],
        after: Sequence[Event] = (),
        sampling: Mapping[str, str] | None = None,
    ) -> None:
        """Record that the whole prompt is computed.

        `run` then stores the blocks that are not yet stored, and writes the ticket.

        Args:
            first_tokens: ids of the generated tokens that follow the prompt.
            after: CUDA events of the kernels that write the last blocks; `run` waits for them
                before it reads the blocks.
            sampling: names and values of the parameters with which `first_tokens` were sampled;
                None to leave them out of the ticket.
        """
        self._finish = partial(
            self._handoff.publish,
            self._blocks,
            self._ticket_id,
            tuple(first_tokens),
            after=tuple(after),
            sampling=dict(sampling or {}),
            deadline_s=self._deadline_s,
        )
        self._end_in(self._deadline_s)

    def fail(self, reason: str) -> None:
        """End the publish without a ticket; `run` notifies waiting decode nodes of `reason`."""
        self._failure = reason
        self._end_in(_LAST_WORD_S)

    def _end_in(self, delay_s: float) -> None:
        self._changed.set()
        self._end_at = asyncio.get_running_loop().time() + delay_s
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(self._end_at)

    async def run(self) -> Published:
        """Announce the ticket, store blocks as they are computed, and publish the prompt.

        Returns:
            The ticket and counts.

        Raises:
            HandoffError: the prompt could not be published, or `fail` was called.
            DuplicateRequestError: the ticket's id is in use for another prompt.
        """
        handoff, tickets = self._handoff, self._handoff.tickets
        await tickets.hashed_keys_of(self._blocks.prompt)
        address = self._blocks.offer(self._ticket_id, handoff.ledger)
        open_ticket = tickets.new_open(self._ticket_id, self._blocks.prompt, address)
        handoff.ledger.opened(open_ticket)
        with tickets.lease.held():
            try:
                published = await self._publish(open_ticket)
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

    async def _publish(self, open_ticket: OpenTicket) -> Published:
        # The open ticket is written while blocks are stored: with a store that takes half a second
        # to answer, one after the other would take as long as a claim waits.
        async with task_group() as tasks:
            opening = tasks.create_task(self._open(open_ticket), name="tierkv-open-ticket")
            try:
                return await self._publish_rest(opening)
            except BaseException:
                opening.cancel()
                raise

    async def _publish_rest(self, opening: asyncio.Task[None]) -> Published:
        present, ready = 0, None
        try:
            async with asyncio.timeout_at(self._end_at) as self._scope:
                present, ready = await self._store_ahead()
        except TimeoutError:
            pass  # the store hangs: the last attempt has a deadline of its own
        finally:
            self._scope = None
        if self._failure is not None:
            self._handoff.stats.failed_publishes += 1
            raise HandoffError(HandoffProblem.PRODUCER_FAILED.value, self._failure)
        finish = self._finish
        assert finish is not None, "it goes on until finished or failed"
        published = await finish(stored_blocks=ready, announced=lambda: asyncio.wait([opening]))
        if ready is None:
            return published
        self._handoff.stats.early_blocks += ready - present
        return replace(published, present_blocks=present, early_blocks=ready - present)

    async def _open(self, open_ticket: OpenTicket) -> None:
        handoff = self._handoff
        try:
            await handoff.tickets.begin(open_ticket)
        except StoreUnavailableError as error:
            log.warning(
                "ticket %s could not be announced before its prompt is computed: %s",
                self._ticket_id,
                error,
            )
        except DuplicateRequestError:
            handoff.stats.failed_publishes += 1
            raise

    async def _store_ahead(self) -> tuple[int, int | None]:
        """Store the prompt's full blocks as they are computed, until `finish` or `fail` is called.

        The result is a pair: the number of leading blocks that were in storage at the start, and
        the number that are in storage at the end. The latter is None if the store did not tell
        which blocks it had at the start.
        """
        handoff, most = self._handoff, self._blocks.prompt.num_blocks
        present, ready = 0, None
        try:
            present = await handoff.find_stored(self._blocks, len(self._blocks.keys))
            present = ready = min(present, most)
            while self._is_going_on:
                if ready >= self._computed_blocks:
                    handoff.tickets.hint(self._ticket_id, f"{PROGRESS}{ready}")
                    await self._change()
                    continue
                stop = min(ready + GROUP_BLOCKS, self._computed_blocks)
                await handoff.store(self._blocks, ready, stop, self._after)
                ready = stop
        except (StoreUnavailableError, TransferError) as error:
            log.warning(
                "blocks of ticket %s cannot be stored during its prefill and are stored "
                "at its end: %s",
                self._ticket_id,
                error,
            )
            while self._is_going_on:
                await self._change()
        return present, ready

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    @property
    def _is_going_on(self) -> bool:
        return self._finish is None and self._failure is None

    async def _close(self, open_ticket: OpenTicket, failure: str) -> None:
        with suppress(TimeoutError, StoreUnavailableError, HandoffError):
            async with asyncio.timeout(_LAST_WORD_S):
                await self._handoff.tickets.give_up(open_ticket, failure or "it failed")
