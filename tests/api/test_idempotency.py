"""Once: one run for each key, and no more memory than was allowed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tierkv.api.idempotency import Once


class Work:
    """Counts its runs; each waits until `go` is set."""

    def __init__(self) -> None:
        self.num_runs = 0
        self.go = asyncio.Event()

    async def __call__(self) -> int:
        self.num_runs += 1
        await self.go.wait()
        return self.num_runs


def once(clock: list[float] | None = None, *, most: int = 3) -> Once[int]:
    hands = clock or [0.0]
    return Once(max_answers=most, ttl_s=10.0, now=lambda: hands[0])


async def do(
    box: Once[int], key: object, content: bytes, work: Callable[[], Awaitable[int]]
) -> int:
    async with box.call(key, content) as call:
        if call.result is None:
            call.result = await work()
    return call.result


async def test_when_the_one_that_runs_is_cancelled_another_takes_over() -> None:
    box, work = once(), Work()
    first = asyncio.ensure_future(do(box, "a", b"x", work))
    await asyncio.sleep(0)
    second = asyncio.ensure_future(do(box, "a", b"x", work))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    work.go.set()
    assert await second == 2
    assert work.num_runs == 2


async def test_open_results_stay_and_past_ones_are_bounded_in_number_and_time() -> None:
    clock, work = [0.0], Work()
    box = once(clock, most=3)
    work.go.set()
    for key in range(10):
        await do(box, key, b"x", work)
    assert len(box) == 10
    for key in range(9):
        box.release(key)
    assert len(box) == 1 + 3
    assert [key for key in range(10) if box.find(key) is not None] == [6, 7, 8, 9]
    clock[0] = 10.1
    assert [key for key in range(10) if box.find(key) is not None] == [9]
    assert len(box) == 1
