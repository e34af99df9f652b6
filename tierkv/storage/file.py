"""The store on a local (or mounted) directory: the embedded default, and the hints
between the processes that share it."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import hashlib
import logging
import os
import struct
import threading
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager, suppress
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
from tierkv.storage.notify import LOOK, Listener, Notifier, Topics, check_message
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

# Hints between the processes that share a directory: files that come and go at once, seen by the
# kernel's inotify.
#
#     store/.notify/3f9c...e1.b12     told: made and removed at once; the name is topic and message
#
# The event outlives the file, so nothing stays behind. A directory shared between machines tells
# only those on the same machine; the others look.


DIRECTORY = ".notify"
_EVENT = struct.Struct("iIII")
_CREATED, _OVERFLOW, _IGNORED = 0x100, 0x4000, 0x8000
_IN_CLOEXEC, _IN_NONBLOCK = os.O_CLOEXEC, os.O_NONBLOCK
_BUFFER_BYTES = 64 * 1024
_LEFT_BEHIND_S = 60.0
_TRY_AGAIN_S = 5.0
_TELL_S = 0.3
_THREADS = 3
_MOST_TELLING = 1024  # more at a time are lost: the disk hangs


class FileNotifier:
    """`Notifier` of the processes that have the directory `root` on one machine."""

    def __init__(self, root: Path) -> None:
        self._directory = root / DIRECTORY
        self._topics = Topics()
        self._is_watching = False
        self._lost = asyncio.Event()
        self._has_warned = False
        self._threads: ThreadPoolExecutor | None = None
        self._num_telling = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        # Threads of its own: those that a disk holds for ever are nobody else's.
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tierkv-notify")
        try:
            async with background({"tierkv-file-notify": self._serve()}):
                yield
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None

    async def tell(self, topic: str, message: str = LOOK) -> None:
        path = self._directory / f"{_digest(topic)}.{check_message(message)}"
        # A hint that is lost, or is stuck with the disk, costs its reader a look.
        if self._threads is not None and self._num_telling < _MOST_TELLING:
            telling = asyncio.get_running_loop().run_in_executor(self._threads, _flash, path)
            self._num_telling += 1
            telling.add_done_callback(self._has_told)
            await asyncio.wait([telling], timeout=_TELL_S)

    def _has_told(self, telling: asyncio.Future[None]) -> None:
        self._num_telling -= 1
        if not telling.cancelled():
            telling.exception()  # seen: the hint is lost

    def listen(self, topic: str) -> AbstractContextManager[Listener]:
        return self._topics.listening(topic, is_live=self._is_watching)

    async def _serve(self) -> None:
        """Watch from the first listener on; a watch that is lost or refused is tried again."""
        while True:
            while not self._topics:
                self._topics.changed.clear()
                await self._topics.changed.wait()
            try:
                fd = await self._open()
            except OSError as error:
                self._warn(error)
            else:
                await self._follow(fd)
            await asyncio.sleep(_TRY_AGAIN_S)

    async def _open(self) -> int:
        """As `_watch`; one that comes after a cancel is closed again. Raises OSError."""
        loop = asyncio.get_running_loop()
        opening = loop.run_in_executor(self._threads, _watch, self._directory)
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_late)
            raise

    async def _follow(self, fd: int) -> None:
        loop = asyncio.get_running_loop()
        self._lost.clear()
        loop.add_reader(fd, self._read, fd)
        try:
            self._is_watching = True
            self._topics.turn_all(is_live=True)
            await self._lost.wait()
        finally:
            self._is_watching = False
            loop.remove_reader(fd)
            os.close(fd)
            self._topics.turn_all(is_live=False)

    def _read(self, fd: int) -> None:
        try:
            events = os.read(fd, _BUFFER_BYTES)
        except BlockingIOError:
            return
        except OSError:
            self._lost.set()
            return
        digests = {_digest(topic): topic for topic in self._topics.wanted}
        at = 0
        while at < len(events):
            _, mask, _, length = _EVENT.unpack_from(events, at)
            name = events[at + _EVENT.size : at + _EVENT.size + length].rstrip(b"\0")
            at += _EVENT.size + length
            if mask & _OVERFLOW:
                self._topics.turn_all(is_live=True)
            elif mask & _IGNORED:
                self._lost.set()
            elif mask & _CREATED:
                digest, _, message = name.decode("ascii", "replace").partition(".")
                if topic := digests.get(digest):
                    self._topics.hear(topic, message)

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning("%s cannot be watched (%s): tickets are polled", self._directory, error)


def _close_late(opening: asyncio.Future[int]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        os.close(opening.result())


def _digest(topic: str) -> str:
    return hashlib.sha256(topic.encode()).hexdigest()[:32]


def _flash(path: Path) -> None:
    """Make a file and remove it. Raises OSError."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return  # nobody has ever listened here
    os.close(fd)
    with suppress(FileNotFoundError):  # another told the same at the same moment
        os.unlink(path)


def _watch(directory: Path) -> int:
    """A non-blocking descriptor of inotify that hears of files made in `directory`.

    Removes what processes left behind that died while telling. Raises OSError.
    """
    os.makedirs(directory, mode=0o700, exist_ok=True)
    with os.scandir(directory) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > _LEFT_BEHIND_S:
                    os.unlink(entry.path)
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        fd: int = libc.inotify_init1(_IN_CLOEXEC | _IN_NONBLOCK)
    except AttributeError:
        raise OSError(errno.ENOSYS, "this system has no inotify") from None
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    if libc.inotify_add_watch(fd, os.fsencode(directory), _CREATED) < 0:
        code = ctypes.get_errno()
        os.close(fd)
        raise OSError(code, os.strerror(code))
    return fd


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
