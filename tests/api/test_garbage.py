"""Reference cycles are found soon, in short looks, whatever else is allocated."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import aiohttp
import pytest

from tests.api.nodes import here
from tests.latch import until
from tierkv.http import process
from tierkv.http.process import short_collections


class Cycle:
    def __init__(self) -> None:
        self.me = self


async def test_a_cycle_is_found_though_nothing_else_is_made_and_the_settings_come_back() -> None:
    before = gc.get_threshold()
    async with short_collections():
        assert gc.get_threshold() != before
        gone = weakref.ref(Cycle())
        await until(lambda: gone() is None, "the cycle to be found")
        # One that was there before its referents went is looked at as well, a little later.
        old = Cycle()
        gc.collect(0)
        gone = weakref.ref(old)
        del old
        await until(lambda: gone() is None, "the older cycle to be found")
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


async def test_a_cycle_that_two_collections_have_seen_alive_is_found_by_the_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under steady load the collector alone never looks through its last generation."""
    monkeypatch.setattr(process, "_ALL_S", 0.05)
    async with short_collections():
        old = Cycle()
        gc.collect(1)
        gone = weakref.ref(old)
        del old
        await until(lambda: gone() is None, "the oldest cycle to be found")


HEAVY = """
import asyncio, gc, resource
from tierkv.http.process import short_collections

class Cycle:
    def __init__(self):
        self.me, self.held = self, b"x" * (1 << 20)

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

async def main():
    async with short_collections():
        before = peak()
        for _ in range(600):
            cycle = Cycle()
            gc.collect(1)
            del cycle
            await asyncio.sleep(0.005)
        print(peak() - before)

asyncio.run(main())
"""


def test_cycles_that_hold_much_memory_are_found_before_they_take_all_of_it() -> None:
    """Of 600 MiB in all, in few objects; each is seen alive by two collections."""
    run = [sys.executable, "-c", HEAVY]
    told = subprocess.run(run, capture_output=True, check=True, timeout=200)
    assert int(told.stdout) < 300


async def test_requests_and_connections_leave_no_cycles_for_the_collector() -> None:
    """Of prompts that begin the same, so that blocks are copied within the device; storage is asked
    for each, and each comes over a connection of its own."""
    words = "a prompt that others share the beginning of, "
    async with here() as on:

        async def ask(number: int) -> None:
            body = {"prompt": f"{words * 4}{number}{words}", "max_tokens": 2}
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"{on.client.url}/v1/generate", json=body) as response,
            ):
                assert response.status == 200

        await ask(0)  # makes what stays
        await on.settle()
        gc.collect()
        gc.disable()
        try:
            for number in range(1, 9):
                await ask(number)
            await on.settle()
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            left = {type(one) for one in gc.garbage if type(one).__module__.startswith("tierkv")}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert left == set()
