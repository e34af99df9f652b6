"""Keeps a file store within its size and the disk's free space above a floor, by eviction.

A prompt's blocks are written and used together, head first, and it loses its end first.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import struct
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from tierkv.storage.file_paths import walk
from tierkv.storage.file_scratch import WRITERS, locked_directory

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
        return (
            f"{num_bytes} bytes do not fit: at most {self._capacity_bytes} bytes of values, at "
            f"least {self._min_free_bytes} bytes free on the disk"
        )

    def is_too_small_for(self, num_bytes: int) -> bool:
        return self._capacity_bytes is not None and num_bytes > self._capacity_bytes

    def make_more(self, num_bytes: int, num_evictions: int, remove: Callable[[str], bool]) -> bool:
        """The disk refused what should fit: it is out of inodes, or there is a quota. Evict a
        share, unless that was done since there were `num_evictions`; whether to try again. Not
        where no space is to be kept free: there it is full when the system says so. Raises OSError.
        """
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
