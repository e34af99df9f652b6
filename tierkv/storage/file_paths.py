"""Where a file store keeps the value of a name, and the way back.

    a:b:c:d     ->  a,b / 7 / e / c,d          directory per prefix and fingerprint, fan-out, leaf
    a:b         ->  a / 0 / 3 / b
    a           ->  , / 9 / c / a

A field of a name starts with a letter or digit and holds no comma, no plus and no slash, so no
part of a path is "." or "..", no two names share a path, and names of the store's own (which start
with a dot) are never the path of a value. A leaf too long for one file name goes on in a directory
whose name ends in a plus.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator
from itertools import islice
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
