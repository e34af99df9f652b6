"""The directory of a file store: paths of values, unfinished values, and eviction.

Eviction keeps the total size of the values within the store's capacity, and a part of the disk
free. The blocks of a prompt are written and used together. Its last blocks are evicted first,
because the first blocks are useful without them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import heapq
import math
import os
import re
import secrets
import stat
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from itertools import count, islice
from pathlib import Path

from tierkv.clock import Clock
from tierkv.errors import BadRequestError, StoreUnavailableError
from tierkv.storage.protocol import ListPage, StoredValue, Usage, check_name, is_name

NEVER_NS = 0
# Least seconds between two updates of a value's access time, which is also its resolution.
USE_GRAIN_S = 60.0


_NO_GROUP = ","
_ABOVE_VALUES = re.compile(r"[^/]+(/[0-9a-f]){0,2}")


def relative_path(name: str) -> tuple[str, ...]:
    """Return the path of the value called `name` in the store: (folder, ..., file name).

    Values are spread over 256 directories on two levels. With a million values, each of the 256 has
    4,000 files.

        a:b:c:d     ->  a,b / 7 / e / c,d          prefix, two levels of fan-out, file
        a:b         ->  a / 0 / 3 / b
        a           ->  , / 9 / c / a

    Fields of names start with a letter or digit and contain no comma or slash. Therefore no
    component of a path is "." or "..", no two names have the same path, and no value has a path of
    the store's own files, which start with a dot.

    Raises:
        BadRequestError: stores do not accept the name.
    """
    return _path_of(check_name(name))


def _path_of(name: str) -> tuple[str, ...]:
    fields = name.split(":")
    group, leaf = fields[: min(2, len(fields) - 1)], fields[min(2, len(fields) - 1) :]
    spread = f"{zlib.crc32(name.encode()) & 0xFF:02x}"
    return (",".join(group) or _NO_GROUP, *spread, ",".join(leaf))


def name_of(path: tuple[str, ...]) -> str | None:
    """Return the name of the value whose file has the path `path` in the store.

    Args:
        path: folders and file name, relative to the store's directory.

    Returns:
        The name; None if no value can have this path.
    """
    if len(path) != 4:  # noqa: PLR2004 - group, two levels of fan-out, leaf
        return None
    group = "" if path[0] == _NO_GROUP else path[0] + ":"
    name = (group + path[3]).replace(",", ":")
    return name if is_name(name) and _path_of(name) == path else None


def walk(
    root: Path,
    prefix: str,
    *,
    after: tuple[str, ...] = (),
    when_empty: Callable[[str], object] | None = None,
) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield name and directory entry of each value under `prefix`, in the order of their paths.

    Directories that cannot contain such a value are not read. The walk skips files that are
    not values, directories that this user may not read, and directories that are removed during the
    walk.

    Args:
        root: the store's directory.
        prefix: start of the names.
        after: path, in parts, after which the walk starts; () for all values.
        when_empty: called with the path of each empty directory that the store has created, if it
            is given.

    Raises:
        OSError: a directory cannot be read.
    """
    for group in _entries(root):
        if _is_directory(group) and _may_hold(group.name, prefix):
            # A directory without a comma may belong to another program that uses the same root.
            notify = when_empty if _NO_GROUP in group.name else None
            yield from _values(Path(group.path), (group.name,), prefix, after, notify)


