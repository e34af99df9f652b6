"""The directory of a file store: paths of names, scratch for what is not yet whole, and the room:
within its size and above a floor of the disk's free space, by eviction.

A prompt's blocks are written and used together, head first, and it loses its end first.
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
# A value's access time is written at most once in this time, and says no more than this.
USE_GRAIN_S = 60.0


_NO_GROUP = ","
_GOES_ON = "+"
# 255 bytes is the limit of common file systems; encrypting ones (ecryptfs) leave 143.
_PIECE_CHARS = 140
# Behind a group, with the parts that go on put together.
_ABOVE_VALUES = re.compile(r"[^/]+(/[0-9a-f]){0,2}|[^/]+(/[0-9a-f]){2}/[^/]+\+")


def relative_path(name: str) -> tuple[str, ...]:
    """The path of the value called `name`, as its parts below the store's directory.

    256 directories at the end of two levels: with a million values, 4,000 files in each.

        a:b:c:d     ->  a,b / 7 / e / c,d          a directory per prefix, fan-out, leaf
        a:b         ->  a / 0 / 3 / b
        a           ->  , / 9 / c / a

    A field of a name starts with a letter or digit and holds no comma, no plus and no slash, so no
    part of a path is "." or "..", no two names share a path, and names of the store's own (which
    start with a dot) are never the path of a value. A leaf too long for one file name goes on in a
    directory whose name ends in a plus.
    """
    return _path_of(check_name(name))


def _path_of(name: str) -> tuple[str, ...]:
    """Unchecked: a look at every file asks for each, in 8 us with its size, of which it was 15."""
    fields = name.split(":")
    group, leaf = fields[: min(2, len(fields) - 1)], fields[min(2, len(fields) - 1) :]
    spread = f"{zlib.crc32(name.encode()) & 0xFF:02x}"
    return (*_pieces(",".join(group) or _NO_GROUP), *spread, *_pieces(",".join(leaf)))


def _pieces(text: str) -> list[str]:
    if len(text) <= _PIECE_CHARS:
        return [text]
    cuts = [text[at : at + _PIECE_CHARS] for at in range(0, len(text), _PIECE_CHARS)]
    return [cut + _GOES_ON for cut in cuts[:-1]] + cuts[-1:]


def name_of(path: tuple[str, ...]) -> str | None:
    """The inverse of `relative_path`; None for a file that no name leads to."""
    text = "/".join(path).replace(_GOES_ON + "/", "")
    parts = text.split("/")
    if len(parts) != 4:  # noqa: PLR2004 - group, two levels of fan-out, leaf
        return None
    group = "" if parts[0] == _NO_GROUP else parts[0] + ":"
    name = (group + parts[3]).replace(",", ":")
    return name if is_name(name) and _path_of(name) == path else None


def walk(
    root: Path,
    prefix: str,
    *,
    after: tuple[str, ...] = (),
    when_empty: Callable[[str], object] = lambda _: None,
) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """(name, directory entry) of each value whose name starts with `prefix`, in order of paths.

    after: only paths behind this one. when_empty: told of directories of ours in which nothing is.
    Directories that cannot hold such a value are not read. Files that are no values, what another
    user keeps there for itself, and whatever vanishes meanwhile, are passed over. Raises OSError.
    """
    for group in _entries(root):
        if _is_directory(group) and _may_hold(group.name, prefix):
            # A directory of one word can be a stranger's, in a store that was put beside others.
            tells = when_empty if _NO_GROUP in group.name else _tell_nobody
            yield from _values(Path(group.path), (group.name,), prefix, after, tells)


class Listing:
    """Blocking, safe from several threads. Raises StoreUnavailableError."""

    def __init__(self, root: Path, clock: Clock) -> None:
        self._root = root
        self._clock = clock

    def page(self, prefix: str, limit: int, cursor: str | None) -> ListPage:
        """Values in the order of their paths; the cursor is the path of the page's last one."""
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
        """Infinite for what was used in the future: the clock was set back since."""
        unused_s = self._clock.wall() - status.st_atime
        return unused_s if unused_s > -USE_GRAIN_S else math.inf

    def eviction_order(self, status: os.stat_result) -> tuple[bool, float, float]:
        """What has expired goes first, then what was used longest ago; of values last used in the
        same minute the ones written last."""
        is_live = not self.is_expired(status)
        used_at = 0.0 if math.isinf(self.seconds_unused(status)) else status.st_atime
        return is_live, used_at // USE_GRAIN_S, -used_at


