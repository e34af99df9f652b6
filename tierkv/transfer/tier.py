"""The storage tier of a service: the attached stores, and reads and writes of blocks in them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import msgspec

from tierkv.cache.keys import Names
from tierkv.cache.layout import Layout
from tierkv.cache.shards import Shard, ShardScheme
from tierkv.errors import ConfigError
from tierkv.gpu.protocol import HostSlots
from tierkv.storage.codec import Codec, SmallCodec, Trust
from tierkv.storage.places import Places, patiently
from tierkv.storage.protocol import BreakerState, Store
from tierkv.transfer.deletions import Deletions
from tierkv.transfer.storage_io import Slice, Slices, StorageIO


@dataclass(frozen=True, slots=True)
class StorageOptions:
    """The settings of a service's storage tier, apart from the common store.

    The common store has the blocks of all fingerprints without a store of their own.

    Attributes:
        open: opens a store by its URL; if None, only store objects can be attached.
        tenants: stores for the blocks of single fingerprints, by the fingerprint's short form.
        codecs: returns the codec (encodes values and checks them when read) for a fingerprint's
            short form; None to protect blocks by a checksum only.
        small: the codec of tickets and other small values.
        touches_per_ttl: largest number of times that a used block's time to live is renewed while
            that time passes once; 0 for never.
        peer_tensor_parallel: tensor-parallel sizes (2, 4 ...) of other nodes, whose blocks this
            node also looks for.
        scheme: the split of blocks over ranks; None to find only blocks of nodes with as many ranks
            as this one.
    """

    open: Callable[[str], Store] | None = None
    tenants: Mapping[str, Store] = field(default_factory=dict)
    codecs: Callable[[str], Codec] | None = None
    small: SmallCodec = field(default_factory=lambda: SmallCodec(Trust.TRUSTED, None))
    touches_per_ttl: int = 0
    peer_tensor_parallel: Sequence[int] = ()
    scheme: ShardScheme | None = None


class StoreState(msgspec.Struct, frozen=True):
    """The state of one attached store.

    Attributes:
        tenant: short form of the fingerprint that owns all blocks in the store; "" for the common
            store.
        url: the store's URL.
        is_shared: True if other processes see the same values.
        is_durable: True if values outlive the process.
        circuit: state of the store's breaker: closed, open or half_open. None, with counts of 0,
            for a store without a breaker.
        reason: why the breaker opened last.
        degraded_s: total seconds in which the breaker was not closed.
        retries: number of operations that were tried a second time.
        refused: number of operations that failed at once, for example because the breaker was open.
        dropped_writes: number of writes dropped because too many bytes were waiting.
        waiting_write_bytes: bytes of the writes that are waiting now.
        negative_hits: number of names that were reported missing without asking the store.
        part: if the store consists of several stores, the URL of the one that has failed and is not
            used; "" if there is none.
        write_refusal: the store's reason when it first refused writes; "" while it accepts writes.
        clock_skew_s: seconds by which this machine's clock is ahead of the store's; None if the
            store does not report its time.
    """

    tenant: str
    url: str
    is_shared: bool
    is_durable: bool
    circuit: str | None
    reason: str = ""
    degraded_s: float = 0.0
    retries: int = 0
    refused: int = 0
    dropped_writes: int = 0
    waiting_write_bytes: int = 0
    negative_hits: int = 0
    part: str = ""
    write_refusal: str = ""
    clock_skew_s: float | None = None

    @property
    def is_degraded(self) -> bool:
        return self.has_open_circuit or bool(self.write_refusal)

    @property
    def has_open_circuit(self) -> bool:
        return self.circuit not in (None, BreakerState.CLOSED.value)


class StorageTier:
    """The storage tier of a service.

    Inside `running()`, `io` reads and writes blocks in the attached stores. Without an attached
    store, each operation of `io` fails.

    Args:
        store: the common store, for fingerprints without a store of their own; None for none.
        options: settings, and the stores of single fingerprints.
        on_change: called when a store is attached or detached, or answers again after a failure.
            Blocks that were believed to be stored may then be missing.
    """

    def __init__(
        self, store: Store | None, options: StorageOptions, on_change: Callable[[], None]
    ) -> None:
        self.options = options
        self.deletions = Deletions()  # shared by all `StorageIO`s of this tier
        self._first = store
        self._stores = Places(store)
        self._pools: Sequence[memoryview] = ()
        self._extra_memory: list[memoryview] = []  # memory of slots that are not the tier's own
        self._on_change = on_change
        self._prefix = ""
        if store is not None:
            store.on_recovery(on_change)

    @asynccontextmanager
    async def running(
        self,
        names: Names,
        layout: Layout,
        host: HostSlots,
        parts: Sequence[Slice] = (),
        *,
        block_ttl_s: float | None,
    ) -> AsyncIterator[None]:
        """Run the attached stores in the `async with` block, where `io` reads and writes blocks.

        Args:
            names: makes the names in storage of the service's blocks.
            layout: layout of whole blocks.
            host: the host slots that blocks are read into and written from.
            parts: one `Slice` per rank: the bytes of a block that belong to the rank, and the
                memory of the rank's host slots; empty if one rank owns all of `host`.
            block_ttl_s: seconds to live of a stored block; None for as long as the store keeps it.

        Raises:
            TierKVError: an attached store cannot be opened.
        """
        self._prefix = names.prefix
        options = self.options
        slices = Slices(
            names,
            parts or [Slice(Shard(0, 1), layout, host)],
            options.scheme,
            options.peer_tensor_parallel,
        )
        self.io = StorageIO(
            self._stores,
            names,
            layout,
            host,
            block_ttl_s=block_ttl_s,
            touches_per_ttl=self.options.touches_per_ttl,
            codecs=self.options.codecs,
            slices=slices,
            deletions=self.deletions,
        )
        arrays = [part.host.array for part in slices.parts]
        if not all(array.flags.c_contiguous for array in arrays):
            arrays = [host.array]  # the slices are pieces of this array
        self._pools = [array.reshape(-1).data for array in arrays] + self._extra_memory
        if self._first is not None:
            self._first.use_memory(self._pools)
        try:
            async with self._stores.running():
                for tenant, store in self.options.tenants.items():
                    await patiently(partial(self.attach, store, tenant))
                async with self.io.running():
                    yield
        finally:
            self._pools = ()  # views of memory that its owner releases

    @asynccontextmanager
    async def io_of_layout(
        self,
        names: Names,
        layout: Layout,
        host: HostSlots,
        *,
        own: str,
        block_ttl_s: float | None,
    ) -> AsyncIterator[StorageIO]:
        """Yield an object that reads and writes blocks of a second layout in the attached stores.

        Enter this context before that of `running()`, and leave it after.

        Args:
            names: makes the names of these blocks in storage.
            layout: the second layout, for example of another cache group.
            host: host slots of the second layout.
            own: short name of the service's own fingerprint; blocks of the second layout are
                encoded with the codec (encryption key) of this fingerprint.
            block_ttl_s: seconds to live of a stored block; None for as long as the store keeps it.
        """
        codecs = self.options.codecs
        io = StorageIO(
            self._stores,
            names,
            layout,
            host,
            block_ttl_s=block_ttl_s,
            touches_per_ttl=self.options.touches_per_ttl,
            codecs=None
            if codecs is None
            else lambda it: codecs(own if it == names.fingerprint else it),
            deletions=self.deletions,
        )
        self._extra_memory.append(host.array.reshape(-1).data)
        try:
            async with io.running():
                yield io
        finally:
            self._extra_memory.clear()  # views of memory that its owner releases

    @property
    def attached_io(self) -> StorageIO | None:
        """The object that reads and writes blocks in the attached stores.

        None while no store is attached.
        """
        return self.io if self._stores.attached else None

    @property
    def store(self) -> Store | None:
        """The common store; None if it is not attached."""
        return self._stores.attached.get("")

    @property
    def stores(self) -> Sequence[Store]:
        """All attached stores: the common one and those of single fingerprints."""
        return tuple(self._stores.attached.values())

    async def attach(self, store: str | Store, tenant: str = "") -> None:
        """Open a store and use it from now on, in place of the attached one, if any.

        If the store cannot be opened, for whatever reason, the earlier store stays attached.

        Args:
            store: the store, or its URL.
            tenant: short name of the fingerprint whose blocks are kept in this store; "" for the
                common store.

        Raises:
            ConfigError: the URL names no store, or this service cannot open stores by URL.
        """
        if isinstance(store, str):
            if self.options.open is None:
                raise ConfigError(
                    "this service was built without a function that opens stores, so "
                    "none can be attached by URL: attach a store object"
                )
            store = self.options.open(store)
        store.use_memory(self._pools)
        await self._stores.attach(store, self._route(tenant))
        store.on_recovery(self._on_change)
        self._on_change()

    def detach(self, tenant: str = "") -> bool:
        """Stop using a store; return True if it was attached.

        Operations that have begun are still completed on that store.

        Args:
            tenant: short name of the fingerprint whose blocks are kept in the store; "" for the
                common store.
        """
        was_there = self._stores.detach(self._route(tenant)) is not None
        self._on_change()
        return was_there

    def state(self) -> tuple[StoreState, ...]:
        """Return the state of every attached store."""
        stores = sorted(self._stores.attached.items())
        return tuple(_state(route.rpartition(":")[2], store) for route, store in stores)

    def _route(self, tenant: str) -> str:
        return f"{self._prefix}:{tenant}" if tenant else ""


def _state(tenant: str, store: Store) -> StoreState:
    can, health = store.capabilities, store.health
    return StoreState(
        tenant=tenant,
        url=store.url,
        is_shared=can.is_shared,
        is_durable=can.is_durable,
        circuit=None if health.circuit is None else health.circuit.value,
        reason=health.reason,
        degraded_s=health.degraded_s,
        part=health.part,
        write_refusal=health.write_refusal,
        clock_skew_s=health.clock_skew_s,
        retries=health.num_retries,
        refused=health.num_refused,
        dropped_writes=health.num_dropped_writes,
        waiting_write_bytes=health.waiting_write_bytes,
        negative_hits=health.negative_hits,
    )
