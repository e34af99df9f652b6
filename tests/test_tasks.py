"""Errors come out of a group of tasks, or of an abandoned wait, as who waits expects them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from itertools import pairwise

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from tests.simulated import simulated
from tierkv import tasks
from tierkv.errors import ShuttingDownError, StoreUnavailableError, TierKVError
from tierkv.tasks import abandonable, background, failures_reported_to, supervised, task_group


async def _all_fail(errors: list[Exception]) -> None:
    """In the same turn of the loop."""
    go = asyncio.Event()

    async def fail(error: Exception) -> None:
        await go.wait()
        raise error

    async with task_group() as group:
        for error in errors:
            group.create_task(fail(error))
        await asyncio.sleep(0)
        go.set()


async def test_a_single_error_comes_out_as_it_is() -> None:
    with pytest.raises(ValueError, match="one"):
        await _all_fail([ValueError("one")])


async def test_of_several_expected_errors_the_first_comes_out_and_names_the_others() -> None:
    first = StoreUnavailableError("the connection is lost")
    with pytest.raises(StoreUnavailableError) as caught:
        await _all_fail([first, StoreUnavailableError("lost"), TierKVError("lost as well")])
    assert caught.value is first
    assert isinstance(caught.value.__cause__, ExceptionGroup)
    assert len(caught.value.__cause__.exceptions) == 3


async def test_nothing_unexpected_hides_behind_an_expected_error() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        await _all_fail([StoreUnavailableError("lost"), ValueError("a bug")])
    assert caught.group_contains(ValueError)


async def _in_a_group(
    group: asyncio.TaskGroup, work: Callable[[], Awaitable[int]], name: str = "work"
) -> int:
    return await abandonable(lambda coro, name: group.create_task(coro, name=name), work, name)


async def test_an_expected_failure_is_for_who_waits_and_not_for_the_group_that_owns_the_task() -> (
    None
):
    async def work() -> int:
        raise StoreUnavailableError("lost")

    async with asyncio.TaskGroup() as group:
        with pytest.raises(StoreUnavailableError, match="lost"):
            await _in_a_group(group, work)


async def test_a_cancelled_wait_ends_at_once_however_long_its_work_takes_to_end() -> None:
    release, is_cancelled = asyncio.Event(), asyncio.Event()

    async def work() -> int:
        try:
            await asyncio.Event().wait()
        finally:
            is_cancelled.set()
            await release.wait()
        return 1

    async with asyncio.TaskGroup() as group:
        waiting = asyncio.ensure_future(_in_a_group(group, work))
        await asyncio.wait([waiting], timeout=0)
        waiting.cancel()
        await asyncio.wait([waiting], timeout=5)
        assert waiting.cancelled()
        await is_cancelled.wait()
        release.set()


async def test_work_that_is_cancelled_by_its_owner_tells_who_waits_for_it() -> None:
    owned: list[asyncio.Task[None]] = []

    async def work() -> int:
        owned[0].cancel()
        await asyncio.Event().wait()
        return 1

    async with asyncio.TaskGroup() as group:

        def start(coro: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
            owned.append(group.create_task(coro, name=name))
            return owned[0]

        with pytest.raises(ShuttingDownError):
            await abandonable(start, work, "work")


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Supervised tasks are started again at once."""
    monkeypatch.setattr(tasks, "_FIRST_PAUSE_S", 0.001)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(
    "error",
    [RedisConnectionError("reset"), RedisTimeoutError("late"), ConnectionResetError(), KeyError(1)],
    ids=repr,
)
async def test_a_supervised_task_that_fails_is_counted_and_started_again_and_nobody_else_hears(
    error: Exception,
) -> None:
    heard: list[str] = []
    works = asyncio.Event()
    before = tasks.failures["hints"]

    async def send() -> None:
        raise error

    async def hints() -> None:
        if tasks.failures["hints"] - before == 2:
            works.set()
            await asyncio.Event().wait()
        async with background({"send": send()}):
            await asyncio.Event().wait()

    with failures_reported_to(lambda name, _: heard.append(name)):
        async with asyncio.timeout(10), supervised({"hints": hints}):
            await works.wait()
    assert tasks.failures["hints"] - before == 2
    assert heard == []


async def test_a_supervised_task_whose_own_state_is_wrong_ends_the_body() -> None:
    heard: list[str] = []

    async def counts() -> None:
        raise AssertionError("two owners of one slot")

    with (
        failures_reported_to(lambda name, _: heard.append(name)),
        pytest.raises(AssertionError, match="two owners"),
    ):
        async with asyncio.timeout(10), supervised({"counts": counts}):
            await asyncio.Event().wait()
    assert heard == ["counts"]


async def test_a_supervised_task_that_fails_as_it_is_cancelled_ends() -> None:
    begun = asyncio.Event()

    async def hints() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            raise RedisConnectionError("closed")

    async with asyncio.timeout(10), supervised({"hints": hints}):
        await begun.wait()


@pytest.mark.parametrize(
    ("runs_s", "pauses_s"),
    [(0.0, [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]), (31.0, [0.5] * 8)],
    ids=["fails at once", "fails after a long time"],
)
@simulated
async def test_a_supervised_task_is_started_again_after_longer_and_longer_pauses(
    runs_s: float, pauses_s: list[float]
) -> None:
    starts: list[float] = []
    is_enough = asyncio.Event()

    async def hints() -> None:
        starts.append(asyncio.get_running_loop().time())
        if len(starts) > len(pauses_s):
            is_enough.set()
        await asyncio.sleep(runs_s)
        raise RuntimeError("it fails")

    async with supervised({"pauses": hints}):
        await is_enough.wait()
    found = [after - before - runs_s for before, after in pairwise(starts)]
    assert found == pytest.approx(pauses_s)
