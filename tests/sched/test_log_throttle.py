"""What can happen by the hundred a second is said once a second, with a count."""

from __future__ import annotations

import logging

import pytest

from tests.latch import until
from tierkv.sched import log_throttle
from tierkv.sched.log_throttle import LogThrottle

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