class Listing:
    """The values in a file store's directory, and the times of their files.

    Methods block. Thread-safe.
    """

    def __init__(self, root: Path, clock: Clock) -> None:
        self._root = root
        self._clock = clock

    def page(self, prefix: str, limit: int, cursor: str | None) -> ListPage:
        """Return one page of values, in the order of their paths.

        Args:
            prefix: start of the names.
            limit: largest number of values in the page.
            cursor: `cursor` of the previous page, which is the path of its last value; None for the
                first page.

        Raises:
            BadRequestError: the cursor does not belong to this store.
            StoreUnavailableError: the directory cannot be read.
        """
        after = () if cursor is None else tuple(cursor.split("/"))
        if after and name_of(after) is None:
            raise BadRequestError(f"{(cursor or '')[:80]!r} is not a cursor of this store")
        values = tuple(islice(self._values(prefix, after), limit))
        is_last = len(values) < limit
        return ListPage(values, None if is_last else "/".join(relative_path(values[-1].name)))

    def usage(self, prefix: str) -> Usage:
        num_values = num_bytes = 0
        for value in self._values(prefix, ()):
            num_values += 1
            num_bytes += value.num_bytes
        return Usage(num_values, num_bytes)

    def _values(self, prefix: str, after: tuple[str, ...]) -> Iterator[StoredValue]:
        try:
            for name, entry in walk(self._root, prefix, after=after):
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode) and not self.is_expired(status):
                        yield StoredValue(name, status.st_size, _expires_at(status))
        except OSError as error:
            raise StoreUnavailableError(sentence("the directory", error)) from error

    def is_expired(self, status: os.stat_result) -> bool:
        expires_at = _expires_at(status)
        return expires_at is not None and expires_at <= self._clock.wall()

    def seconds_unused(self, status: os.stat_result) -> float:
        """Return the seconds since the last use of a file.

        The result is infinite if the last use is in the future, because the clock was set back.
        """
        unused_s = self._clock.wall() - status.st_atime
        return unused_s if unused_s > -USE_GRAIN_S else math.inf

    def eviction_order(self, status: os.stat_result) -> tuple[bool, float, float]:
        """Return a sort key for eviction: the file with the lowest key is evicted first.

        Expired values come first, then the least recently used ones. Values that were last used in
        the same minute count as blocks of one prompt: of these, the one used last (the end of the
        prompt) comes first.
        """
        is_live = not self.is_expired(status)
        used_at = 0.0 if math.isinf(self.seconds_unused(status)) else status.st_atime
        return is_live, used_at // USE_GRAIN_S, -used_at


def _expires_at(status: os.stat_result) -> float | None:
    return None if status.st_mtime_ns == NEVER_NS else status.st_mtime


def sentence(subject: str, error: OSError) -> str:
    """Return "subject: the system's text for the error".

    Args:
        subject: the name of a value, or "the directory".
        error: the failure.
    """
    return f"{subject}: {error.strerror or error}"


def _values(
    directory: Path,
    parts: tuple[str, ...],
    prefix: str,
    after: tuple[str, ...],
    when_empty: Callable[[str], object] | None,
) -> Iterator[tuple[str, os.DirEntry[str]]]:
    if parts < after[: len(parts)]:
        return
    try:
        entries = _entries(directory)
    except PermissionError:
        return
    if when_empty is not None and not entries:
        when_empty(str(directory))
    for entry in entries:
        path = (*parts, entry.name)
        if entry.is_dir(follow_symlinks=False):
            if _ABOVE_VALUES.fullmatch("/".join(path)):
                yield from _values(Path(entry.path), path, prefix, after, when_empty)
        elif path > after:
            name = name_of(path)
            if name is not None and name.startswith(prefix):
                yield name, entry


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_directory(group: os.DirEntry[str]) -> bool:
    try:
        return group.is_dir()
    except OSError:  # such as a link to itself
        return False


def _may_hold(group: str, prefix: str) -> bool:
    if group == _NO_GROUP:
        return True
    if not group[0].isalnum():  # such as .writers
        return False
    start = group.replace(",", ":") + ":"
    return start.startswith(prefix) or prefix.startswith(start)


WRITERS = ".writers"
_LOCK = "lock"
# Another process can remove a directory before its maker has locked it. If this happens every time,
# the file system has no locks.
_MAX_TRIES = 10
_UNUSED_S = 600.0
# Errors of a disk that takes no writes now and can still be read.
WRITE_REFUSALS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})


