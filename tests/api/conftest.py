"""What tests of the API ask: a node, its callers, and a store that two nodes share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.api.guarded import Callers, callers_in
from tests.api.nodes import Here, here
from tierkv.clock import SystemClock
from tierkv.storage.memory import MemorySettings, MemoryStore


@pytest.fixture
async def on() -> AsyncIterator[Here]:
    """A node in this process, which is idle and whole when its test has ended."""
    async with here() as node:
        yield node


@pytest.fixture
def callers(tmp_path: Path) -> Callers:
    return callers_in(tmp_path)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(MemorySettings(), SystemClock())
