"""Wall clocks that differ from this machine's, of a store's user and of whole processes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

_SITE = """\
import sys
import time

_real, _folder, _words = time.time, {folder!r}, sys.orig_argv
_name = _words[_words.index("--name") + 1] if "--name" in _words else "others"


def _time():
    try:
        with open(f"{{_folder}}/{{_name}}.ahead_s") as file:
            return _real() + float(file.read())
    except FileNotFoundError:
        return _real()


time.time = _time
time.time_ns = lambda: int(_time() * 1e9)
"""


@dataclass
class ShiftedClock:
    """A `Clock` with a wall clock that is `ahead_s` seconds ahead of this machine's."""

    ahead_s: float

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time() + self.ahead_s


class ProcessClocks:
    """The wall clocks of the `tierkv` processes that are started inside `used`.

    Args:
        folder: a folder to make, which must exist as long as the processes.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        (folder / "sitecustomize.py").write_text(_SITE.format(folder=str(folder)))

    def shift(self, name: str, ahead_s: float) -> None:
        """Set the clock of the process `--name name` ahead of this machine's, now or later."""
        new = self._folder / f"{name}.new"
        new.write_text(str(ahead_s))
        new.rename(self._folder / f"{name}.ahead_s")

    @contextmanager
    def used(self) -> Iterator[None]:
        before = os.environ.get("PYTHONPATH")
        path = str(self._folder) + (f"{os.pathsep}{before}" if before else "")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", path)
            yield
