"""Behaviour that only the file store has: crashes, rights, eviction, expiry on disk, threads.

Also disks that refuse calls, have broken sectors, or have files of other users.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import random
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.latch import PATIENCE_S, until
from tests.storage.values import (
    Taken,
    TurnedClock,
    cancelled_after,
    content_of,
    get_one,
    guarded,
    landing,
    put_one,
)
from tierkv.clock import SystemClock
from tierkv.errors import StoreCorruptError, StoreRefusedError, StoreUnavailableError
from tierkv.storage import file_room
from tierkv.storage.file import FileSettings, FileStore
from tierkv.storage.file_room import WRITERS, locked_directory, relative_path
from tierkv.storage.protocol import GetStatus, PutItem, PutStatus, Usage

# Replaces and adds values of one repeated byte each, for ever, and prints its progress.
WRITER = """
import asyncio, random, sys
from pathlib import Path
from tierkv.clock import SystemClock
from tierkv.storage.file import FileSettings, FileStore
from tierkv.storage.protocol import PutItem

async def main():
    store = FileStore(Path(sys.argv[1]), FileSettings(), SystemClock())
    async with store.running():
        while True:
            byte = bytes([random.randrange(256)])
            await store.put([
                PutItem(f"t:f:{i}:0", (byte * 100_000, byte * 200_000), keep_existing=i % 2 == 0)
                for i in random.sample(range(200), 8)
            ])
            print(flush=True)

asyncio.run(main())
"""


def file_store(root: Path, clock: TurnedClock | None = None, **settings: float | None) -> FileStore:
    return FileStore(root, FileSettings(**settings), clock or SystemClock())  # type: ignore[arg-type]


def check_no_scratch(root: Path) -> None:
    """Check that there is one writer, without unfinished values."""
    [own] = (root / ".writers").iterdir()
    assert [path.name for path in own.iterdir()] == ["lock"]


async def test_a_writer_killed_at_any_moment_never_leaves_a_torn_value(tmp_path: Path) -> None:
    seen = 0
    for _ in range(4):
        writer = await asyncio.create_subprocess_exec(
            sys.executable, "-c", WRITER, str(tmp_path), stdout=subprocess.PIPE
        )
        assert writer.stdout is not None
        async with file_store(tmp_path).running() as _, asyncio.timeout(60):
            for _ in range(random.randrange(1, 8)):
                await writer.stdout.readline()
            await seen_whole(tmp_path)  # while it writes
            writer.kill()
            await writer.communicate()
        seen += await seen_whole(tmp_path)
    assert seen
    async with file_store(tmp_path).running():
        check_no_scratch(tmp_path)
    assert list((tmp_path / ".writers").iterdir()) == []


async def seen_whole(root: Path) -> int:
    store = file_store(root)
    async with store.running():
        values = (await store.list("t:f:", limit=1_000)).values
        for value in values:
            content = await store.get(value.name, max_bytes=300_000)
            assert content is not None
            assert content == content[:1] * 300_000
        return len(values)


async def test_the_scratch_of_a_living_store_is_left_alone(tmp_path: Path) -> None:
    first = file_store(tmp_path)
    async with first.running():
        [before] = (tmp_path / ".writers").iterdir()
        for _ in range(3):
            async with file_store(tmp_path).running():
                assert before.is_dir()
                assert await put_one(first, f"t:f:{random.random()}:0", b"x") is PutStatus.STORED
        assert list((tmp_path / ".writers").iterdir()) == [before]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield the mount point of a file system of 1 MiB."""
    root = tmp_path / "small"
    root.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tierkv-test", str(root)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small tmpfs needs root and a kernel that lets it")
    try:
        yield root
    finally:
        subprocess.run(["umount", str(root)], check=True)


async def test_a_full_disk_is_full_and_what_is_there_stays_readable(small_disk: Path) -> None:
    store = file_store(small_disk, min_free_bytes=0)
    async with store.running():
        statuses = [
            await put_one(store, f"t:f:{index}:0", content_of(f"{index}", 300_000))
            for index in range(6)
        ]
        assert statuses == [PutStatus.STORED] * 3 + [PutStatus.FULL] * 3
        for index in range(3):
            assert await get_one(store, f"t:f:{index}:0", 300_000) == (
                GetStatus.HIT,
                content_of(f"{index}", 300_000),
            )
        assert await store.usage("t") == Usage(3, 900_000)
        await store.delete(["t:f:0:0"])
        assert await put_one(store, "t:f:4:0", b"x" * 300_000) is PutStatus.STORED
        check_no_scratch(small_disk)