def _expires_at(status: os.stat_result) -> float | None:
    return None if status.st_mtime_ns == NEVER_NS else status.st_mtime


def sentence(subject: str, error: OSError) -> str:
    return f"{subject}: {error.strerror or error}"


def _tell_nobody(_: str) -> None: ...


def _values(
    directory: Path,
    parts: tuple[str, ...],
    prefix: str,
    after: tuple[str, ...],
    when_empty: Callable[[str], object],
) -> Iterator[tuple[str, os.DirEntry[str]]]:
    if parts < after[: len(parts)]:
        return
    try:
        entries = _entries(directory)
    except PermissionError:
        return
    if not entries:
        when_empty(str(directory))
    for entry in entries:
        path = (*parts, entry.name)
        if entry.is_dir(follow_symlinks=False):
            if _leads_to_values(path):
                yield from _values(Path(entry.path), path, prefix, after, when_empty)
        elif path > after:
            name = name_of(path)
            if name is not None and name.startswith(prefix):
                yield name, entry


def _leads_to_values(path: tuple[str, ...]) -> bool:
    """Whether the directory `path` can be above a value: of fan-out, or of a part that goes on."""
    return _ABOVE_VALUES.fullmatch("/".join(path).replace(_GOES_ON + "/", "")) is not None


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_directory(group: os.DirEntry[str]) -> bool:
    """Or a link to one: a model's can have been moved to where there is room for it."""
    try:
        return group.is_dir()
    except OSError:  # such as a link to itself
        return False


def _may_hold(group: str, prefix: str) -> bool:
    """Whether names in the directory `group` can start with `prefix`; not if it is not ours."""
    if group == _NO_GROUP:
        return True
    if not group[0].isalnum() or _GOES_ON in group[:-1]:  # such as .writers and lost+found
        return False
    start = group.removesuffix(_GOES_ON) if group.endswith(_GOES_ON) else group + ","
    start = start.replace(",", ":")
    return start.startswith(prefix) or prefix.startswith(start)


WRITERS = ".writers"
_LOCK = "lock"
# Another process can clear a directory away before we have locked it; that it does so again and
# again has no cause but a file system without locks.
_MAX_TRIES = 10
_UNUSED_S = 600.0
# What a disk says on which nothing can be written just now, though it may well be read.
TAKES_NOTHING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})


