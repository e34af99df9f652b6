"""The components of a running service: opened in order, verified, and closed in reverse order.

The device's memory is one of them; it can be released for a while and allocated again.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from tierkv.cache import invariants
from tierkv.cache.eviction import WriteRule
from tierkv.cache.index import Index
from tierkv.cache.keys import Fingerprint, Names
from tierkv.cache.layout import Layout
from tierkv.cache.node import BlockPool, Tier
from tierkv.errors import ConfigError, InvariantError, ShuttingDownError
from tierkv.gpu.protocol import Device, Direction, HostSlots, Planes
from tierkv.observe import Stats
from tierkv.pd.claims import Claims
from tierkv.pd.direct.direct import Direct
from tierkv.pd.handoff import STAGING_BLOCKS, Handoff, Staging
from tierkv.pd.portions import Portions
from tierkv.pd.settings import DirectPath, HandoffSettings
from tierkv.pd.source import PeerSource
from tierkv.pd.tickets import HandoffStats, ProducerLease, SmallValues, TicketLedger, Tickets
from tierkv.ranks.memory import SharedCpuDevice
from tierkv.ranks.ranked import RankedDevice
from tierkv.sched.fetch import Fetcher, Source
from tierkv.sched.lifecycle import Lifecycle
from tierkv.sched.request import Arrivals
from tierkv.sched.scheduler import Scheduler
from tierkv.sched.settings import CacheSettings
from tierkv.sched.tenants import Tenants
from tierkv.sched.tiers import Tiers
from tierkv.sched.worth import Estimator
from tierkv.tasks import outlast
from tierkv.threads import start_in_thread
from tierkv.transfer.mover import Mover
from tierkv.transfer.tier import StorageTier

T = TypeVar("T")


class Memory:
    """The device's memory for blocks (planes), and the host slots.

    Args:
        device: allocates the memory.
        layout: the planes of a block.

    Attributes:
        planes: the device's memory, present inside `running` unless the device sleeps; `use`
            replaces it.
        host: the host slots, present inside `running` and never replaced.
    """

    planes: Planes
    host: HostSlots

    def __init__(self, device: Device, layout: Layout) -> None:
        self._device = device
        self._layout = layout
        self._has_planes = False
        self._is_open = False  # True while changes are allowed
        self._changes: set[asyncio.Future[None]] = set()

    @asynccontextmanager
    async def running(self, device_blocks: int, host_slots: int) -> AsyncIterator[None]:
        """Allocate the memory in a thread, and free it after the `async with` block.

        A cancelled call waits for the thread, and frees the memory.

        Args:
            device_blocks: number of device blocks.
            host_slots: number of host slots.
        """
        async with entered_in_thread(self._allocated(device_blocks, host_slots)):
            yield

    @contextmanager
    def _allocated(self, device_blocks: int, host_slots: int) -> Iterator[None]:
        self.use(self._device.allocate_planes(self._layout, device_blocks))
        try:
            with host_memory(self._device, self._layout, host_slots) as self.host:
                yield
        finally:
            if self._has_planes:
                self.planes.close()

    @asynccontextmanager
    async def open_to_changes(self) -> AsyncIterator[None]:
        """Allow device memory to be freed or replaced until the `async with` block ends.

        Such changes are made inside `with changing():`. At its end, the block waits for running
        changes.
        """
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False
            await outlast(self._changes, on_cancel=lambda: None)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Let the `with` block free or replace the planes; a shutdown waits until the block ends.

        Raises:
            ShuttingDownError: the node has shut down, or is shutting down.
        """
        if not self._is_open:
            raise ShuttingDownError("this node has shut down")
        end = self._begin_change()
        try:
            yield
        finally:
            end()

    def _begin_change(self) -> Callable[[], None]:
        change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changes.add(change)

        def end() -> None:
            self._changes.remove(change)
            change.set_result(None)

        return end

    async def new_planes(self, device_blocks: int) -> Planes:
        """Allocate planes for `device_blocks` blocks, in a thread.

        The planes are not used until they are passed to `Memory.use`.

        Raises:
            ConfigError: the device has too little memory.
        """
        allocate = functools.partial(self._device.allocate_planes, self._layout, device_blocks)
        opening = start_in_thread(allocate)
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            end = self._begin_change()
            opening.add_done_callback(_close_again)
            opening.add_done_callback(lambda _: end())
            raise

    def use(self, planes: Planes) -> None:
        """Replace the device's memory for blocks by `planes`; the previous planes are not freed."""
        self.planes, self._has_planes = planes, True

    def give_planes_back(self) -> None:
        """Free the planes, because the device goes to sleep."""
        self._has_planes = False
        self.planes.close()


