"""Storage for an engine that keeps its own host memory: its pages, under keys the engine makes.

Engines with a host tier of their own (vLLM's offloading, SGLang's HiCache) want one thing of
tierkv: pages out of that memory into a store and back, by calls that never block. The store, with
deadlines, retries and a breaker, lives on the event loop of a thread; each call returns a
`concurrent.futures.Future`. Values have the header and the checksum of every stored block
(docs/storage-format.md), so a page that comes back is the page that was stored, or a miss.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import uvloop

from tierkv.cache.keys import Fingerprint, Names, StoredKey
from tierkv.cache.layout import Layout, Plane
from tierkv.cache.shards import Shard
from tierkv.clock import SystemClock
from tierkv.embed.thread import unwatch, watch
from tierkv.errors import (
    BadRequestError,
    ConfigError,
    LayoutError,
    ShuttingDownError,
    StoreUnavailableError,
)
from tierkv.gpu.protocol import Ids
from tierkv.storage.codec import Codec
from tierkv.storage.factory import StoreSettings, open_guarded_store
from tierkv.storage.maintenance import remove
from tierkv.storage.protocol import GetStatus, PutStatus, check_prefix, check_ttl
from tierkv.transfer.storage_io import Slice, Slices, StorageIO, StorageStats

Pages = npt.NDArray[np.uint8]
_Result = TypeVar("_Result")

log = logging.getLogger(__name__)

_OPEN_S = 30.0  # a store is opened once, when the engine starts
_CLOSE_S = 30.0
_TOUCHES_PER_TTL = 10  # as `StorageSettings`: a page that is used lives on


class EnginePages:
    """The engine's host memory as the slots of `StorageIO`: uint8 [num_pages, page_bytes]."""

    def __init__(self, pages: Pages) -> None:
        if pages.ndim != 2 or pages.dtype != np.uint8 or pages.strides[1] != 1:  # noqa: PLR2004
            raise LayoutError("pages must be uint8 [num_pages, page_bytes], each page contiguous")
        self._pages: Pages | None = pages
        self.num_slots = len(pages)

    @property
    def array(self) -> Pages:
        if self._pages is None:
            raise LayoutError("this memory was given back to its engine")
        return self._pages

    def close(self) -> None:
        """Hold the memory no more: it is the engine's, which may unmap it now."""
        self._pages = None


class PageStorage:
    """The store `url` for pages of an engine, on a thread of its own; `pool` names the pages.

    ttl_s: how long a stored page lives after its last use, None for as long as the store keeps it.
    deadline_s: after so long a question counts as "not there". Reads and writes have the deadlines
        of the store's settings.
    prefix: of all names in the store.
    codecs: signed or sealed values (`StorageSettings.codecs`); None for a plain checksum.

    Any thread may call; nothing here waits for the store except `open`, `pool` and `close`. Raises
    ConfigError if the URL names no store or a setting is out of range.
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
        self._ttl_s, self._deadline_s, self._prefix = ttl_s, deadline_s, prefix
        self._codecs = codecs
        self._thread = threading.Thread(target=self._live, name="tierkv-pages", daemon=True)
        self._opened: Future[None] = Future()
        self._lock = threading.Lock()  # around the next two, and giving the loop anything
        self._is_closed = self._is_forked = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pending: dict[Future[Any], Coroutine[object, object, Any] | None] = {}
        self._coming: asyncio.Queue[PagePool | None] = asyncio.Queue()  # None: close
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Where the pages go, without secrets."""
        return self._store.url

    def open(self) -> None:
        """Open the store. Raises StoreUnavailableError or ConfigError, with what to do, if it
        cannot be used: an engine should not start with a cache that keeps nothing."""
        watch(self)
        self._thread.start()
        try:
            self._opened.result(timeout=_OPEN_S)
        except TimeoutError:
            raise StoreUnavailableError(f"{self.url} did not open within {_OPEN_S:g} s") from None

    def close(self) -> None:
        """Let what is under way end, and close the store. Any number of times. Raises
        StoreUnavailableError if that takes too long: pages may be read or written still."""
        with self._lock:
            self._is_closed = True
            loop, self._loop = self._loop, None
            if loop is not None:
                loop.call_soon_threadsafe(self._coming.put_nowait, None)
        if self._thread.ident is None or self._is_forked:
            return
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            raise StoreUnavailableError(f"{self.url} is still being used after {_CLOSE_S:g} s")
        unwatch(self)

    def forked(self) -> None:
        self._is_forked = self._is_closed = True
        self._lock = threading.Lock()  # a thread that is not here may have held it
        self._loop, self._pending = None, {}

    def exiting(self) -> None:
        """An engine that has not closed it: what it has stored last is stored."""
        try:
            self.close()
        except StoreUnavailableError as error:
            log.warning("the page storage was not closed before the exit: %s", error)

    def pool(self, identity: Mapping[str, str], *parts: Pages) -> PagePool:
        """Pages that are shared by all engines whose `identity` is the same.

        identity: what makes another engine's bytes usable here: model, revision, dtype, layout,
            page size, ranks. Engines that differ in any of it never see each other's pages.
        parts: uint8 [num_pages, part_bytes], each row contiguous. Page n is row n of every part,
            each a value of its own, and counts only when all are there. The engine's memory, which
            stays mapped until `close` has returned.

        Raises ConfigError if identity names no model, LayoutError if parts are not of that shape,
        ShuttingDownError if the storage is not open.
        """
        pool = PagePool(self, identity, parts)
        with self._lock:
            if self._loop is None:
                raise ShuttingDownError("this page storage is not open")
            self._loop.call_soon_threadsafe(self._coming.put_nowait, pool)
            self._pending[pool.ready] = None
        pool.ready.result(_OPEN_S)
        return pool

    def storage_io(self, fingerprint: Fingerprint, slices: Sequence[Slice]) -> StorageIO:
        """Between the store and `slices` of one fingerprint."""
        names, whole = Names(self._prefix, fingerprint.short), slices[0]
        return StorageIO(
            self._store,
            names,
            whole.layout,
            whole.host,
            deadline_s=self._deadline_s,
            block_ttl_s=self._ttl_s,
            touches_per_ttl=_TOUCHES_PER_TTL,
            codecs=self._codecs,
            slices=Slices(names, slices),
        )

    def run(self, work: Coroutine[object, object, _Result]) -> Future[_Result]:
        """Run `work` on the loop. The future is always done in the end: with ShuttingDownError if
        the storage is not open."""
        future: Future[_Result] = Future()

        async def ends() -> None:
            try:
                result = await work
            except asyncio.CancelledError:
                future.set_exception(ShuttingDownError("this page storage has ended"))
            except BaseException as error:  # noqa: BLE001 - whoever holds the future hears of it
                future.set_exception(error)
            else:
                future.set_result(result)
            self._pending.pop(future, None)

        def start() -> None:
            task = asyncio.get_running_loop().create_task(ends())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        with self._lock:
            if self._loop is not None:
                self._pending[future] = work
                self._loop.call_soon_threadsafe(start)
                return future
        work.close()
        future.set_exception(ShuttingDownError("this page storage is not open"))
        return future

    def _live(self) -> None:
        pools: list[PagePool] = []
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._main(pools))
        except BaseException as error:
            if self._opened.done():
                raise
            self._opened.set_exception(error)
        finally:
            with self._lock:
                self._loop = None
            for pool in pools:
                pool.close()
            for future, work in self._pending.items():
                if work is not None:
                    work.close()
                if not future.done():
                    future.set_exception(ShuttingDownError("this page storage has ended"))

    async def _main(self, pools: list[PagePool]) -> None:
        """One task for all, since what enters a pool's lifetime has to leave it."""
        async with self._store.running(), AsyncExitStack() as lifetimes:
            with self._lock:
                if self._is_closed:  # whoever opened has waited long enough
                    return
                self._loop = asyncio.get_running_loop()
            self._opened.set_result(None)
            while (pool := await self._coming.get()) is not None:
                pools.append(pool)
                await lifetimes.enter_async_context(pool.io.running())
                pool.ready.set_result(None)
                self._pending.pop(pool.ready, None)
            while self._tasks:
                await asyncio.wait(self._tasks)