def age_directories(root: Path) -> None:
    for directory in root.glob("[!.]*/**/"):
        os.utime(directory, (0, 0))


def names_in(root: Path) -> set[str]:
    return {path.name for path in root.glob("t,f/*/*/*")}


async def test_beyond_its_capacity_the_values_used_longest_ago_are_evicted(tmp_path: Path) -> None:
    clock = TurnedClock()
    store = file_store(tmp_path, clock, capacity_bytes=10_000)
    async with store.running():
        for index in range(9):
            assert await put_one(store, f"t:f:{index}:0", bytes(1_000)) is PutStatus.STORED
            clock.now += 100
        assert (await get_one(store, "t:f:0:0", 1_000))[0] is GetStatus.HIT
        assert await put_one(store, "t:f:9:0", bytes(1_000)) is PutStatus.STORED
        assert await store.usage("t") == Usage(10, 10_000)
        clock.now += 100
        assert await put_one(store, "t:f:10:0", bytes(1_000)) is PutStatus.STORED
        assert names_in(tmp_path) == {f"{index},0" for index in (0, 3, 4, 5, 6, 7, 8, 9, 10)}
        assert await put_one(store, "t:f:large:0", bytes(10_001)) is PutStatus.FULL
        assert len(names_in(tmp_path)) == 9


async def test_of_values_used_together_the_end_is_evicted_not_the_head(tmp_path: Path) -> None:
    clock = TurnedClock()
    store = file_store(tmp_path, clock, capacity_bytes=10_000)
    async with store.running():
        clock.now += 60 - store.now() % 60  # a minute of the file system begins
        for index in range(10):
            await put_one(store, f"t:f:{index}:0", bytes(1_000))
            clock.now += 0.1
        clock.now += 100
        await put_one(store, "t:f:new:0", bytes(1_000))
        assert names_in(tmp_path) == {f"{index},0" for index in range(8)} | {"new,0"}


async def test_a_store_knows_at_once_what_the_others_on_its_directory_have_added(
    tmp_path: Path,
) -> None:
    stores = [file_store(tmp_path, capacity_bytes=1_000_000) for _ in range(3)]
    async with stores[0].running(), stores[1].running():
        for store in stores[:2]:
            await put_one(store, f"t:f:{id(store)}:0", bytes(10))
        for index in range(120):
            await put_one(stores[index % 2], f"t:f:{index}:0", bytes(20_000))
            if index % 10 == 9:
                assert (await stores[0].usage("t")).num_bytes <= 1_000_000
        async with stores[2].running():  # a process that opens the store, fills it, and ends
            for index in range(200, 240):
                await put_one(stores[2], f"t:f:{index}:0", bytes(20_000))
        for index in range(300, 340):
            await put_one(stores[index % 2], f"t:f:{index}:0", bytes(20_000))
        assert (await stores[0].usage("t")).num_bytes <= 1_000_000


async def test_what_has_expired_is_evicted_before_what_has_not(tmp_path: Path) -> None:
    clock = TurnedClock()
    store = file_store(tmp_path, clock, capacity_bytes=10_000)
    async with store.running():
        for index in range(5):
            await put_one(store, f"t:f:{index}:0", bytes(1_000))
        clock.now += 100
        for index in range(5, 10):
            await put_one(store, f"t:f:{index}:0", bytes(1_000), ttl_s=10)
        clock.now += 100
        await put_one(store, "t:f:new:0", bytes(1_000))
        assert {f"{index},0" for index in range(5)} | {"new,0"} <= names_in(tmp_path)


def move_times(path: Path, *, used_s: float = 0.0, expires_s: float = 0.0) -> None:
    """Move a value's times of use and expiry, as if the file server's clock had been changed."""
    status = path.stat()
    times = status.st_atime_ns + int(used_s * 1e9), status.st_mtime_ns + int(expires_s * 1e9)
    os.utime(path, ns=times)


async def test_after_the_clock_was_set_back_what_is_used_stays_and_the_rest_goes(
    tmp_path: Path,
) -> None:
    clock = TurnedClock()
    store = file_store(tmp_path, clock, capacity_bytes=10_000)
    async with store.running():
        for index in range(10):
            name = f"t:f:{index}:0"
            await put_one(store, name, bytes(1_000))
            move_times(tmp_path.joinpath(*relative_path(name)), used_s=86_400.0 * 365)
        assert (await get_one(store, "t:f:9:0", 1_000))[0] is GetStatus.HIT
        for index in range(20, 26):
            await put_one(store, f"t:f:{index}:0", bytes(1_000))
            clock.now += 100
        assert {f"{index},0" for index in (9, 20, 21, 22, 23, 24, 25)} <= names_in(tmp_path)


