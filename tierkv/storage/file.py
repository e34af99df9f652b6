"""The store in a local or mounted directory: one file per value, and hints between processes."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import hashlib
import logging
import math
import os
import stat
import struct
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from tierkv.clock import Clock, StoreClock
from tierkv.config import Fixed
from tierkv.errors import ConfigError, StoreCorruptError, StoreRefusedError, StoreUnavailableError
from tierkv.storage.base import (
    CLOCK_EVERY_S,
    BaseStore,
    WorkerThreads,
    read_fully,
    room_for,
    write_fully,
)
from tierkv.storage.file_room import (
    NEVER_NS,
    USE_GRAIN_S,
    WRITE_REFUSALS,
    WRITERS,
    Listing,
    Room,
    Scratch,
    UsedBytes,
    locked_directory,
    relative_path,
    remove_unused,
    sentence,
    walk,
)
from tierkv.storage.protocol import (
    EMPTY_MESSAGE,
    Capabilities,
    GetItem,
    GetOutcome,
    GetStatus,
    Listener,
    ListPage,
    Notifier,
    PutItem,
    PutOutcome,
    PutStatus,
    StoredValue,
    StoreHealth,
    Topics,
    Usage,
    check_limit,
    check_message,
    check_name,
    check_names,
    check_prefix,
    check_ttl,
    too_long,
)
from tierkv.tasks import supervised
from tierkv.threads import Threads

_log = logging.getLogger(__name__)

# Errors if something else is at the path of a value, such as a link into an unmounted file system.
_IN_THE_WAY = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ELOOP})
# A file that another user keeps private counts as missing.
_MISSING = _IN_THE_WAY | {errno.EACCES, errno.EPERM}
_VALUE_REFUSALS = _MISSING | {errno.EFBIG, errno.EXDEV}
# Reported as FULL, because FAILED opens the breaker although other values can be read.
_FULL = WRITE_REFUSALS | _VALUE_REFUSALS
# A broken sector stays broken. A DAMAGED value is deleted and later written to other sectors; as
# FAILED it would stay, and be found again and again.
_UNREADABLE = frozenset({errno.EIO, errno.EBADMSG, errno.EUCLEAN})

# Largest number of evictions for one value: other writers may use the room that they made.
_MAX_EVICTIONS = 3


class ValueFiles:
    """The values of a file store, one file per value. Methods block.

    Any number of threads and processes may use the files.

    A file contains a value's bytes and nothing else. Its modification time is the time of expiry, 0
    (1970) for never, so a listing need not open files; a file copied without its times counts as
    expired. The content of a visible file never changes: a new value is written to another file,
    which is then renamed. Files are renamed, and expired ones removed, under the lock of their
    directory.

    Args:
        root: the store's directory.
        scratch: the directory of values that are being written.
        room: evicts values to make room for new ones.
        clock: the clock of the machine that has the disk, for expiry.
    """

    def __init__(
        self,
        root: Path,
        scratch: Scratch,
        room: Room,
        clock: Clock,
    ) -> None:
        self._root = root
        self._scratch = scratch
        self._room = room
        self._clock = clock
        self.listing = Listing(root, clock)

    def get(self, item: GetItem) -> GetOutcome:
        """Read one value into the buffers of `item`, and return the outcome."""
        try:
            with self._opened(item.name) as fd:
                if fd is None:
                    return GetOutcome(GetStatus.MISS)
                num_bytes = os.fstat(fd).st_size
                if num_bytes > item.room_bytes:
                    return too_long(item, num_bytes)
                digest = item.digest() if item.digest is not None else None
                if not read_fully(fd, room_for(num_bytes, item.into), digest):
                    return GetOutcome(
                        GetStatus.DAMAGED, f"{item.name} was shortened during the read"
                    )
        except PermissionError:
            return GetOutcome(GetStatus.MISS)
        except OSError as error:
            status = GetStatus.DAMAGED if error.errno in _UNREADABLE else GetStatus.FAILED
            return GetOutcome(status, sentence(item.name, error))
        return GetOutcome(GetStatus.HIT, num_bytes=num_bytes, digest=digest)

    def get_small(self, name: str, max_bytes: int) -> bytes | None:
        """Return the value called `name`; None if there is none.

        Args:
            name: name of the value.
            max_bytes: largest accepted length of the value.

        Raises:
            StoreCorruptError: the value is longer than `max_bytes`, was shortened during the read,
                or is on a broken part of the disk.
            StoreUnavailableError: the disk fails.
        """
        try:
            with self._opened(name) as fd:
                if fd is None:
                    return None
                num_bytes = os.fstat(fd).st_size
                if num_bytes > max_bytes:
                    raise StoreCorruptError(
                        f"{name} has {num_bytes} bytes, more than the limit of {max_bytes}"
                    )
                content = bytearray(num_bytes)
                if not read_fully(fd, [memoryview(content)]):
                    raise StoreCorruptError(f"{name} was shortened during the read")
                return bytes(content)
        except OSError as error:
            if error.errno in _UNREADABLE:
                raise StoreCorruptError(sentence(name, error)) from error
            raise _failure(name, error) from error

    def put(self, item: PutItem) -> PutOutcome:
        """Write one value, and evict other values if the file system is full.

        Return the outcome.
        """
        try:
            for _ in range(_MAX_EVICTIONS):
                num_evictions = self._room.num_evictions
                try:
                    return self._put_anew(item)
                except OSError as error:
                    is_short = error.errno in {errno.ENOSPC, errno.EDQUOT}
                    num_bytes = item.num_bytes
                    if not (is_short and self._room.make_more(num_bytes, num_evictions, _unlink)):
                        raise
            return self._put_anew(item)
        except OSError as error:
            status = PutStatus.FULL if error.errno in _FULL else PutStatus.FAILED
            accepts_others = error.errno in _VALUE_REFUSALS
            return PutOutcome(status, sentence(item.name, error), accepts_others=accepts_others)

    def _put_anew(self, item: PutItem) -> PutOutcome:
        path = self._path(item.name)
        try:
            return self._put(path, item)
        except FileNotFoundError:
            self._renew()
        return self._put(path, item)

    def _put(self, path: str, item: PutItem) -> PutOutcome:
        if item.leaves_existing and self._is_live(path):
            return PutOutcome(PutStatus.EXISTED)
        if reason := self._room.make(item.num_bytes, _unlink):
            accepts_others = self._room.is_too_small_for(item.num_bytes)
            return PutOutcome(
                PutStatus.FULL, f"{item.name}: {reason}", accepts_others=accepts_others
            )
        temporary = self._scratch.new_path()
        status = PutStatus.FAILED
        try:
            self._write(temporary, item)
            status = self._publish(temporary, path, item)
            return PutOutcome(status)
        finally:
            if status is not PutStatus.STORED:
                self._room.removed(item.num_bytes)
            with suppress(FileNotFoundError):
                os.unlink(temporary)

    def ping(self) -> None:
        """Check that the directory can be used; create it again if it was removed.

        Raises:
            OSError: the directory cannot be used.
        """
        try:
            os.stat(self._root / WRITERS)  # fails without the right to search the root
        except FileNotFoundError:
            self._renew()

    def _renew(self) -> None:
        self._scratch.renew()
        self._room.forget_size()

    def delete(self, name: str) -> bool:
        """Remove a value; return True if there was one that had not expired.

        Raises:
            StoreUnavailableError: the file cannot be removed.
        """
        path = self._path(name)
        try:
            status = os.stat(path, follow_symlinks=False)
            os.unlink(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise _failure(name, error) from error
        self._room.removed(status.st_size)
        return not self.listing.is_expired(status)

    def touch(self, name: str, ttl_s: float) -> bool:
        """Set a value to expire `ttl_s` seconds from now; return True if there is one.

        Args:
            name: name of the value.
            ttl_s: seconds to live.

        Raises:
            StoreUnavailableError: the file's times cannot be set.
        """
        path = self._path(name)
        expires_ns = math.ceil((self._clock.wall() + ttl_s) * 1e9)
        try:
            with locked_directory(_parent(path)):
                if not self._is_live(path):
                    return False
                used_ns = int(self._clock.wall() * 1e9)
                os.utime(path, ns=(used_ns, expires_ns), follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise _failure(name, error) from error
        return True

    def count_leading(self, names: Sequence[str]) -> int:
        """Return the number of leading `names` that have a value, up to the first that has none.

        Raises:
            StoreUnavailableError: the directory cannot be read.
        """
        try:
            for found, name in enumerate(names):
                if not self._is_live(self._path(name)):
                    return found
        except OSError as error:
            raise StoreUnavailableError(sentence("the directory", error)) from error
        return len(names)

    def present(self, names: Sequence[str]) -> list[bool]:
        """Return, for each name, True if it has a value.

        Raises:
            StoreUnavailableError: the directory cannot be read.
        """
        try:
            return [self._is_live(self._path(name)) for name in names]
        except OSError as error:
            raise StoreUnavailableError(sentence("the directory", error)) from error

    def sweep(self, stop: threading.Event) -> int:
        """Remove expired values until all are removed or `stop` is set; return their number.

        The sweep also removes empty directories that have not changed for ten minutes.

        Raises:
            OSError: the directory cannot be read.
        """
        removed = 0
        self._room.forget_size()
        for _, entry in walk(self._root, "", when_empty=remove_unused):
            if stop.is_set():
                break
            with suppress(FileNotFoundError, PermissionError):  # a file of another user
                if self.listing.is_expired(entry.stat(follow_symlinks=False)):
                    removed += self._remove_expired(entry.path)
        return removed

    def _path(self, name: str) -> str:
        # Text instead of a Path: `exists` then takes 6 us per name, not 11 us.
        return f"{self._root}/{'/'.join(relative_path(name))}"

    @contextmanager
    def _opened(self, name: str) -> Iterator[int | None]:
        path = self._path(name)
        try:
            # The flags prevent hanging on a FIFO and following a symbolic link.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            if error.errno not in _IN_THE_WAY:
                raise
            yield None
            return
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                yield None
            elif self.listing.is_expired(status):
                with suppress(OSError):  # for example on a read-only disk
                    self._remove_expired(path)
                yield None
            else:
                self._mark_used(path, status)
                yield fd
        finally:
            os.close(fd)

    def _is_live(self, path: str) -> bool:
        try:
            status = os.stat(path, follow_symlinks=False)
        except OSError as error:
            if error.errno not in _MISSING:
                raise
            return False
        return stat.S_ISREG(status.st_mode) and not self.listing.is_expired(status)

    def _mark_used(self, path: str, status: os.stat_result) -> None:
        """Set the file's access time, by which eviction chooses, if the time is a minute old."""
        if self.listing.seconds_unused(status) < USE_GRAIN_S:
            return
        # A file of another user, or one that is being replaced, cannot be marked; the read goes on.
        with suppress(OSError), locked_directory(_parent(path), waits=False):
            expires_ns = os.stat(path, follow_symlinks=False).st_mtime_ns
            used_ns = int(self._clock.wall() * 1e9)
            os.utime(path, ns=(used_ns, expires_ns), follow_symlinks=False)

    def _remove_expired(self, path: str) -> bool:
        busy_or_gone = suppress(FileNotFoundError, BlockingIOError)
        with busy_or_gone, locked_directory(_parent(path), waits=False):
            if self.listing.is_expired(os.stat(path, follow_symlinks=False)):
                os.unlink(path)
                return True
        return False

    def _write(self, temporary: str, item: PutItem) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o600)
        try:
            write_fully(fd, item.completed())
            expires_ns = NEVER_NS
            if item.ttl_s is not None:
                expires_ns = math.ceil((self._clock.wall() + item.ttl_s) * 1e9)
            os.utime(fd, ns=(int(self._clock.wall() * 1e9), expires_ns))
        finally:
            os.close(fd)

    def _publish(self, temporary: str, path: str, item: PutItem) -> PutStatus:
        _make_directory(_parent(path))
        with locked_directory(_parent(path)):
            if item.leaves_existing and self._is_live(path):
                return PutStatus.EXISTED
            os.rename(temporary, path)
        return PutStatus.STORED


