"""For tests on a GPU, and of what a machine says of itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tierkv.gpu import numa


@pytest.fixture(autouse=True)
def _nothing_blocks_the_loop() -> None:
    """Not watched here: a service opens its device and memory on the loop, before it serves."""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root folder of a machine whose /proc and /sys are empty."""
    monkeypatch.setattr(numa, "ROOT", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were not installed."""
    for module in [name for name in sys.modules if name.startswith("tierkv.gpu.cuda")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "cupy", None)
