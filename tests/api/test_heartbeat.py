"""How late the loop is, and whether it was its own work or had to wait for a core."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.latch import until
from tierkv.http.process import TICK_S, Heartbeat

_STILL_S = 0.3


async def lateness(stand_still: Callable[[], None]) -> tuple[float, float]:
    """Of the beat during which the loop was kept by `stand_still`."""
    beats: list[tuple[float, float]] = []
    heartbeat = Heartbeat(lambda *beat: beats.append(beat))
    async with heartbeat.running():
        await until(lambda: bool(beats), "a beat")
        stand_still()
        told = len(beats)
        await until(lambda: len(beats) > told, "the late beat")
        assert heartbeat.worst_lag_s >= beats[told][0]
        return beats[told]


def compute() -> None:
    until_s = time.thread_time() + _STILL_S
    while time.thread_time() < until_s:
        pass


async def test_a_loop_that_computes_is_late_by_its_own_work() -> None:
    late_s, busy_s = await lateness(compute)
    assert late_s >= _STILL_S - 2 * TICK_S
    assert _STILL_S - 2 * TICK_S <= busy_s <= late_s


async def test_a_loop_that_is_not_run_is_late_without_work_of_its_own() -> None:
    late_s, busy_s = await lateness(lambda: time.sleep(_STILL_S))
    assert late_s >= _STILL_S - 2 * TICK_S
    assert busy_s < _STILL_S / 2
