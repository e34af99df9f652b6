"""Waiting for a store without being held by it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TypeVar

from tierkv.errors import ShuttingDownError, TierKVError
from tierkv.sched.tiers import Tiers

T = TypeVar("T")


async def abandonable(tiers: Tiers, work: Callable[[], Coroutine[None, None, T]], name: str) -> T:
    """What `work()` returns or raises, run in a task of the tiers'. A cancel is raised at once; it
    cancels `work` too, which may take longer to end: a store that hangs in the system lets go of
    its buffers when it can, and what `work` holds stays held until then.

    Raises ShuttingDownError when the task ends without an outcome: what was not expected stops the
    service."""
    outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    task = tiers.started(_carry_out(work, outcome), name)
    task.add_done_callback(
        lambda _: _tell(outcome, ShuttingDownError("this node is shutting down"))
    )
    try:
        return await outcome
    except asyncio.CancelledError:
        task.cancel()
        raise


async def _carry_out(
    work: Callable[[], Coroutine[None, None, T]], outcome: asyncio.Future[T]
) -> None:
    try:
        result = await work()
    except TierKVError as error:
        _tell(outcome, error)
    else:
        if not outcome.done():
            outcome.set_result(result)


def _tell(outcome: asyncio.Future[T], error: TierKVError) -> None:
    if not outcome.done():
        outcome.set_exception(error)