class PagePool:
    """Pages of one identity; made by `PageStorage.pool`, where the arguments are told of."""

    def __init__(
        self, storage: PageStorage, identity: Mapping[str, str], parts: Sequence[Pages]
    ) -> None:
        self._memory = [EnginePages(part) for part in parts]
        if len({memory.num_slots for memory in self._memory}) != 1:
            raise LayoutError("the parts of a page must be arrays of as many rows")
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
        self.ready: Future[None] = Future()

    @property
    def stats(self) -> StorageStats:
        return self.io.stats

    def close(self) -> None:
        """Hold the engine's memory no more."""
        for memory in self._memory:
            memory.close()

    def present(self, keys: Sequence[bytes]) -> Future[list[bool]]:
        """For each key whether its page is stored; False for all if the store does not say so in
        time."""
        return self._storage.run(self._present(self._stored(keys)))

    def count(self, keys: Sequence[bytes]) -> Future[int]:
        """How many pages are stored, from the first on and without a gap; 0 if the store does not
        say so in time."""
        return self._storage.run(self._count(self._stored(keys)))

    def load(self, keys: Sequence[bytes], page_ids: Sequence[int]) -> Future[list[bool]]:
        """Bring pages into `page_ids`. For each whether every byte is there, checked; the others
        hold anything. The pages are the caller's again when the future is done."""
        return self._storage.run(self._load(self._stored(keys), self._ids(keys, page_ids)))

    def store(self, keys: Sequence[bytes], page_ids: Sequence[int]) -> Future[list[bool]]:
        """Store the pages at `page_ids`. For each whether it is in the store now. The pages stay
        as they are until the future is done."""
        return self._storage.run(self._save(self._stored(keys), self._ids(keys, page_ids)))

    def clear(self) -> Future[int]:
        """Forget every stored page of this identity, whoever stored it; how many values there were.
        StoreUnavailableError if the store does not answer, and some may be left."""
        return self._storage.run(self._clear())

    def _stored(self, keys: Sequence[bytes]) -> list[StoredKey]:
        # An engine's key has any length; a stored name and header have 32 bytes.
        return [
            StoredKey(hashlib.sha256(self._root + key).digest(), 1, is_tail=False) for key in keys
        ]

    def _ids(self, keys: Sequence[bytes], page_ids: Sequence[int]) -> Ids:
        if len(keys) != len(page_ids):
            raise LayoutError(f"{len(keys)} keys for {len(page_ids)} pages")
        return np.asarray(page_ids, np.int32)

    async def _present(self, keys: Sequence[StoredKey]) -> list[bool]:
        try:
            return await self.io.are_present(keys)
        except StoreUnavailableError:
            return [False] * len(keys)

    async def _count(self, keys: Sequence[StoredKey]) -> int:
        try:
            return await self.io.count_present(keys)
        except StoreUnavailableError:
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
        return await remove(self.io.store, f"{names.prefix}:{names.fingerprint}:")
