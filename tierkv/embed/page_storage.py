"""Storage for an engine that has its own host memory: pages under keys that the engine makes.

Engines with a host tier of their own (vLLM's offloading, SGLang's HiCache) need one thing of
tierkv: calls that copy pages between that memory and a store, and never block. The store, with
deadlines, retries and a circuit breaker, runs on the event loop of a thread; each call returns a
`concurrent.futures.Future`. Each stored page has a header and a checksum (docs/storage-format.md):
a loaded page equals the stored page, or counts as missing.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from tierkv.cache.keys import Fingerprint, Names, StoredKey
from tierkv.cache.layout import Layout, Plane
from tierkv.cache.shards import Shard
from tierkv.clock import SystemClock
from tierkv.errors import (
    BadRequestError,
    ConfigError,
    LayoutError,
    StoreUnavailableError,
)
from tierkv.gpu.protocol import Ids
from tierkv.loop_thread import LoopThread
from tierkv.storage.codec import Codec
from tierkv.storage.factory import StoreSettings, open_guarded_store
from tierkv.storage.maintenance import remove_all
from tierkv.storage.protocol import GetStatus, PutStatus, check_prefix, check_ttl
from tierkv.tasks import task_group
from tierkv.transfer.storage_io import Slice, Slices, StorageIO, StorageStats

Pages = npt.NDArray[np.uint8]
_Result = TypeVar("_Result")

_OPEN_S = 30.0  # a store is opened once, when the engine starts
_CLOSE_S = 30.0
_CLEAR_S = 30.0  # the wait of `clear` for pages that are being stored
_TOUCHES_PER_TTL = 10  # as `StorageSettings`: a page that is used lives on


class EnginePages:
    """The engine's host memory, as the host slots that `StorageIO` reads and writes.

    Args:
        pages: uint8 [num_pages, page_bytes], each page contiguous.

    Raises:
        LayoutError: `pages` has another shape, type or order in memory.
    """

    def __init__(self, pages: Pages) -> None:
        if pages.ndim != 2 or pages.dtype != np.uint8 or pages.strides[1] != 1:  # noqa: PLR2004
            raise LayoutError(
                "pages must be uint8 [num_pages, page_bytes] with each page contiguous"
            )
        self._pages: Pages | None = pages
        self.num_slots = len(pages)

    @property
    def array(self) -> Pages:
        """The pages, uint8 [num_pages, page_bytes].

        Raises:
            LayoutError: `close` was called.
        """
        if self._pages is None:
            raise LayoutError("the memory of these pages was returned to the engine")
        return self._pages

    def close(self) -> None:
        """Drop the reference to the engine's memory, which the engine may then unmap."""
        self._pages = None


