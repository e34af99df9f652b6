"""The thread and event loop of an embedded service, with a task for every call."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import msgspec

from tierkv import tracing
from tierkv.config import all_above_zero, all_at_least_one, none_negative
from tierkv.embed.exchange import AbortedError, Call, Exchange, Work
from tierkv.errors import DeviceFailedError, ServiceFailedError, ShuttingDownError, TierKVError
from tierkv.loop_thread import LoopThread
from tierkv.service import Service
from tierkv.tasks import task_group

T = TypeVar("T")


class ForkedError(TierKVError):
    """This process is a fork, and the service's thread is in the parent process.

    Open a service here, or fork before a service is opened.
    """


class CloseTimeoutError(TierKVError):
    """Opening or closing took longer than its deadline, and continues in the service's thread.

    Memory that running copies use is released when they are done.
    """


class EmbedSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of a cache service that runs in a thread of the engine's process.

    A call is a method call of the engine, such as `admit`, which the service's thread carries out.

    Attributes:
        max_calls: largest number of calls that are running, or have finished without their results
            being read.
        load_timeout_s: seconds that the load of a request's cached blocks may take. The engine
            computes blocks that have not arrived by then.
        open_deadline_s: seconds that `open` waits for memory and the store.
        close_deadline_s: seconds that `close` waits for copies.
        grace_s: seconds that running calls may take after `close` was called; then they are
            cancelled.
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

_CHECK_DEVICE_S = 0.05  # a lost device sends no notice
_UNWIND_S = 2.0  # a failed service may wait for a copy; its callers get an answer after this time
NEEDS_NO_DEVICE = frozenset({"end", "abort", "stats", "verify"})


class ServiceThread:
    """A service in a thread of its own, and the calls to it from any other thread.

    Args:
        build: returns the service; called on the service's thread, which also closes the service's
            device.
        settings: limits of calls and deadlines.
        at_close: called on the service's thread when all calls have ended, before the service
            closes.
    """

    def __init__(
        self,
        build: Callable[[], Service],
        settings: EmbedSettings,
        *,
        at_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._build = build
        self._at_close = at_close
        self.exchange = Exchange(settings.max_calls, self._wake)
        self._thread = LoopThread(
            "embedded service",
            self._lifetime,
            name="tierkv-embed",
            close_s=settings.close_deadline_s,
            on_end=self._ended,
            on_fork=self._forked,
        )
        self._service: Service | None = None
        self._group: asyncio.TaskGroup | None = None
        self._running: dict[int, tuple[Call[Any], asyncio.Task[object]]] = {}
        self._reasons: dict[int, TierKVError] = {}  # why running calls are being cancelled
        self._is_awake = False
        self._has_calls = asyncio.Event()
        self._is_failing = False

    # From any thread

    def open(self) -> None:
        """Start the thread, and wait until the service accepts calls.

        Raises:
            ConfigError: the configuration is wrong, or the service was opened before.
            StoreUnavailableError: the store cannot be used.
            CloseTimeoutError: the service did not open within `open_deadline_s`.
        """
        tracing.join()
        deadline_s = self._settings.open_deadline_s
        try:
            is_open = self._thread.open(deadline_s)
        except TierKVError:
            raise
        except Exception as error:
            raise _as_failure(error) from error
        if not is_open:
            raise CloseTimeoutError(
                f"the service did not open within {deadline_s:g} s: check that its store answers"
            )

    def close(self, deadline_s: float | None = None) -> None:
        """Refuse new calls, wait for running calls and copies, and close the service.

        Calls that still run after `EmbedSettings.grace_s` seconds are cancelled. Further calls of
        `close` do nothing.

        Args:
            deadline_s: seconds to wait; None for `EmbedSettings.close_deadline_s`.

        Raises:
            CloseTimeoutError: the service was still closing after the deadline.
            TierKVError: the error that stopped the service earlier, if no call has raised it yet.
        """
        if not self._thread.close(deadline_s):
            raise CloseTimeoutError(
                "the service is still closing, since copies or calls have not ended"
            )
        error = self._thread.pop_error()
        if error is not None:
            raise _as_failure(error)

    @property
    def is_open(self) -> bool:
        """True if the service accepts calls."""
        return self._thread.is_open and self.exchange.failure is None

    @property
    def service(self) -> Service:
        """The service, after `open`. Only its own thread may call its methods."""
        assert self._service is not None, "the service is open"
        return self._service

    def run(
        self, kind: str, work: Callable[[Service], Awaitable[T]], *, request_id: str = ""
    ) -> Call[T]:
        """Return a call that runs `work` with the service, on the service's thread.

        Args:
            kind: the call's name.
            work: must not block. An error of `work` that is not a TierKVError stops the service.
            request_id: id of the request that the call is about; "" for none.
        """
        return self.exchange.submit(kind, request_id, lambda: work(self.service))

    def _wake(self) -> None:
        if not self._is_awake:
            self._is_awake = True
            if not self._thread.call(self._drain):
                self._is_awake = False  # not open yet, or `_ended` answers every call

    def _ended(self, error: BaseException | None) -> None:
        closed = ShuttingDownError("this service is closed")
        self.exchange.fail(closed if error is None else _as_failure(error))

    def _forked(self) -> None:
        self.exchange.fork(
            ForkedError(
                "this service belongs to the parent of this forked process: make another "
                "service here"
            )
        )

    # On the thread

    @asynccontextmanager
    async def _lifetime(self) -> AsyncIterator[None]:
        self._service = service = self._build()
        service.on_failure = self._failed
        try:
            async with service.running():
                try:
                    async with self._taking_calls(service):
                        yield
                except BaseException:  # leaving the service must not keep callers waiting
                    asyncio.get_running_loop().call_later(_UNWIND_S, self._fail_slowly)
                    raise
                self._at_close()
        finally:
            service.device.close()

    @asynccontextmanager
    async def _taking_calls(self, service: Service) -> AsyncIterator[None]:
        async with task_group() as group:
            self._group = group
            watcher = group.create_task(self._watch_device(service), name="tierkv-watch")
            self._drain()
            try:
                yield
                self.exchange.refuse(ShuttingDownError("this service is closing"))
                service.drain()  # a call that waits for blocks would never get any
                await self._finish_calls()
            except BaseException:  # a failure of another task arrives as a cancellation
                self._is_failing = True
                raise
            watcher.cancel()

    async def _finish_calls(self) -> None:
        self._drain()
        tasks = {task for _, task in self._running.values()}
        if tasks:
            await asyncio.wait(tasks, timeout=self._settings.grace_s)
        self._cancel_all(ShuttingDownError("this service was closed before the call was done"))
        if tasks:
            await asyncio.wait(tasks)

    def _drain(self) -> None:
        if self._group is None:
            return  # not open yet
        self._is_awake = False  # first: a call that is made from now on wakes the loop again
        while (found := self.exchange.pop_work()) is not None:
            if not found[0].is_done:
                self._start(*found)
        while (number := self.exchange.pop_cancel()) is not None:
            if number in self._running:
                self._running[number][1].cancel()

    def _start(self, call: Call[Any], work: Work) -> None:
        assert self._group is not None, "calls are taken once the service runs"
        job = self._run(call, work)
        try:
            task = self._group.create_task(job, name=f"tierkv-{call.kind}", context=call.span)
        except RuntimeError:  # the group is ending, and `_ended` will answer the call
            job.close()
            return
        self._running[call.number] = (call, task)
        self._has_calls.set()
        task.add_done_callback(partial(self._answer, call))

    async def _run(self, call: Call[Any], work: Work) -> object:
        """Return a TierKVError of `work` instead of raising it, which would stop the service."""
        try:
            failure = self.service.device.failure
            if failure is not None and call.kind not in NEEDS_NO_DEVICE:
                raise DeviceFailedError(failure)
            return await work()
        except TierKVError as error:
            return error

    def _answer(self, call: Call[Any], task: asyncio.Task[object]) -> None:
        del self._running[call.number]
        reason = self._reasons.pop(call.number, None)
        if task.cancelled():
            if self._is_failing:
                return  # `_ended` answers with the error of the service
            self.exchange.finish(call, error=reason or AbortedError(f"{call} was cancelled"))
        elif (unexpected := task.exception()) is not None:
            self.exchange.fail(_as_failure(unexpected))
        elif isinstance(result := task.result(), TierKVError):
            self.exchange.finish(call, error=result)
        else:
            self.exchange.finish(call, result=result)

    async def _watch_device(self, service: Service) -> None:
        while service.device.failure is None:
            await self._has_calls.wait()
            await asyncio.sleep(_CHECK_DEVICE_S)
            if not self._running:
                self._has_calls.clear()
        self._cancel_all(DeviceFailedError(service.device.failure), but=NEEDS_NO_DEVICE)

    def _cancel_all(self, reason: TierKVError, *, but: frozenset[str] = frozenset()) -> None:
        for number, (call, task) in list(self._running.items()):
            if call.kind not in but:
                self._reasons[number] = reason
                task.cancel()

    def _failed(self) -> None:
        """End the service after an unexpected error.

        Calls that have no answer after 2 s are refused with ServiceFailedError.
        """
        self._thread.ask_to_close()
        asyncio.get_running_loop().call_later(_UNWIND_S, self._fail_slowly)

    def _fail_slowly(self) -> None:
        self.exchange.fail(
            ServiceFailedError("the service is stopping after an error: read its log")
        )


def _as_failure(error: BaseException) -> TierKVError:
    if isinstance(error, TierKVError):
        return error
    failure = ServiceFailedError(f"the service stopped after {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
