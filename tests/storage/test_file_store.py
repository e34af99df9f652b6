"""Behaviour that only the file store has: crashes, rights, eviction, expiry on disk, threads."""

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

import pytest

from tests.latch import PATIENCE_S, until
from tests.storage.values import (
    Taken,
    TurnedClock,
    cancelled_after,
    content_of,
    get_one,
    landing,
    put_one,
)
from tierkv.clock import SystemClock
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
        [own] = (tmp_path / ".writers").iterdir()
        assert [path.name for path in own.iterdir()] == ["lock"]
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
        [own] = (small_disk / ".writers").iterdir()
        assert [path.name for path in own.iterdir()] == ["lock"]


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
        [own] = (tmp_path / ".writers").iterdir()
        assert [path.name for path in own.iterdir()] == ["lock"]


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
            clock.now += 1
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
        clock.now += 1
        monkeypatch.setattr(fcntl, "flock", late_flock)
        assert (await get_one(store, "t:f:a:0", 3))[0] is GetStatus.MISS
        monkeypatch.undo()
        assert await get_one(store, "t:f:a:0", 3) == (GetStatus.HIT, b"new")


async def test_two_who_find_no_value_do_not_both_store_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, rename, second_came = fcntl.flock, os.rename, threading.Event()
    asked: list[int] = []

    def counted_flock(fd: int, operation: int) -> None:
        asked.append(fd)
        if len(asked) == 2:
            second_came.set()
        flock(fd, operation)

    def late_rename(source: str, target: str) -> None:
        assert second_came.wait(10)
        rename(source, target)

    stores = [file_store(tmp_path) for _ in range(2)]
    async with stores[0].running(), stores[1].running():
        monkeypatch.setattr(fcntl, "flock", counted_flock)
        monkeypatch.setattr(os, "rename", late_rename)
        async with asyncio.TaskGroup() as group:
            puts = [group.create_task(put_one(store, "t:f:a:0", b"x")) for store in stores]
        assert sorted(put.result().value for put in puts) == ["existed", "stored"]
        monkeypatch.undo()


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

    def refused(call: Callable[..., object]) -> Callable[..., object]:
        def only_ours(path: str | Path, *more: object, **options: object) -> object:
            if str(path) in not_ours:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return call(path, *more, **options)

        return only_ours

    for name in ("open", "scandir"):
        monkeypatch.setattr(os, name, refused(getattr(os, name)))
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
            for directory in (tmp_path / "t,gone").glob("**/"):
                os.utime(directory, (0, 0))
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
