"""The cache service: composes device, tiers, storage, scheduler and hand-off; owns their lives."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

from tierkv import observe
from tierkv.cache.fingerprint import Fingerprint
from tierkv.cache.index import Index
from tierkv.cache.keys import Names, Prompt
from tierkv.cache.node import Tier
from tierkv.cache.pool import BlockPool
from tierkv.cache.space import Space
from tierkv.cache.write_policy import WriteRule
from tierkv.clock import Clock, SystemClock
from tierkv.errors import (
    ConfigError,
    HandoffError,
    InvariantError,
    StoreUnavailableError,
)
from tierkv.gpu.protocol import Device, Event, HostSlots, Planes
from tierkv.observe import Lookup, Stats
from tierkv.pd.claims import ClaimPolicy, Claims
from tierkv.pd.handoff import Handoff, Published
from tierkv.pd.settings import HandoffSettings
from tierkv.pd.staging import STAGING_BLOCKS, Staging
from tierkv.pd.ticket import ClaimProblem, Ticket
from tierkv.sched.explain import Explanation, explain
from tierkv.sched.fetcher import Fetched, Fetcher
from tierkv.sched.lifecycle import Lifecycle
from tierkv.sched.request import Request, RequestSpec
from tierkv.sched.scheduler import Scheduler
from tierkv.sched.settings import CacheSettings
from tierkv.sched.tiers import Tiers
from tierkv.sched.waiting import Limits
from tierkv.storage.protocol import Store
from tierkv.transfer.mover import Mover
from tierkv.transfer.storage_io import StorageIO

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
        name: str = "tierkv",
        clock: Clock | None = None,
    ) -> None:
        if fingerprint.layout.block_size != settings.block_size:
            raise ConfigError("the layout and the cache settings name different block sizes")
        self.fingerprint = fingerprint
        self.settings = settings
        self.device = device
        self.store = store
        self._handoff_settings = handoff
        self._name = name
        self._clock = clock or SystemClock()
        self._host: HostSlots | None = None
        self.is_ready = False
        self.is_draining = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Opens store and memory; at the end waits for every copy, checks the books, frees all."""
        layout = self.fingerprint.layout
        async with AsyncExitStack() as stack:
            if self.store is not None:
                await stack.enter_async_context(self.store.running())
            stack.enter_context(self._memory())
            assert self._host is not None, "memory is there"
            self.mover = Mover(self.device, self.planes, self._host)
            await stack.enter_async_context(self.mover.running())
            storage = None
            if self.store is not None:
                storage = StorageIO(
                    self.store,
                    Names(self._handoff_settings.prefix, self.fingerprint.short),
                    layout,
                    self._host,
                    deadline_s=self._handoff_settings.lookup_deadline_s,
                    block_ttl_s=self._handoff_settings.block_ttl_s,
                )
                await stack.enter_async_context(storage.running())
            await stack.enter_async_context(self._control(storage))
            self.is_ready = True
            try:
                yield
            finally:
                self.is_ready = False
                self.drain()
            await self.scheduler.until_idle()
        log.info("service %s closed", self._name)

    @contextmanager
    def _memory(self) -> Iterator[None]:
        layout, settings = self.fingerprint.layout, self.settings
        self.planes: Planes = self.device.allocate_planes(layout, settings.device_blocks)
        try:
            self._host = self.device.allocate_host(layout, settings.host_blocks + STAGING_BLOCKS)
            try:
                yield
            finally:
                self._host.close()
        finally:
            self.planes.close()

    @asynccontextmanager
    async def _control(self, storage: StorageIO | None) -> AsyncIterator[None]:
        settings = self.settings
        root = self.fingerprint.root()
        self.index = Index(settings.block_size, root, settings.policies())
        self.tiers = Tiers(
            index=self.index,
            root_digest=root,
            device_pool=BlockPool("device", settings.device_blocks),
            host_pool=BlockPool("host", settings.host_blocks),
            mover=self.mover,
            storage=storage,
            host_rule=WriteRule(settings.host_write, settings.host_after_hits),
            storage_rule=WriteRule(settings.storage_write, settings.storage_after_hits),
            background_copies=settings.background_copies,
            watermarks=settings.watermarks(),
        )
        self.scheduler = Scheduler(self.tiers)
        self.fetcher = Fetcher(self.tiers, storage) if storage else None
        self.lifecycle = Lifecycle(self.tiers, (settings.device_blocks, settings.host_blocks))
        self._storage = storage
        self._staging = Staging(first_slot=settings.host_blocks)
        self.handoff: Handoff | None = None
        self.claims: Claims | None = None
        if storage is not None and self.fetcher is not None:
            self.handoff = Handoff(
                self.tiers,
                storage,
                self.fingerprint,
                self._clock,
                self._staging,
                ticket_ttl_s=self._handoff_settings.ticket_ttl_s,
                producer=self._name,
            )
            self.claims = Claims(
                self.handoff,
                self.scheduler,
                self.fetcher,
                fetch_deadline_s=settings.fetch_deadline_s,
            )
        async with self.tiers.running():
            yield
        self.tiers.pins.clear()
        # Every task has ended, so the books must be closed: a leak stops here, loudly.
        wrong = self.verify()
        wrong += [f"request {r.request_id!r} never ended" for r in self.scheduler.running_requests]
        if wrong:
            raise InvariantError(tuple(wrong))

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
        differs = fingerprint.layout.digest != self.fingerprint.layout.digest
        if differs or fingerprint.short == self.fingerprint.short:
            raise ConfigError("another fingerprint has the same layout and another root")
        space = Space(fingerprint.short, fingerprint.root(), quota=quota)
        self.index.open_space(space, self.settings.device_eviction)
        if limits is not None:
            self.scheduler.limit(space.name, limits)
        return space.name

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
        return await self.scheduler.admit(spec, await self._fetch(prompt) if uses_cache else None)

    async def _fetch(self, prompt: Prompt) -> Fetched | None:
        if self.fetcher is None:
            return None
        return await self.fetcher.fetch(prompt, deadline_s=self.settings.fetch_deadline_s)

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

    async def claim(
        self,
        request_id: str,
        ticket_id: str,
        prompt: Prompt,
        *,
        max_new_tokens: int,
        policy: ClaimPolicy = ClaimPolicy.WHOLE,
        deadline_s: float | None = None,
    ) -> tuple[Request, Ticket]:
        """Wait for a published prompt and get its blocks, every token of them on the way.

        With ClaimPolicy.RECOMPUTE the request may have fewer `cached_tokens`, the rest of which
        the engine computes. Raises HandoffError, its reason a ClaimProblem, and what admit does.
        """
        claims = self._claims()
        spec = RequestSpec(request_id, prompt, max_new_tokens, needs_logits=False)
        if deadline_s is None:
            deadline_s = self._handoff_settings.claim_deadline_s
        return await claims.claim(spec, ticket_id, policy=policy, deadline_s=deadline_s)

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
        if self._storage is not None:
            keys = self.tiers.prompt_keys(prompt)[match.num_blocks :]
            try:
                present = await self._storage.count_present(keys)
                stored = sum(key.num_tokens for key in keys[:present])
            except StoreUnavailableError:
                stored = None
        return Lookup(
            num_tokens=prompt.num_tokens,
            device_tokens=(match.device_blocks + match.loading_blocks) * size,
            host_tokens=match.host_blocks * size,
            storage_tokens=stored,
        )

    def explain(self, prompt: Prompt) -> Explanation:
        """Which block of `prompt` is where, what is missing first, and why."""
        return explain(self.index, prompt, self.tiers.history)

    def stats(self) -> Stats:
        return observe.stats(self.scheduler, self.mover, self._storage)

    def verify(self) -> list[str]:
        """Recount leases, slots, states and orphans; what is wrong, in words, [] if nothing is."""
        return observe.verify(self.scheduler, self.mover, self.fetcher, self._staging)


def _no_storage() -> HandoffError:
    return HandoffError(
        ClaimProblem.UNAVAILABLE.value,
        "this node has no storage tier: set storage.url to hand prompts over",
    )
