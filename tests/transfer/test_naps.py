"""How long the poller sleeps between two looks: less for short copies, which somebody waits for."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from tests.latch import ManualEvent, finish, until
from tests.transfer.test_mover import LAYOUT, ground, ids
from tierkv.gpu.protocol import Direction
from tierkv.transfer import mover
from tierkv.transfer.mover import EventPoller

SHORT_S, LONG_S = 0.0001, 0.0008


class Naps:
    """Of the thread that watches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lengths_s: list[float] = []
        self._sleep = time.sleep
        monkeypatch.setattr(time, "sleep", self._note)
        monkeypatch.setattr(mover, "_LEAST_NAP_S", SHORT_S)
        monkeypatch.setattr(mover, "_LONG_NAP_S", LONG_S)

    def _note(self, length_s: float) -> None:
        if threading.current_thread().name.startswith("tierkv-poller"):
            self.lengths_s.append(length_s)
        self._sleep(length_s)

    async def least_s(self, tell: Callable[[], object]) -> float:
        """Over several beginnings, of which `tell` makes one: a nap is longer where a thread has
        waited for a core since."""
        for _ in range(20):
            tell()
            told = len(self.lengths_s)
            async with asyncio.timeout(20):
                while len(self.lengths_s) < told + 2:  # noqa: ASYNC110 - of another thread
                    await asyncio.sleep(0.001)
        return min(self.lengths_s)


@pytest.mark.parametrize("are_long", [(True,), (True, True), (False,), (True, False)])
async def test_what_takes_long_is_looked_at_more_seldom_unless_something_short_is_beside_it(
    monkeypatch: pytest.MonkeyPatch, are_long: tuple[bool, ...]
) -> None:
    naps = Naps(monkeypatch)
    poller = EventPoller()
    async with poller.running():
        events = [ManualEvent() for _ in are_long]
        futures = [
            poller.done(event, is_long=is_long)
            for event, is_long in zip(events, are_long, strict=True)
        ]
        brief = ManualEvent()

        def tell() -> None:
            nonlocal brief
            brief.finish()
            brief = ManualEvent()
            futures.append(poller.done(brief, is_long=True))
            events.append(brief)

        least_s = await naps.least_s(tell)
        for event in events:
            event.finish()
        for future in futures:
            await finish(future)
    assert least_s == (LONG_S if all(are_long) else SHORT_S)


@pytest.mark.parametrize("count", [1, 2])
async def test_a_movement_is_long_by_its_bytes(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(mover, "_SHORT_BYTES", LAYOUT.block_bytes)
    naps = Naps(monkeypatch)
    async with ground() as here:
        here.latch.hold(Direction.LOAD)
        movement = here.mover.load(ids(*range(count)), ids(*range(count)))
        event, futures = ManualEvent(), []

        def tell() -> None:
            nonlocal event
            event.finish()
            event = ManualEvent()
            futures.append(here.mover.poller.done(event, is_long=True))

        least_s = await naps.least_s(tell)
        event.finish()
        here.latch.release()
        await finish(movement.done())
        for future in futures:
            await finish(future)
    assert least_s == (LONG_S if count > 1 else SHORT_S)


async def test_the_end_of_any_of_several_copies_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    naps = Naps(monkeypatch)
    poller = EventPoller()
    async with poller.running():
        events = [ManualEvent() for _ in range(3)]
        futures = [poller.done(event, is_long=True) for event in events]
        for event, future in reversed([*zip(events, futures, strict=True)]):
            told = len(naps.lengths_s)
            await until(lambda told=told: len(naps.lengths_s) > told + 2)  # type: ignore[misc]
            event.finish()
            await finish(future)
