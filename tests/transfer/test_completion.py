"""The poller turns device events into futures, many per look, and sleeps when there are none."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tests.latch import ManualEvent, finish, turns, until
from tierkv.errors import ShuttingDownError, TransferError
from tierkv.transfer import mover
from tierkv.transfer.mover import EventPoller


class Watched(ManualEvent):
    """Knows which threads have looked at it, one entry for each look."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[int] = []

    @property
    def is_done(self) -> bool:
        self.threads.append(threading.get_ident())
        return super().is_done


async def test_beside_what_is_long_the_loop_is_left_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its eager looks would keep the interpreter from the threads that submit and compute."""
    monkeypatch.setattr(mover, "_EAGER_S", 60.0)
    poller, loops_thread = EventPoller(), threading.get_ident()
    async with poller.running():
        short, long = Watched(), Watched()
        ended = [poller.done(short), poller.done(long, is_long=True)]
        await turns(500)
        looks_meanwhile = [*short.threads, *long.threads].count(loops_thread)
        for event in (short, long):
            event.finish()
        for future in ended:
            await finish(future)
    assert looks_meanwhile < 20


async def test_leaving_waits_for_what_is_in_flight_and_then_refuses() -> None:
    poller = EventPoller()
    event = ManualEvent()
    left = asyncio.Event()

    async def live() -> asyncio.Future[None]:
        async with poller.running():
            future = poller.done(event)
        left.set()
        return future

    async with asyncio.TaskGroup() as group:
        living = group.create_task(live())
        await until(lambda: event.num_looks > 2)
        assert not left.is_set()
        event.finish()
    assert living.result().done()
    with pytest.raises(ShuttingDownError):
        await poller.done(ManualEvent())


async def test_a_bug_in_what_is_told_at_once_is_the_pollers_too() -> None:
    """It is one of the service's life, and no line in a log that nobody reads."""
    poller, event = EventPoller(), ManualEvent()
    event.finish()

    def bug(error: TransferError | None) -> None:
        raise RuntimeError("a bug")

    async def live() -> None:
        async with poller.running():
            assert poller.call_if_done(event, bug)
            await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="a bug"):
        await finish(live())


async def test_what_comes_while_another_takes_long_does_not_wait_for_it() -> None:
    poller = EventPoller()
    async with poller.running():
        slow, quick = Watched(), ManualEvent()
        waiting = poller.done(slow)
        await until(lambda: len(set(slow.threads)) > 1, "a thread that looks at it")
        second = poller.done(quick)
        quick.finish()
        try:
            await finish(second)
            assert not waiting.done()
        finally:
            slow.finish()
        await finish(waiting)


async def test_an_earlier_event_of_a_line_does_not_wait_for_a_later_one_that_came_first() -> None:
    poller = EventPoller()
    async with poller.running():
        line = object()
        events = {position: ManualEvent(line, position) for position in (2, 0, 3, 1)}
        futures = {position: poller.done(event) for position, event in events.items()}
        try:
            for position in range(4):
                assert not futures[position].done()
                events[position].finish()
                await finish(futures[position])
        finally:
            for event in events.values():
                event.finish()
        assert poller.num_in_flight == 0
