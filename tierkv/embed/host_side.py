"""The service's side of an `EngineCache`: promises on the host tier, slots for saves, tickets.

Everything here runs on the service's loop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field

import numpy as np

from tierkv.cache.index import Lease
from tierkv.cache.keys import Prompt, StoredKey
from tierkv.cache.node import CopyState, Ids, Tier
from tierkv.errors import HandoffError, OutOfBlocksError, StoreUnavailableError
from tierkv.gpu.protocol import HostSlots
from tierkv.pd.claims import Watch
from tierkv.pd.handoff import Published
from tierkv.pd.tickets import ClaimProblem, Ticket, check_written
from tierkv.sched.copies import path_keys
from tierkv.sched.events import CacheEvent, Happening
from tierkv.sched.worth import FetchPolicy
from tierkv.service import Service
from tierkv.tasks import abandonable

_NO_SLOTS: Ids = np.zeros(0, np.int32)
_MOST_FAILURES = 4096  # blocks whose failed loads are counted


@dataclass(frozen=True, slots=True)
class HeldRun:
    """Slots of one group's blocks in a row, from position `first` in the prompt on."""

    first: int
    slots: Ids


@dataclass(slots=True, eq=False)
class HostPromise:
    """Tokens of a prompt that are on the host, held for one request until it has loaded them.

    parts: for each group, its blocks' slots, that of the partly shared or last one included.
    owner: has one entry, which whoever ends the promise takes; taking it is one step for any
    thread. problem: why there is not more, None if nothing went wrong.
    """

    num_tokens: int
    parts: list[HeldRun] = field(default_factory=lambda: [HeldRun(0, _NO_SLOTS)])
    lease: Lease | None = None
    ticket: Ticket | None = None
    problem: str | None = None
    num_blocks: int = 0  # that it counts for among all promises
    timer: asyncio.TimerHandle | None = None
    owner: deque[None] = field(default_factory=lambda: deque([None]))

    @property
    def first_tokens(self) -> tuple[int, ...]:
        return self.ticket.first_tokens if self.ticket is not None else ()

    @property
    def is_over(self) -> bool:
        """Whether it was loaded, given back, or has expired."""
        return not self.owner

    def claim(self) -> bool:
        """Take it; False if somebody was faster."""
        try:
            self.owner.popleft()
        except IndexError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class Kept:
    """num_blocks: that lookups find now. unused: by group, slots that were not needed for them."""

    num_blocks: int
    unused: tuple[tuple[int, ...], ...]


