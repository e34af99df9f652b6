"""Tasks and deadlines of the body of a `with`, waits that outlast a cancel, and waits that end
before the work does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager
from typing import TypeVar

from tierkv.errors import ShuttingDownError, TierKVError

T = TypeVar("T")


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """A TaskGroup whose single error comes out as it is, not in a group of one: who enters a
    lifetime expects the errors of what lives in it. So does the first of several that are all
    expected: a connection that is lost fails all who wait for it in the same turn of the loop."""
    try:
        async with asyncio.TaskGroup() as group:
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
    """Run each coroutine, as a task of the given name, until the body ends; then cancel them.

    One that fails cancels the body.
    """
    async with task_group() as group:
        tasks = [group.create_task(coro, name=name) for name, coro in work.items()]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


@asynccontextmanager
async def deadline(
    seconds: float | None, late: Callable[[], Exception]
) -> AsyncIterator[asyncio.Timeout]:
    """Raises what `late` makes if the body takes longer; a TimeoutError of its own comes out as it
    is. None is no deadline, until the scope that is yielded is given one."""
    scope = asyncio.timeout(seconds)
    try:
        async with scope:
            yield scope
    except TimeoutError as error:
        if not scope.expired():
            raise
        raise late() from error


async def outlast(
    futures: AbstractSet[asyncio.Future[None]], *, on_cancel: Callable[[], None]
) -> None:
    """Return when all `futures` are done; cancels are collected and raised only then."""
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
                future.exception()  # seen: the cancel is what the caller hears of
        raise cancelled


async def expected(work: Awaitable[T]) -> T | TierKVError:
    """What `work` returns, or the TierKVError that it raises, as a value: for the task of a group
    whose expected failure concerns who waits for it, not the group."""
    try:
        return await work
    except TierKVError as error:
        return error


async def abandonable(
    start: Callable[[Coroutine[None, None, None], str], asyncio.Task[None]],
    work: Callable[[], Awaitable[T]],
    name: str,
    *,
    ended: Callable[[], TierKVError] = lambda: ShuttingDownError("this node is shutting down"),
) -> T:
    """What `work()` returns or raises, run in a task that its owner `start`s under `name`.

    A cancel is raised at once. It cancels `work` too, which may take longer to end: a thread in a
    system call on a disk that hangs cannot be cancelled, and what it uses stays in use until then.
    Raises what `ended` makes if the task ends without an outcome, as when its group is cancelled.
    """
    outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    async def carry_out() -> None:
        result = await expected(work())
        if outcome.done():
            return
        if isinstance(result, TierKVError):
            outcome.set_exception(result)
        else:
            outcome.set_result(result)

    def tell(_: asyncio.Task[None]) -> None:
        if not outcome.done():
            outcome.set_exception(ended())

    task = start(carry_out(), name)
    task.add_done_callback(tell)
    try:
        return await outcome
    finally:
        task.cancel()