class PageStorage:
    """A store for an engine's pages, on a thread of its own. Each `pool` has one kind of pages.

    Any thread may call. Only `open`, `pool` and `close` wait for the store.

    Args:
        url: URL of the store.
        settings: settings of each kind of store, such as time limits; None for the defaults.
        ttl_s: seconds that a stored page is kept after its last use; None for as long as the store
            keeps it.
        deadline_s: seconds after which a page counts as not stored if the store has not answered
            the lookup. Reads and writes have the deadlines of the store's settings.
        prefix: prefix of all names in the store.
        codecs: returns the codec for signed or sealed values (`StorageSettings.codecs`); None for a
            plain checksum.

    Raises:
        ConfigError: the URL names no store, or a setting is out of range.
    """

    def __init__(
        self,
        url: str,
        *,
        settings: StoreSettings | None = None,
        ttl_s: float | None = None,
        deadline_s: float = 2.0,
        prefix: str = "tierkv",
        codecs: Callable[[str], Codec] | None = None,
    ) -> None:
        if not (math.isfinite(deadline_s) and deadline_s > 0):
            raise ConfigError(f"deadline_s must be a number above 0, not {deadline_s}")
        try:
            check_prefix(prefix)
            if ttl_s is not None:
                check_ttl(ttl_s)
        except BadRequestError as error:
            raise ConfigError(str(error)) from error
        self._store = open_guarded_store(url, settings or StoreSettings(), SystemClock())
        self._ttl_s, self.deadline_s, self._prefix = ttl_s, deadline_s, prefix
        self._codecs = codecs
        self._pools: list[PagePool] = []
        self._thread = LoopThread(
            "page storage", self._lifetime, name="tierkv-pages", close_s=_CLOSE_S
        )

    @property
    def url(self) -> str:
        """The store's URL, without secrets."""
        return self._store.url

    def open(self) -> None:
        """Open the store, and wait until it answers.

        Raises:
            StoreUnavailableError: the store cannot be used; the text says what to do.
            ConfigError: the store's settings are wrong, or it was opened before.
        """
        if not self._thread.open(_OPEN_S):
            raise StoreUnavailableError(
                f"{self.url} did not open within {_OPEN_S:g} s: check the store and its address"
            )

    def close(self) -> None:
        """Wait for running calls, and close the store. Further calls of `close` do nothing.

        Raises:
            StoreUnavailableError: calls still run after 30 s: pages may still be read or written.
        """
        if not self._thread.close():
            raise StoreUnavailableError(
                f"{self.url} still has operations under way after {_CLOSE_S:g} s"
            )

    def pool(self, identity: Mapping[str, str], *parts: Pages) -> PagePool:
        """Return a pool of pages, which all engines with the same `identity` share in the store.

        Args:
            identity: everything that decides on a page's bytes: model, revision, dtype, layout,
                page size, ranks. Engines that differ in any of these never read each other's pages.
            parts: uint8 [num_pages, part_bytes] each, rows contiguous. Page n is row n of every
                part. Each part is stored as a value of its own, and a page counts as stored only
                with all its parts. The engine owns the memory, and must keep it mapped until
                `close` has returned.

        Raises:
            ConfigError: `identity` names no model.
            LayoutError: a part is not an array of that shape and type.
            ShuttingDownError: the storage is not open.
        """
        pool = PagePool(self, identity, parts)
        self._thread.run(self._begin(pool)).result(_OPEN_S)
        return pool

    def storage_io(self, fingerprint: Fingerprint, slices: Sequence[Slice]) -> StorageIO:
        """Return an object that reads and writes the stored pages of one identity.

        Args:
            fingerprint: identity of the pages: their model, layout and tenant.
            slices: memory and layout of each rank's part of a page.
        """
        names, whole = Names(self._prefix, fingerprint.short), slices[0]
        return StorageIO(
            self._store,
            names,
            whole.layout,
            whole.host,
            block_ttl_s=self._ttl_s,
            touches_per_ttl=_TOUCHES_PER_TTL,
            codecs=self._codecs,
            slices=Slices(names, slices),
        )

    def run(self, work: Coroutine[object, object, _Result]) -> Future[_Result]:
        """Run `work` on the event loop of the storage's thread.

        Returns:
            The future of the result, which is completed in any case. It raises ShuttingDownError if
                the storage is not open, or closes before `work` ends.
        """
        return self._thread.run(work)

    @asynccontextmanager
    async def _lifetime(self) -> AsyncIterator[None]:
        try:
            async with self._store.running(), task_group() as self._group:
                self._closing = asyncio.Event()
                yield
                self._closing.set()
        finally:
            for pool in self._pools:
                pool.close()

    async def _begin(self, pool: PagePool) -> None:
        self._pools.append(pool)
        began: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._group.create_task(self._live(pool, began), name="tierkv-page-pool")
        await began

    async def _live(self, pool: PagePool, began: asyncio.Future[None]) -> None:
        async with pool.io.running():
            began.set_result(None)
            await self._closing.wait()