class HostSide:
    """most_promised: blocks that all promises hold together; a larger one goes alone.
    most_reserved: by group, host slots kept ready for saves. max_failures: see
    EngineCacheSettings."""

    def __init__(
        self,
        service: Service,
        *,
        most_promised: int,
        most_reserved: Sequence[int],
        max_failures: int,
        max_events: int,
    ) -> None:
        self.most_reserved = most_reserved
        self._service = service
        self._most_promised = most_promised
        self._max_failures = max_failures
        self._promises: set[HostPromise] = set()
        self._promised_blocks = 0
        self._turn = asyncio.Lock()  # of who waits for room to be promised something
        self._freed = asyncio.Event()
        self._lent: dict[int, Ids] = {}  # slots that are reserved for saves, or being written
        self._failures: OrderedDict[bytes, int] = OrderedDict()
        self._max_events = max_events
        self._listening = ExitStack()

    @property
    def slots(self) -> HostSlots:
        return self._service.host_slots

    async def begin(self, service: Service) -> None:
        """Listen to events from now on."""
        subscription = service.events.subscribe(self._max_events)
        self._events = self._listening.enter_context(subscription)

    def take_events(self) -> list[CacheEvent]:
        """Those since the last time; any thread."""
        return self._events.take()

    # Promises

    async def promise(
        self, prompt: Prompt, ticket_id: str | None, expires_s: float, limit: int | None = None
    ) -> HostPromise:
        """Bring to the host what storage has of `prompt`, and hold what is there then, `limit`
        tokens at most. Raises HandoffError if the ticket does not come or is another prompt's.
        Cancelling it leaves nothing held."""
        ticket: Ticket | None = None
        keys: Sequence[StoredKey] = ()
        if ticket_id is not None:
            ticket, keys = await self._ticket(ticket_id, prompt)
        async with self._room(prompt.num_blocks + 1) as promise:
            promise.ticket = ticket
            problem = await self._fetch_and_hold(prompt, keys, promise)
            if limit is not None:
                promise.num_tokens = min(promise.num_tokens, limit)
            promise.problem = problem
            loop = asyncio.get_running_loop()
            promise.timer = loop.call_later(expires_s, self._expire, promise)
        return promise

    async def count(self, prompt: Prompt) -> HostPromise:
        """As `promise`, of what is where, with nothing held."""
        found = await self._service.lookup(prompt)
        stored = found.storage_tokens
        problem = "storage did not answer" if stored is None else None
        return HostPromise(found.device_tokens + found.host_tokens + (stored or 0), problem=problem)

    async def _ticket(self, ticket_id: str, prompt: Prompt) -> tuple[Ticket, Sequence[StoredKey]]:
        handoff = self._service.handoff
        if handoff is None:
            raise HandoffError(ClaimProblem.UNAVAILABLE.value, "there is no storage for a ticket")
        watch = Watch(
            handoff.tickets,
            ticket_id,
            prompt,
            on_progress=lambda _: None,
            on_open=lambda _: None,
        )
        return await watch.ticket(
            deadline_s=self._service.handoff_settings.claim_deadline_s
        ), watch.keys

    async def _fetch_and_hold(
        self, prompt: Prompt, keys: Sequence[StoredKey], promise: HostPromise
    ) -> str | None:
        service = self._service
        if service.tiers.copies.storage is None:
            self._hold(prompt, promise)
            return None
        policy = FetchPolicy.WAIT_COMPLETE if keys else service.settings.fetch_policy
        fetched = await service.fetcher.fetch(
            prompt, deadline_s=service.settings.fetch_deadline_s, policy=policy, promised=keys
        )
        try:
            self._hold(prompt, promise)
        finally:
            fetched.release()
        problem = fetched.first_problem
        is_whole = promise.num_tokens == prompt.num_tokens
        return None if is_whole or problem is None else problem.reason

    def _hold(self, prompt: Prompt, promise: HostPromise) -> None:
        """What the host has of it now. Decided in one step: nothing can go in between."""
        index, size = self._service.index, prompt.block_size
        match = index.match(prompt)
        num_tokens, node, stop = match.num_blocks * size, match.node, match.num_blocks
        partial = match.partial
        if partial is not None:
            [state] = index.states(Tier.HOST, partial.node, partial.block, partial.block + 1)
            if state is CopyState.READY:
                num_tokens += partial.num_tokens
                node, stop = partial.node, partial.block + 1
        if stop:
            lease = index.hold(node, stop)
            index.count_hit(lease)
            num_good = self._num_good(lease)
            promise.lease = lease
            promise.num_tokens = min(num_tokens, num_good * size)
            slots = index.slots(Tier.HOST, lease.node, 0, min(stop, num_good))
            promise.parts = [HeldRun(0, slots)]
        self._recount(promise, stop)

    def _num_good(self, lease: Lease) -> int:
        """So many first blocks of the path have not failed to load too often."""
        if not self._failures:
            return lease.num_blocks
        for at, key in enumerate(path_keys(self._service.index, lease.node, 0, lease.num_blocks)):
            if self._failures.get(key.digest, 0) >= self._max_failures:
                return at
        return lease.num_blocks

    @asynccontextmanager
    async def _room(self, num_blocks: int) -> AsyncIterator[HostPromise]:
        """A promise, as soon as there is room for so many blocks among all, first come, first
        served. If the body fails there is none."""
        promise = HostPromise(0)
        async with self._turn:
            while self._promised_blocks and not self._fits(num_blocks):
                self._freed.clear()
                await self._freed.wait()
            self._promises.add(promise)
            self._recount(promise, num_blocks)
        try:
            yield promise
        except BaseException:  # a cancel too: nobody has heard of it
            self._release(promise)
            raise

    def _fits(self, num_blocks: int) -> bool:
        return self._promised_blocks + num_blocks <= self._most_promised

    def _recount(self, promise: HostPromise, num_blocks: int) -> None:
        self._promised_blocks += num_blocks - promise.num_blocks
        promise.num_blocks = num_blocks
        self._freed.set()

    def _expire(self, promise: HostPromise) -> None:
        if promise.claim():
            self._release(promise)

    async def free(self, promise: HostPromise) -> None:
        """Nobody wants what was promised; the caller has claimed it."""
        self._release(promise)

    async def loaded(self, promise: HostPromise, failed: Sequence[Sequence[int]]) -> None:
        """The load of a promise is over. failed: by group, positions of blocks that it did not
        bring; each counts against its block. A ticket of which all came is acknowledged."""
        lease = promise.lease
        if failed and lease is not None:
            keys = path_keys(self._service.index, lease.node, 0, lease.num_blocks)
            for at in failed[0]:
                digest = keys[at].digest
                self._failures[digest] = self._failures.pop(digest, 0) + 1
            while len(self._failures) > _MOST_FAILURES:
                self._failures.popitem(last=False)
        self._release(promise)
        handoff = self._service.handoff
        if promise.ticket is not None and not failed and handoff is not None:
            acknowledged = self._acknowledge(promise.ticket)
            self._service.tiers.work.start(acknowledged, "tierkv-acknowledge")

    async def _acknowledge(self, ticket: Ticket) -> None:
        handoff = self._service.handoff
        if handoff is not None:
            with suppress(StoreUnavailableError):  # it is only news
                await handoff.tickets.acknowledge(ticket)

    def _release(self, promise: HostPromise) -> None:
        self._promises.discard(promise)
        if promise.timer is not None:
            promise.timer.cancel()
        if promise.lease is not None:
            self._service.index.release(promise.lease)
            promise.lease = None
            self._service.tiers.work.capacity_changed()
        self._recount(promise, 0)

    # Saves

    async def reserve(self, counts: Sequence[int]) -> list[list[int]]:
        """By group, up to so many host slots for saves, evicting what may go."""
        [count] = counts
        tiers, found = self._service.tiers, []
        count = min(count, tiers.eviction.available(Tier.HOST))
        if count > 0:
            with suppress(OutOfBlocksError):
                found = tiers.eviction.take(Tier.HOST, count).tolist()
        for slot in found:
            self._lent[slot] = np.array([slot], np.int32)
            tiers.slots.lend(Tier.HOST, self._lent[slot])
        return [found]

    async def keep(self, prompt: Prompt, copied: Sequence[tuple[int, Ids, Ids]]) -> Kept:
        """Let lookups find blocks of `prompt`: for each group their positions, and slots that have
        all their bytes. What cannot hang under its parent, because that was evicted meanwhile, is
        not kept."""
        [(_, positions, slots)] = copied
        first = int(positions[0])
        index, tiers = self._service.index, self._service.tiers
        match = index.match(prompt, first * prompt.block_size)
        if match.num_blocks < first:
            return Kept(0, (tuple(slots.tolist()),))
        lease = index.hold(match.node, first)
        stop = min(first + len(slots), prompt.num_blocks)
        owned = np.ones(len(slots), np.bool_)
        if stop > first:
            refused = index.insert(Tier.HOST, lease, prompt, stop, slots[: stop - first])
            owned[list(refused)] = False
            tiers.events.tell(Happening.STORED, "host", lease.node, first, stop)
        end = lease.node
        if first + len(slots) > stop:
            end, is_new = index.insert_tail(Tier.HOST, lease, prompt, int(slots[-1]))
            owned[-1] = is_new
            if is_new:
                tiers.events.tell(Happening.STORED, "host", end, stop, stop + 1)
        for slot in slots[owned].tolist():
            tiers.slots.unlend(Tier.HOST, self._lent.pop(slot))
        tiers.copies.write_down(end, end.end)
        index.release(lease)
        tiers.work.capacity_changed()
        return Kept(len(slots), (tuple(slots[~owned].tolist()),))

    async def publish(
        self, prompt: Prompt, ticket_id: str, first_tokens: Sequence[int]
    ) -> Published:
        """Store what of `prompt` is not stored yet, out of the host tier, and then a ticket. Raises
        HandoffError, DuplicateRequestError."""
        service = self._service
        await service.check_ticket_is_free(ticket_id, prompt)
        promise = HostPromise(0)
        self._promises.add(promise)
        deadline_s = service.handoff_settings.publish_deadline_s
        try:
            self._hold(prompt, promise)
            if promise.num_tokens < prompt.num_tokens:
                raise HandoffError(
                    ClaimProblem.UNAVAILABLE.value,
                    f"the host has only {promise.num_tokens} of {prompt.num_tokens} tokens",
                )
            async with asyncio.timeout(deadline_s):
                return await self._publish(prompt, promise, ticket_id, first_tokens)
        except TimeoutError as error:
            text = f"the prompt could not be published within {deadline_s:g} s"
            raise HandoffError(ClaimProblem.UNAVAILABLE.value, text) from error
        except StoreUnavailableError as error:
            raise HandoffError(ClaimProblem.UNAVAILABLE.value, str(error)) from error
        finally:
            self._release(promise)

    async def _publish(
        self, prompt: Prompt, promise: HostPromise, ticket_id: str, first_tokens: Sequence[int]
    ) -> Published:
        handoff, tiers = self._service.handoff, self._service.tiers
        storage = tiers.copies.storage
        if handoff is None or storage is None:
            raise HandoffError(ClaimProblem.UNAVAILABLE.value, "there is no storage for a ticket")
        keys = handoff.tickets.keys_of(prompt)
        present = await handoff.count_present(keys)
        lease = promise.lease
        assert lease is not None, "the whole prompt is held"

        async def flush() -> None:
            held = tiers.index.hold_as_is(lease.node)  # the store may be at it when we have gone
            try:
                outcomes = await storage.flush(
                    keys[present:], promise.parts[0].slots[present:], notes_tails=False
                )
            finally:
                tiers.index.release(held)
                tiers.work.capacity_changed()
            check_written(storage, outcomes)

        if present < len(keys):
            await abandonable(tiers.work.started, flush, "tierkv-publish")
        opened = handoff.tickets.new_open(ticket_id, prompt)
        ticket = handoff.tickets.new(opened, first_tokens, None)
        await handoff.tickets.complete(ticket)
        handoff.ledger.published(ticket)
        tiers.work.start(storage.tails.note(keys[-1:]), "tierkv-note-tail")
        block_bytes = self._service.fingerprint.layout.block_bytes
        return Published(ticket, len(keys), present, (len(keys) - present) * block_bytes)

    # All of it

    async def verify(self, service: Service) -> list[str]:
        """As Service.verify, with what is held here."""
        leases = sum(one.lease is not None for one in self._promises)
        wrong = service.verify(num_leases=leases)
        counted = sum(one.num_blocks for one in self._promises)
        if counted != self._promised_blocks:
            wrong.append(f"{self._promised_blocks} blocks are promised, not {counted}")
        return wrong

    async def give_back(self, service: Service) -> None:
        """At the end: promises, and slots that nothing was saved to."""
        for promise in list(self._promises):
            self._release(promise)
        slots = np.array(list(self._lent), np.int32)
        for one in self._lent.values():
            service.tiers.slots.unlend(Tier.HOST, one)
        self._lent.clear()
        service.tiers.slots.give(Tier.HOST, slots)
        self._listening.close()
