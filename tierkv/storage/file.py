"""The store on a local (or mounted) directory: the embedded default."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tierkv.clock import Clock
from tierkv.config import Fixed
from tierkv.errors import ConfigError, StoreUnavailableError
from tierkv.storage.base import BaseStore
from tierkv.storage.file_paths import Listing
from tierkv.storage.file_room import Room, UsedBytes
from tierkv.storage.file_scratch import WRITERS, Scratch
from tierkv.storage.file_values import DirectWriter, ValueFiles
from tierkv.storage.notify import Notifier
from tierkv.storage.notify_file import FileNotifier
from tierkv.storage.protocol import (
    Capabilities,
    GetItem,
    GetOutcome,
    GetStatus,
    ListPage,
    PutItem,
    PutOutcome,
    PutStatus,
    Usage,
    check_limit,
    check_name,
    check_names,
    check_prefix,
    check_ttl,
)
from tierkv.storage.threads import WorkerThreads
from tierkv.tasks import background

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FileSettings:
    """num_threads: reads at the same time, and as many writes.

    syncs_values: flush every value to the disk before it counts as stored. Off by default: a block
        lost in a power cut is a miss, a torn one is caught by its length and checksum, and with
        flushes 64 values of 2 MiB were written at 0.8-1.1 GB/s instead of 1.2-2.7.
    writes_directly: past the page cache, where the file system can: faster writes, and slower reads
        of what was written lately. For a store much larger than memory.
    sweep_interval_s: how often expired values are removed; they are invisible before that.
    capacity_bytes: of all values; those used longest ago are evicted. None: no limit.
    min_free_bytes: of the file system, kept free the same way; 0: whatever the system allows.
    """

    num_threads: int = 4
    syncs_values: bool = False
    writes_directly: bool = False
    sweep_interval_s: Fixed[float] = 600.0
    capacity_bytes: int | None = None
    min_free_bytes: int = 512 << 20

    def __post_init__(self) -> None:
        if not 1 <= self.num_threads <= 64:  # noqa: PLR2004
            raise ConfigError(f"a file store has 1 to 64 threads, not {self.num_threads}")
        if not self.sweep_interval_s > 0:
            raise ConfigError(f"sweep_interval_s must be above 0, not {self.sweep_interval_s}")
        if self.capacity_bytes is not None and self.capacity_bytes < 1:
            raise ConfigError(f"a file store cannot hold {self.capacity_bytes} bytes")
        if self.min_free_bytes < 0:
            raise ConfigError(f"min_free_bytes must not be negative, as {self.min_free_bytes} is")


class FileStore(BaseStore):
    """`Store` in files below a directory, which any number of processes may share.

    All file work is done in the store's own threads: some for reads and questions, others for what
    these shall not wait behind. A cancelled caller is held until the thread that has its buffers is
    done with them.
    There is no deadline here: no system call on a file has one, and a read that hangs has its
    buffers for as long. A directory that somebody removes is made again for the next value.
    """

    def __init__(self, root: Path, settings: FileSettings, clock: Clock) -> None:
        """root: made if it is not there; a relative one counts from where the process is now."""
        self._root = Path(os.path.normpath(root if root.is_absolute() else Path.cwd() / root))
        self._settings = settings
        self._clock = clock
        # A question waits behind reads that hang, and so shows that the disk does.
        self._readers = WorkerThreads(self.url, settings.num_threads)
        self._writers = WorkerThreads(self.url, settings.num_threads)
        self._files: ValueFiles | None = None

    def notifier(self) -> Notifier:
        return FileNotifier(self._root)

    @property
    def url(self) -> str:
        return self._root.as_uri()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(is_shared=True, is_durable=True)

    def is_made(self) -> bool:
        """Whether a store was ever opened here. Blocks. Raises StoreUnavailableError."""
        try:
            return (self._root / WRITERS).is_dir()
        except PermissionError as error:
            raise self._refusal(error) from error

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        stop = threading.Event()
        async with self._readers.running(), self._writers.running():
            scratch = await self._writers.run(self._open)
            room = Room(
                self._root,
                UsedBytes(self._root / WRITERS, lambda: scratch.directory),
                capacity_bytes=self._settings.capacity_bytes,
                min_free_bytes=self._settings.min_free_bytes,
                order=Listing(self._root, self._clock).eviction_order,
            )
            files = ValueFiles(
                self._root,
                scratch,
                room,
                self._clock,
                syncs=self._settings.syncs_values,
                direct=DirectWriter() if self._settings.writes_directly else None,
            )
            try:
                async with background({"tierkv-file-sweep": self._keep_sweeping(files, stop)}):
                    self._files = files
                    try:
                        yield
                    finally:
                        self._files = None
                        stop.set()
            finally:
                try:
                    await self._writers.idle()
                finally:
                    await self._writers.run(scratch.close)

    async def ping(self) -> None:
        files = self._opened()
        try:
            await self._readers.run(files.ping)
        except OSError as error:
            raise StoreUnavailableError(f"{self.url}: {error.strerror}") from error

    async def exists(self, names: Sequence[str]) -> int:
        check_names(names)
        files = self._opened()
        return await self._readers.run(lambda: files.count_leading(names))

    async def present(self, names: Sequence[str]) -> list[bool]:
        check_names(names)
        files = self._opened()
        return await self._readers.run(lambda: files.present(names))

    async def get_into(self, items: Sequence[GetItem]) -> list[GetOutcome]:
        if self._files is None:
            return [GetOutcome(GetStatus.FAILED, f"{self.url} is closed")] * len(items)
        return await self._readers.run_each(self._files.get, items)

    async def get(self, name: str, *, max_bytes: int) -> bytes | None:
        check_name(name)
        files = self._opened()
        return await self._readers.run(lambda: files.get_small(name, max_bytes))

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        if self._files is None:
            return [PutOutcome(PutStatus.FAILED, f"{self.url} is closed")] * len(items)
        return await self._writers.run_each(self._files.put, items)

    async def delete(self, names: Sequence[str]) -> int:
        check_names(names)
        files = self._opened()
        return sum(await self._writers.run_each(files.delete, names))

    async def touch(self, names: Sequence[str], *, ttl_s: float) -> int:
        check_names(names)
        check_ttl(ttl_s)
        files = self._opened()
        return sum(await self._writers.run_each(lambda name: files.touch(name, ttl_s), names))

    async def list(self, prefix: str, *, limit: int, cursor: str | None = None) -> ListPage:
        check_prefix(prefix)
        check_limit(limit)
        files = self._opened()
        return await self._writers.run(lambda: files.listing.page(prefix, limit, cursor))

    async def usage(self, prefix: str) -> Usage:
        check_prefix(prefix)
        files = self._opened()
        return await self._writers.run(lambda: files.listing.usage(prefix))

    async def sweep(self) -> int:
        """Remove expired values now; returns how many. Raises StoreUnavailableError."""
        files = self._opened()
        try:
            return await self._writers.run(lambda: files.sweep(threading.Event()))
        except OSError as error:
            raise StoreUnavailableError(f"{self.url}: {error.strerror}") from error

    async def _keep_sweeping(self, files: ValueFiles, stop: threading.Event) -> None:
        while True:
            try:
                removed = await self._writers.run(lambda: files.sweep(stop))
                _log.debug("%s: removed %d expired values", self.url, removed)
            except OSError as error:
                _log.warning("%s: expired values stay for now: %s", self.url, error)
            await asyncio.sleep(self._settings.sweep_interval_s)

    def _opened(self) -> ValueFiles:
        if self._files is None:
            raise StoreUnavailableError(f"{self.url} is closed")
        return self._files

    def _open(self) -> Scratch:
        try:
            os.makedirs(self._root, mode=0o700, exist_ok=True)
            scratch = Scratch(self._root)
        except (FileExistsError, NotADirectoryError) as error:
            raise StoreUnavailableError(
                f"{self._root} is no directory, or below a file: set another directory"
            ) from error
        except OSError as error:
            raise self._refusal(error) from error
        if scratch.refused is not None:
            _log.warning("%s is only read for now: %s", self.url, scratch.refused.strerror)
        return scratch

    def _refusal(self, error: OSError) -> StoreUnavailableError:
        return StoreUnavailableError(
            f"the directory {self._root} cannot hold a store ({error.strerror or error}): "
            f"let user {os.geteuid()} write in it, or set another directory"
        )
