"""A test that hangs is named with its own time limit, and its run has a summary."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_INI = "[pytest]\ntimeout = 2\ntimeout_method = thread\nasyncio_mode = auto\n"
_TESTS = """
import asyncio, os, threading, pytest

@pytest.mark.timeout(100)
def test_wrong():
    assert 1 == 2

{hang}
@pytest.mark.timeout(100)
def test_right():
    pass
"""
_OWN = """
@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.timeout(1.5))])
def test_hang(n):
    print("what it said")
    threading.Event().wait()
"""
_DEFAULT = """
async def test_hang():
    print("what it said")
    await asyncio.Event().wait()
"""
_CRASH = """
def test_hang():
    os._exit(3)
"""


HANGS = pytest.mark.parametrize(
    ("hang", "name", "limit_s"),
    [
        pytest.param(_OWN, "test_hang[1]", "1.5", id="own"),
        pytest.param(_DEFAULT, "test_hang", "2", id="default"),
    ],
)


def run(folder: Path, hang: str, *options: str) -> tuple[int, str]:
    (folder / "pytest.ini").write_text(_INI)
    (folder / "conftest.py").write_bytes(Path(__file__).with_name("conftest.py").read_bytes())
    (folder / "test_some.py").write_text(_TESTS.format(hang=hang))
    temporary = folder / "temporary"
    temporary.mkdir()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", *options, str(folder)]
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        command,
        cwd=folder,
        check=False,
        env={**own, "TMPDIR": str(temporary), "COLUMNS": "120"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    left = [path.name for path in temporary.iterdir()]
    assert not [name for name in left if not name.startswith("pytest-of-")], left
    return done.returncode, done.stdout


@HANGS
def test_a_worker_that_hangs_is_named_with_its_limit(
    hang: str, name: str, limit_s: str, tmp_path: Path
) -> None:
    code, told = run(tmp_path, hang, "-n", "1")
    assert code == 1, told
    line = f"FAILED test_some.py::{name} - this test reached its time limit of {limit_s} s"
    assert line in told
    assert "what it said" in told, told
    assert hang is _DEFAULT or 'test_some.py", line' in told, told  # where it waits
    assert "2 failed, 1 passed" in told, told


@HANGS
def test_without_workers_the_run_ends_with_its_summary(
    hang: str, name: str, limit_s: str, tmp_path: Path
) -> None:
    code, told = run(tmp_path, hang)
    assert code == 1, told
    line = f"FAILED test_some.py::{name} - this test reached its time limit of {limit_s} s"
    assert line in told
    assert "what it said" in told, told
    assert "FAILED test_some.py::test_wrong - assert 1 == 2" in told, told
    assert "2 failed" in told, told
    last = f"{name}: this test reached its time limit of {limit_s} s; no test after it was run"
    assert told.rstrip().endswith(last), told


def test_a_process_that_ends_otherwise_is_not_said_to_have_reached_a_limit(tmp_path: Path) -> None:
    code, told = run(tmp_path, _CRASH, "-n", "1")
    assert code == 1, told
    assert "crashed while running 'test_some.py::test_hang'" in told, told
    assert "time limit" not in told, told
    assert "2 failed, 1 passed" in told, told
