"""Task groups, background tasks, deadlines, and waits that handle a cancel in their own way.

When the waiting task is cancelled, `outlast` waits until the work has ended, and `abandonable`
stops waiting at once, although the work may still run.
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

# Number of failures of supervised tasks since the process began, by the name of the task.
failures: Counter[str] = Counter()

OnFailure = Callable[[str, BaseException], None]
_on_failure: ContextVar[OnFailure | None] = ContextVar("tierkv_on_failure", default=None)


@contextmanager
def failures_reported_to(on_failure: OnFailure) -> Iterator[None]:
    """Call `on_failure` as soon as a task of a `task_group` fails with an unexpected error.

    This applies to groups that are entered inside the `with` block. Without this context manager, a
    group raises the error only after all of its tasks have ended. A TierKVError is expected, and
    not reported.

    Args:
        on_failure: called with the name of the task and its error.
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
    """Enter an asyncio.TaskGroup that raises one error, if possible, not an error group.

    Yields:
        The task group.

    Raises:
        BaseException: the error, if there is only one, from a task or from the `with` block.
        TierKVError: the first error, if there are several and all are TierKVErrors.
        BaseExceptionGroup: all errors, if there are several and not all are TierKVErrors.
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
    """Run coroutines as tasks until the `async with` block ends, then cancel them.

    If a task fails, the `async with` block is cancelled, and the task's error is raised.

    Args:
        work: the coroutines, by the name of their task.
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
    """Run functions as tasks until the `with` block ends, and restart a task that fails.

    Use this for work whose failure must not stop the `with` block, such as probes and prefetches.
    An error is logged and counted in `failures`; the function is called again after a pause of 0.5
    s, which doubles up to 30 s. Only an AssertionError, which means that tierkv has a bug, cancels
    the `with` block and is raised. A function that returns is not called again.

    Args:
        work: the coroutine functions, by the name of their task.
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
    """Async context manager that cancels the code inside after `seconds` and raises `late()`.

    A TimeoutError that this code raises itself is not replaced.

    Args:
        seconds: the time limit; None for no limit. `async with` provides the `asyncio.Timeout`, by
            which the limit can be changed.
        late: makes the error to raise.
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
    futures: AbstractSet[asyncio.Future[Any]], *, on_cancel: Callable[[], object]
) -> None:
    """Wait until all futures are done, even if the caller is cancelled.

    A cancel is raised after the wait. Results and errors of the futures are not returned or raised.

    Args:
        futures: the futures to wait for.
        on_cancel: called at each cancel during the wait.

    Raises:
        CancelledError: the caller was cancelled during the wait.
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
    """Run two awaitables at the same time, and return both results.

    Args:
        first: an awaitable.
        second: another awaitable.

    Raises:
        TierKVError: an awaitable failed. The error is raised after both have ended; if both failed,
            it is that of `first`.
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
    """Return the result of `work`, or the TierKVError that it raises.

    The error is returned, not raised, so that it does not cancel the task group of the caller.
    """
    try:
        return await work
    except TierKVError as error:
        return error


class _Start(Protocol):
    """A function that starts a task, such as `TaskGroup.create_task`."""

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
    """Run `work()` in a task of another task group, and wait for its result.

    If the caller is cancelled, its wait ends at once. The task is cancelled too, but may end later:
    for example, a thread that waits for a hanging disk cannot be cancelled. Memory that `work` uses
    must therefore stay valid until the task ends.

    Args:
        start: starts the task in the other group, such as its `create_task`.
        work: makes the awaitable to run.
        name: name of the task.
        ended: makes the error to raise if the task ends without a result, for example because its
            group is cancelled.

    Returns:
        The result of `work()`.

    Raises:
        TierKVError: the error of `work()`, or the error that `ended` makes.
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
    """Run a coroutine in a new event loop, and cancel it at Ctrl-C.

    The cancel takes effect between two callbacks of the loop. With `asyncio.run` of Python 3.11 to
    3.14, Ctrl-C may interrupt a callback, which then fails with a traceback of its own.

    Args:
        work: the coroutine.

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
