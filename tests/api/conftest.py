"""The node that a test of the API asks."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.api.nodes import Here, here


@pytest.fixture
async def on() -> AsyncIterator[Here]:
    """A node in this process, which is idle and whole when its test has ended."""
    async with here() as node:
        yield node
