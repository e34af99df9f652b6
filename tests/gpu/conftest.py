"""For tests on a GPU."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _nothing_blocks_the_loop() -> None:
    """Not watched here: a service opens its device and memory on the loop, before it serves."""