class PagePool:
    """Pages of one kind (model, layout, size ...) in an engine's memory, and their stored copies.

    `PageStorage.pool` makes this object.
    """

    def __init__(
        self, storage: PageStorage, identity: Mapping[str, str], parts: Sequence[Pages]
    ) -> None:
        self._memory = [EnginePages(part) for part in parts]
        if len({memory.num_slots for memory in self._memory}) != 1:
            raise LayoutError("all parts of a page must have the same number of rows")
        planes = [Plane(0, "page", "bytes", part.shape[1]) for part in parts]
        if len(parts) > 1:
            planes = [replace(plane, role=f"page part {n}") for n, plane in enumerate(planes)]
        others = ";".join(f"{name}={value}" for name, value in sorted(identity.items()))
        model = identity.get("model", "")
        whole = Layout(1, tuple(planes))
        fingerprint = Fingerprint(model, whole, revision=others, weight_dtype="opaque")
        slices = [
            Slice(Shard(n, len(parts)), Layout(1, (plane,)), memory)
            for n, (plane, memory) in enumerate(zip(planes, self._memory, strict=True))
        ]
        self._root = fingerprint.root()
        self._storage = storage
        self.io = storage.storage_io(fingerprint, slices)

    @property
    def stats(self) -> StorageStats:
        return self.io.stats

    def close(self) -> None:
        """Drop the references to the engine's memory, which the engine may then unmap."""
        for memory in self._memory:
            memory.close()

    def present(self, keys: Sequence[bytes]) -> Future[list[bool]]:
        """Return a future with one bool for each key: True if its page is stored.

        If the store does not answer in time, all are False.
        """
        return self._storage.run(self._present(self._stored(keys)))

    def count(self, keys: Sequence[bytes]) -> Future[int]:
        """Return a future with the number of stored pages before the first one that is missing.

        If the store does not answer in time, the number is 0.
        """
        return self._storage.run(self._count(self._stored(keys)))

    def load(self, keys: Sequence[bytes], page_ids: Sequence[int]) -> Future[list[bool]]:
        """Copy stored pages into the engine's memory.

        The engine must not use the pages before the future is done. A page that did not arrive may
        then hold any bytes.

        Args:
            keys: the engine's keys of the pages.
            page_ids: for each key, the number of its page in the engine's memory.

        Returns:
            A future with one bool for each key: True if every byte has arrived and matches its
                checksum.
        """
        return self._storage.run(self._load(self._stored(keys), self._ids(keys, page_ids)))

    def store(self, keys: Sequence[bytes], page_ids: Sequence[int]) -> Future[list[bool]]:
        """Copy pages of the engine's memory to the store.

        The engine must not change the pages before the future is done.

        Args:
            keys: the engine's keys of the pages.
            page_ids: for each key, the number of its page in the engine's memory.

        Returns:
            A future with one bool for each key: True if the page is in the store now.
        """
        return self._storage.run(self._save(self._stored(keys), self._ids(keys, page_ids)))

    def clear(self) -> Future[int]:
        """Delete all stored pages of this pool's `identity`, also those that other engines stored.

        A page that is being stored is deleted too, after its write has ended. Until the future is
        done, no page is stored and `load` finds none.

        Returns:
            A future with the number of deleted values. The future raises StoreUnavailableError if
                the store does not answer; some pages may then remain.
        """
        return self._storage.run(self._clear())

    def _stored(self, keys: Sequence[bytes]) -> list[StoredKey]:
        # An engine's key has any length; a stored name and header have 32 bytes.
        return [
            StoredKey(hashlib.sha256(self._root + key).digest(), 1, is_tail=False) for key in keys
        ]

    def _ids(self, keys: Sequence[bytes], page_ids: Sequence[int]) -> Ids:
        if len(keys) != len(page_ids):
            raise LayoutError(
                f"there must be one key for each page: {len(keys)} keys were given for "
                f"{len(page_ids)} pages"
            )
        return np.asarray(page_ids, np.int32)

    async def _present(self, keys: Sequence[StoredKey]) -> list[bool]:
        try:
            async with asyncio.timeout(self._storage.deadline_s):
                return await self.io.are_present(keys)
        except (StoreUnavailableError, TimeoutError):
            return [False] * len(keys)

    async def _count(self, keys: Sequence[StoredKey]) -> int:
        try:
            async with asyncio.timeout(self._storage.deadline_s):
                return await self.io.count_present(keys)
        except (StoreUnavailableError, TimeoutError):
            return 0

    async def _load(self, keys: Sequence[StoredKey], ids: Ids) -> list[bool]:
        outcomes = await self.io.fetch(keys, ids)
        return [outcome.status is GetStatus.HIT for outcome in outcomes]

    async def _save(self, keys: Sequence[StoredKey], ids: Ids) -> list[bool]:
        outcomes = await self.io.flush(keys, ids, notes_tails=False)
        stored = (PutStatus.STORED, PutStatus.EXISTED)
        return [outcome.status in stored for outcome in outcomes]

    async def _clear(self) -> int:
        names = self.io.names
        async with self.io.deletions.deleting(_CLEAR_S):
            return await remove_all(self.io.store, f"{names.prefix}:{names.fingerprint}:")
