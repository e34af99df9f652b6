"""The thread of an embedded service: its loop, the service's life, and a task for every call."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet

import msgspec
import uvloop

from tierkv.config import all_above_zero, all_at_least_one, none_negative
from tierkv.embed.exchange import AbortedError, Call, Exchange, Work
from tierkv.embed.requests import Requests
from tierkv.errors import ConfigError, DeviceFailedError, ShuttingDownError, TierKVError
from tierkv.service import Service
from tierkv.tasks import task_group


class ServiceFailedError(TierKVError):
    """The service stopped after an error nobody expected (its cause): start another one."""


class ForkedError(TierKVError):
    """This process is a fork, and the service's thread is in its parent: open one here, or fork
    before one is opened."""


class CloseTimeoutError(TierKVError):
    """Closing takes longer than its deadline; it goes on in its thread. The memory that copies in
    flight touch is not given back before they are done."""


class EmbedSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """max_calls: calls open at a time, those done that nobody has taken included.
    load_timeout_s: cached blocks that take longer to arrive are computed instead.
    open_deadline_s, close_deadline_s: how long `open` and `close` wait, for memory and the store to
        be there, and for copies to end. grace_s: how long calls may go on once it closes.
    """

    max_calls: int = 4096
    load_timeout_s: float = 30.0
    open_deadline_s: float = 60.0
    close_deadline_s: float = 60.0
    grace_s: float = 5.0

    def __post_init__(self) -> None:
        all_at_least_one("embed", self, "max_calls")
        all_above_zero("embed", self, "load_timeout_s", "open_deadline_s", "close_deadline_s")
        none_negative("embed", self, "grace_s")


log = logging.getLogger(__name__)

_LOOK_AT_DEVICE_S = 0.05  # a device that is lost has no way to call
_UNWIND_S = 2.0  # a service that failed may wait for a copy; who asked it hears of it before that
NEEDS_NO_DEVICE = frozenset({"end", "abort", "stats", "verify"})


class ServiceThread:
    """build: makes the service, on the thread; it and its device are closed there."""

    def __init__(self, build: Callable[[], Service], settings: EmbedSettings) -> None:
        self.settings = settings
        self.exchange = Exchange(settings.max_calls, self._wake)
        self.requests: Requests | None = None
        self._build = build
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._group: asyncio.TaskGroup | None = None
        self._running: dict[int, tuple[Call[Any], asyncio.Task[object]]] = {}
        self._reasons: dict[int, TierKVError] = {}  # why calls under way are being cancelled
        self._is_awake = False
        self._has_calls = asyncio.Event()
        self._opened = threading.Event()
        self._ended = threading.Event()
        self._closing = asyncio.Event()
        self._is_close_asked = False
        self._problem: TierKVError | None = None
        self._is_forked = False
        self._is_failing = False

    # From any thread

    def open(self) -> None:
        """Start; return when the service takes calls. Raises what keeps it from that."""
        if self._thread is not None:
            raise ConfigError("an embedded service is opened once")
        self._thread = threading.Thread(target=self._live, name="tierkv-embed", daemon=True)
        watch(self)
        self._thread.start()
        if not self._opened.wait(self.settings.open_deadline_s):
            self._ask_to_close()
            raise CloseTimeoutError(
                f"the service did not open within {self.settings.open_deadline_s:g} s"
            )
        if self._problem is not None:
            raise self._take_problem()

    def close(self, deadline_s: float | None = None) -> None:
        """Take no more calls, let those under way end (after grace_s they are cancelled), end the
        requests, wait for copies, close everything. Any thread, any number of times.

        Raises CloseTimeoutError after `deadline_s`, and the error with which the service ended, if
        nobody has heard it yet.
        """
        if self._thread is None or self._is_forked:
            return
        self._ask_to_close()
        if threading.current_thread() is self._thread:
            return  # it cannot wait for itself; it closes once this call of it is over
        if not self._ended.wait(
            self.settings.close_deadline_s if deadline_s is None else deadline_s
        ):
            raise CloseTimeoutError("the service is still closing: copies or calls do not end")
        self._thread.join()
        if self._problem is not None:
            raise self._take_problem()

    @property
    def is_open(self) -> bool:
        return self._opened.is_set() and self.exchange.failure is None

    def forked(self) -> None:
        self._is_forked = True
        self.exchange.fork(ForkedError("this process was forked from the one of the service"))

    def exiting(self) -> None:
        try:
            self.close()
        except TierKVError as error:
            log.warning("the service was not closed before the exit, and ended badly: %s", error)

    def _take_problem(self) -> TierKVError:
        assert self._problem is not None, "there is one"
        problem, self._problem = self._problem, None
        return problem

    def _ask_to_close(self) -> None:
        self.exchange.refuse(ShuttingDownError("this service is closing"))
        self._is_close_asked = (
            True  # before the look at the loop: `_main` looks the other way round
        )
        self._on_loop(self._closing.set)

    def _wake(self) -> None:
        if not self._is_awake:
            self._is_awake = True
            self._on_loop(self._drain)

    def _on_loop(self, call: Callable[[], None]) -> None:
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:  # closed: `_live` has answered, or is about to answer, every call
            self._is_awake = False

    # On the thread

    def _live(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                self._loop = runner.get_loop()
                runner.run(self._main())
        except BaseException as error:  # the thread's last line: every call is told what ended it
            self._problem = _as_failure(error)
            log.error("the embedded service has failed: %s", self._problem, exc_info=error)
        finally:
            self.exchange.fail(self._problem or ShuttingDownError("this service is closed"))
            unwatch(self)
            self._opened.set()
            self._ended.set()

    async def _main(self) -> None:
        service = self._build()
        try:
            async with service.running():
                self.requests = Requests(service, load_timeout_s=self.settings.load_timeout_s)
                try:
                    await self._take_calls(service)
                except BaseException:  # whatever it is, leaving the service must not take for ever
                    asyncio.get_running_loop().call_later(_UNWIND_S, self._fail_slowly)
                    raise
                for name in self.requests.end_all():
                    log.warning("request %r had not been ended when the service closed", name)
        finally:
            service.device.close()

    async def _take_calls(self, service: Service) -> None:
        async with task_group() as self._group:
            watcher = self._group.create_task(self._watch_device(service), name="tierkv-watch")
            if self._is_close_asked:
                self._closing.set()
            self._drain()
            self._opened.set()
            try:
                await self._closing.wait()
                service.drain()  # who waits for blocks would wait in vain
                await self._finish_calls()
            except BaseException:  # a cancel is how a failure elsewhere arrives here
                self._is_failing = True
                raise
            watcher.cancel()

    async def _finish_calls(self) -> None:
        self._drain()
        tasks = {task for _, task in self._running.values()}
        if tasks:
            await asyncio.wait(tasks, timeout=self.settings.grace_s)
        self._cancel_all(ShuttingDownError("this service was closed before the call was done"))
        if tasks:
            await asyncio.wait(tasks)

    def _drain(self) -> None:
        self._is_awake = False  # first: who asks from now on wakes the loop again
        while (found := self.exchange.take_work()) is not None:
            if not found[0].is_done:
                self._start(*found)
        while (number := self.exchange.take_cancel()) is not None:
            if number in self._running:
                self._running[number][1].cancel()

    def _start(self, call: Call[Any], work: Work) -> None:
        assert self._group is not None, "calls are taken from when the service runs"
        job = self._run(call, work)
        try:
            task = self._group.create_task(job, name=f"tierkv-{call.kind}", context=call.span)
        except RuntimeError:  # the group is ending, and `_live` will tell the call why
            job.close()
            return
        self._running[call.number] = (call, task)
        self._has_calls.set()
        task.add_done_callback(partial(self._answer, call))

    async def _run(self, call: Call[Any], work: Work) -> object:
        """An expected failure is returned: it is for who asked, not for the group."""
        try:
            if call.kind not in NEEDS_NO_DEVICE:
                self._check_device()
            return await work()
        except TierKVError as error:
            return error

    def _answer(self, call: Call[Any], task: asyncio.Task[object]) -> None:
        """Not in the task: one that is cancelled before its first step never runs a `finally`."""
        del self._running[call.number]
        reason = self._reasons.pop(call.number, None)
        if task.cancelled():
            if self._is_failing:
                return  # `_live` answers, with what made the service fail
            self.exchange.finish(call, error=reason or AbortedError(f"{call} was cancelled"))
        elif (unexpected := task.exception()) is not None:
            self.exchange.fail(_as_failure(unexpected))
        elif isinstance(result := task.result(), TierKVError):
            self.exchange.finish(call, error=result)
        else:
            self.exchange.finish(call, result=result)

    async def _watch_device(self, service: Service) -> None:
        """Once the device is lost, no call waits for it any more. While there is no call nothing is
        looked at: each look costs an engine's thread the GIL."""
        while service.device.failure is None:
            await self._has_calls.wait()
            await asyncio.sleep(_LOOK_AT_DEVICE_S)
            if not self._running:
                self._has_calls.clear()
        self._cancel_all(DeviceFailedError(service.device.failure), but=NEEDS_NO_DEVICE)

    def _check_device(self) -> None:
        assert self.requests is not None, "calls are taken from when the service runs"
        failure = self.requests.service.device.failure
        if failure is not None:
            raise DeviceFailedError(failure)

    def _cancel_all(self, reason: TierKVError, *, but: frozenset[str] = frozenset()) -> None:
        for number, (call, task) in list(self._running.items()):
            if call.kind not in but:
                self._reasons[number] = reason
                task.cancel()

    def _fail_slowly(self) -> None:
        self.exchange.fail(
            ServiceFailedError("the service is stopping after an error; see its log")
        )