@contextmanager
def host_memory(device: Device, layout: Layout, num_slots: int) -> Iterator[HostSlots]:
    """Allocate host slots, and free them at the end of the `with` block.

    Allocating and freeing block the calling thread.

    Args:
        device: allocates the slots.
        layout: the planes of a block.
        num_slots: number of slots.

    Raises:
        ConfigError: the machine has too little memory.
    """
    host = device.allocate_host(layout, num_slots)
    try:
        yield host
    finally:
        host.close()


@asynccontextmanager
async def entered_in_thread(memory: AbstractContextManager[T]) -> AsyncIterator[T]:
    """Enter the context `memory` in a thread, because pinning memory takes 0.1 s and more.

    A cancelled call waits for the thread, and frees the memory.

    Args:
        memory: a context that allocates memory; its result is yielded.
    """
    with ExitStack() as stack:
        entering = start_in_thread(functools.partial(stack.enter_context, memory))
        await outlast({entering}, on_cancel=lambda: None)
        yield entering.result()


def _close_again(opening: asyncio.Future[Planes]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """The values that a service is built from.

    Attributes:
        device: the device of the cache.
        fingerprint: the service's own fingerprint.
        settings: sizes and rules of the tiers.
        handoff: settings of tickets, and the name prefix and lifetime of all stored values.
        name: name of this node, written on its tickets.
        fingerprints: all open fingerprints by the name of their space; the service's own under "".
    """

    device: Device
    fingerprint: Fingerprint
    settings: CacheSettings
    handoff: HandoffSettings
    name: str
    fingerprints: dict[str, Fingerprint] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.reset_fingerprints()

    def reset_fingerprints(self) -> None:
        """Remove all fingerprints from `fingerprints` except the service's own."""
        self.fingerprints.clear()
        self.fingerprints[""] = self.fingerprint


class Components:
    """The parts of a service (index, scheduler, fetcher ...), connected to each other.

    They do nothing outside `running()`.

    Args:
        config: device, fingerprint and settings of the service.
        mover: copies blocks between device and host.
        host: the host slots.
        storage: the storage tier.
    """

    def __init__(
        self, config: ServiceConfig, mover: Mover, host: HostSlots, storage: StorageTier
    ) -> None:
        self.mover = mover
        self._storage = storage
        settings, handoff, fingerprint = config.settings, config.handoff, config.fingerprint
        self.tiers = self._tiers(settings, fingerprint)
        self.index = self.tiers.index
        storage.io.asking = self.tiers.events.asking
        self.estimator = Estimator(
            bytes_per_token=fingerprint.layout.block_bytes / settings.block_size
        )
        self.scheduler = Scheduler(self.tiers, prefill=self.estimator.prefill)
        stats = HandoffStats()
        source, peers = self._sources(handoff, host, stats)
        self.fetcher = Fetcher(self.tiers, storage.io, self.estimator, source=source)
        self.arrivals = Arrivals()
        self.tenants = Tenants(
            self.tiers,
            config.fingerprints,
            lambda name: self.scheduler.is_used_by(name) or self.arrivals.is_used_by(name),
            on_close=self.scheduler.forget_turns,
            max_tenants=settings.max_tenants,
            quota=settings.quota(),
            eviction=(settings.device_eviction, settings.host_eviction),
        )
        self.lifecycle = Lifecycle(self.tiers, (settings.device_blocks, settings.host_slots))
        self._hand_over(config, peers, stats)

    def _sources(
        self, handoff: HandoffSettings, host: HostSlots, stats: HandoffStats
    ) -> tuple[Source, PeerSource]:
        io, options = self._storage.io, self._storage.options
        if handoff.direct is DirectPath.OFF or io.slices.size > 1:
            return io, PeerSource()
        direct = Direct(
            self.tiers,
            io,
            host,
            handoff,
            codecs=options.codecs,
            stats=stats,
            allocate=self.scheduler.acquire_device,
        )
        return direct.offers, direct

    def _tiers(self, settings: CacheSettings, fingerprint: Fingerprint) -> Tiers:
        root = fingerprint.root()
        return Tiers(
            index=Index(settings.block_size, root, settings.policies()),
            device_pool=BlockPool("device", settings.device_blocks),
            host_pool=BlockPool("host", settings.host_blocks),
            mover=self.mover,
            storage=self._storage.attached_io,
            host_rule=WriteRule(settings.host_write, settings.host_after_hits),
            storage_rule=WriteRule(settings.storage_write, settings.storage_after_hits),
            background_copy_bytes=settings.background_copy_bytes,
            block_bytes=fingerprint.layout.block_bytes,
        )

    def _hand_over(self, config: ServiceConfig, peers: PeerSource, stats: HandoffStats) -> None:
        settings, storage = config.handoff, self._storage.io
        values = SmallValues(storage.store, self._storage.options.small)
        lease = ProducerLease(storage, values, lease_s=settings.producer_lease_s)
        tickets = Tickets(
            storage,
            values,
            self.tiers,
            config.fingerprints,
            lease=lease,
            ticket_ttl_s=settings.ticket_ttl_s,
            claimed_ttl_s=settings.claimed_ttl_s,
            name=config.name,
        )
        staging = Staging(first_slot=config.settings.host_slots)
        self.handoff = Handoff(
            self.tiers,
            storage,
            staging,
            tickets,
            ledger=TicketLedger(tickets),
            source=peers,
            stats=stats,
        )
        self.portions = Portions(self.scheduler, storage, staging)
        self.claims = Claims(
            tickets,
            self.scheduler,
            self.fetcher,
            self.arrivals,
            source=peers,
            portions=self.portions,
            estimator=self.estimator,
            fetch_deadline_s=config.settings.fetch_deadline_s,
            stats=stats,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the components inside the `async with`.

        On leaving it, end all tasks and check for leaks.

        Raises:
            InvariantError: a lease or slot was not released.
        """
        tiers = self.tiers
        async with self.handoff.running(), tiers.work.running(tiers.slots.num_lent):
            yield
        tiers.pins.clear()
        wrong = self.verify()
        if self.fetcher.num_held:
            wrong.append(f"{self.fetcher.num_held} fetched prompts were never released")
        if wrong:
            raise InvariantError(tuple(wrong))

    def verify(self, num_leases: int = 0) -> list[str]:
        """Check the bookkeeping: recount the leases, the slots and the states of blocks.

        While requests, copies or fetches are under way, leases are not recounted.

        Args:
            num_leases: number of leases that callers of the service have acquired and not released.

        Returns:
            A sentence for each violation; [] for none.
        """
        tiers, scheduler, fetcher = self.tiers, self.scheduler, self.fetcher
        requests = (*scheduler.running_requests, *scheduler.ending_requests)
        private = [request.private_slots() for request in requests]
        wrong = invariants.findings(
            self.index,
            tiers.slots.pools,
            {
                Tier.DEVICE: np.concatenate([tiers.slots.lent(Tier.DEVICE), *private]).tolist(),
                Tier.HOST: tiers.slots.lent(Tier.HOST).tolist(),
            },
        )
        wrong += scheduler.findings() + tiers.pins.findings() + self.tenants.findings()
        is_busy = private or scheduler.num_waiting or fetcher.num_held
        if is_busy or tiers.work.num_tasks or self.mover.num_in_flight:
            return wrong
        num_out = self.index.num_held_leases - tiers.pins.num_leases
        num_out -= self.handoff.source.num_leases
        if num_out != num_leases:
            wrong.append(f"no request runs, but {num_out} leases are held, not {num_leases}")
        wrong += fetcher.findings() + scheduler.loads.findings()
        return wrong + tiers.copies.findings() + self.handoff.findings()

    def stats(self) -> Stats:
        tiers, scheduler, mover = self.tiers, self.scheduler, self.mover
        storage = tiers.copies.storage
        return Stats(
            device=tiers.slots.pools[Tier.DEVICE].stats(),
            host=tiers.slots.pools[Tier.HOST].stats(),
            running_requests=len(scheduler.running_requests),
            waiting_requests=scheduler.num_waiting,
            requests=scheduler.stats,
            tiers=tiers.eviction.stats,
            storage=storage.stats if storage else None,
            loaded_bytes=mover.bytes_moved[Direction.LOAD],
            offloaded_bytes=mover.bytes_moved[Direction.OFFLOAD],
            load_layers=mover.layer_times,
            handoff=self.handoff.stats,
            decisions=tiers.decisions,
        )


def check(config: ServiceConfig) -> RankedDevice | None:
    """Check that the layout and the device agree with the settings.

    Returns:
        The device if it is a `RankedDevice`, otherwise None.

    Raises:
        ConfigError: the layout's block size or the device's number of ranks differs from the
            settings.
    """
    settings = config.settings
    if config.fingerprint.layout.block_size != settings.block_size:
        raise ConfigError(
            f"the layout has blocks of {config.fingerprint.layout.block_size} tokens, but "
            f"cache.block_size is {settings.block_size}: make them equal"
        )
    ranks = config.device if isinstance(config.device, RankedDevice) else None
    num_ranks = len(ranks.devices) if ranks is not None else 1
    if num_ranks != settings.tensor_parallel:
        raise ConfigError(
            f"cache.tensor_parallel is {settings.tensor_parallel}, but the device has "
            f"{num_ranks} ranks: make them equal"
        )
    return ranks


@asynccontextmanager
async def opened(
    config: ServiceConfig, memory: Memory, storage: StorageTier
) -> AsyncIterator[Components]:
    """Open the components of a service. On leaving, wait for every copy, and check for leaks.

    Args:
        config: the values that the service is built from.
        memory: the memory of device and host, which this function allocates.
        storage: the storage tier, which this function opens.

    Yields:
        The components.

    Raises:
        ConfigError: values of `config` contradict each other, or there is too little memory.
        InvariantError: on leaving, a lease or slot was not released.
    """
    settings, ranks = config.settings, check(config)
    device = config.device
    slicing = device if isinstance(device, SharedCpuDevice) else ranks
    host_slots = settings.host_slots + STAGING_BLOCKS
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(memory.running(settings.device_blocks, host_slots))
        mover = Mover(config.device, memory.planes, memory.host)
        await stack.enter_async_context(mover.running())
        await stack.enter_async_context(memory.open_to_changes())
        storing = storage.running(
            Names(config.handoff.prefix, config.fingerprint.short),
            config.fingerprint.layout,
            memory.host,
            slicing.slices(memory.host) if slicing is not None else (),
            block_ttl_s=config.handoff.block_ttl_s,
        )
        await stack.enter_async_context(storing)
        parts = Components(config, mover, memory.host, storage)
        await stack.enter_async_context(parts.running())
        yield parts
