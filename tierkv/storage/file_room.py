"""Keeps a file store within its size and the disk's free space above a floor, by eviction.

Evicted are the values used longest ago; among those last used in the same minute, the ones written
last. A prompt's blocks are written and used together, head first, so it loses its end.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

from tierkv.storage.file_paths import walk
from tierkv.storage.file_scratch import WRITERS, locked_directory

# A value's access time is written at most once in this time, and says no more than this.
USE_GRAIN_S = 60.0
# Eviction looks at every file (1 s for 200,000), so it makes more room than is needed just now.
_LOW_WATERMARK = 0.9


class Room:
    """Blocking, safe from several threads; processes on one directory evict one at a time.

    capacity_bytes: of all values; None for no limit. min_free_bytes: of the file system.
    """

    def __init__(self, root: Path, *, capacity_bytes: int | None, min_free_bytes: int) -> None:
        self._root = root
        self._capacity_bytes = capacity_bytes
        self._min_free_bytes = min_free_bytes
        self._lock = threading.Lock()
        self._used_bytes: int | None = None  # not known before the first look
        self.num_evicted = 0

    def make(self, num_bytes: int, remove: Callable[[str], bool]) -> str:
        """Evict until `num_bytes` more fit; returns why they do not, "" if they do.

        remove: forgets the file at a path; whether it was there. Raises OSError.
        """
        if self._fits(num_bytes):
            return ""
        with self._lock:
            if not self._fits(num_bytes):
                with locked_directory(str(self._root / WRITERS)):
                    self._evict(num_bytes, remove)
        if self._fits(num_bytes):
            return ""
        return (
            f"{num_bytes} bytes do not fit: at most {self._capacity_bytes} bytes of values, at "
            f"least {self._min_free_bytes} bytes free on the disk"
        )

    def added(self, num_bytes: int) -> None:
        """`num_bytes` are new; negative for what is gone. Other processes' are seen later."""
        with self._lock:
            if self._used_bytes is not None:
                self._used_bytes += num_bytes

    def forget_size(self) -> None:
        """Look again before the next decision: other processes add and remove values, too."""
        self._used_bytes = None

    def _free_bytes(self) -> int:
        disk = os.statvfs(self._root)
        return disk.f_bavail * disk.f_frsize

    def _fits(self, num_bytes: int) -> bool:
        if self._min_free_bytes and self._free_bytes() - num_bytes < self._min_free_bytes:
            return False
        if self._capacity_bytes is None:
            return True
        used = self._used_bytes
        return used is not None and used + num_bytes <= self._capacity_bytes

    def _evict(self, num_bytes: int, remove: Callable[[str], bool]) -> None:
        files = []
        for _, entry in walk(self._root, ""):
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                key = (status.st_atime // USE_GRAIN_S, -status.st_atime)
                files.append((key, status.st_size, entry.path))
        used = sum(size for _, size, _ in files)
        excess = 0
        if self._capacity_bytes is not None and used + num_bytes > self._capacity_bytes:
            excess = used + num_bytes - int(self._capacity_bytes * _LOW_WATERMARK)
        if self._min_free_bytes:
            excess = max(excess, self._min_free_bytes + num_bytes - self._free_bytes())
        if num_bytes <= (self._capacity_bytes or num_bytes):
            for _, size, path in sorted(files):
                if excess <= 0:
                    break
                if remove(path):
                    excess -= size
                    used -= size
                    self.num_evicted += 1
        self._used_bytes = used