def _failure(name: str, error: OSError) -> StoreUnavailableError:
    kind = StoreRefusedError if error.errno in _FULL else StoreUnavailableError
    return kind(sentence(name, error))


def _make_directory(directory: str) -> None:
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
    except FileExistsError:  # `makedirs` also raises this for a directory removed just then
        os.makedirs(directory, mode=0o700, exist_ok=True)


def _unlink(path: str) -> bool:
    try:
        os.unlink(path)
    except (FileNotFoundError, PermissionError):
        return False
    return True


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


DIRECTORY = ".notify"
_EVENT = struct.Struct("iIII")
_CREATED, _OVERFLOW, _IGNORED = 0x100, 0x4000, 0x8000
_BUFFER_BYTES = 64 * 1024
_LEFT_BEHIND_S = 60.0
_TRY_AGAIN_S = 5.0
_NOTIFY_S = 0.3
_THREADS = 3
_MAX_NOTIFYING = 1024  # with more at a time the disk hangs, and further hints are lost


class FileNotifier:
    """The `Notifier` of processes on one machine that share the store's directory, `root`.

    A hint is a file that is created and removed at once. The kernel (inotify) reports the creation
    to the other processes, even after the file is gone.

        store/.notify/3f9c...e1.b12     a hint: the digest of the topic, and the message

    Processes on other machines that share the directory receive no hints and have to poll.
    """

    def __init__(self, root: Path) -> None:
        self._directory = root / DIRECTORY
        self._topics = Topics()
        self._is_watching = False
        self._lost = asyncio.Event()
        self._has_warned = False
        self._threads: Threads | None = None
        self._num_notifying = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        # Separate threads, because a disk that hangs may block them for ever.
        self._threads = Threads(_THREADS, "tierkv-notify")
        try:
            async with supervised({"tierkv-file-notify": self._serve}):
                yield
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None

    async def notify(self, topic: str, message: str = EMPTY_MESSAGE) -> None:
        """Send `message` to the listeners of `topic`, by creating a file that they watch for.

        The file is removed at once. The message is lost after an error, on a slow disk, or if too
        many messages are being sent.
        """
        path = self._directory / f"{_digest(topic)}.{check_message(message)}"
        # A lost or delayed hint only delays the listeners.
        if self._threads is not None and self._num_notifying < _MAX_NOTIFYING:
            notifying = asyncio.get_running_loop().run_in_executor(self._threads, _flash, path)
            self._num_notifying += 1
            notifying.add_done_callback(self._has_sent)
            await asyncio.wait([notifying], timeout=_NOTIFY_S)

    def _has_sent(self, notifying: asyncio.Future[None]) -> None:
        self._num_notifying -= 1
        if not notifying.cancelled():
            notifying.exception()  # retrieved, so that asyncio does not log it: the hint is lost

    def listen(self, topic: str) -> AbstractContextManager[Listener]:
        return self._topics.listening(topic, is_live=self._is_watching)

    async def _serve(self) -> None:
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
            self._topics.set_all_live(is_live=True)
            await self._lost.wait()
        finally:
            self._is_watching = False
            loop.remove_reader(fd)
            os.close(fd)
            self._topics.set_all_live(is_live=False)

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
                self._topics.set_all_live(is_live=True)
            elif mask & _IGNORED:
                self._lost.set()
            elif mask & _CREATED:
                digest, _, message = name.decode("ascii", "replace").partition(".")
                if topic := digests.get(digest):
                    self._topics.deliver(topic, message)

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s cannot be watched for changes (%s), so tickets are polled",
                self._directory,
                error,
            )


