"""The life of a server process: event loop lag, log, signals, running calls, and shutdown.

Changed certificates and auth files are read again.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from os import _exit
from pathlib import Path
from types import TracebackType
from typing import Protocol

from tierkv.errors import ConfigError, TierKVError
from tierkv.tasks import background, supervised
from tierkv.threads import in_thread, start_thread, start_threads

TICK_S = 0.05
_TICKS = 1200  # one minute


class Heartbeat:
    """A measurement of the event loop's lag, 20 times a second inside `running()`.

    The lag is the time by which a sleeping task wakes up too late, because the loop was busy.

    Attributes:
        on_beat: Called after each measurement with two numbers of seconds: the lag, and the part of
            it in which the loop's thread used the CPU, at most.
    """

    def __init__(self, on_beat: Callable[[float, float], None] = lambda *_: None) -> None:
        self.on_beat = on_beat
        self._last: float | None = None
        self._late: deque[float] = deque(maxlen=_TICKS)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Measure the event loop's lag inside the `async with`."""
        async with background({"tierkv-heartbeat": self._beat()}):
            yield

    @property
    def age_s(self) -> float | None:
        """Seconds since the last measurement; None before the first measurement."""
        return None if self._last is None else asyncio.get_running_loop().time() - self._last

    @property
    def worst_lag_s(self) -> float:
        """The longest lag in the last minute, in seconds."""
        return max(self._late, default=0.0)

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._last, worked_s = loop.time(), time.thread_time()
            await asyncio.sleep(TICK_S)
            late_s = max(loop.time() - self._last - TICK_S, 0.0)
            self._late.append(late_s)
            self.on_beat(late_s, min(late_s, time.thread_time() - worked_s))


log = logging.getLogger(__name__)


class CallUnderWay:
    """A context manager for the handling of one HTTP call, which a shutdown can cancel.

    Args:
        working: The set of running calls; it contains this object during the `with` block.
    """

    __slots__ = ("_is_cut_off", "_num_cancels", "_task", "_working")

    def __init__(self, working: Working) -> None:
        self._working = working
        self._is_cut_off = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "a call is answered in a task"
        self._task, self._num_cancels = task, task.cancelling()
        self._working.calls.add(self)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._working.calls.discard(self)
        self._working.changed()
        is_last = self._is_cut_off and self._task.uncancel() <= self._num_cancels
        if is_last and kind is asyncio.CancelledError:
            raise self._working.cut_off() from error

    def cut_off(self) -> None:
        """Cancel the handling of the call, because the server shuts down.

        The context manager then raises the error that answers calls cancelled by a shutdown.
        """
        if not self._is_cut_off:
            self._is_cut_off = True
            self._task.cancel()


class Working:
    """The set of running calls, for which a shutdown waits.

    Attributes:
        calls: The calls that run now.

    Args:
        cut_off: Function that returns the error for a call that a shutdown cancels.
    """

    def __init__(self, cut_off: Callable[[], TierKVError]) -> None:
        self.cut_off = cut_off
        self.calls: set[CallUnderWay] = set()
        self._changed = asyncio.Event()
        self._has_grace_ended = False

    def __len__(self) -> int:
        return len(self.calls)

    def call(self) -> CallUnderWay:
        """Return a context manager that registers one running call, for which a shutdown waits.

        If a shutdown cancels the call, the context manager raises the error that `cut_off` returns.
        """
        return CallUnderWay(self)

    def changed(self) -> None:
        self._changed.set()

    def end_grace(self) -> None:
        """Cancel running calls without further grace time.

        If `idle` is waiting, the calls are cancelled now, otherwise as soon as `idle` is called.
        """
        self._has_grace_ended = True
        self.changed()

    async def idle(self, *, grace_s: float) -> None:
        """Wait until no call runs.

        Calls that still run are cancelled after `grace_s` seconds, or by `end_grace`.
        """
        try:
            async with asyncio.timeout(grace_s):
                while self.calls and not self._has_grace_ended:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass
        for call in self.calls:
            call.cut_off()
        while self.calls:
            self._changed.clear()
            await self._changed.wait()


@contextmanager
def stop_signal(end_grace: Callable[[], None]) -> Iterator[asyncio.Event]:
    """Yield an event that the first SIGTERM or SIGINT sets. A second signal calls `end_grace`.

    SIGHUP does not end the process.

    Args:
        end_grace: Function that cancels running requests.
    """
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            log.warning("a second signal: not waiting for the work under way")
            end_grace()
        stop.set()

    def on_hangup() -> None:
        log.info("SIGHUP: certificates and the auth file are read again when they have changed")

    loop = asyncio.get_running_loop()
    handlers = {signal.SIGTERM: on_signal, signal.SIGINT: on_signal, signal.SIGHUP: on_hangup}
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield stop
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)


