"""The gateway that a test asks, in front of scripted nodes."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.gateway.scripted import Stage, stage


@pytest.fixture
async def on() -> AsyncIterator[Stage]:
    """A gateway in front of two prefill and two decode nodes."""
    async with stage() as behind:
        yield behind
