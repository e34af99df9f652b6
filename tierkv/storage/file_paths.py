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

import os
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from tierkv.storage.protocol import check_name, is_name

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


def name_of(path: tuple[str, ...]) -> str | None:
    """The inverse of `relative_path`; None for a file that no name leads to."""
    text = "/".join(path).replace(_GOES_ON + "/", "")
    parts = text.split("/")
    if len(parts) != 4:  # noqa: PLR2004 - group, two levels of fan-out, leaf
        return None
    group = "" if parts[0] == _NO_GROUP else parts[0] + ":"
    name = (group + parts[3]).replace(",", ":")
    return name if is_name(name) and _path_of(name) == path else None


def _pieces(text: str) -> list[str]:
    if len(text) <= _PIECE_CHARS:
        return [text]
    cuts = [text[at : at + _PIECE_CHARS] for at in range(0, len(text), _PIECE_CHARS)]
    return [cut + _GOES_ON for cut in cuts[:-1]] + cuts[-1:]


def _tell_nobody(_: str) -> None: ...


def walk(
    root: Path,
    prefix: str,
    *,
    after: tuple[str, ...] = (),
    when_empty: Callable[[str], object] = _tell_nobody,
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
