"""Tasks and deadlines of the body of a `with`, and a wait that outlasts a cancel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager

from tierkv.errors import TierKVError


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
