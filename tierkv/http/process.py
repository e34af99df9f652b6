"""The life of a process that serves: its log, its signals, the work under way and the files it
reads again when they change."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import TracebackType

from tierkv.errors import ConfigError, TierKVError
from tierkv.tasks import background

log = logging.getLogger("tierkv.server")


class CallUnderWay:
    """One call under way, from `async with` to its end. A class, since each request makes one, and
    generators in layers took 10 us."""

    __slots__ = ("_scope", "_working")

    def __init__(self, working: Working) -> None:
        self._working = working
        self._scope = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        await self._scope.__aenter__()
        self._working.begins(self._scope)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._working.ends(self._scope)
        try:
            await self._scope.__aexit__(kind, error, trace)
        except TimeoutError as late:
            raise self._working.cut_off() from late


class Working:
    """cut_off: makes what is raised in the middle of work whose time is up. num_open: what else is
    waited for, besides calls; say `changed` when it may have become less."""

    def __init__(
        self, cut_off: Callable[[], TierKVError], num_open: Callable[[], int] = lambda: 0
    ) -> None:
        self._cut_off = cut_off
        self._num_open = num_open
        self._scopes: set[asyncio.Timeout] = set()
        self._changed = asyncio.Event()
        self._is_hurried = False

    def __len__(self) -> int:
        return len(self._scopes)

    def call(self) -> CallUnderWay:
        """One call, for `async with`. It raises what `cut_off` makes when its time is up."""
        return CallUnderWay(self)

    def begins(self, scope: asyncio.Timeout) -> None:
        self._scopes.add(scope)

    def ends(self, scope: asyncio.Timeout) -> None:
        self._scopes.discard(scope)
        self.changed()

    def cut_off(self) -> TierKVError:
        return self._cut_off()

    def changed(self) -> None:
        self._changed.set()

    def hurry(self) -> None:
        """Wait for nobody's work any more."""
        self._is_hurried = True
        self.changed()

    async def idle(self, *, grace_s: float) -> None:
        """Return when no call is left: all done, or cut off after `grace_s` or a `hurry`."""
        try:
            async with asyncio.timeout(grace_s):
                while (self._scopes or self._num_open()) and not self._is_hurried:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass
        for scope in self._scopes:
            if not scope.expired():
                scope.reschedule(asyncio.get_running_loop().time())
        while self._scopes:
            self._changed.clear()
            await self._changed.wait()


@contextmanager
def told_to_end(hurry: Callable[[], None]) -> Iterator[asyncio.Event]:
    """An event that SIGTERM and SIGINT set; a second signal calls `hurry`, on the loop."""
    told = asyncio.Event()

    def on_signal() -> None:
        if told.is_set():
            log.warning("a second signal: not waiting for the work under way")
            hurry()
        told.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        yield told
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


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


def log_to_stderr(level: str) -> None:
    logging.basicConfig(
        stream=sys.stderr, level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
