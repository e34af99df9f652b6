"""The cache service: composes device, tiers, storage, scheduler and hand-off; owns their lives."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    suppress,
)

from tierkv import observe
from tierkv.cache.fingerprint import Fingerprint
from tierkv.cache.index import Index
from tierkv.cache.keys import Names, Prompt
from tierkv.cache.node import Tier
from tierkv.cache.pool import BlockPool
from tierkv.cache.space import Quota
from tierkv.cache.write_policy import WriteRule
from tierkv.clock import Clock, SystemClock
from tierkv.errors import (
    ConfigError,
    HandoffError,
    InvariantError,
    OwnershipError,
    StoreUnavailableError,
)
from tierkv.gpu.protocol import Device, Event, HostSlots, Planes
from tierkv.observe import Lookup, Stats
from tierkv.pd import status
from tierkv.pd.claims import ClaimPolicy, Claims
from tierkv.pd.direct.direct import Direct
from tierkv.pd.handoff import Handoff, Published
from tierkv.pd.lease import ProducerLease
from tierkv.pd.ledger import Ledger, TicketView
from tierkv.pd.settings import HandoffSettings
from tierkv.pd.staging import STAGING_BLOCKS, Staging
from tierkv.pd.stats import HandoffStats
from tierkv.pd.status import TicketStatus
from tierkv.pd.stream import Stream
from tierkv.pd.ticket import ClaimProblem, Ticket
from tierkv.pd.tickets import Tickets
from tierkv.sched.arriving import Arriving
from tierkv.sched.estimate import Estimator
from tierkv.sched.events import CacheEvents
from tierkv.sched.explain import Explanation, Surroundings, explain
from tierkv.sched.fetcher import Fetched, Fetcher
from tierkv.sched.lifecycle import Lifecycle
from tierkv.sched.ranked import RankedDevice
from tierkv.sched.request import Request, RequestSpec
from tierkv.sched.scheduler import Scheduler
from tierkv.sched.settings import CacheSettings
from tierkv.sched.stored import stored_beyond
from tierkv.sched.tenants import Tenants
from tierkv.sched.tiers import Tiers
from tierkv.sched.waiting import Limits
from tierkv.storage import maintenance
from tierkv.storage.protocol import Store
from tierkv.tasks import outlast
from tierkv.transfer.mover import Mover
from tierkv.transfer.storage_io import StorageIO
from tierkv.transfer.storage_io_tier import StorageOptions, StorageTier, StoreState

log = logging.getLogger("tierkv.service")


class Service:
    """One model's cache on one device. Use it inside `running()`, from one event loop."""

    def __init__(  # noqa: PLR0913 - what a service is made of
        self,
        device: Device,
        fingerprint: Fingerprint,
        settings: CacheSettings,
        handoff: HandoffSettings,
        store: Store | None,
        *,
        storage: StorageOptions | None = None,
        name: str = "tierkv",
        clock: Clock | None = None,
    ) -> None:
        if fingerprint.layout.block_size != settings.block_size:
            raise ConfigError("the layout and the cache settings name different block sizes")
        self.fingerprint = fingerprint
        self.settings = settings
        self.device = device
        self._storage_tier = StorageTier(store, storage or StorageOptions(), self._storage_changed)
        self._handoff_settings = handoff
        self._fingerprints = {"": fingerprint}
        self._name = name
        self._clock = clock or SystemClock()
        self._host: HostSlots | None = None
        self.ranks = device if isinstance(device, RankedDevice) else None
        num_ranks = len(self.ranks.devices) if self.ranks is not None else 1
        if num_ranks != settings.tensor_parallel:
            raise ConfigError(
                f"cache.tensor_parallel is {settings.tensor_parallel}, the device has {num_ranks}"
            )
        self._has_planes = False
        self.is_ready = False
        self.is_draining = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Opens store and memory; at the end waits for every copy, checks the books, frees all."""
        async with AsyncExitStack() as stack:
            await self._open_memory(stack)
            assert self._host is not None, "memory is there"
            self.mover = Mover(self.device, self.planes, self._host)
            await stack.enter_async_context(self.mover.running())
            await stack.enter_async_context(self._running_storage(self._host))
            await stack.enter_async_context(self._control(self._storage_tier.io))
            self.is_ready = True
            try:
                yield
            finally:
                self.is_ready = False
                self.drain()
            await self.scheduler.until_idle()
        log.info("service %s closed", self._name)

    def _running_storage(self, host: HostSlots) -> AbstractAsyncContextManager[None]:
        names = Names(self._handoff_settings.prefix, self.fingerprint.short)
        return self._storage_tier.running(
            names,
            self.fingerprint.layout,
            host,
            self.ranks.slices(host) if self.ranks is not None else (),
            deadline_s=self._handoff_settings.lookup_deadline_s,
            block_ttl_s=self._handoff_settings.block_ttl_s,
        )

    async def _open_memory(self, stack: AsyncExitStack) -> None:
        """In a thread: pinning takes 0.1 s and more. A cancel waits for its end, so that the stack
        knows what to close."""
        loop = asyncio.get_running_loop()
        opening = loop.run_in_executor(None, stack.enter_context, self._memory())
        await outlast({opening}, on_cancel=lambda: None)
        opening.result()

    @contextmanager
    def _memory(self) -> Iterator[None]:
        layout, settings = self.fingerprint.layout, self.settings
        self.planes: Planes = self.device.allocate_planes(layout, settings.device_blocks)
        self._has_planes = True
        try:
            self._host = self.device.allocate_host(layout, settings.host_blocks + STAGING_BLOCKS)
            try:
                yield
            finally:
                self._host.close()
        finally:
            if self._has_planes:
                self.planes.close()

    @asynccontextmanager
    async def _control(self, storage: StorageIO) -> AsyncIterator[None]:
        settings = self.settings
        root = self.fingerprint.root()
        self.index = Index(settings.block_size, root, settings.policies())
        self.tiers = Tiers(
            index=self.index,
            root_digest=root,
            device_pool=BlockPool("device", settings.device_blocks),
            host_pool=BlockPool("host", settings.host_blocks),
            mover=self.mover,
            storage=self._storage_tier.attached_io,
            host_rule=WriteRule(settings.host_write, settings.host_after_hits),
            storage_rule=WriteRule(settings.storage_write, settings.storage_after_hits),
            background_copy_bytes=settings.background_copy_bytes,
            block_bytes=self.fingerprint.layout.block_bytes,
            watermarks=settings.watermarks(),
        )
        self.estimator = Estimator(
            bytes_per_token=self.fingerprint.layout.block_bytes / settings.block_size,
            policy=settings.fetch_policy,
            deadline_s=settings.fetch_deadline_s,
            first_try_s=settings.fetch_deadline_s,
        )
        self.scheduler = Scheduler(
            self.tiers, default=settings.limits(), prefill=self.estimator.prefill
        )
        assert self._host is not None, "memory is there"
        stats = HandoffStats()
        self._direct = Direct(
            self.tiers,
            storage,
            self._host,
            self._handoff_settings,
            codecs=self._storage_tier.options.codecs,
            stats=stats,
        )
        self.fetcher = Fetcher(self.tiers, storage, self.estimator, source=self._direct.offers)
        self._arriving = Arriving()
        self.tenants = Tenants(
            self.tiers,
            self._fingerprints,
            lambda name: self.scheduler.is_used_by(name) or self._arriving.is_used_by(name),
            on_close=self.scheduler.forget_tenant,
            max_tenants=settings.max_tenants,
            quota=settings.quota(),
            eviction=settings.device_eviction,
        )
        self.lifecycle = Lifecycle(self.tiers, (settings.device_blocks, settings.host_blocks))
        self._staging = Staging(first_slot=settings.host_blocks)
        self._compose_handoff(storage, stats)
        async with self._all_handoffs.running(), self.tiers.running():
            yield
        self.tiers.pins.clear()
        # Every task has ended, so the books must be closed: a leak stops here, loudly.
        wrong = self.verify()
        wrong += [f"request {r.request_id!r} never ended" for r in self.scheduler.running_requests]
        if wrong:
            raise InvariantError(tuple(wrong))

    def _compose_handoff(self, storage: StorageIO, stats: HandoffStats) -> None:
        settings = self._handoff_settings
        lease = ProducerLease(storage, self._clock, lease_s=settings.producer_lease_s)
        tickets = Tickets(
            storage,
            self.tiers,
            self._fingerprints,
            self._clock,
            ticket_ttl_s=settings.ticket_ttl_s,
            claimed_ttl_s=settings.claimed_ttl_s,
            name=self._name,
        )
        ledger = Ledger(tickets, self._clock, incarnation=lease.incarnation)
        self._all_handoffs = Handoff(
            self.tiers,
            storage,
            self._staging,
            tickets,
            lease=lease,
            ledger=ledger,
            direct=self._direct,
            stats=stats,
        )
        self._all_claims = Claims(
            tickets,
            lease,
            self.scheduler,
            self.fetcher,
            direct=self._direct,
            fetch_deadline_s=self.settings.fetch_deadline_s,
            stats=stats,
        )

    # Storage

    @property
    def store(self) -> Store | None:
        """The store that is attached, for all tenants that have none of their own."""
        return self._storage_tier.store

    async def attach_storage(self, store: str | Store, *, tenant: str = "") -> None:
        """Use a store from now on, instead of the one there, if any; see StorageTier.attach.

        tenant: a name from `open_fingerprint`, or the service's own fingerprint's short form: only
            its blocks go there. Tickets are in the common store always.
        """
        await self._storage_tier.attach(store, tenant)

    def detach_storage(self, *, tenant: str = "") -> bool:
        """Go on without the store; whether there was one. What is under way ends on it, or fails
        as if the store had gone; requests compute instead."""
        return self._storage_tier.detach(tenant)

    def storage_state(self) -> tuple[StoreState, ...]:
        """Each attached store, and how it is doing. One that is degraded only slows a node down."""
        return self._storage_tier.state()

    def _storage_changed(self) -> None:
        """Another store is there, or one that may have lost what it had."""
        if not self.is_ready:
            return
        self.tiers.storage = self._storage_tier.attached_io
        for node in self.index.nodes():
            self.index.unmark_stored(node, node.start, node.end)
        self.tiers.capacity_changed()

    def drain(self) -> None:
        """Take no new requests; `running()` then ends once the running ones have."""
        self.is_draining = True
        self.scheduler.drain()

    def pause(self) -> None:
        """Admit nobody until `unpause`."""
        self.scheduler.pause()

    def unpause(self) -> None:
        self.scheduler.unpause()

    def open_fingerprint(
        self,
        fingerprint: Fingerprint,
        *,
        quota: tuple[int | None, int | None] = (None, None),
        limits: Limits | None = None,
    ) -> str:
        """Serve another tenant or adapter beside the service's own; it shares nothing with them.

        quota: the most device and host blocks it may have, None for any; over it, it evicts its
        own. Returns the name that its prompts carry as `space`. Its layout must be the service's.
        """
        space = self.tenants.open(fingerprint, quota)
        if limits is not None:
            self.scheduler.limit(space, limits)
        return space

    def space_of_tenant(self, tenant: str) -> str:
        """What this tenant's prompts carry as `space`, opened on first use: Tenants.space_of."""
        return self.tenants.space_of(tenant)

    def close_fingerprint(self, space: str) -> int:
        """Forget a fingerprint opened beside the service's own, and its blocks, which must not be
        in use; how many copies that were. See Tenants.close."""
        return self.tenants.close(space)

    def set_quota(self, space: str, quota: Quota) -> None:
        """The most device and host blocks a space may have from now on; see Tenants.set_quota."""
        self.tenants.set_quota(space, quota)

    def quota_of(self, space: str) -> Quota:
        return self.tenants.quota_of(space)

    def set_limits(self, space: str, limits: Limits) -> None:
        """What a space may have running from now on."""
        self.index.root_named(space)
        self.scheduler.limit(space, limits)

    def fingerprint_of(self, space: str) -> Fingerprint:
        """Of a name from `open_fingerprint`, or the service's own for ""."""
        return self._fingerprints[space]

    def roots(self) -> dict[str, bytes]:
        """The digest that the first block of every prompt has for its parent, by space."""
        return {space: one.root() for space, one in self._fingerprints.items()}

    def pin(self, name: str, prompt: Prompt, ttl_s: float, *, is_soft: bool = False) -> int:
        """Keep what is cached of `prompt` for a while; how many blocks. See Pins."""
        return self.tiers.pins.pin(name, prompt, ttl_s, is_soft=is_soft)

    def unpin(self, name: str) -> bool:
        """End a pin before its time; whether there was one."""
        was_there = self.tiers.pins.unpin(name)
        self.tiers.capacity_changed()
        return was_there

    def reset(self) -> int:
        """Forget all that nobody holds; how many copies are left. See Lifecycle.reset."""
        return self.lifecycle.reset()

    async def resize(self, tier: Tier, capacity: int) -> None:
        """Use `capacity` slots of a tier from now on; see Lifecycle.resize."""
        await self.lifecycle.resize(tier, capacity)

    async def free(self, *, clears_storage: bool = False) -> int:
        """Forget all that nobody holds, as `reset`; with `clears_storage` also every value of this
        service's fingerprints in the attached store, for all nodes that share it. How many stored
        values that were. Raises StoreUnavailableError."""
        self.lifecycle.reset()
        store = self.store
        if not clears_storage or store is None:
            return 0
        names = Names(self._handoff_settings.prefix, self.fingerprint.short)
        shorts = {space or self.fingerprint.short for space in self._fingerprints}
        removed = 0
        for short in sorted(shorts):
            removed += await maintenance.remove(store, f"{names.prefix}:{short}:")
        return removed

    @property
    def is_asleep(self) -> bool:
        return self.lifecycle.is_asleep

    async def sleep(self, *, keeps_blocks: bool = True) -> None:
        """Give the device's memory back until `wake`. Nobody is admitted meanwhile; it waits for
        requests that run and for pins.

        keeps_blocks: blocks that are only on the device go to the host first, as far as it has
        room; the rest, and with False all of them, is forgotten. Cancelling it undoes it. Raises
        OwnershipError if it sleeps already.
        """
        self.scheduler.pause()
        try:
            await self.lifecycle.empty_device(keeps_blocks=keeps_blocks)
        except BaseException:
            if not self.is_asleep:
                self.scheduler.unpause()
            raise
        try:
            await self.mover.suspend()  # goes to its end even if it is cancelled
        finally:
            self._has_planes = False
            self.planes.close()

    async def wake(self, device_blocks: int | None = None) -> None:
        """Take device memory again, for `device_blocks`, None for as many as before, and admit.
        `planes` is another object then. Raises ConfigError, still asleep, if there is no room, and
        OwnershipError if it does not sleep."""
        if not self.is_asleep:
            raise OwnershipError("the device does not sleep")
        count = device_blocks or self.tiers.pools[Tier.DEVICE].capacity
        layout = self.fingerprint.layout
        allocate = functools.partial(self.device.allocate_planes, layout, count)
        opening = asyncio.get_running_loop().run_in_executor(None, allocate)
        try:
            await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_again)
            raise
        planes = opening.result()
        try:
            await self.mover.reopen(planes)
        except BaseException:
            await self.mover.suspend()
            planes.close()
            raise
        self.planes, self._has_planes = planes, True
        self.lifecycle.refill_device(count)
        self.scheduler.unpause()

    # Requests

    async def admit(
        self,
        request_id: str,
        prompt: Prompt,
        *,
        max_new_tokens: int,
        uses_cache: bool = True,
        priority: int = 0,
    ) -> Request:
        """Find what is cached of `prompt` on any tier and get its blocks; see Scheduler.admit."""
        spec = RequestSpec(
            request_id, prompt, max_new_tokens, uses_cache=uses_cache, priority=priority
        )
        self.scheduler.check(spec)
        fetched = None
        if uses_cache and self.tiers.storage is not None:
            async with self._arriving.arrival(request_id, prompt.space):
                fetched = await self._fetch(prompt)
        return await self.scheduler.admit(spec, fetched)

    def abort(self, request_id: str) -> bool:
        """Nobody wants this request any more; whether there was one. See Scheduler.abort."""
        return self._arriving.abort(request_id) or self.scheduler.abort(request_id)

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """The engine took so long to compute so many prompt tokens. From these the node learns
        what is worth fetching, or waiting for; without them every fetch has its full deadline, and
        nobody waits for blocks that another request is computing."""
        if num_tokens > 0 and seconds > 0:
            self.estimator.note_prefill(num_tokens, seconds)

    async def _fetch(self, prompt: Prompt) -> Fetched | None:
        if self.tiers.storage is None:
            return None
        settings = self.settings
        return await self.fetcher.fetch(
            prompt, deadline_s=settings.fetch_deadline_s, policy=settings.fetch_policy
        )

    async def commit(self, request: Request, tokens: bytes, *, after: Sequence[Event] = ()) -> None:
        await self.scheduler.commit(request, tokens, after=after)

    def end(self, request: Request, *, after: Sequence[Event] = ()) -> None:
        self.scheduler.end(request, after=after)

    async def extend(self, request: Request, num_tokens: int) -> None:
        """Room for `num_tokens` more tokens; see Scheduler.extend."""
        await self.scheduler.extend(request, num_tokens)

    def preempt(self, request: Request, *, after: Sequence[Event] = ()) -> None:
        """Give the blocks back for a while; see Scheduler.preempt."""
        self.scheduler.preempt(request, after=after)

    async def resume(self, request: Request, *, max_new_tokens: int) -> Request:
        """Bring a preempted request back; see Scheduler.resume."""
        return await self.scheduler.resume(request, max_new_tokens=max_new_tokens)

    # Hand-off

    async def publish(
        self,
        request: Request,
        ticket_id: str,
        first_tokens: Sequence[int],
        *,
        after: Sequence[Event] = (),
    ) -> Published:
        """Store the request's computed prompt, and a ticket for it; see Handoff.publish."""
        return await self._handoff().publish(
            request,
            ticket_id,
            first_tokens,
            after=after,
            deadline_s=self._handoff_settings.publish_deadline_s,
        )

    def stream(self, request: Request, ticket_id: str) -> Stream | None:
        """Publish the request's prompt while it is computed; None if the settings say otherwise.

        See Stream. Raises HandoffError without a storage tier.
        """
        handoff = self._handoff()
        if not self._handoff_settings.streams:
            return None
        deadline_s = self._handoff_settings.publish_deadline_s
        return Stream(handoff, request, ticket_id, deadline_s=deadline_s)

    async def claim(
        self,
        request_id: str,
        ticket_id: str,
        prompt: Prompt,
        *,
        max_new_tokens: int,
        policy: ClaimPolicy = ClaimPolicy.WHOLE,
        deadline_s: float | None = None,
    ) -> tuple[Request, Ticket | None]:
        """Wait for a published prompt and get its blocks, every token of them on the way.

        With ClaimPolicy.RECOMPUTE the request may have fewer `cached_tokens`, the rest of which
        the engine computes, and there may be no ticket; with RECOMPUTE_ALL there is neither.
        Raises HandoffError, its reason a ClaimProblem, and what admit does.
        """
        claims = self._claims()
        spec = RequestSpec(request_id, prompt, max_new_tokens, needs_logits=False)
        if deadline_s is None:
            deadline_s = self._handoff_settings.claim_deadline_s
        return await claims.claim(spec, ticket_id, policy=policy, deadline_s=deadline_s)

    async def ticket_state(self, ticket_id: str) -> TicketStatus:
        """How a ticket stands, of whatever node it is; without waiting for it."""
        handoff = self._handoff()
        return await status.look(handoff.tickets, handoff.lease, ticket_id)

    async def forget_ticket(self, ticket_id: str) -> bool:
        """Delete a ticket, whole or open; whether there was one. Raises StoreUnavailableError."""
        return await self._handoff().tickets.forget(ticket_id)

    async def acknowledge(self, ticket_id: str) -> None:
        """Say that a ticket was claimed, for an engine that did not claim it through `claim`.

        Raises HandoffError if there is none, and StoreUnavailableError.
        """
        tickets = self._handoff().tickets
        ticket = await tickets.read(ticket_id)
        if ticket is None:
            raise HandoffError(ClaimProblem.NOT_YET.value, f"there is no ticket {ticket_id[:80]!r}")
        await tickets.acknowledge(ticket)

    def issued_tickets(self) -> list[TicketView]:
        """What became of the last tickets of this node, the newest first."""
        return self._all_handoffs.ledger.views

    @property
    def handoff(self) -> Handoff | None:
        """None without a storage tier to hand over through."""
        return self._all_handoffs if self.tiers.storage is not None else None

    @property
    def claims(self) -> Claims | None:
        return self._all_claims if self.tiers.storage is not None else None

    def _handoff(self) -> Handoff:
        if self.handoff is None:
            raise _no_storage()
        return self.handoff

    def _claims(self) -> Claims:
        if self.claims is None:
            raise _no_storage()
        return self.claims

    # Looking

    async def lookup(self, prompt: Prompt) -> Lookup:
        """Where the prompt's tokens are right now. Changes nothing, and promises nothing."""
        match = self.index.match(prompt)
        size = self.settings.block_size
        stored: int | None = 0
        storage = self.tiers.storage
        if storage is not None:
            try:
                _, stored = await stored_beyond(self.tiers, storage, prompt, match)
            except StoreUnavailableError:
                stored = None
        return Lookup(
            num_tokens=prompt.num_tokens,
            device_tokens=(match.device_blocks + match.loading_blocks) * size,
            host_tokens=match.host_blocks * size,
            storage_tokens=stored,
        )

    def explain(self, prompt: Prompt, *, names_fields: bool = False) -> Explanation:
        """Which block of `prompt` is where on this node, what is missing first, and why.

        names_fields: say in which fields a fingerprint differs under which it is cached. Only for
        an operator: it tells one tenant about another.
        """
        return self._explain(prompt, names_fields=names_fields, stored=None)

    async def explain_with_storage(
        self, prompt: Prompt, *, deadline_s: float, names_fields: bool = False
    ) -> Explanation:
        """`explain`, and what storage has beyond that; without that part if it does not answer
        within `deadline_s` seconds."""
        stored: int | None = None
        storage, match = self.tiers.storage, self.index.match(prompt)
        if storage is not None:
            with suppress(StoreUnavailableError, TimeoutError):
                async with asyncio.timeout(deadline_s):
                    stored, _ = await stored_beyond(self.tiers, storage, prompt, match)
        return self._explain(prompt, names_fields=names_fields, stored=stored)

    def _explain(self, prompt: Prompt, *, names_fields: bool, stored: int | None) -> Explanation:
        def is_fetching(asked: Prompt, block: int) -> bool:
            if not self.fetcher.num_in_flight:
                return False
            keys = self.tiers.prompt_keys(asked)
            return block < len(keys) and self.fetcher.is_fetching(keys[block].digest)

        computing = self.scheduler.computing
        around = Surroundings(
            fetching=is_fetching,
            computing=lambda match, asked: (
                computing.find(match, asked, asked.num_blocks) is not None
            ),
            fingerprints=self._fingerprints if names_fields else None,
            stored=stored,
        )
        return explain(self.index, prompt, self.tiers.history, around)

    @property
    def events(self) -> CacheEvents:
        """What happens to cached blocks, for who subscribes."""
        return self.tiers.events

    def stats(self) -> Stats:
        return observe.stats(self.scheduler, self.mover, self.tiers.storage, self._all_handoffs)

    def verify(self) -> list[str]:
        """Recount leases, slots, states and orphans; what is wrong, in words, [] if nothing is."""
        return observe.verify(self.scheduler, self.mover, self.fetcher, self._all_handoffs)


def _close_again(opening: asyncio.Future[Planes]) -> None:
    """Memory that came for a `wake` that was cancelled."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def _no_storage() -> HandoffError:
    return HandoffError(
        ClaimProblem.UNAVAILABLE.value,
        "this node has no storage tier: set storage.url to hand prompts over",
    )