def _as_failure(error: BaseException) -> TierKVError:
    if isinstance(error, TierKVError):
        return error
    failure = ServiceFailedError(f"the service stopped after {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


class Ending(Protocol):
    def forked(self) -> None:
        """Called in a forked child: the loop's thread does not exist here."""

    def exiting(self) -> None:
        """Called when the interpreter is about to exit, before any thread pool has ended."""


_open: WeakSet[Ending] = WeakSet()


def watch(service: Ending) -> None:
    """Tell `service` of forks and of the exit until it is garbage or `unwatch`ed."""
    _open.add(service)


def unwatch(service: Ending) -> None:
    _open.discard(service)


def _on_fork() -> None:
    for service in list(_open):
        service.forked()
    _open.clear()


def _on_exit() -> None:
    for service in list(_open):
        service.exiting()


def _before_thread_pools_end(call: Callable[[], None]) -> None:
    """`atexit` comes too late: by then concurrent.futures has ended every pool of the process, and
    with them the lanes that the service needs to finish its copies. What it uses itself to be
    called early runs in reverse order of registration, so that we, who import it, come first."""
    early: Callable[[Callable[[], None]], object] | None = vars(threading).get("_register_atexit")
    (early or atexit.register)(call)


os.register_at_fork(after_in_child=_on_fork)
_before_thread_pools_end(_on_exit)
