"""A test that hangs is named with its own time limit, and its run has a summary."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_INI = "[pytest]\ntimeout = 1\ntimeout_method = thread\nasyncio_mode = auto\n"
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
@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.timeout(0.5))])
def test_own(n):
    print("what it said")
    threading.Event().wait()
"""
_DEFAULT = """
async def test_default():
    print("what it said")
    await asyncio.Event().wait()
"""
_CRASH = """
def test_crash():
    os._exit(3)
"""


def run(folder: Path, hang: str, *options: str) -> tuple[int, str]:
    (folder / "pytest.ini").write_text(_INI)
    (folder / "conftest.py").write_bytes(Path(__file__).with_name("conftest.py").read_bytes())
    (folder / "test_some.py").write_text(_TESTS.format(hang=hang))
    temporary = folder / "temporary"
    temporary.mkdir()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly"]
    command += ["-p", "no:schemathesis", *options, str(folder)]
    # pytest repeats whole reports in its summary where it believes that it runs in a CI.
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PYTEST_") and name not in {"CI", "BUILD_NUMBER"}
    }
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


def test_workers_that_hang_are_named_with_their_limits_and_those_that_crash_are_not(
    tmp_path: Path,
) -> None:
    code, told = run(tmp_path, _OWN + _CRASH, "-n", "1")
    assert code == 1, told
    line = "FAILED test_some.py::test_own[1] - this test reached its time limit of 0.5 s"
    assert line in told, told
    assert told.count("what it said") == 1, told
    assert 'test_some.py", line' in told, told  # where it waits
    assert "crashed while running 'test_some.py::test_crash'" in told, told
    crashed = [line for line in told.splitlines() if "test_crash" in line]
    assert not [line for line in crashed if "time limit" in line], told
    assert "3 failed, 1 passed" in told, told


def test_without_workers_the_run_ends_with_its_summary(tmp_path: Path) -> None:
    code, told = run(tmp_path, _DEFAULT)
    assert code == 1, told
    name = "test_default"
    line = f"FAILED test_some.py::{name} - this test reached its time limit of 1 s"
    assert line in told
    assert "what it said" in told, told
    assert "FAILED test_some.py::test_wrong - assert 1 == 2" in told, told
    assert "2 failed" in told, told
    last = f"{name}: this test reached its time limit of 1 s; no test after it was run"
    assert told.rstrip().endswith(last), told