class Served(Protocol):
    """The methods of a node or a gateway that `serve` calls."""

    def running(self) -> AbstractAsyncContextManager[None]: ...
    def drain(self) -> None: ...
    def end_grace(self) -> None: ...
    async def idle(self, *, grace_s: float) -> None: ...


async def serve(  # noqa: PLR0913 - each is the node's or the gateway's own
    served: Served,
    name: str,
    listening: AbstractAsyncContextManager[str],
    announce: Callable[[str], None],
    *,
    grace_s: float,
    on_closing: Callable[[], None],
    stop: asyncio.Event,
) -> None:
    """Run a node or a gateway until `stop` is set, then shut it down.

    During the shutdown, the node or gateway reports not ready and rejects new requests. Running
    requests are cancelled after the grace time. Health checks are answered until the end.

    Args:
        served: The node or gateway.
        name: Name of the node or gateway in the log.
        listening: Context manager that answers requests while it is entered, and yields the URL.
        announce: Called with the URL when requests are answered there.
        grace_s: Seconds for which running requests may continue.
        on_closing: Called when no request runs any more, and at the end of the grace time at the
            latest. It may be called twice.
        stop: The event that starts the shutdown, for example on SIGTERM.
    """
    await start_threads()
    async with listening as url, served.running():
        gc.collect()
        gc.freeze()  # objects made so far stay alive: the collector can skip them
        log.info("%s is ready at %s", name, url)
        announce(url)
        try:
            await stop.wait()
            log.info("%s drains, for up to %g s", name, grace_s)
            # Closing begins after the grace time, even if some work does not end when cut off.
            asyncio.get_running_loop().call_later(grace_s, on_closing)
            served.drain()
            await served.idle(grace_s=grace_s)
        finally:
            on_closing()
    log.info("%s has ended", name)


class LastResort:
    """A watchdog thread that kills the process `limit_s` seconds after `start`, even if it hangs.

    This damages no stored value, because a value becomes visible only when it is complete.

    Attributes:
        why: Function that returns the reason for the log entry.

    Args:
        limit_s: Seconds from `start` until the process ends with exit status 1.
    """

    def __init__(self, limit_s: float) -> None:
        self.why: Callable[[], str] = lambda: "closing hangs"  # the sentence of the log entry
        self._limit_s = limit_s
        self._is_started, self._is_over = threading.Event(), threading.Event()
        start_thread(self._watch, "tierkv-last-resort")

    def start(self) -> None:
        """Start the countdown after which the process is killed; further calls do nothing."""
        self._is_started.set()

    def cancel(self) -> None:
        """Cancel the time limit, so that the process is not killed."""
        self._is_over.set()
        self._is_started.set()

    def _watch(self) -> None:
        self._is_started.wait()
        if not self._is_over.wait(self._limit_s):
            log.critical("%s: the process ends without waiting for it", self.why())
            _exit(1)


_Seen = tuple[tuple[int, int, int] | None, ...]


@asynccontextmanager
async def watching(
    files: Sequence[Path], reload: Callable[[], Awaitable[None]], *, every_s: float
) -> AsyncIterator[None]:
    """Call `reload` on entering the `async with`, and again whenever one of `files` changes.

    Args:
        files: The files to watch.
        reload: Coroutine function that reads the files.
        every_s: Seconds between two checks for changes.

    Raises:
        ConfigError: The first `reload` raised this error. If a later one raises it, the error is
            logged, and `reload` is called again after the next change.
    """
    seen = await in_thread(
        _identities, files
    )  # before `reload`, so that a change during `reload` is not missed
    await reload()
    async with supervised({"tierkv-watch": lambda: _watch(files, reload, seen, every_s)}):
        yield


async def _watch(
    files: Sequence[Path], reload: Callable[[], Awaitable[None]], seen: _Seen, every_s: float
) -> None:
    while True:
        await asyncio.sleep(every_s)
        now = await in_thread(_identities, files)
        if now == seen:
            continue
        seen = now
        try:
            await reload()
        except ConfigError as error:
            log.error(
                "a changed file was rejected, and its earlier content stays in force: %s", error
            )


def _identities(files: Sequence[Path]) -> _Seen:
    return tuple(_identity(file) for file in files)


def _identity(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def log_to_stderr(level: str) -> None:
    """Configure logging so that lines of `level` and above go to stderr."""
    logging.basicConfig(
        stream=sys.stderr, level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
