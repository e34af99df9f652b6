"""What a directory of values holds: the listing of a file store, and when each value expires."""

from __future__ import annotations

import contextlib
import math
import os
import stat
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tierkv.clock import Clock
from tierkv.errors import BadRequestError, StoreUnavailableError
from tierkv.storage.file_paths import name_of, relative_path, walk
from tierkv.storage.protocol import ListPage, StoredValue, Usage

NEVER_NS = 0
# A value's access time is written at most once in this time, and says no more than this.
USE_GRAIN_S = 60.0


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