class Scratch:
    """A directory of our own below `root`, cleared when closed or, at the latest, by a successor.

    All methods block. `new_path` and `renew` are safe from several threads.

        .writers / 3f9c... / lock       locked by the kernel for as long as the process lives
                           / 0, 1, ...  values being written
                           / added      see `UsedBytes`

    It is on the same file system as the values, so a rename makes a value visible at once. One
    directory for the leftovers, rather than beside the values, makes clearing up independent of how
    many values there are; a lock, rather than a process id, also tells the dead from the living
    between containers, and survives process ids used again.
    """

    def __init__(self, root: Path) -> None:
        """Clear away what the dead left, then make the directory. Raises OSError.

        A disk that takes nothing now is one to read what is there from: `refused` says why, there
        is no directory, and `renew` makes it when the disk takes it.
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
            self._directory, self._lock_fd = _make(writers)
        except OSError as error:
            if error.errno not in TAKES_NOTHING:
                raise
            self.refused = error
            self._directory = writers / secrets.token_hex(8)
        self._serial = count()
        self._renewing = threading.Lock()

    @property
    def directory(self) -> Path:
        return self._directory

    def new_path(self) -> str:
        """A path below the directory that was never given before."""
        return f"{self._directory}/{next(self._serial)}"

    def renew(self) -> None:
        """Make another directory if somebody has removed ours, such as with all values.

        Raises OSError, also where that would be on another file system: then the disk that the
        values were on is gone, not they.
        """
        with self._renewing:
            if os.path.exists(self._directory / _LOCK):
                return
            there = next(path for path in self._writers.parents if path.exists())
            if os.stat(there).st_dev != self._device:
                raise OSError(errno.ENODEV, "the file system it was on is not mounted")
            os.makedirs(self._writers, mode=0o700, exist_ok=True)
            gone = self._lock_fd
            self._directory, self._lock_fd = _make(self._writers)
            if gone is not None:
                os.close(gone)

    def close(self) -> None:
        """Clear the directory away. What cannot be removed is left to a successor."""
        try:
            _clear(self._directory)
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
        os.close(fd)  # cleared away between making and locking it
    raise OSError("no lock to be had on new files: is this a network file system without locks?")


def _lock(directory: Path) -> int | None:
    """The locked file, or None if another process has it or has cleared the directory away."""
    try:
        fd = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:
        os.close(fd)
        raise
    return fd


def _clear_if_dead(directory: Path) -> None:
    fd = None
    with contextlib.suppress(OSError):  # root's, who is looking into the store, or a full disk
        fd = _lock(directory)
    if fd is not None:
        try:
            _clear(directory)
        finally:
            os.close(fd)


def _clear(directory: Path) -> None:
    # The lock goes last: whoever locks a new file of that name meanwhile keeps the directory.
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(directory), key=lambda name: name == _LOCK):
            os.unlink(directory / name)
        os.rmdir(directory)


@contextlib.contextmanager
def locked_directory(directory: str, *, waits: bool = True) -> Iterator[None]:
    """Keep other threads and processes that ask for the same lock out. Blocks; raises OSError,
    FileNotFoundError also where the directory was removed, and perhaps made again, meanwhile.

    waits: False raises BlockingIOError where another has the lock, who may be frozen.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(fd), os.stat(directory)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), directory)
        yield
    finally:
        # Closing is not enough: a child that was forked meanwhile has it open as well.
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def remove_unused(directory: str) -> None:
    """Remove an empty directory into which nothing has come for long, and from which nothing has
    gone. Whoever would use it just now finds it gone, and makes it again."""
    with contextlib.suppress(OSError), locked_directory(directory, waits=False):
        if time.time() - os.stat(directory).st_mtime > _UNUSED_S:
            os.rmdir(directory)


ADDED = "added"
_COUNT = struct.Struct("<q")


# Eviction looks at every file (1 s for 200,000), so it makes more room than is needed just now: of
# a capacity, and of all values where the disk is short. Without, each value written to a disk that
# was down to its floor, with 22,000 files, took 40 ms, and batches of them missed their deadlines.
_LOW_WATERMARK = 0.9
_SPARE = 0.02
_PART_FILES = 1000

# Its place in the order, its bytes and its path; flat, so that no search for cycles visits it.
_File = tuple[bool, float, float, int, str]


