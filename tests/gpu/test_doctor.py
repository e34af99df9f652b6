"""What a machine says of its memory, and what `tierkv doctor` makes of it."""

from __future__ import annotations

import json
import platform
import re
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.gpu.test_memory_limits import write
from tierkv.cli import main
from tierkv.gpu import numa


def run_doctor(storage: str, *options: str) -> Result:
    of_a_gateway = {"TIERKV_GATEWAY__PORT": "81"}  # one environment serves both roles
    found = CliRunner().invoke(main, ["doctor", "--storage", storage, *options], env=of_a_gateway)
    assert found.exit_code in {0, 1}, found.output
    assert found.stdout, found.output
    return found


def doctor() -> list[str]:
    return run_doctor("none").stdout.splitlines()


def test_a_doctor_does_not_guess_where_the_machine_says_nothing(root: Path) -> None:
    lines = doctor()
    for what in ("transparent huge pages", "NUMA nodes"):
        assert next(line for line in lines if line.startswith(what)).endswith(
            "unknown on this machine"
        )
    assert not any("transparent_hugepage" in line for line in lines), "there is nothing to set"


def test_a_doctor_tells_huge_pages_that_are_off_from_those_that_are_set_aside(root: Path) -> None:
    write(
        root / "sys/kernel/mm",
        {
            "transparent_hugepage/enabled": "always madvise [never]",
            "hugepages/hugepages-2048kB/free_hugepages": 512,
            "hugepages/hugepages-2048kB/nr_hugepages": 512,
        },
    )
    lines = doctor()
    at = next(at for at, line in enumerate(lines) if line.startswith("transparent huge pages"))
    assert lines[at].endswith("never  [warning]")
    assert "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled" in lines[at + 1]
    assert any("1.00 GiB left of 1.00 GiB" in line for line in lines)


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in {"x86_64", "aarch64"},
    reason="mbind is Linux's, and its number is known for two kinds of machine",
)
def test_a_doctor_says_whether_memory_may_be_placed_where_there_is_a_choice(root: Path) -> None:
    assert not any(line.startswith("NUMA placement") for line in doctor())
    for node in range(2):
        (root / f"sys/devices/system/node/node{node}").mkdir(parents=True)
    told = next(line for line in doctor() if line.startswith("NUMA placement"))
    assert ("allowed" in told) == numa.may_place()


def test_without_cupy_a_doctor_ends_with_an_error_and_the_remedy(without_cupy: None) -> None:
    found = run_doctor("none")
    assert found.exit_code == 1
    assert "CuPy" in found.stdout
    assert "pip install -e '.[cuda12]'" in found.stdout


def test_a_doctor_measures_the_store(tmp_path: Path) -> None:
    assert "GB/s written" in run_doctor((tmp_path / "store").as_uri()).stdout
    assert [one for one in (tmp_path / "store").rglob("*") if one.stat().st_size > 1 << 19] == []
    gone = run_doctor("redis://127.0.0.1:1", "--json")
    assert gone.exit_code == 1
    [told] = [one for one in json.loads(gone.stdout)["findings"] if one["what"] == "store"]
    assert told["verdict"] == "bad"
    assert "cannot be reached" in told["value"]


@pytest.mark.parametrize(("ahead_s", "which"), [(660.0, "ahead of"), (-660.0, "behind")])
def test_a_doctor_compares_this_machines_clock_with_the_stores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: float, which: str
) -> None:
    url = (tmp_path / "store").as_uri()
    right = run_doctor(url).stdout
    assert re.search(r"^clock +0\.\d\d s from the store's$", right, re.MULTILINE)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + ahead_s)
    wrong = run_doctor(url).stdout
    assert f"this machine's clock is 660 s {which} it  [warning]" in wrong