class Scratch:
    """This process's directory for unfinished values, below the store's directory `root`.

    `close` removes it. If the process dies, the next process that opens the store removes it.
    Methods block. `new_path` and `renew` are thread-safe.

        .writers / 3f9c... / lock       locked by the kernel for as long as the process lives
                           / 0, 1, ...  values being written
                           / added      number of bytes that the process has added (`UsedBytes`)

    The directory is on the same file system as the values, so renaming a file makes its value
    visible at once. A lock, unlike a process id, shows which processes are alive even between
    containers and after ids are reused.

    Attributes:
        directory: path of this process's directory.
        refused: the error of a disk that accepts no writes; None otherwise.
    """

    def __init__(self, root: Path) -> None:
        """Create this process's directory for unfinished values; remove those of dead processes.

        If the disk accepts no writes, no directory is created, and the error is in the attribute
        `refused`. Values can still be read, and a later call of `renew` creates the directory.

        Args:
            root: the store's directory.

        Raises:
            OSError: the directory cannot be created or read.
        """
        self._writers = writers = root / WRITERS
        os.makedirs(writers, mode=0o700, exist_ok=True)
        with os.scandir(writers) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    _clear_if_dead(Path(entry.path))
        self._device = os.stat(writers).st_dev
        self._lock_fd: int | None = None
        self.refused: OSError | None = None
        try:
            self.directory, self._lock_fd = _make(writers)
        except OSError as error:
            if error.errno not in WRITE_REFUSALS:
                raise
            self.refused = error
            self.directory = writers / secrets.token_hex(8)
        self._serial = count()
        self._renewing = threading.Lock()

    def time(self) -> float | None:
        """Return the Unix time of the machine that has the store's disk, such as an NFS server.

        The result is None if the time cannot be read.
        """
        if self._lock_fd is None:
            return None
        try:
            os.utime(self._lock_fd)  # the machine that has the disk sets the time
            return os.fstat(self._lock_fd).st_mtime
        except OSError:
            return None

    def new_path(self) -> str:
        """Return a new path in this process's directory for unfinished values."""
        return f"{self.directory}/{next(self._serial)}"

    def renew(self) -> None:
        """Create another directory if this one was removed, for example together with all values.

        Raises:
            OSError: the directory cannot be created, or the file system of the store is not mounted
                now.
        """
        with self._renewing:
            if os.path.exists(self.directory / _LOCK):
                return
            there = next(path for path in self._writers.parents if path.exists())
            if os.stat(there).st_dev != self._device:
                raise OSError(errno.ENODEV, "the store's file system is not mounted")
            os.makedirs(self._writers, mode=0o700, exist_ok=True)
            gone = self._lock_fd
            self.directory, self._lock_fd = _make(self._writers)
            if gone is not None:
                os.close(gone)

    def close(self) -> None:
        """Remove the directory. Files that cannot be removed are left for the next process."""
        try:
            _clear(self.directory)
        finally:
            if self._lock_fd is not None:
                os.close(self._lock_fd)


def _make(writers: Path) -> tuple[Path, int]:
    for _ in range(_MAX_TRIES):
        directory = writers / secrets.token_hex(8)
        os.mkdir(directory, mode=0o700)
        try:
            fd = _lock(directory)
        except OSError:
            _clear(directory)
            raise
        if fd is None:
            continue
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(directory / _LOCK), os.fstat(fd)):
                return directory, fd
        os.close(fd)  # another process has removed the directory before it was locked
    raise OSError(
        "new files cannot be locked: use a file system with locks (some network file "
        "systems have none)"
    )


def _lock(directory: Path) -> int | None:
    try:
        fd = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return fd


def _clear_if_dead(directory: Path) -> None:
    fd = None
    with contextlib.suppress(OSError):  # such as another user's directory, or a full disk
        fd = _lock(directory)
    if fd is not None:
        try:
            _clear(directory)
        finally:
            os.close(fd)


def _clear(directory: Path) -> None:
    # The lock file is removed last: a process that locks a new one then keeps the directory.
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(directory), key=lambda name: name == _LOCK):
            os.unlink(directory / name)
        os.rmdir(directory)


