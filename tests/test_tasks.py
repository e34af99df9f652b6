"""Errors come out of a group of tasks as who waits for it expects them."""

from __future__ import annotations

import asyncio

import pytest

from tierkv.errors import StoreUnavailableError, TierKVError
from tierkv.tasks import task_group


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