def _close_late(opening: asyncio.Future[int]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        os.close(opening.result())


def _digest(topic: str) -> str:
    return hashlib.sha256(topic.encode()).hexdigest()[:32]


def _flash(path: Path) -> None:
    """Create and remove a file at once, to notify the processes that watch the directory."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return  # no process has ever listened here
    os.close(fd)
    with suppress(FileNotFoundError):  # another process sent the same hint at the same moment
        os.unlink(path)


def _watch(directory: Path) -> int:
    os.makedirs(directory, mode=0o700, exist_ok=True)
    with os.scandir(directory) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > _LEFT_BEHIND_S:
                    os.unlink(entry.path)
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        fd: int = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
    except AttributeError:
        raise OSError(errno.ENOSYS, "this system has no inotify") from None
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    if libc.inotify_add_watch(fd, os.fsencode(directory), _CREATED) < 0:
        code = ctypes.get_errno()
        os.close(fd)
        raise OSError(code, os.strerror(code))
    return fd


@dataclass(frozen=True, slots=True)
class FileSettings:
    """The settings of a file store.

    Attributes:
        num_threads: number of threads that read; the same number of other threads write.
        sweep_interval_s: seconds between removals of expired values. An expired value counts as
            missing even before its removal.
        capacity_bytes: largest total size of all values, beyond which the least recently used ones
            are evicted. None for no limit.
        min_free_bytes: bytes of the file system to keep free by evicting values; 0 to use all that
            the system allows.
    """

    num_threads: Fixed[int] = 4
    sweep_interval_s: Fixed[float] = 600.0
    capacity_bytes: int | None = None
    min_free_bytes: int = 512 << 20

    def __post_init__(self) -> None:
        if not 1 <= self.num_threads <= 64:  # noqa: PLR2004
            raise ConfigError(f"storage.file.num_threads must be 1 to 64, not {self.num_threads}")
        if not self.sweep_interval_s > 0:
            raise ConfigError(
                f"storage.file.sweep_interval_s must be above 0, not {self.sweep_interval_s}"
            )
        if self.capacity_bytes is not None and self.capacity_bytes < 1:
            raise ConfigError(
                f"storage.file.capacity_bytes must be above 0, not {self.capacity_bytes}"
            )
        if self.min_free_bytes < 0:
            raise ConfigError(
                f"storage.file.min_free_bytes must be at least 0, not {self.min_free_bytes}"
            )


class FileStore(BaseStore):
    """A `Store` in files below a directory, which any number of processes may share.

    There are no deadlines: if a read hangs, its caller waits even after a cancel, because the
    buffers are in use. If the directory is removed, the next write creates it again.
    """

    def __init__(self, root: Path, settings: FileSettings, clock: Clock) -> None:
        """Set the directory, which is created when the store is opened.

        Args:
            root: the directory; a relative path starts at the current working directory.
            settings: settings of the store.
            clock: the clock for times to live.
        """
        self._root = Path(os.path.normpath(root if root.is_absolute() else Path.cwd() / root))
        self._settings = settings
        self._clock = StoreClock(clock)
        # Questions share the threads of reads: if reads hang, the questions show that the disk
        # hangs.
        self._readers = WorkerThreads(self.url, settings.num_threads)
        self._writers = WorkerThreads(self.url, settings.num_threads)
        self._files: ValueFiles | None = None

    @property
    def health(self) -> StoreHealth:
        return StoreHealth(clock_skew_s=self._clock.skew_s)

    def now(self) -> float:
        return self._clock.wall()

    def notifier(self) -> Notifier:
        return FileNotifier(self._root)

    @property
    def url(self) -> str:
        return self._root.as_uri()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(is_shared=True, is_durable=True)

    def is_made(self) -> bool:
        """Return True if a store was ever opened in this directory. Blocks the thread.

        Raises:
            StoreUnavailableError: the directory may not be read.
        """
        try:
            return (self._root / WRITERS).is_dir()
        except PermissionError as error:
            raise self._refusal(error) from error

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        stop = threading.Event()
        async with (
            self._readers.running(),
            self._writers.running(),
            self._writers.holding(self._open, Scratch.close) as scratch,
        ):
            room = Room(
                self._root,
                UsedBytes(self._root / WRITERS, lambda: scratch.directory),
                capacity_bytes=self._settings.capacity_bytes,
                min_free_bytes=self._settings.min_free_bytes,
                order=Listing(self._root, self._clock).eviction_order,
            )
            files = ValueFiles(self._root, scratch, room, self._clock)
            beside = {
                "tierkv-file-sweep": lambda: self._keep_sweeping(files, stop),
                "tierkv-file-clock": lambda: self._keep_reading_clock(scratch),
            }
            async with supervised(beside):
                self._files = files
                try:
                    yield
                finally:
                    self._files = None
                    stop.set()

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
        page = await self._writers.run(lambda: files.listing.page(prefix, limit, cursor))
        return replace(page, values=tuple(map(self._by_our_clock, page.values)))

    def _by_our_clock(self, value: StoredValue) -> StoredValue:
        skew_s = self._clock.skew_s
        if skew_s is None or value.expires_at is None:
            return value
        return replace(value, expires_at=value.expires_at + skew_s)

    async def usage(self, prefix: str) -> Usage:
        check_prefix(prefix)
        files = self._opened()
        return await self._writers.run(lambda: files.listing.usage(prefix))

    async def sweep(self) -> int:
        """Remove expired values now; return their number.

        Raises:
            StoreUnavailableError: the directory cannot be read.
        """
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
                _log.warning(
                    "expired values of %s cannot be removed at the moment: %s", self.url, error
                )
            await asyncio.sleep(self._settings.sweep_interval_s)

    async def _keep_reading_clock(self, scratch: Scratch) -> None:
        while True:
            await asyncio.sleep(CLOCK_EVERY_S)
            await self._readers.run(lambda: self._read_clock(scratch))

    def _read_clock(self, scratch: Scratch) -> None:
        asked_at = self._clock.monotonic()
        store_time = scratch.time()
        if store_time is not None:
            self._clock.note(store_time, asked_at)

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
                f"{self._root} is a file, or lies below a file: set another directory"
            ) from error
        except OSError as error:
            raise self._refusal(error) from error
        if scratch.refused is not None:
            _log.warning(
                "%s refuses writes, so values are only read: %s",
                self.url,
                scratch.refused.strerror,
            )
        self._read_clock(scratch)
        return scratch

    def _refusal(self, error: OSError) -> StoreUnavailableError:
        return StoreUnavailableError(
            f"the directory {self._root} cannot be used as a store "
            f"({error.strerror or error}): let user {os.geteuid()} write to it, or set "
            "another directory"
        )
