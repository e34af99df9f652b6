"""Keeps a file store within its size and the disk's free space above a floor, by eviction.

A prompt's blocks are written and used together, head first, and it loses its end first.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

from tierkv.storage.file_paths import walk
from tierkv.storage.file_scratch import WRITERS, locked_directory
from tierkv.storage.file_used import UsedBytes

# Eviction looks at every file (1 s for 200,000), so it makes more room than is needed just now.
_LOW_WATERMARK = 0.9


class Room:
    """Blocking, safe from several threads; processes on one directory evict one at a time.

    capacity_bytes: of all values; None for no limit. min_free_bytes: of the file system.
    order: of files, the one with the least goes first.
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

    def make(self, num_bytes: int, remove: Callable[[str], bool]) -> str:
        """Evict until `num_bytes` more fit, and count them as added; returns why they do not, "" if
        they do.

        remove: forgets the file at a path; whether it was there. Raises OSError.
        """
        with self._lock:
            if not self._fits(num_bytes):
                with locked_directory(str(self._root / WRITERS)):
                    self._evict(num_bytes, remove)
            if self._fits(num_bytes):
                self._add(num_bytes)
                return ""
        return (
            f"{num_bytes} bytes do not fit: at most {self._capacity_bytes} bytes of values, at "
            f"least {self._min_free_bytes} bytes free on the disk"
        )

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
        if self._min_free_bytes and self._free_bytes() - num_bytes < self._min_free_bytes:
            return False
        if self._capacity_bytes is None:
            return True
        used = self._used.total()
        return used is not None and used + num_bytes <= self._capacity_bytes

    def _evict(self, num_bytes: int, remove: Callable[[str], bool]) -> None:
        counts = self._used.counts()
        files = []
        for _, entry in walk(self._root, ""):
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                files.append((self._order(status), status.st_size, entry.path))
        used = sum(size for _, size, _ in files)
        self._used.saw(used, counts)
        excess = 0
        if self._capacity_bytes is not None and used + num_bytes > self._capacity_bytes:
            excess = used + num_bytes - int(self._capacity_bytes * _LOW_WATERMARK)
        if self._min_free_bytes:
            excess = max(excess, self._min_free_bytes + num_bytes - self._free_bytes())
        if num_bytes > (self._capacity_bytes or num_bytes):
            return
        for _, size, path in sorted(files):
            if excess <= 0:
                break
            if remove(path):
                excess -= size
                self._add(-size)