async def test_the_disk_is_not_filled_beyond_the_floor(small_disk: Path) -> None:
    store = file_store(small_disk, min_free_bytes=500_000)
    async with store.running():
        for index in range(20):
            assert await put_one(store, f"t:f:{index}:0", bytes(100_000)) is PutStatus.STORED
            disk = os.statvfs(small_disk)
            # Up to two blocks of the file system are missing.
            assert disk.f_bavail * disk.f_frsize >= 450_000
        assert len(names_in(small_disk)) >= 3
    store = file_store(small_disk, min_free_bytes=1 << 30)
    async with store.running():
        assert await put_one(store, "t:f:more:0", bytes(100_000)) is PutStatus.FULL


async def test_a_value_larger_than_files_may_be_is_full_and_leaves_nothing(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    async with store.running():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        try:
            status = await put_one(store, "t:f:a:0", bytes(2 << 20))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert status is PutStatus.FULL
        assert await store.exists(["t:f:a:0"]) == 0
        check_no_scratch(tmp_path)


async def test_expiry_outlives_the_process_and_expired_files_are_removed(tmp_path: Path) -> None:
    clock = TurnedClock()
    store = file_store(tmp_path, clock)
    async with store.running():
        await put_one(store, "t:f:a:0", b"a", ttl_s=100.0)
        await put_one(store, "t:f:b:0", b"b", ttl_s=200.0)
        await put_one(store, "t:f:c:0", b"c")
    for name in ("t:f:a:0", "t:f:b:0"):
        move_times(tmp_path.joinpath(*relative_path(name)), expires_s=-100.0)
    store = file_store(tmp_path, clock, num_threads=1)
    async with store.running():
        assert await store.exists(["t:f:b:0", "t:f:c:0", "t:f:a:0"]) == 2
        await store.sweep()  # after the sweep at the start
        assert not tmp_path.joinpath(*relative_path("t:f:a:0")).exists()
        clock.now += 100
        assert (await get_one(store, "t:f:b:0", 1))[0] is GetStatus.MISS
        assert not tmp_path.joinpath(*relative_path("t:f:b:0")).exists()
        assert await store.sweep() == 0
        assert tmp_path.joinpath(*relative_path("t:f:c:0")).read_bytes() == b"c"


async def test_of_many_who_take_over_an_expired_value_one_has_stored_it(tmp_path: Path) -> None:
    clock = TurnedClock()
    stores = [file_store(tmp_path, clock, num_threads=8) for _ in range(2)]
    async with stores[0].running(), stores[1].running():
        for round_number in range(20):
            name = f"t:f:{round_number}:0"
            await put_one(stores[0], name, b"old", ttl_s=1.0)
            clock.now += 1.001  # Unix seconds as floats are exact to 0.2 us
            async with asyncio.TaskGroup() as group:
                puts = [group.create_task(put_one(s, name, b"new")) for s in stores * 6]
            statuses = sorted(put.result().value for put in puts)
            assert statuses == ["existed"] * 11 + ["stored"]


async def test_a_value_renewed_just_before_its_removal_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, flock = TurnedClock(), fcntl.flock
    store = file_store(tmp_path, clock, num_threads=1)
    path = tmp_path.joinpath(*relative_path("t:f:a:0"))

    def late_flock(fd: int, operation: int) -> None:
        # Not for other locks, such as those of the store's own directories.
        if operation != fcntl.LOCK_UN and os.path.samestat(os.fstat(fd), os.stat(path.parent)):
            path.write_bytes(b"new")
            os.utime(path, (0, 0))
        flock(fd, operation)

    async with store.running():
        await put_one(store, "t:f:a:0", b"old", ttl_s=1.0)
        await store.sweep()  # after the sweep at the start
        clock.now += 1.001
        monkeypatch.setattr(fcntl, "flock", late_flock)
        assert (await get_one(store, "t:f:a:0", 3))[0] is GetStatus.MISS
        monkeypatch.undo()
        assert await get_one(store, "t:f:a:0", 3) == (GetStatus.HIT, b"new")


async def test_links_pipes_and_strangers_in_the_directory_do_no_harm(tmp_path: Path) -> None:
    root, secret = tmp_path / "store", tmp_path / "secret"
    secret.write_bytes(b"secret")
    store = file_store(root, num_threads=1)
    async with store.running():
        await put_one(store, "t:f:a:0", b"value!")
        await store.sweep()  # after the sweep at the start, which removes these as expired values
        for name, make in (("t:f:link:0", Path.symlink_to), ("t:f:pipe:0", None)):
            path = root.joinpath(*relative_path(name))
            path.parent.mkdir(parents=True, exist_ok=True)
            if make is None:
                os.mkfifo(path)
            else:
                make(path, secret)
            os.utime(path, (0, 0), follow_symlinks=False)  # the times of a value that never expires
            async with asyncio.timeout(5):
                assert (await get_one(store, name, 6))[0] is GetStatus.MISS
                assert await store.get(name, max_bytes=6) is None
                assert await store.exists([name]) == 0
        (root / "stranger").write_text("x")
        (root / "t,f" / "stranger").write_text("x")
        (root / "t,f" / "7").mkdir(exist_ok=True)
        (root / "t,f" / "7" / "stranger").symlink_to(tmp_path)
        names = [value.name for value in (await store.list("t", limit=100)).values]
        assert names == ["t:f:a:0"]
        assert await store.usage("t") == Usage(1, 6)
        await store.delete(["t:f:link:0"])
        root.joinpath(*relative_path("t:f:link:0")).symlink_to(secret)
        for name in ("t:f:link:0", "t:f:pipe:0"):  # neither prevents a write of the value
            assert await put_one(store, name, b"value?") is PutStatus.STORED
            assert await get_one(store, name, 6) == (GetStatus.HIT, b"value?")
    assert secret.read_bytes() == b"secret"


@pytest.mark.parametrize("what", ["root", "content", "writers"])
async def test_what_somebody_removes_is_a_miss_and_made_again(tmp_path: Path, what: str) -> None:
    root = tmp_path / "store"
    store = file_store(root, capacity_bytes=1000)
    open_before = len(os.listdir("/proc/self/fd"))
    async with store.running():
        assert await put_one(store, "t:f:1:0", bytes(800)) is PutStatus.STORED
        removed = {"root": [root], "content": [*root.iterdir()], "writers": [root / WRITERS]}
        for path in removed[what]:
            shutil.rmtree(path)
        expected = GetStatus.HIT if what == "writers" else GetStatus.MISS
        assert (await get_one(store, "t:f:1:0", 800))[0] is expected
        await store.ping()
        # The count of the ended process is known to be lost.
        assert await put_one(store, "t:f:2:0", bytes(800)) is PutStatus.STORED
        assert (await get_one(store, "t:f:2:0", 800))[0] is GetStatus.HIT
        async with file_store(root).running():  # it removes files of dead processes, not ours
            assert await put_one(store, "t:f:3:0", b"x") is PutStatus.STORED
        assert await store.delete(["t:f:2:0", "t:f:3:0"]) >= 1
    assert list((root / WRITERS).iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) <= open_before


async def test_a_file_system_that_is_gone_is_not_replaced_by_the_one_below(
    tmp_path: Path, small_disk: Path
) -> None:
    """After an unmount, values would otherwise fill the disk that has the mount point."""
    root = tmp_path / "store"
    root.symlink_to(small_disk, target_is_directory=True)
    store = file_store(root, min_free_bytes=0)
    async with store.running():
        assert await put_one(store, "t:f:1:0", b"x") is PutStatus.STORED
        root.unlink()
        root.mkdir()
        [outcome] = await store.put([PutItem("t:f:2:0", (b"x",))])
        assert outcome.status is PutStatus.FAILED
        assert "not mounted" in outcome.reason
        assert list(root.iterdir()) == []


@pytest.mark.parametrize("ticks", [2, 5, 9])
async def test_a_cancel_while_a_store_is_opened_leaves_no_scratch(
    tmp_path: Path, ticks: int
) -> None:
    async def use() -> None:
        async with file_store(tmp_path).running():
            await asyncio.Event().wait()

    with suppress(asyncio.CancelledError):
        await cancelled_after(ticks, use())
    assert not list((tmp_path / ".writers").glob("*"))


async def test_nothing_is_left_open_after_the_lifetime(tmp_path: Path) -> None:
    open_before = len(os.listdir("/proc/self/fd"))
    store = file_store(tmp_path)
    async with store.running():
        await store.put([PutItem(f"t:f:{i}:0", (b"x",)) for i in range(50)])
        await get_one(store, "t:f:1:0", 1)
        await get_one(store, "t:f:nothing:0", 1)
        # The lock, and the directories that the sweep reads until it has ended.
        await until(lambda: len(os.listdir("/proc/self/fd")) <= open_before + 1)
    assert len(os.listdir("/proc/self/fd")) <= open_before
    async with asyncio.timeout(5):
        for thread in threading.enumerate():
            if thread.name.startswith("tierkv-store"):
                await asyncio.to_thread(thread.join)


async def test_a_value_that_is_cut_while_it_is_read_has_no_digest(tmp_path: Path) -> None:
    content = content_of("a", 700_000)
    path = tmp_path.joinpath(*relative_path("t:f:a:0"))

    class Cutting(Taken):
        def update(self, piece: memoryview, /) -> None:
            super().update(piece)
            with suppress(FileNotFoundError):  # cut before, expired thereby, and swept
                os.truncate(path, 300_000)

    async with (store := file_store(tmp_path)).running():
        await put_one(store, "t:f:a:0", content)
        item, _ = landing("t:f:a:0", len(content))
        [outcome] = await store.get_into([replace(item, digest=Cutting)])
        assert (outcome.status, outcome.digest) == (GetStatus.DAMAGED, None)


async def test_what_is_another_users_keeps_nobody_from_what_is_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other user may be root, after a look into the store or with a node of another model."""
    clock = TurnedClock()
    not_ours = {str(tmp_path / name) for name in (".writers/root", ".writers/root/lock", "t,a/1")}
    (tmp_path / ".writers/root").mkdir(parents=True)
    (tmp_path / "t,a/1").mkdir(parents=True)
    for call in ("open", "scandir"):
        refuses(monkeypatch, call, errno.EACCES, lambda path: path in not_ours)
    store = file_store(tmp_path, clock, capacity_bytes=1000)
    async with store.running():
        assert await put_one(store, "t:f:1:0", bytes(500), ttl_s=10.0) is PutStatus.STORED
        assert await put_one(store, "t:f:2:0", bytes(400)) is PutStatus.STORED
        clock.now += 60.0
        expired = tmp_path.joinpath(*relative_path("t:f:1:0"))
        async with asyncio.timeout(PATIENCE_S):
            while expired.exists():
                await store.sweep()  # skips a directory that the sweep at the start has locked
        assert await put_one(store, "t:f:3:0", bytes(700)) is PutStatus.STORED  # one was evicted
        assert [one.name for one in (await store.list("t:", limit=10)).values] == ["t:f:3:0"]
    assert [path.name for path in (tmp_path / ".writers").iterdir()] == ["root"]


async def test_directories_of_a_model_that_is_no_more_are_not_kept(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    names = [f"t:{model}:{index}:0" for model in ("gone", "used") for index in range(5)]
    async with store.running():
        await store.put([PutItem(name, (b"x",)) for name in names])
        assert await store.delete(names[:5]) == 5
        await store.sweep()
        assert (tmp_path / "t,gone").exists()  # it was in use just now
        for _ in relative_path(names[0])[:-1]:
            age_directories(tmp_path)
            await store.sweep()
        assert not (tmp_path / "t,gone").exists()
        assert await store.exists(names[5:]) == 5
        assert await put_one(store, names[0], b"x") is PutStatus.STORED
        assert await get_one(store, names[0], 1) == (GetStatus.HIT, b"x")


async def test_a_directory_removed_while_it_is_made_costs_no_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process's sweep removes the directory after `mkdir` has found it."""
    made, parent = os.mkdir, str(tmp_path.joinpath(*relative_path("t:f:1:0")).parent)

    def removed_meanwhile(path: str, mode: int = 0o777) -> None:
        try:
            made(path, mode)
        except FileExistsError:
            if path == parent:
                os.rmdir(path)
            raise

    store = file_store(tmp_path)
    async with store.running():
        os.makedirs(parent)
        monkeypatch.setattr(os, "mkdir", removed_meanwhile)
        assert await put_one(store, "t:f:1:0", b"value") is PutStatus.STORED
        assert await store.get("t:f:1:0", max_bytes=10) == b"value"


async def test_a_directory_removed_and_made_again_does_not_let_two_be_the_first(
    tmp_path: Path,
) -> None:
    slow, fast = file_store(tmp_path), file_store(tmp_path)
    path = tmp_path.joinpath(*relative_path("t:f:1:0"))
    path.parent.mkdir(parents=True)
    async with slow.running(), fast.running(), asyncio.TaskGroup() as group:
        lock = os.open(path.parent, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        put = group.create_task(put_one(slow, "t:f:1:0", b"slow", only_new=True))
        await until(lambda: any(tmp_path.glob(".writers/*/0")), "written, and not visible")
        await asyncio.to_thread(path.parent.rmdir)
        fast_is = await put_one(fast, "t:f:1:0", b"fast", only_new=True)
        os.close(lock)
        # The slow write waits for the lock of the removed directory. If it had not begun to wait at
        # the removal, it is the first in the new directory.
        outcomes = {fast_is: b"fast", await put: b"slow"}
        assert outcomes.keys() == {PutStatus.STORED, PutStatus.EXISTED}
        assert await slow.get("t:f:1:0", max_bytes=10) == outcomes[PutStatus.STORED]


FORKING = """
import os, sys
from tierkv.storage.file_room import locked_directory

with locked_directory(sys.argv[1]):
    if not os.fork():
        sys.stdin.read()  # until the test is over
        os._exit(0)
print("left", flush=True)
sys.stdin.read()
"""


def test_a_lock_ends_with_its_holder_though_a_child_was_forked_meanwhile(tmp_path: Path) -> None:
    """An engine may start its workers by fork; they inherit the open file of the lock."""
    with subprocess.Popen(
        [sys.executable, "-c", FORKING, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as forking:
        assert forking.stdout is not None
        assert forking.stdout.readline() == "left\n"
        with locked_directory(str(tmp_path), waits=False):
            pass
        forking.communicate(timeout=200)


# Disks that refuse calls, have broken sectors, or have files of other users


def refuses(
    disk: pytest.MonkeyPatch, call: str, code: int, where: Callable[[str], bool] = lambda _: True
) -> None:
    """Let the system call `call` fail with `code` for paths that `where` accepts."""
    asked = getattr(os, call)

    def refuse(path: str | Path, *more: object, **options: object) -> object:
        if where(str(path)):
            raise OSError(code, os.strerror(code), str(path))
        return asked(path, *more, **options)

    disk.setattr(os, call, refuse)


async def test_empty_directories_of_strangers_beside_the_values_stay(tmp_path: Path) -> None:
    strangers = ["backup", "project/.git/refs", "project/3/f", "a,b/objects", "a,b/1/photos"]
    for path in strangers:
        (tmp_path / path).mkdir(parents=True)
    store = file_store(tmp_path, min_free_bytes=0, num_threads=1)  # one sweep at a time
    async with store.running():
        assert await put_one(store, "a:b:ours:0", b"x") is PutStatus.STORED
        ours = tmp_path.joinpath(*relative_path("a:b:ours:0")).parent
        assert await store.delete(["a:b:ours:0"]) == 1
        age_directories(tmp_path)
        await store.sweep()
        assert not ours.exists()
    assert [path for path in strangers if not (tmp_path / path).is_dir()] == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
async def test_a_disk_that_takes_nothing_more_is_opened_to_be_read_and_emptied(
    tmp_path: Path, code: int
) -> None:
    root = tmp_path / "store"
    async with (store := file_store(root, min_free_bytes=0, capacity_bytes=1000)).running():
        assert await put_one(store, "t:f:a:0", b"value") is PutStatus.STORED
        assert await put_one(store, "t:f:b:0", b"value") is PutStatus.STORED
    store = file_store(root, min_free_bytes=0, capacity_bytes=1000)
    with pytest.MonkeyPatch.context() as disk:
        refuses(disk, "mkdir", code)
        async with store.running():
            assert await get_one(store, "t:f:a:0", 5) == (GetStatus.HIT, b"value")
            assert await put_one(store, "t:f:a:0", b"value") is PutStatus.EXISTED
            assert await put_one(store, "t:f:c:0", b"value") is PutStatus.FULL
            assert await store.usage("t") == Usage(2, 10)
            assert await store.delete(["t:f:b:0"]) == 1
            await store.ping()
            disk.undo()
            assert await put_one(store, "t:f:c:0", b"value") is PutStatus.STORED
        assert list((root / WRITERS).iterdir()) == []
        refuses(disk, "mkdir", code)
        with pytest.raises(StoreUnavailableError, match="set another directory"):
            async with file_store(tmp_path / "new", min_free_bytes=0).running():
                pass


@pytest.mark.parametrize(
    "code", [errno.EROFS, errno.EACCES, errno.EPERM, errno.EXDEV]
)  # EXDEV: such as a link to another disk
async def test_a_disk_that_lets_nothing_be_changed_is_not_kept_from_its_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    store = guarded(file_store(tmp_path, min_free_bytes=0), full_pause_s=0.001)
    async with store.running():
        assert await put_one(store, "t:f:a:0", b"value") is PutStatus.STORED
        refuses(monkeypatch, "rename", code)
        for call in ("utime", "unlink"):
            refuses(monkeypatch, call, code, lambda path: "t,f" in path)
        for index in range(20):  # such as batches of a long prompt's blocks
            assert await put_one(store, f"t:f:{index}:0", b"x") is PutStatus.FULL
            with pytest.raises(StoreRefusedError, match="t:f:a:0"):
                await store.touch(["t:f:a:0"], ttl_s=60)
            with pytest.raises(StoreRefusedError, match="t:f:a:0"):
                await store.delete(["t:f:a:0"])
        assert store.health.num_opened == 0
        assert await get_one(store, "t:f:a:0", 5) == (GetStatus.HIT, b"value")


@pytest.mark.parametrize("code", [errno.EIO, errno.EBADMSG])
async def test_a_value_on_a_broken_place_of_the_disk_is_damaged(tmp_path: Path, code: int) -> None:
    """A damaged value is deleted. With another outcome it would be found, and fail, every time."""
    async with (store := file_store(tmp_path, min_free_bytes=0)).running():
        assert await put_one(store, "t:f:a:0", b"value") is PutStatus.STORED
        with pytest.MonkeyPatch.context() as disk:
            refuses(disk, "preadv", code)
            assert (await get_one(store, "t:f:a:0", 5))[0] is GetStatus.DAMAGED
            with pytest.raises(StoreCorruptError, match="t:f:a:0"):
                await store.get("t:f:a:0", max_bytes=10)


async def test_what_may_not_be_removed_keeps_nothing_else_from_going(tmp_path: Path) -> None:
    clock = TurnedClock()
    settings = FileSettings(min_free_bytes=0, capacity_bytes=1000)
    async with (store := FileStore(tmp_path, settings, clock)).running():
        names = [f"t:f:{index}:0" for index in range(20)]
        await store.put([PutItem(name, (bytes(20),), ttl_s=50.0) for name in names])
        kept = str(tmp_path.joinpath(*relative_path(names[3])))
        clock.now += 60.0
        with pytest.MonkeyPatch.context() as disk:
            refuses(disk, "unlink", errno.EPERM, lambda path: path == kept)
            await store.sweep()
            assert names_in(tmp_path) == {"3,0"}
            clock.now -= 60.0
            assert await put_one(store, "t:f:a:0", bytes(900)) is PutStatus.STORED
            assert await put_one(store, "t:f:b:0", bytes(900)) is PutStatus.STORED
            assert await store.present(["t:f:a:0", names[3]]) == [False, True]


async def test_a_disk_down_to_its_floor_is_not_looked_through_for_each_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listing the directory takes a second with 200,000 values."""
    statvfs, walked = os.statvfs, 0

    def filled_disk(path: Path) -> os.statvfs_result:
        """Report a disk with room for 200 values of 1,000 bytes."""
        disk = list(statvfs(path))
        disk[1] = 1  # f_frsize, in bytes
        disk[4] = 200_000 - 1000 * len(names_in(tmp_path))  # f_bavail
        return os.statvfs_result(disk)

    walk_of_room = file_room.walk

    def walk(*some: Any, **more: Any) -> Iterator[tuple[str, os.DirEntry[str]]]:
        nonlocal walked
        walked += 1
        return walk_of_room(*some, **more)

    store = FileStore(tmp_path, FileSettings(min_free_bytes=40_000), TurnedClock())
    async with store.running():
        monkeypatch.setattr(os, "statvfs", filled_disk)
        monkeypatch.setattr(file_room, "walk", walk)
        for index in range(200):
            assert await put_one(store, f"t:f:{index}:0", bytes(1000)) is PutStatus.STORED
        assert 1 <= walked <= 12
        assert 150 <= (await store.usage("t")).num_values <= 160


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
async def test_a_disk_without_inodes_or_beyond_a_quota_gives_up_what_was_used_longest_ago(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """The disk reports free bytes all the time, so only the refused write shows the limit."""
    clock, names = TurnedClock(), [f"t:f:{index}:0" for index in range(100)]
    store = FileStore(tmp_path, FileSettings(min_free_bytes=1), clock)
    async with store.running():
        for name in names:
            assert await put_one(store, name, b"value") is PutStatus.STORED
            clock.now += 100
        renamed = os.rename

        def rename(old: str, new: str) -> None:
            if len(names_in(tmp_path)) >= 100:
                raise OSError(code, os.strerror(code), new)
            renamed(old, new)

        monkeypatch.setattr(os, "rename", rename)
        put = await store.put([PutItem(f"t:f:new{index}:0", (b"value",)) for index in range(4)])
        assert {outcome.status for outcome in put} == {PutStatus.STORED}
        are_there = await store.present(names)
        num_removed = are_there.index(True)
        assert 1 <= num_removed <= 20
        assert all(are_there[num_removed:])


async def test_a_models_directory_that_was_moved_and_linked_counts_like_any_other(
    tmp_path: Path,
) -> None:
    root, moved = tmp_path / "store", tmp_path / "moved"
    names = [f"t:f:{index}:0" for index in range(20)]
    async with (store := file_store(root, min_free_bytes=0, capacity_bytes=10_000)).running():
        await store.put([PutItem(name, (bytes(100),)) for name in names])
    (root / "t,f").rename(moved)
    (root / "t,f").symlink_to(moved)
    (root / "t,loop").symlink_to(root / "t,loop")
    (root / "t,root").symlink_to("/")
    async with (store := file_store(root, min_free_bytes=0, capacity_bytes=10_000)).running():
        assert await store.usage("t:f:") == Usage(20, 2000)
        for index in range(200):
            assert await put_one(store, f"t:f:new{index}:0", bytes(100)) is PutStatus.STORED
        assert (await store.usage("t:f:")).num_bytes <= 10_000


async def test_a_models_directory_of_another_user_keeps_nobody_from_other_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory may be root's, if root ran a node of that model here before."""
    store = guarded(file_store(tmp_path, min_free_bytes=0), full_pause_s=0.001)
    async with store.running():
        assert await put_one(store, "t:ours:a:0", b"value") is PutStatus.STORED
        assert await put_one(store, "t:root:a:0", b"value") is PutStatus.STORED
        for call in ("stat", "open", "mkdir"):
            refuses(monkeypatch, call, errno.EACCES, lambda path: "t,root/" in path)
        for index in range(10):
            assert await store.exists([f"t:root:{index}:0"]) == 0
            assert await store.present([f"t:root:{index}:0"]) == [False]
            assert (await get_one(store, "t:root:a:0", 5))[0] is GetStatus.MISS
            assert await put_one(store, f"t:root:{index}:0", b"value") is PutStatus.FULL
            with pytest.raises(StoreRefusedError, match="t:root:a:0"):
                await store.get("t:root:a:0", max_bytes=10)
        assert store.health.num_opened == 0
        assert await get_one(store, "t:ours:a:0", 5) == (GetStatus.HIT, b"value")


def directory_in_place(path: Path) -> None:
    path.mkdir(parents=True)
    (path / "file").touch()


def file_on_the_way(path: Path) -> None:
    path.parents[2].write_bytes(b"")


def link_to_itself(path: Path) -> None:
    path.parents[2].symlink_to(path.parents[2])


@pytest.mark.parametrize(
    "put_there",
    [directory_in_place, file_on_the_way, link_to_itself],
)
async def test_what_is_in_the_way_of_a_models_values_keeps_nobody_from_the_rest(
    tmp_path: Path, put_there: Callable[[Path], None]
) -> None:
    store = guarded(file_store(tmp_path, min_free_bytes=0), full_pause_s=100.0)
    name = "t:theirs:a:0"
    async with store.running():
        assert await put_one(store, "t:ours:a:0", b"value") is PutStatus.STORED
        put_there(tmp_path.joinpath(*relative_path(name)))
        for _ in range(10):
            assert await put_one(store, name, b"value") is PutStatus.FULL
        assert await put_one(store, "t:ours:b:0", b"value") is PutStatus.STORED
        for _ in range(10):
            assert await store.exists([name]) == 0
            assert await store.present([name]) == [False]
            assert (await get_one(store, name, 5))[0] is GetStatus.MISS
            assert await store.get(name, max_bytes=5) is None
        assert store.health.num_opened == 0
        assert await get_one(store, "t:ours:a:0", 5) == (GetStatus.HIT, b"value")
        assert (await store.usage("t")) == Usage(2, 10)
