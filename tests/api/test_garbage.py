"""Reference cycles are found soon, in short looks, whatever else is allocated."""

from __future__ import annotations

import gc
import weakref

from tests.latch import until
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
