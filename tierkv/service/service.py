"""`Service`, the cache of one model's KV on device, host and storage."""

from __future__ import annotations

import asyncio
import logging
import operator
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

from tierkv.cache.groups import FlatBlocks
from tierkv.cache.keys import Fingerprint, Names, Prompt, StoredKey
from tierkv.cache.node import CopyState, Quota, Tier
from tierkv.errors import (
    ConfigError,
    HandoffError,
    OwnershipError,
    ShuttingDownError,
    StoreUnavailableError,
    TierKVError,
)
from tierkv.gpu.protocol import Device, HostSlots, Planes
from tierkv.observe import Lookup, Stats, Timelines
from tierkv.pd.handoff import Handoff, Published, PublishStream
from tierkv.pd.settings import HandoffSettings
from tierkv.pd.tickets import HandoffProblem, TicketStatus, status_of
from tierkv.sched.budget import Budget
from tierkv.sched.copies import count_stored, keys_beyond, stored_beyond
from tierkv.sched.events import CacheEvents
from tierkv.sched.explain import Explanation, explain
from tierkv.sched.fetch import Fetched
from tierkv.sched.request import RequestSpec
from tierkv.sched.settings import CacheSettings
from tierkv.sched.worth import FetchPolicy
from tierkv.service.components import (
    Components,
    Memory,
    ServiceConfig,
    check,
    entered_in_thread,
    host_memory,
    opened,
)
from tierkv.service.kv_events import EventsSection, KvEventPublisher
from tierkv.storage import maintenance
from tierkv.storage.protocol import Store, StoredValue
from tierkv.tasks import failures_reported_to, task_group
from tierkv.transfer.deletions import Deletions
from tierkv.transfer.storage_io import StorageIO
from tierkv.transfer.tier import StorageOptions, StorageTier, StoreState

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Publishing:
    """The publish of one prompt under one ticket, running or ended.

    Attributes:
        task: the task that publishes; its result is the outcome.
        stream: the stream, if the publish began before the prompt was computed. None for any other
            publish, and after a call of the stream's `finish` or `fail`, even while `task` still
            runs.
        refused: the error that was passed to `give_up`; None if `give_up` was not called.
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
        """Wait until the ticket is published. Cancelling the wait does not stop the publish.

        Returns:
            The ticket and counts.

        Raises:
            HandoffError, StoreUnavailableError, DuplicateRequestError: the publish failed.
            TierKVError: the error that was passed to `give_up`, if the publish was cancelled.
        """
        await asyncio.wait([self.task])
        if self.task.cancelled():
            raise self.refused or ShuttingDownError(
                "this node was stopped before the prompt was published"
            )
        outcome = self.task.result()
        if isinstance(outcome, TierKVError):
            raise outcome
        return outcome

    def give_up(self, why: TierKVError) -> None:
        """Cancel the publish, so that no ticket is written; `published` then raises `why`."""
        self.refused = self.refused or why
        self.task.cancel()


class Publishings:
    """The running publishes, one task each. `running` ends when all of them have ended."""

    def __init__(self) -> None:
        self._open: set[Publishing] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with task_group() as self._tasks:
            yield

    def start(
        self, work: Coroutine[None, None, Published], stream: PublishStream | None = None
    ) -> Publishing:
        """Run a publish in a task. If it raises a TierKVError, other tasks continue.

        Args:
            work: the coroutine that publishes.
            stream: the stream that `work` runs; None for a prompt that is already computed.

        Returns:
            The running publish, which contains the error if there is one.
        """
        task = self._tasks.create_task(_outcome(work), name="tierkv-publish")
        publishing = Publishing(task, stream)
        self._open.add(publishing)

        # A callback, since a task that is cancelled before its first step never runs its `finally`.
        def ended(_: asyncio.Task[Published | TierKVError]) -> None:
            self._open.discard(publishing)
            work.close()

        task.add_done_callback(ended)
        return publishing

    def give_up(self) -> None:
        """Cancel all running publishes, so that none of them writes its ticket."""
        for publishing in list(self._open):
            publishing.give_up(
                ShuttingDownError("this node was stopped before the prompt was published")
            )


async def _outcome(work: Coroutine[None, None, Published]) -> Published | TierKVError:
    try:
        return await work
    except TierKVError as error:
        log.warning("a prompt was not published: %s", error)
        return error


@dataclass(frozen=True, slots=True)
class Freed:
    """The outcome of `Service.free`.

    Attributes:
        held_copies: number of copies of blocks, on device or host, that stay because requests, pins
            or running copies use them.
        removed_values: number of values removed from storage.
    """

    held_copies: int
    removed_values: int


_ASLEEP = "sleep"  # reason of the pause during sleep, so that `wake` ends no other pause


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """The host slots of a cache group with a layout of its own, and its access to storage.

    Attributes:
        host: the host slots.
        io: reads and writes the group's blocks in storage.
    """

    host: HostSlots
    io: StorageIO


class Service:
    """One model's cache on one device. Use it inside `running()`, from one event loop.

    Args:
        device: the device of the cache.
        fingerprint: the service's own fingerprint: model, layout, adapter and tenant.
        settings: sizes of the tiers, and settings of copies, fetches and eviction.
        handoff: settings of tickets, and the name prefix and lifetime of all stored values.
        store: the store that all tenants use by default; None for no store.
        storage: other settings of the storage tier, such as the protection of stored values and the
            stores of single tenants; None for the defaults.
        name: name of this node.
        other_groups: for each cache group with a layout of its own, its fingerprint and number of
            host slots. `EngineCache` records these groups' blocks; they are not in the index.
        kv_events: addresses at which cache events are published; None to publish no events.
    """

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
        other_groups: Sequence[tuple[Fingerprint, int]] = (),
        kv_events: EventsSection | None = None,
    ) -> None:
        config = ServiceConfig(device, fingerprint, settings, handoff, name)
        self.ranks = check(config)
        self.fingerprint, self.settings, self.device = fingerprint, settings, device
        self._config = config
        self._fingerprints = config.fingerprints
        self._memory = Memory(device, fingerprint.layout)
        self._storage_tier = StorageTier(store, storage or StorageOptions(), self._storage_changed)
        self.groups: Sequence[GroupMemory] = ()
        self._other_groups = tuple(other_groups)
        self.flat_blocks: Sequence[FlatBlocks] = ()  # of groups beside the index, see HostSide
        self.publishings = Publishings()
        self.publisher = KvEventPublisher(kv_events or EventsSection(), name, self._fingerprints)
        self.timelines = Timelines()
        self.is_ready = False
        self.is_draining = False
        self.failure: str | None = None  # the unexpected error that closes the service
        self.on_failure: Callable[[], None] = lambda: None  # called when `failure` is known

    # Opening and closing

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Allocate memory, run the service while the `async with` block runs, then free the memory.

        After the block, wait for every copy and check for leaks. The service can run again later.
        All fingerprints except the service's own must then be added again.
        """
        self.is_draining = False
        self.failure = None
        self._config.reset_fingerprints()
        with failures_reported_to(self._failed):
            async with self._running():
                yield
        log.info("service %s closed", self._config.name)

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        async with (
            self._groups(),
            opened(self._config, self._memory, self._storage_tier) as parts,
        ):
            self._adopt(parts)
            try:
                async with self.publisher.running(self.events, self.index):
                    self.is_ready = True
                    async with self.publishings.running():
                        yield
            finally:
                self.is_ready = False
                self.drain()
            await self.scheduler.until_idle()

    @asynccontextmanager
    async def _groups(self) -> AsyncIterator[None]:
        settings = self._config.handoff
        async with AsyncExitStack() as stack:
            groups = []
            for fingerprint, count in self._other_groups:
                memory = host_memory(self.device, fingerprint.layout, count)
                host = await stack.enter_async_context(entered_in_thread(memory))
                io = self._storage_tier.io_of_layout(
                    Names(settings.prefix, fingerprint.short),
                    fingerprint.layout,
                    host,
                    own=self.fingerprint.short,
                    block_ttl_s=settings.block_ttl_s,
                )
                groups.append(GroupMemory(host, await stack.enter_async_context(io)))
            self.groups = groups
            try:
                yield
            finally:
                self.groups = ()

    def _failed(self, task: str, error: BaseException) -> None:
        log.critical(
            "service %s has failed and closes: task %s ended with %r",
            self._config.name,
            task,
            error,
            exc_info=error,
        )
        if self.failure is None:
            self.failure = f"{task} ended with {type(error).__name__}: {error}"
        if self.is_ready:
            self.drain()
        self.on_failure()

    def _adopt(self, parts: Components) -> None:
        self._parts = parts
        self.mover, self.index, self.tiers = parts.mover, parts.index, parts.tiers
        self.scheduler, self.fetcher = parts.scheduler, parts.fetcher
        self.estimator, self.tenants = parts.estimator, parts.tenants
        self.claims, self.portions = parts.claims, parts.portions
        self._arrivals = parts.arrivals

    @property
    def planes(self) -> Planes:
        """The device's memory for blocks. Each `wake` replaces this object by a new one."""
        return self._memory.planes

    @property
    def host_slots(self) -> HostSlots:
        """The memory of the host tier."""
        return self._memory.host

    @property
    def handoff_settings(self) -> HandoffSettings:
        return self._config.handoff

    def drain(self) -> None:
        """Refuse new requests, so that `running()` can end once the running requests have ended."""
        self.is_draining = True
        self._parts.arrivals.drain()
        self.scheduler.drain()

    # Storage

    @property
    def store(self) -> Store | None:
        """The store for all tenants that have no store of their own; None if none is attached."""
        return self._storage_tier.store

    async def attach_storage(self, store: str | Store, *, tenant: str = "") -> None:
        """Open a store, and use it from now on instead of the tenant's earlier store, if any.

        If the new store cannot be opened, the earlier store stays attached.

        Args:
            store: the store, or its URL.
            tenant: short name of the fingerprint whose blocks go to this store, as returned by
                `open_fingerprint`. "" attaches the common store, for all tickets, and for blocks of
                fingerprints without a store of their own.

        Raises:
            ConfigError: the URL names no store, or this service cannot open stores by URL.
        """
        await self._storage_tier.attach(store, tenant)

    def detach_storage(self, *, tenant: str = "") -> bool:
        """Stop using the store of `tenant`; return True if there was one.

        Operations that have begun on the store end or fail. A request that waits for a failed
        operation computes instead.

        Args:
            tenant: the name that was passed to `attach_storage`; "" for the common store.
        """
        return self._storage_tier.detach(tenant)

    def storage_state(self) -> tuple[StoreState, ...]:
        """Return the state of each attached store."""
        return self._storage_tier.state()

    def _storage_changed(self) -> None:
        if not self.is_ready:
            return
        self.tiers.copies.storage = self._storage_tier.attached_io
        self.estimator.tier.forget()
        self.tiers.copies.note_nothing_stored()
        self.tiers.work.capacity_changed()

    # Tenants

    def open_fingerprint(
        self,
        fingerprint: Fingerprint,
        *,
        quota: tuple[int | None, int | None] = (None, None),
    ) -> str:
        """Accept prompts of a further tenant or adapter.

        Prompts with different fingerprints share no blocks.

        Args:
            fingerprint: the further fingerprint, with the layout of the service.
            quota: largest numbers of device and host blocks that this fingerprint may have; None
                for no limit. Beyond the quota, its own blocks are evicted.

        Returns:
            The name of its part of the index (its space), for `Prompt.of(space=)`.
        """
        return self.tenants.open(fingerprint, quota)

    def close_fingerprint(self, space: str) -> int:
        """Refuse prompts of a space from now on, and remove its blocks from device and host.

        Blocks in storage are not removed. The call does not yield to the event loop.

        Args:
            space: the name that `open_fingerprint` returned.

        Returns:
            The number of blocks removed from the device plus the number removed from the host.

        Raises:
            BadRequestError: the space is in use or not open; nothing has changed.
        """
        return self.tenants.close(space)

    async def retire_fingerprint(self, space: str) -> int:
        """Remove the blocks of a space from device and host, then refuse its prompts.

        Other tasks of the event loop run during the call. Blocks in storage are not removed.

        Args:
            space: the name that `open_fingerprint` returned.

        Returns:
            The number of blocks removed from the device plus the number removed from the host.

        Raises:
            BadRequestError: the space is not open or is in use. If a request begins to use it
                during the call, it stays open, without the blocks that were removed until then.
        """
        return await self.tenants.retire(space)

    def space_of_tenant(self, tenant: str, adapter: str = "") -> str:
        """Return the name of the space for a tenant's prompts; open the space on first use.

        Args:
            tenant: name of the tenant; "" for blocks without a tenant.
            adapter: name and revision of LoRA weights; "" for none.

        Returns:
            The name, for `Prompt.of(space=)`.

        Raises:
            OutOfBlocksError: too many spaces are open, and all are in use.
        """
        return self.tenants.space_of(tenant, adapter)

    def quota_of(self, space: str) -> Quota:
        """Return the limits on a space's device and host blocks; the space need not be open."""
        return self.tenants.quota_of(space)

    def set_quota(self, space: str, quota: Quota) -> None:
        """Set the largest numbers of blocks of a space.

        Args:
            space: name of the space.
            quota: largest numbers of device and host blocks; None for no limit.
        """
        self.tenants.set_quota(space, quota)

    def fingerprint_of(self, space: str) -> Fingerprint:
        """Return the fingerprint (model, layout, adapter, tenant ...) of an open space."""
        return self._fingerprints[space]

    def tenant_of(self, space: str) -> str | None:
        """Return the tenant of a space; None if the space is not open."""
        fingerprint = self._fingerprints.get(space)
        return None if fingerprint is None else fingerprint.tenant

    def roots(self) -> dict[str, bytes]:
        """Return the root of each open space, by the name of the space."""
        return {space: one.root() for space, one in self._fingerprints.items()}

    # Pins, sizes, sleep

    def pin(self, name: str, prompt: Prompt, ttl_s: float, *, is_soft: bool = False) -> int:
        """Protect the cached blocks of a prompt from eviction for some seconds.

        Args:
            name: name of the pin; a pin of the same name is replaced.
            prompt: the prompt with the blocks to pin; only cached blocks are pinned.
            ttl_s: seconds until the pin ends, above 0.
            is_soft: True to allow eviction of the blocks once no block without a pin is left.

        Returns:
            The number of pinned blocks.

        Raises:
            BadRequestError: `ttl_s` is not above 0.
        """
        return self.tiers.pins.pin(name, prompt, ttl_s, is_soft=is_soft)

    def unpin(self, name: str) -> bool:
        """Remove a pin; return True if there was one."""
        return self.tiers.pins.unpin(name)

    def stored_under(self, space: str = "") -> str:
        """Return the prefix of the names of a space's stored blocks, for `tierkv storage`."""
        return f"{self._config.handoff.prefix}:{space or self.fingerprint.short}"

    async def resize(self, tier: Tier, capacity: int) -> None:
        """Set the number of usable slots of a tier; wait until the slots that it loses are free.

        Args:
            tier: device or host.
            capacity: number of slots, each for one block; at least 1, at most the number allocated
                at the start.

        Raises:
            ConfigError: there is no memory for `capacity` slots.
            OwnershipError: the device sleeps, or another resize or sleep of the tier has not ended.
        """
        await self._parts.lifecycle.resize(tier, capacity)

    def reset(self) -> int:
        """Remove every block that is not in use from device and host.

        Stored values stay. No other task runs during the call.

        Returns:
            The number of copies of blocks that are left because they are in use.
        """
        return self._parts.lifecycle.reset() + self._forget_flat()

    async def forget(self) -> int:
        """Remove every block that is not in use from device and host.

        Stored values stay. Other tasks run during the call, and blocks that come into use may stay.

        Returns:
            The number of copies of blocks that are left because they are in use.
        """
        return await self._parts.lifecycle.forget() + self._forget_flat()

    def _forget_flat(self) -> int:
        return sum(blocks.forget() for blocks in self.flat_blocks)

    async def free(self, *, clears_storage: bool = False) -> Freed:
        """Remove all unused blocks from device and host, and with `clears_storage` from storage.

        Args:
            clears_storage: True to delete also every stored value of this service's fingerprints
                and every ticket of their prompts, in every attached store, for all nodes that share
                the store. From the call on, this service does not match, fetch, store or publish
                blocks that were cached before. Running requests keep their blocks until they end.

        Returns:
            The number of copies that stay because they are in use, and the number of deleted
                values.

        Raises:
            StoreUnavailableError: a store did not answer, or running writes did not end in time.
                Some stored values may be left. This service uses no stored value until a deletion
                has succeeded.
        """
        held = await self.forget()
        if not clears_storage:
            return Freed(held, 0)
        self.tiers.retire()
        for blocks in self.flat_blocks:
            blocks.retire()
        deadline_s = self._config.handoff.publish_deadline_s
        try:
            async with self._storage_tier.deletions.deleting(deadline_s):
                removed = await self._remove_stored()
        finally:
            self.tiers.copies.note_nothing_stored()
        return Freed(await self.forget(), removed)

    async def _remove_stored(self) -> int:
        removed = 0
        if self.handoff is not None and self.store is not None:
            removed += await self.handoff.tickets.forget_all()
        ours = {one.short for one in self._fingerprints.values()} | self.tenants.closed
        ours.update(group.io.names.fingerprint for group in self.groups)

        prefix = f"{self._config.handoff.prefix}:"

        def is_ours(value: StoredValue) -> bool:
            return value.name.removeprefix(prefix).partition(":")[0] in ours

        for store in self._storage_tier.stores:
            removed += await maintenance.remove_all(store, prefix, is_ours)
        return removed

    @property
    def deletions(self) -> Deletions:
        """Number of this service's deletions of its stored values, and whether one is running."""
        return self._storage_tier.deletions

    @property
    def is_asleep(self) -> bool:
        return self._parts.lifecycle.is_asleep

    async def sleep(self, *, keeps_blocks: bool = True) -> None:
        """Free the device's memory until `wake`, once running requests and pins have ended.

        The call waits for them. No request is admitted until `wake`. A cancelled call changes
        nothing.

        Args:
            keeps_blocks: True to copy blocks that are only on the device to the host, as far as the
                host has room. All other device blocks are forgotten.

        Raises:
            OwnershipError: the device sleeps already, or another call resizes it or wakes it.
        """
        lifecycle = self._parts.lifecycle
        with lifecycle.alone(Tier.DEVICE):
            self.scheduler.pause(why=_ASLEEP)
            try:
                await lifecycle.empty_device(keeps_blocks=keeps_blocks)
            except BaseException:
                if not lifecycle.is_asleep:
                    self.scheduler.unpause(why=_ASLEEP)
                raise
            with self._memory.changing():
                try:
                    await self.mover.suspend()  # completes even if this call is cancelled
                finally:
                    self._memory.give_planes_back()

    async def wake(self, device_blocks: int | None = None) -> None:
        """Allocate device memory again, and admit requests unless `pause` was called.

        Afterwards `planes` is another object.

        Args:
            device_blocks: number of device blocks, at least 1; None for as many as before.

        Raises:
            ConfigError: the device has too little memory, or `device_blocks` is below 1. The device
                still sleeps.
            OwnershipError: the device does not sleep, or another call resizes it or wakes it.
        """
        lifecycle, memory = self._parts.lifecycle, self._memory
        with lifecycle.alone(Tier.DEVICE), memory.changing():
            if not lifecycle.is_asleep:
                raise OwnershipError("the device is awake: only a sleeping device can be woken")
            before = self.tiers.slots.pools[Tier.DEVICE].capacity
            # An integer, perhaps NumPy's.
            count = before if device_blocks is None else operator.index(device_blocks)
            if count < 1:
                raise ConfigError(f"the device needs at least 1 block, not {count}")
            planes = await memory.new_planes(count)
            try:
                await self.mover.reopen(planes)
            except BaseException:
                try:
                    await self.mover.suspend()
                finally:
                    planes.close()
                raise
            memory.use(planes)
            lifecycle.refill_device(count)
            self.scheduler.unpause(why=_ASLEEP)

    def pause(self) -> None:
        """Admit no requests until `unpause` is called. Running requests continue."""
        self.scheduler.pause()

    def unpause(self) -> None:
        self.scheduler.unpause()

    # Requests: called by Session

    def budget(self) -> Budget:
        """Return a new time budget for a request: the seconds that it may wait for storage."""
        deadline_s = self.settings.fetch_deadline_s
        match self.settings.fetch_policy:
            case FetchPolicy.BEST_EFFORT:
                return Budget(deadline_s, estimator=self.estimator)
            case FetchPolicy.WAIT_COMPLETE:
                return Budget(deadline_s, step_s=deadline_s)
            case FetchPolicy.DEADLINE:
                return Budget(deadline_s)

    def fetches(self, spec: RequestSpec) -> bool:
        """Return True if the service fetches missing blocks of the request from storage.

        The result is False without a storage tier, and for a request that does not use the cache.
        """
        return spec.uses_cache and self.tiers.copies.storage is not None

    async def fetched(self, spec: RequestSpec, budget: Budget | None = None) -> Fetched:
        """Fetch blocks that device and host lack from storage to the host, before admission.

        Args:
            spec: the request.
            budget: the remaining time that the request may wait; None for a new budget.

        Returns:
            The fetched blocks, which stay on the host until they are passed to `Scheduler.admit`,
                or the caller releases them.

        Raises:
            RequestAbortedError: the request was aborted during the fetch.
            ShuttingDownError: the node is shutting down.
            DuplicateRequestError: a request with this id is running or waiting.
            RequestTooLargeError: the request needs more blocks than the device, or the quota of its
                space, has.
        """
        self.scheduler.check(spec)
        async with self._arrivals.wait(spec) as arrival:
            fetched = await self.fetcher.fetch(spec.prompt, budget or self.budget())
            arrival.release = fetched.release
        return fetched

    def abort(self, request_id: str) -> bool:
        """Abort the waiting, running or preempted request with this id.

        A running request continues until its next `commit` or `extend`, which raises
        RequestAbortedError. Its blocks are released when the caller ends it.

        Returns:
            True if there was such a request.
        """
        return self._arrivals.abort(request_id) or self.scheduler.abort(request_id)

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """Record how fast the engine computes, for the choice between fetching and computing.

        Without such records, tierkv estimates the speed from the time between admission and commit,
        and no request waits for blocks that another request is computing.

        Args:
            num_tokens: number of prompt tokens computed.
            seconds: time that computing took.
        """
        if num_tokens > 0 and seconds > 0:
            self.estimator.prefill.note(num_tokens, seconds)

    # Hand-off

    @property
    def handoff(self) -> Handoff | None:
        """The publisher of prompts for other nodes; None if no store is attached."""
        return self._parts.handoff if self.tiers.copies.storage is not None else None

    def require_handoff(self) -> Handoff:
        """Return the publisher of prompts for other nodes.

        Raises:
            HandoffError: no store is attached.
        """
        if self.tiers.copies.storage is None:
            raise HandoffError(
                HandoffProblem.UNAVAILABLE.value,
                "this node has no storage tier, so prompts cannot be handed over: set storage.url",
            )
        return self._parts.handoff

    async def check_ticket_is_free(self, ticket_id: str, prompt: Prompt) -> None:
        """Check that no ticket of another prompt has this id.

        If the store does not answer in time, the check passes.

        Args:
            ticket_id: id of the ticket.
            prompt: the prompt to publish.

        Raises:
            DuplicateRequestError: the id names a ticket of another prompt that decode nodes can
                claim.
            HandoffError: no store is attached.
        """
        tickets = self.require_handoff().tickets
        with suppress(TimeoutError):
            async with self._question().limit():
                keys = await tickets.hashed_keys_of(prompt)
                await tickets.check_free(ticket_id, keys.all_digests())

    async def ticket_state(self, ticket_id: str) -> TicketStatus:
        """Read the present state of a ticket, published by any node, from the store."""
        return await status_of(self.require_handoff().tickets, ticket_id)

    async def forget_ticket(self, ticket_id: str) -> bool:
        """Delete a ticket with its open ticket and acknowledgement.

        Returns:
            True if at least one of these three records existed.

        Raises:
            BadRequestError: the id cannot be encoded as UTF-8.
            StoreUnavailableError: the store did not answer.
        """
        return await self.require_handoff().tickets.forget(ticket_id)

    async def acknowledge(self, ticket_id: str) -> None:
        """Record in the store that a ticket was claimed.

        Call this for an engine that has read the prompt's blocks without a call of `claim`.

        Raises:
            HandoffError: the ticket does not exist.
            StoreUnavailableError: the store did not answer.
        """
        tickets = self.require_handoff().tickets
        ticket = await tickets.read(ticket_id)
        if ticket is None:
            raise HandoffError(
                HandoffProblem.NOT_YET.value,
                f"there is no ticket {ticket_id[:80]!r}: it was never published, or has expired",
            )
        await tickets.acknowledge(ticket)

    # Lookups

    def _question(self) -> Budget:
        return Budget(self._config.handoff.lookup_deadline_s)

    async def lookup(self, prompt: Prompt) -> Lookup:
        """Return how many of the prompt's tokens are on each tier now.

        The blocks are not protected from eviction.
        """
        index, storage, size = self.index, self.tiers.copies.storage, prompt.block_size
        match = index.match(prompt)
        partial, is_on_device = match.partial, False
        if partial is not None:  # read before the wait, during which it may be evicted
            [state] = index.states(Tier.DEVICE, partial.node, partial.block, partial.block + 1)
            is_on_device = state is CopyState.READY
        stored: int | None = 0
        if storage is not None:
            try:
                async with self._question().limit():
                    stored = (await stored_beyond(index, storage, prompt, match)).num_tokens
            except (StoreUnavailableError, TimeoutError):
                stored = None
        device = (match.device_blocks + match.loading_blocks) * size
        host = match.host_blocks * size
        if partial is not None and not stored:  # else storage has more of that block
            if is_on_device:
                device += partial.num_tokens
            else:
                host += partial.num_tokens
        return Lookup(prompt.num_tokens, device, host, stored)

    def explain(
        self, prompt: Prompt, *, names_fields: bool = False, stored: range | None = None
    ) -> Explanation:
        """Explain which blocks of a prompt are cached on which tier, and why the next block is not.

        Args:
            prompt: the prompt to look up.
            names_fields: True to name the fields in which the fingerprint of another cached copy of
                the prompt differs. For operators only: the names reveal one tenant's data to
                another.
            stored: indices of the blocks found in storage beyond those on device and host; None if
                storage was not asked.

        Returns:
            The explanation.
        """
        match, fetcher = self.index.match(prompt), self.fetcher
        at = match.num_blocks
        keys: Sequence[StoredKey] = ()
        if fetcher.num_in_flight:
            keys = self.tiers.copies.prompt_keys(prompt)[at : at + 1]
        computing = self.scheduler.computing.find(match, prompt, prompt.num_blocks)
        return explain(
            self.index,
            prompt,
            match,
            self.tiers.eviction.history,
            fetching=any(fetcher.is_fetching(key, at) for key in keys),
            computing=computing is not None,
            fingerprints=self._fingerprints if names_fields else None,
            stored=stored,
            now=asyncio.get_running_loop().time(),
        )

    async def explain_with_storage(
        self, prompt: Prompt, *, deadline_s: float, names_fields: bool = False
    ) -> Explanation:
        """Explain which blocks of a prompt are cached or stored, and why the next block is not.

        Args:
            prompt: the prompt to look up.
            deadline_s: largest number of seconds to wait for storage; after that the explanation
                leaves storage out.
            names_fields: True to name the fields in which the fingerprint of another cached copy of
                the prompt differs. For operators only: the names reveal one tenant's data to
                another.

        Returns:
            The explanation.
        """
        storage, match, stored = self.tiers.copies.storage, self.index.match(prompt), None
        if storage is not None:
            with suppress(StoreUnavailableError, TimeoutError):
                async with Budget(deadline_s).limit():
                    count = await count_stored(storage, keys_beyond(self.index, prompt, match))
                    stored = range(match.num_blocks, match.num_blocks + count)
        return self.explain(prompt, names_fields=names_fields, stored=stored)

    @property
    def events(self) -> CacheEvents:
        """The changes of cached blocks as events, to which callers can subscribe."""
        return self.tiers.events

    def stats(self) -> Stats:
        return self._parts.stats()

    def verify(self, *, num_leases: int = 0) -> list[str]:
        """Check the bookkeeping of blocks, slots and leases; return a sentence for each error.

        Args:
            num_leases: number of leases that code outside the service has acquired and not
                released.
        """
        return self._parts.verify(num_leases)
