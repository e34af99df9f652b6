"""Values as files: the blocking half of the file store, run in its threads.

A file holds a value's bytes and nothing else. Its modification time is when the value expires, 0
(1970) for never; so expiry costs no byte, is there the moment the file is, and shows in a listing
without opening the file. A file copied without its times counts as expired.

A visible file never changes. It becomes visible by `rename`, over the old one if there is one.
Whoever does that or removes a file because of what it is (there already, or expired) holds the lock
of its directory while looking and acting.
"""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from tierkv.clock import Clock
from tierkv.errors import StoreCorruptError, StoreRefusedError, StoreUnavailableError
from tierkv.storage.buffers import flat, read_fully, write_fully
from tierkv.storage.file_paths import NEVER_NS, USE_GRAIN_S, Listing, relative_path, sentence, walk
from tierkv.storage.file_room import Room
from tierkv.storage.file_scratch import (
    TAKES_NOTHING,
    WRITERS,
    Scratch,
    locked_directory,
    remove_unused,
)
from tierkv.storage.protocol import (
    Buffer,
    GetItem,
    GetOutcome,
    GetStatus,
    PutItem,
    PutOutcome,
    PutStatus,
)

_ALIGNMENT = 4096
_CHUNK_BYTES = 4 << 20
# Smaller values are not worth a trip to the disk each.
_DIRECT_MIN_BYTES = 256 << 10


# Something else is where a value, or a directory on the way to it, belongs: a link that leads to
# where nothing is mounted now, say.
_IN_THE_WAY = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ELOOP})
# What another user keeps for itself is not there for us.
_NOT_THERE = _IN_THE_WAY | {errno.EACCES, errno.EPERM}
_TAKES_OTHERS = _NOT_THERE | {errno.EFBIG, errno.EXDEV}
# Not a failure, five of which would keep readers away as well: others can be read.
_FULL = TAKES_NOTHING | _TAKES_OTHERS
# A place of the disk that is broken stays so, and the value would be found, and not written again,
# for as long as it is asked for; forgotten, it gets another place.
_UNREADABLE = frozenset({errno.EIO, errno.EBADMSG, errno.EUCLEAN})

# For one value that the system refuses for want of room: others take what was made.
_MAX_EVICTIONS = 3


