"""Notices that files have changed, and lets their owner read them again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tierkv.errors import ConfigError
from tierkv.tasks import background

log = logging.getLogger("tierkv.watch")

_Seen = tuple[tuple[int, int, int] | None, ...]


@asynccontextmanager
async def watching(
    files: Sequence[Path], reload: Callable[[], Awaitable[None]], *, every_s: float
) -> AsyncIterator[None]:
    """Calls `reload` before the body, and while it runs again after any of `files` has become
    another one.

    What the first call raises comes out. A ConfigError of a later one is logged once; `reload` is
    called again only after the next change.
    """
    seen = await asyncio.to_thread(_look, files)  # first, or a change while reading would be missed
    await reload()
    async with background({"tierkv-watch": _watch(files, reload, seen, every_s)}):
        yield


async def _watch(
    files: Sequence[Path], reload: Callable[[], Awaitable[None]], seen: _Seen, every_s: float
) -> None:
    while True:
        await asyncio.sleep(every_s)
        now = await asyncio.to_thread(_look, files)
        if now == seen:
            continue
        seen = now
        try:
            await reload()
        except ConfigError as error:
            log.error("what was read before stays in force: %s", error)


def _look(files: Sequence[Path]) -> _Seen:
    return tuple(_identity(file) for file in files)


def _identity(file: Path) -> tuple[int, int, int] | None:
    """Of the file's content: another write or another file gives another one."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