class Room:
    """Blocking, safe from several threads; processes on one directory evict one at a time.

    capacity_bytes: of all values; None for no limit. min_free_bytes: of the file system.
    order: sort key of a file; the file with the smallest key is evicted first.
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
        self.num_evictions = 0  # that have removed something

    def make(self, num_bytes: int, remove: Callable[[str], bool]) -> str:
        """Evict until `num_bytes` more fit, and count them as added; returns why they do not, "" if
        they do.

        remove: forgets the file at a path; whether it was there. Raises OSError.
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
        told = ", ".join(limit.format(value) for limit, value in limits.items() if value)
        return f"{num_bytes} bytes do not fit: {told}"

    def is_too_small_for(self, num_bytes: int) -> bool:
        return self._capacity_bytes is not None and num_bytes > self._capacity_bytes

    def make_more(self, num_bytes: int, num_evictions: int, remove: Callable[[str], bool]) -> bool:
        """The disk refused what should fit: it is out of inodes, or there is a quota. Evict a
        share, unless another has since there were `num_evictions`; whether to try again. With
        min_free_bytes 0 nothing is evicted: the disk is full when it says so. Raises OSError."""
        with self._lock:
            if self._min_free_bytes and num_evictions == self.num_evictions:
                with locked_directory(str(self._root / WRITERS)):
                    self._evict(num_bytes, remove, is_refused=True)
            return num_evictions != self.num_evictions

    def removed(self, num_bytes: int) -> None:
        """So many are gone, or were not added after all."""
        with self._lock:
            self._add(-num_bytes)

    def forget_size(self) -> None:
        """Look again before the next decision."""
        with self._lock:
            self._used.forget()

    def _add(self, num_bytes: int) -> None:
        if self._capacity_bytes is not None:
            self._used.add(num_bytes)

    def _free_bytes(self) -> int:
        disk = os.statvfs(self._root)
        return disk.f_bavail * disk.f_frsize

    def _fits(self, num_bytes: int) -> bool:
        if self._lacking_bytes(num_bytes) > 0:
            return False
        if self._capacity_bytes is None:
            return True
        used = self._used.total()
        return used is not None and used + num_bytes <= self._capacity_bytes

    def _lacking_bytes(self, num_bytes: int) -> int:
        """Of the file system."""
        if not self._min_free_bytes:
            return 0
        return self._min_free_bytes + num_bytes - self._free_bytes()

    def _evict(
        self, num_bytes: int, remove: Callable[[str], bool], *, is_refused: bool = False
    ) -> bool:
        """Whether there is room now. Not asked again of what all have counted, or the disk: others
        add to that all the while, and one answer of no keeps a node from writing for a second."""
        counts = self._used.counts()
        parts, used = self._look()
        self._used.saw(used, counts)
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
            self._add(-freed)  # of each it would take longer than the removal
        while parts:
            parts.pop()
        self.num_evictions += freed > 0
        return freed >= max(over, lacking)

    def _look(self) -> tuple[list[list[_File]], int]:
        """All files, in parts that are each in order, and how many bytes they have.

        In parts, since no other thread runs while one list is sorted, or goes: the event loop stood
        still for 3 s with 200,000 files in one (2 busy cores).
        """
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
    """How many bytes the values in one directory have, as all processes that use it count together.
    Blocking; not safe from several threads, but beside other processes.

        .writers / 3f9c... / added      what this process has added since it began

    A look at every file says how many there are; from then on what all have added since is enough,
    until one of them is gone and its count with it.

    own: this process's directory below `writers`.
    """

    def __init__(self, writers: Path, own: Callable[[], Path]) -> None:
        self._writers = writers
        self._own = own
        self._own_added = 0
        self._seen: int | None = None
        self._when_seen: Mapping[str, int] = {}

    def add(self, num_bytes: int) -> None:
        self._own_added += num_bytes
        # On a disk that is full, others hear of it with the next one.
        with contextlib.suppress(OSError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
            fd = os.open(self._own() / ADDED, flags, 0o600)
            try:
                os.pwrite(fd, _COUNT.pack(self._own_added), 0)
            finally:
                os.close(fd)

    def counts(self) -> Mapping[str, int]:
        """What each process has added. Raises OSError."""
        counts = {name: _read(self._writers / name / ADDED) for name in os.listdir(self._writers)}
        return counts | {self._own().name: self._own_added}

    def saw(self, num_bytes: int, counts: Mapping[str, int]) -> None:
        """All values had so many bytes when the processes' counts were these."""
        self._seen, self._when_seen = num_bytes, counts

    def forget(self) -> None:
        self._seen = None

    def total(self) -> int | None:
        """None if it is not known. Raises OSError."""
        if self._seen is None:
            return None
        counts = self.counts()
        if not self._when_seen.keys() <= counts.keys():
            return None
        return self._seen + sum(counts.values()) - sum(self._when_seen.values())


def _read(path: Path) -> int:
    """0 for a process that has added nothing, or whose count may not be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return 0
    try:
        content = os.read(fd, _COUNT.size)
    except OSError:
        return 0
    finally:
        os.close(fd)
    return int(_COUNT.unpack(content)[0]) if len(content) == _COUNT.size else 0
