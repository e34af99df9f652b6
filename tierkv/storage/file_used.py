"""How many bytes the values in one directory have, as all processes that use it count together.

    .writers / 3f9c... / added      what this process has added since it began, less what it removed

A look at every file says how many there are; from then on what all have added since is enough,
until one of them is gone and its count with it.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

ADDED = "added"
_COUNT = struct.Struct("<q")


class UsedBytes:
    """Blocking; not safe from several threads, but beside other processes.

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
