"""Where one running file store writes what is not yet whole, and how the dead's is cleared away.

    .writers / 3f9c... / lock       locked by the kernel for as long as the process lives
                       / 0, 1, ...  values being written
                       / added      see file_used

It is on the same file system as the values, so a rename makes a value visible at once.
One directory for the leftovers, rather than beside the values, makes clearing up independent of how
many values there are; a lock, rather than a process id, also tells the dead from the living
between containers, and survives process ids used again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

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
