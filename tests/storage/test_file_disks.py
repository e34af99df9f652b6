"""The file store on a disk that refuses calls, has broken sectors, or has files of other users."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.storage.values import TurnedClock, get_one, put_one
from tierkv.clock import SystemClock
from tierkv.errors import StoreCorruptError, StoreRefusedError, StoreUnavailableError
from tierkv.storage import file_room
from tierkv.storage.factory import StoreSettings, open_guarded_store
from tierkv.storage.file import FileSettings, FileStore
from tierkv.storage.file_room import WRITERS, relative_path
from tierkv.storage.guard import GuardedStore, ResilienceSettings
from tierkv.storage.protocol import GetStatus, PutItem, PutStatus, Usage


def file_store(root: Path, **settings: int) -> FileStore:
    return FileStore(root, FileSettings(min_free_bytes=0, **settings), SystemClock())


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


def age_directories(root: Path) -> None:
    for directory in root.glob("[!.]*/**/"):
        os.utime(directory, (0, 0))


def values_in(root: Path) -> list[str]:
    """Return the paths of all values, including expired ones."""
    return [str(path) for path in root.glob("t,f/*/*/*")]


async def test_empty_directories_of_strangers_beside_the_values_stay(tmp_path: Path) -> None:
    strangers = ["backup", "project/.git/refs", "project/3/f", "a,b/objects", "a,b/1/photos"]
    for path in strangers:
        (tmp_path / path).mkdir(parents=True)
    async with (store := file_store(tmp_path, num_threads=1)).running():  # one sweep at a time
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
    async with (store := file_store(root, capacity_bytes=1000)).running():
        assert await put_one(store, "t:f:a:0", b"value") is PutStatus.STORED
        assert await put_one(store, "t:f:b:0", b"value") is PutStatus.STORED
    store = file_store(root, capacity_bytes=1000)
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
            async with file_store(tmp_path / "new").running():
                pass


def guarded(root: Path, *, full_pause_s: float = 0.001) -> GuardedStore:
    settings = StoreSettings(
        file=FileSettings(min_free_bytes=0),
        resilience=ResilienceSettings(20.0, write_timeout_s=20.0, full_pause_s=full_pause_s),
    )
    return open_guarded_store(root.as_uri(), settings, SystemClock())


@pytest.mark.parametrize(
    "code", [errno.EROFS, errno.EACCES, errno.EPERM, errno.EXDEV]
)  # EXDEV: such as a link to another disk
async def test_a_disk_that_lets_nothing_be_changed_is_not_kept_from_its_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    store = guarded(tmp_path)
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
    async with (store := file_store(tmp_path)).running():
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
            assert values_in(tmp_path) == [kept]
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
        disk[4] = 200_000 - 1000 * len([*tmp_path.glob("t,f/*/*/*")])  # f_bavail
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
            if len([*tmp_path.glob("t,f/*/*/*")]) >= 100:
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
    async with (store := file_store(root, capacity_bytes=10_000)).running():
        await store.put([PutItem(name, (bytes(100),)) for name in names])
    (root / "t,f").rename(moved)
    (root / "t,f").symlink_to(moved)
    (root / "t,loop").symlink_to(root / "t,loop")
    (root / "t,root").symlink_to("/")
    async with (store := file_store(root, capacity_bytes=10_000)).running():
        assert await store.usage("t:f:") == Usage(20, 2000)
        for index in range(200):
            assert await put_one(store, f"t:f:new{index}:0", bytes(100)) is PutStatus.STORED
        assert (await store.usage("t:f:")).num_bytes <= 10_000


async def test_a_models_directory_of_another_user_keeps_nobody_from_other_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory may be root's, if root ran a node of that model here before."""
    store = guarded(tmp_path)
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
    store = guarded(tmp_path, full_pause_s=100.0)
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