@contextlib.contextmanager
def locked_directory(directory: str, *, waits: bool = True) -> Iterator[None]:
    """Lock a directory against other threads and processes during the `with` block.

    The wait for the lock blocks the thread.

    Args:
        directory: path of the directory.
        waits: False to raise BlockingIOError if another process or thread has the lock.

    Raises:
        FileNotFoundError: the directory was removed during the wait for the lock. Another process
            may have made a new one at the same path since.
        OSError: the directory cannot be locked.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(fd), os.stat(directory)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), directory)
        yield
    finally:
        # Closing is not enough: a child process forked since then has the file open, too.
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def remove_unused(directory: str) -> None:
    """Remove a directory if it is empty and nothing in it has changed for 10 minutes.

    A writer that needs the directory creates it again.
    """
    with contextlib.suppress(OSError), locked_directory(directory, waits=False):
        if time.time() - os.stat(directory).st_mtime > _UNUSED_S:
            os.rmdir(directory)


ADDED = "added"
_COUNT = struct.Struct("<q")


# Eviction looks at every file (1 s for 200,000), so it makes more room than is needed now: a share
# of the capacity, and of all values if the disk is short. Otherwise each value on a disk with only
# `min_free_bytes` left takes 40 ms with 22,000 files.
_LOW_WATERMARK = 0.9
_SPARE = 0.02
# Files in one sorted list: sorting or freeing a list stops all other threads, for 3 s with 200,000
# files in one list.
_PART_FILES = 1000

# Sort key, bytes and path of a file, in a flat tuple that the garbage collector does not visit.
_File = tuple[bool, float, float, int, str]


class Room:
    """The room in a file store: evicts values to make room for new ones within the size limits.

    Methods block. Thread-safe. Processes that share a directory evict one at a time.

    Args:
        root: the store's directory.
        used: counts the bytes of all values.
        capacity_bytes: largest total size of all values; None for no limit.
        min_free_bytes: bytes of the file system to keep free.
        order: returns the sort key of a file; the file with the lowest key is evicted first.
    """

    def __init__(
        self,
        root: Path,
        used: UsedBytes,
        *,
        capacity_bytes: int | None,
        min_free_bytes: int,
        order: Callable[[os.stat_result], tuple[bool, float, float]],
    ) -> None:
        self._root = root
        self._used = used
        self._capacity_bytes = capacity_bytes
        self._min_free_bytes = min_free_bytes
        self._order = order
        self._lock = threading.Lock()
        self.num_evictions = 0  # evictions that removed something

    def make(self, num_bytes: int, remove: Callable[[str], bool]) -> str:
        """Make room for a new value: evict values until the store's limits allow it.

        If there is room, the new value's bytes are counted as used.

        Args:
            num_bytes: size of the new value.
            remove: removes the file at a path and returns True if there was one.

        Returns:
            "" if the new value may be written; otherwise a sentence that names the limits.

        Raises:
            OSError: the directory cannot be read.
        """
        with self._lock:
            is_room = self._fits(num_bytes)
            if not is_room and not self.is_too_small_for(num_bytes):
                with locked_directory(str(self._root / WRITERS)):
                    is_room = self._evict(num_bytes, remove)
            if is_room:
                self._add(num_bytes)
                return ""
        limits = {
            "capacity_bytes allows {} bytes of values": self._capacity_bytes,
            "min_free_bytes keeps {} bytes of the disk free": self._min_free_bytes,
        }
        reasons = ", ".join(limit.format(value) for limit, value in limits.items() if value)
        return f"there is no room for {num_bytes} bytes: {reasons}"

    def is_too_small_for(self, num_bytes: int) -> bool:
        return self._capacity_bytes is not None and num_bytes > self._capacity_bytes

    def make_more(self, num_bytes: int, num_evictions: int, remove: Callable[[str], bool]) -> bool:
        """Evict stored values after the disk refused a write although enough bytes seemed free.

        For example, the disk has no inodes left, or a quota. Values are evicted until their total
        size is at least `num_bytes`. Nothing is evicted if `min_free_bytes` is 0, because a full
        disk is then normal.

        Args:
            num_bytes: size of the refused value.
            num_evictions: `self.num_evictions` before the write that was refused. If that number
                has changed, another thread has evicted values, and no more are evicted.
            remove: removes the file at a path and returns True if there was one.

        Returns:
            True if values were evicted, here or by another thread, so that the write can be tried
                again.

        Raises:
            OSError: the directory cannot be read.
        """
        with self._lock:
            if self._min_free_bytes and num_evictions == self.num_evictions:
                with locked_directory(str(self._root / WRITERS)):
                    self._evict(num_bytes, remove, is_refused=True)
            return num_evictions != self.num_evictions

    def removed(self, num_bytes: int) -> None:
        """Subtract `num_bytes` from the bytes that the values use.

        Call this after values were removed, or if the bytes that `make` has reserved were not
        written.
        """
        with self._lock:
            self._add(-num_bytes)

    def forget_size(self) -> None:
        """Discard the measured total size of all values; the next write measures it again."""
        with self._lock:
            self._used.forget()

    def _add(self, num_bytes: int) -> None:
        if self._capacity_bytes is not None:
            self._used.add(num_bytes)

    def _fits(self, num_bytes: int) -> bool:
        if self._lacking_bytes(num_bytes) > 0:
            return False
        if self._capacity_bytes is None:
            return True
        used = self._used.total()
        return used is not None and used + num_bytes <= self._capacity_bytes

    def _lacking_bytes(self, num_bytes: int) -> int:
        """Return the bytes to free so that, after writing `num_bytes`, `min_free_bytes` are free.

        The result is 0 or less if nothing has to be freed.
        """
        if not self._min_free_bytes:
            return 0
        disk = os.statvfs(self._root)
        return self._min_free_bytes + num_bytes - disk.f_bavail * disk.f_frsize

    def _evict(
        self, num_bytes: int, remove: Callable[[str], bool], *, is_refused: bool = False
    ) -> bool:
        """Delete files until a value of `num_bytes` fits; return False if it still does not.

        The least valuable files are deleted first. `remove` deletes the file at a path and returns
        True if there was one; `is_refused` is True if the file system has just refused to write the
        value.
        """
        counts = self._used.counts()
        parts, used = self._list_files()
        self._used.record(used, counts)
        capacity = self._capacity_bytes
        over = wanted = 0
        if capacity is not None:
            over = (self._used.total() or used) + num_bytes - capacity
            wanted = over + capacity - int(capacity * _LOW_WATERMARK) if over > 0 else 0
        lacking = num_bytes if is_refused else self._lacking_bytes(num_bytes)
        if lacking > 0:
            wanted = max(wanted, lacking + int(used * _SPARE))
        freed = 0
        try:
            for *_, size, path in heapq.merge(*parts):
                if freed >= wanted:
                    break
                if remove(path):
                    freed += size
        finally:
            self._add(-freed)  # all at once, because counting a file takes longer than removing it
        while parts:
            parts.pop()
        self.num_evictions += freed > 0
        return freed >= max(over, lacking)

    def _list_files(self) -> tuple[list[list[_File]], int]:
        """Return lists of files, each in the order of eviction, and the files' total bytes."""
        parts: list[list[_File]] = []
        part: list[_File] = []
        used = 0
        for _, entry in walk(self._root, ""):
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                part.append((*self._order(status), status.st_size, entry.path))
                used += status.st_size
            if len(part) == _PART_FILES:
                part.sort()
                parts.append(part)
                part = []
        parts.append(sorted(part))
        return parts, used


