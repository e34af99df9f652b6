"""Tasks that end with the body of a `with`, deadlines, and waits that treat a cancel specially.

Some waits here go on despite a cancel until the work has ended; others end at once, while the work
still goes on.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager, contextmanager
from contextvars import Context, ContextVar
from types import TracebackType
from typing import Any, Protocol, TypeVar

from tierkv.errors import ShuttingDownError, TierKVError

T = TypeVar("T")
U = TypeVar("U")

_log = logging.getLogger(__name__)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0

# Failures of supervised tasks since the process began, by the task's name.
failures: Counter[str] = Counter()

OnFailure = Callable[[str, BaseException], None]
_on_failure: ContextVar[OnFailure | None] = ContextVar("tierkv_on_failure", default=None)


@contextmanager
def failures_reported_to(on_failure: OnFailure) -> Iterator[None]:
    """Make task groups that are entered in the body report an unexpected error at once.

    A group itself raises the error only when all its tasks have ended.

    Args:
        on_failure: receives the name of the task and its error.
    """
    _on_failure.set(on_failure)
    try:
        yield
    finally:
        _on_failure.set(None)


class _ReportingGroup(asyncio.TaskGroup):
    """A task group that reports the unexpected error of a task as soon as the task ends."""

    def __init__(self, on_failure: OnFailure) -> None:
        super().__init__()
        self._on_failure = on_failure

    def create_task(
        self,
        coro: Coroutine[Any, Any, T] | Generator[Any, None, T],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        """See `asyncio.TaskGroup.create_task`."""
        task = super().create_task(coro, name=name, context=context)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not isinstance(error, TierKVError):
            self._on_failure(task.get_name(), error)


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """Enter a TaskGroup that raises an error itself, not an exception group with one error.

    If several tasks fail with a TierKVError, the first is raised: for example, a lost connection
    fails all tasks that wait for it at once.

    Yields:
        The group.

    Raises:
        TierKVError: the first error, if all failed tasks raised one.
        BaseExceptionGroup: all errors, if several tasks failed unexpectedly.
    """
    report = _on_failure.get()
    try:
        async with asyncio.TaskGroup() if report is None else _ReportingGroup(report) as group:
            yield group
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
        if len(errors.exceptions) == 1:
            raise first from first.__cause__
        if all(isinstance(error, TierKVError) for error in errors.exceptions):
            raise first from errors
        raise


@asynccontextmanager
async def background(work: dict[str, Coroutine[None, None, None]]) -> AsyncIterator[None]:
    """Run coroutines, as tasks of the given names, until the body ends; then cancel them.

    A task that fails cancels the body.
    """
    async with task_group() as group:
        tasks = [group.create_task(coro, name=name) for name, coro in work.items()]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


@asynccontextmanager
async def supervised(
    work: dict[str, Callable[[], Coroutine[None, None, None]]],
) -> AsyncIterator[None]:
    """Run coroutine functions, as tasks of the given names, until the body ends.

    For tasks that the body can do without: hints, publishers of events, probes, renewals,
    prefetches. A task that raises any error is logged, counted in `failures`, and started again
    after a pause of 0.5 s, which doubles up to 30 s. Neither the body nor the service sees the
    error, except for an AssertionError: it means that our own state is wrong, and cancels the body.
    """
    async with background({name: _supervise(name, start) for name, start in work.items()}):
        yield


async def _supervise(name: str, start: Callable[[], Coroutine[None, None, None]]) -> None:
    report, loop, pause_s = _on_failure.get(), asyncio.get_running_loop(), _FIRST_PAUSE_S
    task = asyncio.current_task()
    assert task is not None, "this is one"
    while True:
        began_at = loop.time()
        # Failures of groups that `start` enters are caught below.
        _on_failure.set(None)
        try:
            return await start()
        except AssertionError:
            raise
        except Exception as error:
            if task.cancelling():  # before Python 3.13 a TaskGroup that fails forgets the cancel
                raise asyncio.CancelledError from error
            is_first = not failures[name]
            failures[name] += 1
            if loop.time() - began_at > _LONGEST_PAUSE_S:
                pause_s = _FIRST_PAUSE_S
            text = "task %s failed (%s: %s) and is restarted in %g s"
            about = (name, type(error).__name__, error, pause_s)
            _log.warning(text, *about, exc_info=error if is_first else None)
        finally:
            _on_failure.set(report)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


class deadline:  # noqa: N801 - as contextlib.suppress; a generator took 5 us more
    """A scope that raises the error made by `late` if its body takes longer than `seconds`.

    A TimeoutError of the body passes unchanged.

    Args:
        seconds: the time limit; None for none, until the yielded `asyncio.Timeout` is given one.
        late: makes the error.
    """

    __slots__ = ("_late", "_scope")

    def __init__(self, seconds: float | None, late: Callable[[], Exception]) -> None:
        self._scope = asyncio.timeout(seconds)
        self._late = late

    async def __aenter__(self) -> asyncio.Timeout:
        return await self._scope.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self._scope.__aexit__(kind, error, trace)
        except TimeoutError as late:
            raise self._late() from late


async def outlast(
    futures: AbstractSet[asyncio.Future[Any]], *, on_cancel: Callable[[], None]
) -> None:
    """Wait until all futures are done, even if the caller is cancelled.

    A cancel is raised afterwards.

    Args:
        futures: the futures to wait for.
        on_cancel: called at each cancel.

    Raises:
        CancelledError: the caller was cancelled while it waited.
    """
    cancelled: asyncio.CancelledError | None = None
    while pending := {future for future in futures if not future.done()}:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
            on_cancel()
    if cancelled is not None:
        for future in futures:
            if not future.cancelled():
                future.exception()  # marked as retrieved: the caller receives the cancel
        raise cancelled


async def both(first: Awaitable[T], second: Awaitable[U]) -> tuple[T, U]:
    """Run two awaitables at the same time.

    Args:
        first: an awaitable.
        second: another one.

    Returns:
        Both results.

    Raises:
        TierKVError: one of them failed. The error is raised when both have ended; that of `first`
            wins.
    """
    async with task_group() as group:
        beside = group.create_task(expected(second))
        found = await expected(first)
    if isinstance(found, TierKVError):
        raise found
    other = beside.result()
    if isinstance(other, TierKVError):
        raise other
    return found, other


async def expected(work: Awaitable[T]) -> T | TierKVError:
    """Return the result of `work`, or the TierKVError that it raised.

    As the error is not raised in a task, it does not cancel the task's group.
    """
    try:
        return await work
    except TierKVError as error:
        return error


class _Start(Protocol):
    """The signature of a function that starts a task, such as TaskGroup.create_task."""

    def __call__(
        self, work: Coroutine[None, None, None], /, *, name: str
    ) -> asyncio.Task[None]: ...


async def abandonable(
    start: _Start,
    work: Callable[[], Awaitable[T]],
    name: str,
    *,
    ended: Callable[[], TierKVError] = lambda: ShuttingDownError("this node is shutting down"),
) -> T:
    """Run `work()` in a task of another owner, and wait for its outcome.

    A cancel ends the wait at once. It is passed to `work` too, which may take longer to end: a
    thread in a system call on a disk that hangs cannot be cancelled, and the memory that it uses
    stays in use until then.

    Args:
        start: starts the task in its owner's group.
        work: makes the awaitable to run.
        name: name of the task.
        ended: makes the error to raise if the task ends without an outcome, for example because its
            group is cancelled.

    Returns:
        The result of `work()`.

    Raises:
        TierKVError: the error of `work()`, or of `ended`.
    """
    outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    async def carry_out() -> None:
        try:
            result = await work()
        except TierKVError as error:
            if not outcome.done():
                outcome.set_exception(error)
        else:
            if not outcome.done():
                outcome.set_result(result)

    def report(_: asyncio.Task[None]) -> None:
        if not outcome.done():
            outcome.set_exception(ended())

    task = start(carry_out(), name=name)
    task.add_done_callback(report)
    try:
        return await outcome
    finally:
        task.cancel()


def run_until_stopped(work: Coroutine[object, object, T]) -> T:
    """Run `work` as `asyncio.run` does, for a command that Ctrl-C may stop.

    Ctrl-C cancels `work` between two callbacks of the loop. `asyncio.run` (3.11 to 3.14) does so
    inside a callback, which fails with a traceback of its own if it then completes a future that
    was cancelled.

    Returns:
        The result of `work`.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    stopped = False

    async def main() -> T:
        task = asyncio.current_task()
        assert task is not None, "this is one"

        def stop() -> None:
            nonlocal stopped
            stopped = True
            task.cancel()

        if threading.current_thread() is threading.main_thread():  # only this receives signals
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop)
        return await work

    try:
        return asyncio.run(main())
    except asyncio.CancelledError:
        if stopped:
            raise KeyboardInterrupt from None
        raise
