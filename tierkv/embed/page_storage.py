"""Storage for an engine that keeps its own host memory: equal pages, under keys the engine makes.

Engines with a host tier of their own (vLLM's offloading, SGLang's HiCache) want one thing of
tierkv: pages out of that memory into a store and back, by calls that never block. The store, with
deadlines, retries and a breaker, lives on the event loop of a thread; each call returns a
`concurrent.futures.Future`. Values have the header and the checksum of every stored block
(docs/storage-format.md), so a page that comes back is the page that was stored, or a miss.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import uvloop

from tierkv.cache.keys import Fingerprint, Names, StoredKey
from tierkv.cache.layout import Layout, Plane
from tierkv.clock import SystemClock
from tierkv.errors import ConfigError, LayoutError, ShuttingDownError, StoreUnavailableError
from tierkv.gpu.protocol import Ids
from tierkv.storage.factory import StoreSettings, open_guarded_store
from tierkv.storage.protocol import GetStatus, PutStatus
from tierkv.transfer.storage_io import StorageIO, StorageStats

Pages = npt.NDArray[np.uint8]
_Result = TypeVar("_Result")

_PREFIX = "tierkv"
_OPEN_S = 30.0  # a store is opened once, when the engine starts
_CLOSE_S = 30.0


class EnginePages:
    """The engine's host memory as the slots of `StorageIO`: uint8 [num_pages, page_bytes]."""

    def __init__(self, pages: Pages) -> None:
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
    """Pages of `pages` in the store `url`, shared by all engines whose `identity` is the same.

    pages: uint8 [num_pages, page_bytes], each page contiguous; the engine's, and it stays mapped
        until `close` has returned.
    identity: what makes another engine's bytes usable here: model, revision, dtype, layout, block
        size, ranks. Engines that differ in any of it never see each other's pages.
    ttl_s: how long a stored page lives, None for as long as the store keeps it.
    deadline_s: after so long a question counts as "not there". Reads and writes have the deadlines
        of the store's settings.

    Any thread may call; nothing here waits for the store except `open` and `close`. Raises
    ConfigError if the URL names no store or identity no model, LayoutError if pages is not of that
    shape.
    """

    def __init__(
        self,
        url: str,
        pages: Pages,
        identity: Mapping[str, str],
        *,
        settings: StoreSettings | None = None,
        ttl_s: float | None = None,
        deadline_s: float = 2.0,
    ) -> None:
        if pages.ndim != 2 or pages.dtype != np.uint8 or pages.strides[1] != 1:  # noqa: PLR2004
            raise LayoutError("pages must be uint8 [num_pages, page_bytes], each page contiguous")
        model = identity.get("model", "")
        others = ";".join(f"{name}={value}" for name, value in sorted(identity.items()))
        layout = Layout(1, (Plane(0, "page", "bytes", pages.shape[1]),))
        fingerprint = Fingerprint(model, layout, revision=others, weight_dtype="opaque")
        self._root = fingerprint.root()
        self._store = open_guarded_store(url, settings or StoreSettings(), SystemClock())
        self._pages = EnginePages(pages)
        self._io = StorageIO(
            self._store,
            Names(_PREFIX, fingerprint.short),
            layout,
            self._pages,
            deadline_s=deadline_s,
            block_ttl_s=ttl_s,
        )
        self._thread = threading.Thread(target=self._live, name="tierkv-pages", daemon=True)
        self._opened: Future[None] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = asyncio.Event()
        self._is_closed = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Where the pages go, without secrets."""
        return self._store.url

    @property
    def stats(self) -> StorageStats:
        return self._io.stats

    def open(self) -> None:
        """Open the store. Raises StoreUnavailableError or ConfigError, with what to do, if it
        cannot be used: an engine should not start with a cache that keeps nothing."""
        self._thread.start()
        try:
            self._opened.result(timeout=_OPEN_S)
        except TimeoutError:
            raise StoreUnavailableError(f"{self.url} did not open within {_OPEN_S:g} s") from None

    def close(self) -> None:
        """Let what is under way end, and close the store. Any number of times. Raises
        StoreUnavailableError if that takes too long: pages may be read or written still."""
        self._is_closed = True
        loop = self._loop
        if loop is None:
            return
        loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            raise StoreUnavailableError(f"{self.url} is still being used after {_CLOSE_S:g} s")
        self._loop = None
        self._pages.close()

    def present(self, keys: Sequence[bytes]) -> Future[list[bool]]:
        """For each key whether its page is stored; False for all if the store does not say so in
        time."""
        return self._call(self._present(self._stored(keys)))

    def load(self, keys: Sequence[bytes], page_ids: Sequence[int]) -> Future[list[bool]]:
        """Bring pages into `page_ids`. For each whether every byte is there, checked; the others
        hold anything. The pages are the caller's again when the future is done."""
        return self._call(self._load(self._stored(keys), self._ids(keys, page_ids)))

    def store(self, keys: Sequence[bytes], page_ids: Sequence[int]) -> Future[list[bool]]:
        """Store the pages at `page_ids`. For each whether it is in the store now. The pages stay
        as they are until the future is done."""
        return self._call(self._save(self._stored(keys), self._ids(keys, page_ids)))

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
        names = [self._io.names.name(key) for key in keys]
        try:
            return await self._store.present(names)
        except StoreUnavailableError:
            return [False] * len(keys)

    async def _load(self, keys: Sequence[StoredKey], ids: Ids) -> list[bool]:
        outcomes = await self._io.fetch(keys, ids)
        return [outcome.status is GetStatus.HIT for outcome in outcomes]

    async def _save(self, keys: Sequence[StoredKey], ids: Ids) -> list[bool]:
        outcomes = await self._io.flush(keys, ids, notes_tails=False)
        stored = (PutStatus.STORED, PutStatus.EXISTED)
        return [outcome.status in stored for outcome in outcomes]

    def _call(self, work: Coroutine[object, object, _Result]) -> Future[_Result]:
        future: Future[_Result] = Future()
        loop = self._loop
        if self._is_closed or loop is None:
            work.close()
            future.set_exception(ShuttingDownError("this page storage is not open"))
            return future

        async def run() -> None:
            try:
                result = await work
            except BaseException as error:  # noqa: BLE001 - whoever holds the future hears of it
                future.set_exception(error)
            else:
                future.set_result(result)

        def start() -> None:
            task = asyncio.get_running_loop().create_task(run())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        loop.call_soon_threadsafe(start)
        return future

    def _live(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        try:
            async with self._store.running(), self._io.running():
                self._loop = asyncio.get_running_loop()
                self._opened.set_result(None)
                await self._closing.wait()
                while self._tasks:
                    await asyncio.wait(self._tasks)
        except (StoreUnavailableError, ConfigError) as error:
            if self._opened.done():
                raise
            self._opened.set_exception(error)