class UsedBytes:
    """The total bytes of the values in a store's directory, counted by all processes that use it.

    Sometimes a process adds up the sizes of all files. The total is this sum plus the bytes that
    all processes have added since. Each process writes the bytes that it has added since its start
    to the file `added` in its own subdirectory of `writers`. The total is unknown before the first
    sum, and again after a process has ended, because the file of that process is removed.

    Methods block. Use an object from one thread at a time.

    Args:
        writers: the directory with one subdirectory for each process.
        own: returns the subdirectory of this process.
    """

    def __init__(self, writers: Path, own: Callable[[], Path]) -> None:
        self._writers = writers
        self._own = own
        self._own_added = 0
        self._measured_bytes: int | None = None
        self._measured_counts: Mapping[str, int] = {}

    def add(self, num_bytes: int) -> None:
        self._own_added += num_bytes
        # If the disk is full, the next write contains this count, too.
        with contextlib.suppress(OSError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
            fd = os.open(self._own() / ADDED, flags, 0o600)
            try:
                os.pwrite(fd, _COUNT.pack(self._own_added), 0)
            finally:
                os.close(fd)

    def counts(self) -> Mapping[str, int]:
        """Return the bytes of values that each process has added, by the process's directory name.

        Raises:
            OSError: the directory cannot be read.
        """
        counts = {name: _read(self._writers / name / ADDED) for name in os.listdir(self._writers)}
        return counts | {self._own().name: self._own_added}

    def record(self, num_bytes: int, counts: Mapping[str, int]) -> None:
        """Record that the values had `num_bytes` bytes in total when `counts` was read.

        Args:
            num_bytes: total bytes of all values, measured by a walk over the files.
            counts: the result of the method `counts`, called just before the walk. `total` later
                adds only the bytes that processes have added since that call.
        """
        self._measured_bytes, self._measured_counts = num_bytes, counts

    def forget(self) -> None:
        self._measured_bytes = None

    def total(self) -> int | None:
        """Return the total bytes of the values in the directory.

        Returns:
            The bytes; None if all files have to be measured again, because a process that had added
                values has ended.

        Raises:
            OSError: the directory cannot be read.
        """
        if self._measured_bytes is None:
            return None
        counts = self.counts()
        if not self._measured_counts.keys() <= counts.keys():
            return None
        return self._measured_bytes + sum(counts.values()) - sum(self._measured_counts.values())


def _read(path: Path) -> int:
    content = b""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            content = os.read(fd, _COUNT.size)
        finally:
            os.close(fd)
    return int(_COUNT.unpack(content)[0]) if len(content) == _COUNT.size else 0
