"""Memory is refused in a sentence where its limits leave too little, and nothing is killed."""

from __future__ import annotations

import json
import mmap
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.world import GQA
from tierkv.api.settings import NodeSettings
from tierkv.cli import main
from tierkv.errors import ConfigError
from tierkv.gpu import room
from tierkv.gpu.cpu import CpuHostSlots, CpuPlanes
from tierkv.ranks.memory import SharedSlots, shared_memory

GIB = 1 << 30
MIB = 1 << 20


def write(folder: Path, files: Mapping[str, object]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def version_2(
    folder: Path, limit: int | str, used: int, of_files: int = 0, high: int | str = "max"
) -> None:
    stat = f"anon {used - of_files}\nactive_file 0\ninactive_file {of_files}"
    files = {"memory.max": limit, "memory.high": high, "memory.current": used, "memory.stat": stat}
    write(folder, files)


def version_1(folder: Path, limit: int, used: int, of_files: int = 0) -> None:
    stat = f"inactive_file 7\ntotal_active_file {of_files}\ntotal_inactive_file 0"
    files = {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.stat": stat}
    write(folder, files)


def container() -> room.MemoryLimit:
    return named("memory of this container")


def named(what: str) -> room.MemoryLimit:
    [found] = [limit for limit in room.memory_limits() if limit.what == what]
    return found


def test_the_cgroup_that_leaves_least_counts_however_far_above_the_process(root: Path) -> None:
    write(root, {"proc/self/cgroup": "0::/system.slice/tierkv.service/main"})
    base = root / "sys/fs/cgroup"
    version_2(base / "system.slice/tierkv.service/main", "max", 2 * GIB)
    version_2(base / "system.slice/tierkv.service", 10 * GIB, 3 * GIB)
    version_2(base / "system.slice", 100 * GIB, 4 * GIB)
    assert container().left_bytes == 7 * GIB
    version_2(base / "system.slice", 100 * GIB, 4 * GIB, high=6 * GIB)
    assert container().left_bytes == 2 * GIB, "the kernel stops who is above memory.high"
    assert container().source == "/sys/fs/cgroup/system.slice/memory.high"


def test_files_that_a_cgroup_holds_in_memory_take_no_room(root: Path) -> None:
    """A model's weights, read from disk, are dropped when memory runs short."""
    write(root, {"proc/self/cgroup": "0::/"})
    version_2(root / "sys/fs/cgroup", 100 * GIB, 99 * GIB, of_files=60 * GIB)
    assert container().left_bytes == 61 * GIB


def test_a_container_that_is_shown_its_own_cgroup_only_has_its_limit(root: Path) -> None:
    write(root, {"proc/self/cgroup": "4:cpu,memory:/docker/1f2e\n0::/../../other"})
    version_1(root / "sys/fs/cgroup/memory", 8 * GIB, 5 * GIB, of_files=2 * GIB)
    assert container().left_bytes == 5 * GIB
    version_1(root / "sys/fs/cgroup/memory/docker/1f2e", 4 * GIB, 2 * GIB)
    assert container().left_bytes == 2 * GIB
    assert container().source == "/sys/fs/cgroup/memory/docker/1f2e/memory.limit_in_bytes"


@pytest.mark.parametrize("limit", ["max", 1 << 62])
def test_no_limit_refuses_nothing(root: Path, limit: int | str) -> None:
    assert container().left_bytes is None
    version_2(root / "sys/fs/cgroup", limit, GIB)
    assert container().left_bytes is None
    room.require_room(1 << 60, "the host tier", "cache.host_blocks")


def test_a_refusal_says_the_numbers_the_file_and_what_to_set(root: Path) -> None:
    version_2(root / "sys/fs/cgroup", 600 * MIB, 100 * MIB)
    with pytest.raises(ConfigError) as refused:
        shared_memory(2 * GIB)
    assert str(refused.value) == (
        "the host tier needs 2.00 GiB of memory, but this process can allocate only "
        "500.0 MiB more: memory of this container is 600.0 MiB (/sys/fs/cgroup/memory.max). "
        "Raise that limit (docker --memory, Kubernetes resources.limits.memory, systemd "
        "MemoryMax), or lower cache.host_blocks (an engine's host_bytes)"
    )
    for allocate in (
        lambda: CpuPlanes(GQA, GIB // GQA.block_bytes),
        lambda: CpuHostSlots(GQA, GIB // GQA.block_bytes),
    ):
        with pytest.raises(ConfigError, match=r"allocate only 500\.0 MiB more"):
            allocate()
    with pytest.raises(ConfigError):
        room.require_room(490 * MIB, "the host tier", "cache.host_blocks")  # nothing would be left
    room.require_room(430 * MIB, "the host tier", "cache.host_blocks")


def test_pages_that_exist_already_take_addresses_alone(root: Path) -> None:
    descriptor = shared_memory(MIB)
    version_2(root / "sys/fs/cgroup", 600 * MIB, 600 * MIB)
    SharedSlots(descriptor, 1, MIB, slice(0, MIB)).close()


def test_memory_that_is_not_filled_yet_counts_as_taken_until_it_is_gone(root: Path) -> None:
    """Planes and host slots that fit one by one, and not together."""
    version_2(root / "sys/fs/cgroup", 600 * MIB, 100 * MIB)
    planes = CpuPlanes(GQA, 300 * MIB // GQA.block_bytes)
    with pytest.raises(ConfigError, match=r"the host tier needs 300\.0 MiB"):
        CpuHostSlots(GQA, 300 * MIB // GQA.block_bytes)
    for array in planes.arrays:
        array[:] = 1  # the cgroup counts them from now on, were this one real
    CpuHostSlots(GQA, 300 * MIB // GQA.block_bytes).close()
    planes.close()
    del array
    CpuPlanes(GQA, 400 * MIB // GQA.block_bytes).close()
    CpuHostSlots(GQA, 400 * MIB // GQA.block_bytes).close()


def test_a_machine_with_too_little_memory_is_a_warning(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory of some virtual machines grows while it is used."""
    write(root / "proc", {"meminfo": f"MemTotal: {8 << 20} kB\nMemAvailable: {4 << 20} kB"})
    room.require_room(3 * GIB, "the host tier", "cache.host_blocks")
    assert caplog.messages == []
    room.require_room(4 * GIB, "the host tier", "cache.host_blocks")
    [told] = caplog.messages
    assert "this process can allocate only 4.00 GiB more" in told
    with pytest.raises(ConfigError, match=r"the model m needs 4\.00 GiB"):
        room.require_room(4 * GIB, "the model m", "the size of the model", is_filled_now=True)


def test_a_doctor_shows_the_numbers_that_allocations_are_checked_against(root: Path) -> None:
    version_2(root / "sys/fs/cgroup", 600 * MIB, 100 * MIB)
    write(root / "proc", {"meminfo": f"MemTotal: {8 << 20} kB\nMemAvailable: {4 << 20} kB"})
    (root / "dev/shm").mkdir(parents=True)
    shown = CliRunner().invoke(main, ["doctor", "--storage", "none", "--json"])
    values = {one["what"]: one["value"] for one in json.loads(shown.stdout)["findings"]}
    limits = {limit.what: limit.sentence for limit in room.memory_limits()}
    del limits["/dev/shm, for engines"]  # others write there meanwhile
    assert values.items() >= limits.items()
    assert (
        values["memory of this container"]
        == "500.0 MiB left of 600.0 MiB (/sys/fs/cgroup/memory.max)"
    )
    assert "/dev/shm, for engines" in values


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
def test_dev_shm_is_shown_and_does_not_limit_memory_files(root: Path) -> None:
    folder = root / "dev/shm"
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("this machine does not let a test mount")
    try:
        (folder / "other").write_bytes(bytes(3 * MIB))
        shown = named("/dev/shm, for engines")
        assert (shown.left_bytes, shown.limit_bytes) == (5 * MIB, 8 * MIB)
        os.close(shared_memory(16 * MIB))
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_address_space_is_counted(root: Path) -> None:
    taken = mmap.PAGESIZE * 1000
    write(root, {"proc/self/statm": "1000 1 1"})
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    assert named("address space").left_bytes is None
    resource.setrlimit(resource.RLIMIT_AS, (64 * GIB, hard))
    try:
        assert named("address space").left_bytes == 64 * GIB - taken
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def in_a_process(
    *arguments: str, enter: Callable[[], None], **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run Python in a process that calls `enter` first."""
    return subprocess.run(
        [sys.executable, *arguments],
        check=False,
        capture_output=True,
        text=True,
        preexec_fn=enter,
        timeout=60,
        env=os.environ | environ,
    )


@pytest.mark.parametrize(
    "allocate",
    [
        "shared_memory(size)",
        "SharedSlots(os.memfd_create('x'), 1, size, slice(0, 1))",
        "CpuHostSlots(Layout(1, (Plane(0, 'k', 'uint8', 1 << 20),)), size >> 20)",
    ],
)
def test_a_process_with_too_few_addresses_is_told(allocate: str) -> None:
    def enter() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (2 * GIB, 2 * GIB))

    script = f"""
import os
from tierkv.cache.layout import Layout, Plane
from tierkv.errors import ConfigError
from tierkv.gpu.cpu import CpuHostSlots
from tierkv.ranks.memory import SharedSlots, shared_memory
size = 8 << 30
try:
    {allocate}
except ConfigError as error:
    print(error)
"""
    ran = in_a_process("-c", script, enter=enter)
    assert "needs 8.00 GiB" in ran.stdout, ran.stderr
    assert "(ulimit -v)" in ran.stdout


@pytest.fixture
def of_600_mib() -> Iterator[Callable[[], None]]:
    """A function that puts the calling process into a memory cgroup of 600 MiB."""
    base = Path("/sys/fs/cgroup")
    version_one = base / "memory"
    folder = (version_one if version_one.is_dir() else base) / f"tierkv-test-{os.getpid()}"
    try:
        folder.mkdir()
        name = "memory.limit_in_bytes" if version_one.is_dir() else "memory.max"
        (folder / name).write_text(str(600 * MIB))
    except OSError as error:
        if folder.is_dir():
            folder.rmdir()
        pytest.skip(f"this machine does not let a test make a memory cgroup: {error}")
    try:

        def enter() -> None:
            (folder / "cgroup.procs").write_text(str(os.getpid()))

        yield enter
    finally:
        folder.rmdir()


@pytest.mark.promise("Host memory above a container's limit is refused, and the process survives.")
def test_an_engine_cache_above_its_containers_memory_is_refused_and_not_killed(
    of_600_mib: Callable[[], None], tmp_path: Path
) -> None:
    script = f"""
from tests.world import BLOCK, GQA
from tierkv.cache.groups import CacheGroup
from tierkv.cache.keys import Fingerprint
from tierkv.embed import EngineCache, RankSocket
from tierkv.errors import ConfigError
from tierkv.sched.settings import CacheSettings
cache = EngineCache(
    Fingerprint("m", GQA),
    [CacheGroup(GQA)],
    host_bytes=2 << 30,
    cache=CacheSettings(block_size=BLOCK),
    ranks=RankSocket({str(tmp_path / "ranks.sock")!r}, [[GQA]]),
)
try:
    cache.__enter__()
except ConfigError as error:
    print(error)
"""
    ran = in_a_process("-c", script, enter=of_600_mib)
    assert ran.returncode == 0, ran.stderr
    assert (
        "the host tier needs 2.00 GiB of memory, but this process can allocate only" in ran.stdout
    )
    assert "600.0 MiB (/sys/fs/cgroup/" in ran.stdout


@pytest.mark.promise("Host memory above a container's limit is refused, and the process survives.")
def test_serve_above_its_containers_memory_ends_with_the_sentence(
    of_600_mib: Callable[[], None],
) -> None:
    settings = NodeSettings()
    block_bytes = settings.model.layout(settings.cache.block_size).block_bytes
    host_blocks = str(13 * GIB // 2 // block_bytes)
    arguments = ("-m", "tierkv", "serve", "--port", "0", "--storage", "none")
    ran = in_a_process(*arguments, enter=of_600_mib, TIERKV_CACHE__HOST_BLOCKS=host_blocks)
    assert ran.returncode == 1
    assert "the host tier needs 6.5" in ran.stderr
    assert "600.0 MiB (/sys/fs/cgroup/" in ran.stderr
    assert ran.stderr.count("\n") <= 2, ran.stderr