class ValueFiles:
    """Blocking, safe from several threads and beside other processes on the same directory.

    syncs: each value is on the disk itself before it is visible, and its directory entry when put
        returns. direct: large values are written past the page cache.
    """

    def __init__(
        self,
        root: Path,
        scratch: Scratch,
        room: Room,
        clock: Clock,
        *,
        syncs: bool,
        direct: DirectWriter | None,
    ) -> None:
        self._root = root
        self._scratch = scratch
        self._room = room
        self._clock = clock
        self.listing = Listing(root, clock)
        self._syncs = syncs
        self._direct = direct

    def get(self, item: GetItem) -> GetOutcome:
        try:
            with self._opened(item.name) as fd:
                if fd is None:
                    return GetOutcome(GetStatus.MISS)
                num_bytes = os.fstat(fd).st_size
                if num_bytes != item.num_bytes:
                    return GetOutcome(
                        GetStatus.DAMAGED,
                        f"{item.name} has {num_bytes} bytes, not {item.num_bytes}",
                    )
                digest = item.digest() if item.digest is not None else None
                if not read_fully(fd, item.into, digest):
                    return GetOutcome(GetStatus.DAMAGED, f"{item.name} was cut while being read")
        except PermissionError:
            return GetOutcome(GetStatus.MISS)
        except OSError as error:
            status = GetStatus.DAMAGED if error.errno in _UNREADABLE else GetStatus.FAILED
            return GetOutcome(status, sentence(item.name, error))
        return GetOutcome(GetStatus.HIT, digest=digest)

    def get_small(self, name: str, max_bytes: int) -> bytes | None:
        """The value called `name`, or None. Raises StoreCorruptError, StoreUnavailableError."""
        try:
            with self._opened(name) as fd:
                if fd is None:
                    return None
                num_bytes = os.fstat(fd).st_size
                if num_bytes > max_bytes:
                    raise StoreCorruptError(
                        f"{name} has {num_bytes} bytes, more than the {max_bytes} it may have"
                    )
                content = bytearray(num_bytes)
                if not read_fully(fd, [memoryview(content)]):
                    raise StoreCorruptError(f"{name} was cut while being read")
                return bytes(content)
        except OSError as error:
            if error.errno in _UNREADABLE:
                raise StoreCorruptError(sentence(name, error)) from error
            raise _failure(name, error) from error

    def put(self, item: PutItem) -> PutOutcome:
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
            takes_others = error.errno in _TAKES_OTHERS
            return PutOutcome(status, sentence(item.name, error), takes_others=takes_others)

    def _put_anew(self, item: PutItem) -> PutOutcome:
        """Also where somebody has removed the directory. Raises OSError."""
        path = self._path(item.name)
        try:
            return self._put(path, item)
        except FileNotFoundError:
            self._renew()
        return self._put(path, item)

    def _put(self, path: str, item: PutItem) -> PutOutcome:
        """Raises OSError."""
        if item.leaves_existing and self._is_live(path):
            return PutOutcome(PutStatus.EXISTED)
        if reason := self._room.make(item.num_bytes, _unlink):
            takes_others = self._room.is_too_small_for(item.num_bytes)
            return PutOutcome(PutStatus.FULL, f"{item.name}: {reason}", takes_others=takes_others)
        temporary = self._scratch.new_path()
        status = PutStatus.FAILED
        try:
            self._write(temporary, item)
            status = self._publish(temporary, path, item)
            return PutOutcome(status)
        finally:
            if status is not PutStatus.STORED:
                self._room.removed(item.num_bytes)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)

    def ping(self) -> None:
        """Raises OSError."""
        try:
            os.stat(self._root / WRITERS)  # asks for the right to look into the root
        except FileNotFoundError:
            self._renew()

    def _renew(self) -> None:
        """Somebody has removed the directory, or all that is in it: there are no values now.
        Raises OSError."""
        self._scratch.renew()
        self._room.forget_size()

    def delete(self, name: str) -> bool:
        """Whether there was a value. Raises StoreUnavailableError."""
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
        """Whether there was a value, which now lives for `ttl_s`. Raises StoreUnavailableError."""
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
        try:
            for found, name in enumerate(names):
                if not self._is_live(self._path(name)):
                    return found
        except OSError as error:
            raise StoreUnavailableError(sentence("the directory", error)) from error
        return len(names)

    def present(self, names: Sequence[str]) -> list[bool]:
        """Raises StoreUnavailableError."""
        try:
            return [self._is_live(self._path(name)) for name in names]
        except OSError as error:
            raise StoreUnavailableError(sentence("the directory", error)) from error

    def sweep(self, stop: threading.Event) -> int:
        """Remove expired values until done or told to stop; returns how many. Directories of models
        and tenants that are no more go, too, a level at a time. Raises OSError."""
        removed = 0
        self._room.forget_size()
        for _, entry in walk(self._root, "", when_empty=remove_unused):
            if stop.is_set():
                break
            with contextlib.suppress(FileNotFoundError, PermissionError):  # another user's stays
                if self.listing.is_expired(entry.stat(follow_symlinks=False)):
                    removed += self._remove_expired(entry.path)
        return removed

    def _path(self, name: str) -> str:
        # Text, not a Path: exists() takes 6 us a name instead of 11.
        return f"{self._root}/{'/'.join(relative_path(name))}"

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[int | None]:
        """The open file of a value, None if there is none or its time is over."""
        path = self._path(name)
        try:
            # Not to hang on a FIFO, nor to follow a link, should someone have put one there.
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
                with contextlib.suppress(OSError):  # such as of a disk that may only be read
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
            if error.errno not in _NOT_THERE:
                raise
            return False
        return stat.S_ISREG(status.st_mode) and not self.listing.is_expired(status)

    def _mark_used(self, path: str, status: os.stat_result) -> None:
        """Note for the eviction when the value was last used, to the minute."""
        if self.listing.seconds_unused(status) < USE_GRAIN_S:
            return
        # A file that is not ours, or is just being written again, can be read and not marked; it
        # is a hit all the same.
        with contextlib.suppress(OSError), locked_directory(_parent(path), waits=False):
            expires_ns = os.stat(path, follow_symlinks=False).st_mtime_ns
            used_ns = int(self._clock.wall() * 1e9)
            os.utime(path, ns=(used_ns, expires_ns), follow_symlinks=False)

    def _remove_expired(self, path: str) -> bool:
        """Whether it was removed. What another keeps locked is left to a later one."""
        busy_or_gone = contextlib.suppress(FileNotFoundError, BlockingIOError)
        with busy_or_gone, locked_directory(_parent(path), waits=False):
            if self.listing.is_expired(os.stat(path, follow_symlinks=False)):
                os.unlink(path)
                return True
        return False

    def _write(self, temporary: str, item: PutItem) -> None:
        rest: Sequence[Buffer] = item.completed()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        if self._direct is not None and item.num_bytes >= _DIRECT_MIN_BYTES:
            end = self._direct.write(temporary, rest)
            if end is not None:
                rest, flags = (end,), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o600)
        try:
            write_fully(fd, rest)
            expires_ns = NEVER_NS
            if item.ttl_s is not None:
                expires_ns = math.ceil((self._clock.wall() + item.ttl_s) * 1e9)
            os.utime(fd, ns=(int(self._clock.wall() * 1e9), expires_ns))
            if self._syncs:
                os.fsync(fd)
        finally:
            os.close(fd)

    def _publish(self, temporary: str, path: str, item: PutItem) -> PutStatus:
        _make_directory(_parent(path))
        with locked_directory(_parent(path)):
            if item.leaves_existing and self._is_live(path):
                return PutStatus.EXISTED
            os.rename(temporary, path)
        if self._syncs:
            fd = os.open(_parent(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        return PutStatus.STORED


class _OfThread(threading.local):
    view: memoryview | None = None


class DirectWriter:
    """Writes a value past the page cache, through an aligned buffer of the writing thread's own.
    Blocking, safe from several threads.

    What was written is then not in memory, so reading it back soon costs five times as much, and on
    the one disk measured it was hardly faster than buffered writes (0.9 to 1.0 GB/s): it is for a
    store much larger than memory, whose writes should not push other pages out. Not the default.
    """

    def __init__(self) -> None:
        self._buffers = _OfThread()
        self._is_possible = True

    def write(self, path: str, parts: Sequence[Buffer]) -> bytes | None:
        """Make the file `path` of `parts`, up to its last whole page; returns what is left of them.

        None if its file system cannot; nothing is left then. Raises OSError, having written a part.
        """
        if not self._is_possible:
            return None
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_DIRECT
        fd = None
        try:
            fd = os.open(path, flags, 0o600)
            return self._write(fd, parts)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._is_possible = False  # such as old tmpfs, or sectors larger than our pieces
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            return None
        finally:
            if fd is not None:
                os.close(fd)

    def _write(self, fd: int, parts: Sequence[Buffer]) -> bytes:
        buffer = self._buffer()
        filled, written = 0, 0
        for view in flat(parts):
            at = 0
            while at < len(view):
                taken = min(len(view) - at, _CHUNK_BYTES - filled)
                buffer[filled : filled + taken] = view[at : at + taken]
                filled += taken
                at += taken
                if filled == _CHUNK_BYTES:
                    written += _write_all(fd, buffer, written)
                    filled = 0
        whole = filled - filled % _ALIGNMENT
        _write_all(fd, buffer[:whole], written)
        return bytes(buffer[whole:filled])

    def _buffer(self) -> memoryview:
        if self._buffers.view is None:
            self._buffers.view = memoryview(mmap.mmap(-1, _CHUNK_BYTES))
        return self._buffers.view


def _write_all(fd: int, aligned: memoryview, offset: int) -> int:
    done = 0
    while done < len(aligned):
        done += os.pwrite(fd, aligned[done:], offset + done)
    return done


def _failure(name: str, error: OSError) -> StoreUnavailableError:
    kind = StoreRefusedError if error.errno in _FULL else StoreUnavailableError
    return kind(sentence(name, error))


def _make_directory(directory: str) -> None:
    """With those above it, where they are missing. Raises OSError."""
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
    except FileExistsError:  # so says `makedirs` also of one that was removed while it looked
        os.makedirs(directory, mode=0o700, exist_ok=True)


def _unlink(path: str) -> bool:
    """False where there is none, or none that we may remove."""
    try:
        os.unlink(path)
    except (FileNotFoundError, PermissionError):
        return False
    return True


def _parent(path: str) -> str:
    return path.rpartition("/")[0]
