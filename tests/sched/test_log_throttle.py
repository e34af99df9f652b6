"""What can happen by the hundred a second is said once a second, with a count."""

from __future__ import annotations

import logging
import re
import time

import pytest

from tests.latch import until
from tests.world import world
from tierkv.cache.eviction import WritePolicy
from tierkv.clock import SystemClock
from tierkv.sched import log_throttle
from tierkv.sched.log_throttle import LogThrottle
from tierkv.storage.memory import MemorySettings, MemoryStore

log = logging.getLogger("tests.log_throttle")


async def test_the_first_is_said_at_once_and_the_others_are_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(log_throttle, "INTERVAL_S", 0.05)
    warnings = LogThrottle(log, "broken (x%d): %s")
    for number in range(600):
        warnings.warn(f"reason {number}")
    assert caplog.messages == ["broken (x1): reason 0"]
    await until(lambda: len(caplog.messages) == 2, "the line that counts the others")
    assert caplog.messages[1] == "broken (x599): reason 599"
    warnings.warn("again", 3)
    await until(lambda: len(caplog.messages) == 3, "a line for what came later")
    assert caplog.messages[2] == "broken (x3): again"


async def test_a_store_that_is_full_is_warned_of_once_a_second_not_once_a_block(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(log_throttle, "INTERVAL_S", 0.05)
    full = MemoryStore(MemorySettings(capacity_bytes=1), SystemClock())
    async with world(
        store=full,
        device_blocks=300,
        host_blocks=300,
        storage_write=WritePolicy.WRITE_THROUGH,
    ) as here:
        began = time.monotonic()
        await here.run([token % 50 for token in range(1_000)])
        expected = here.storage_stats.failed_writes
        assert expected == 250

        def counts() -> list[int]:
            found = (
                re.match(r"a block was not stored \(x(\d+)\)", line) for line in caplog.messages
            )
            return [int(one[1]) for one in found if one]

        await until(lambda: sum(counts()) == expected, "every block is counted")
        assert len(counts()) <= 2 + (time.monotonic() - began) / 0.05
