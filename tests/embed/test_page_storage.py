"""Pages of an engine's own host memory in a store: exact, or a miss."""

from __future__ import annotations

import asyncio
import mmap
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.redis_server import RedisServer, empty_redis, module_redis, redis_server
from tierkv.embed.page_storage import PagePool, PageStorage
from tierkv.errors import ConfigError, LayoutError, ShuttingDownError, StoreUnavailableError
from tierkv.loop_thread import LoopClosedError

__all__ = ["empty_redis", "module_redis"]

_ENGINE = {"model": "llama", "dtype": "bfloat16"}
_WAIT_S = 120.0


def pages_of(seed: int, num_pages: int = 8, page_bytes: int = 3000) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (num_pages, page_bytes), dtype=np.uint8)


KEYS = [bytes([n]) * 36 for n in range(8)]


@contextmanager
def opened(url: str, *parts: np.ndarray, **more: Any) -> Iterator[tuple[PageStorage, PagePool]]:
    """more: what else the engine's identity has, and the storage's settings in seconds."""
    settings = {name: more.pop(name) for name in ("ttl_s", "deadline_s") if name in more}
    storage = PageStorage(url, **settings)
    storage.open()
    try:
        yield storage, storage.pool(_ENGINE | more, *parts)
    finally:
        storage.close()


@pytest.fixture(params=["redis", "file"])
def url(request: pytest.FixtureRequest, empty_redis: RedisServer, tmp_path: Path) -> str:
    return empty_redis.url if request.param == "redis" else f"file://{tmp_path}/pages"


@pytest.fixture
def written(url: str) -> tuple[str, np.ndarray]:
    """A store with eight pages that an engine, closed since, has stored."""
    pages = pages_of(1)
    with opened(url, pages) as (_, pool):
        assert pool.store(KEYS, range(8)).result(_WAIT_S) == [True] * 8
    return url, pages


@pytest.mark.promise("Pages of an engine's host memory come back whole or not at all.")
def test_what_one_engine_stored_another_reads_to_the_byte(written: tuple[str, np.ndarray]) -> None:
    url, pages = written
    there = np.zeros((16, pages.shape[1]), np.uint8)
    other = b"never stored"
    with opened(url, there) as (_, pool):
        assert pool.present([KEYS[3], other, KEYS[0]]).result(_WAIT_S) == [True, False, True]
        wanted, rows = [KEYS[5], other, KEYS[2]], [9, 1, 14]
        assert pool.load(wanted, rows).result(_WAIT_S) == [True, False, True]
    assert (there[9] == pages[5]).all()
    assert (there[14] == pages[2]).all()
    untouched = [row for row in range(16) if row not in rows]
    assert not there[untouched].any()


@pytest.mark.parametrize("differs", ["model", "dtype", "ranks"])
def test_engines_that_differ_never_see_each_others_pages(
    written: tuple[str, np.ndarray], differs: str
) -> None:
    url, pages = written
    with opened(url, np.zeros_like(pages), **{differs: "another"}) as (_, pool):
        assert pool.present(KEYS).result(_WAIT_S) == [False] * 8
        assert pool.load(KEYS, range(8)).result(_WAIT_S) == [False] * 8


@pytest.mark.promise("Pages of an engine's host memory come back whole or not at all.")
def test_a_damaged_page_is_a_miss_and_the_others_are_read(empty_redis: RedisServer) -> None:
    pages = pages_of(2)
    with opened(empty_redis.url, pages) as (_, pool):
        pool.store(KEYS[:1], [0]).result(_WAIT_S)
        names = empty_redis.execute("KEYS", "*")
        assert isinstance(names, list)
        pool.store(KEYS[1:], range(1, 8)).result(_WAIT_S)
        empty_redis.execute("SETRANGE", names[0], 1000, b"\x00\xff\x00")
        before = pages.copy()
        pages[:] = 0
        assert pool.load(KEYS, range(8)).result(_WAIT_S) == [False] + [True] * 7
        assert (pages[1:] == before[1:]).all()
        assert pool.stats.damaged_blocks == 1


def test_a_server_that_dies_is_a_miss_and_not_an_error() -> None:
    with redis_server() as server, opened(server.url, pages_of(3), deadline_s=1.0) as (_, pool):
        pool.store(KEYS, range(8)).result(_WAIT_S)
        server.kill()
        assert pool.present(KEYS).result(_WAIT_S) == [False] * 8
        assert pool.load(KEYS, range(8)).result(_WAIT_S) == [False] * 8
        assert pool.store(KEYS, range(8)).result(_WAIT_S) == [False] * 8


def test_closing_lets_what_is_under_way_end_and_refuses_what_comes_later(url: str) -> None:
    keys = [bytes([n]) * 32 for n in range(200)]
    with opened(url, pages_of(4, 200)) as (storage, pool):
        future = pool.store(keys, range(200))
        storage.close()
        assert future.result(0) == [True] * 200
        with pytest.raises(ShuttingDownError):
            pool.present(keys).result(0)
    assert not [thread for thread in threading.enumerate() if thread.name == "tierkv-pages"]


def test_an_engine_may_unmap_its_memory_once_the_storage_is_closed() -> None:
    memory = mmap.mmap(-1, 8 * mmap.PAGESIZE)
    pages = np.frombuffer(memory, np.uint8).reshape(8, -1)
    with opened("memory://", pages) as (_, pool):
        assert pool.store(KEYS, range(8)).result(_WAIT_S) == [True] * 8
    del pages
    memory.close()  # BufferError while an array uses it


@pytest.mark.parametrize("closes", ["never", "when the interpreter ends"])
def test_what_a_process_has_stored_is_there_when_it_has_ended(tmp_path: Path, closes: str) -> None:
    """Also if it does not close, or so late that the interpreter's thread pools have ended."""
    lines = [
        "import atexit, numpy as np",
        "from tierkv.embed.page_storage import PageStorage",
        f"storage = PageStorage({f'file://{tmp_path}/store'!r})",
        f"if {closes != 'never'}: atexit.register(storage.close)",
        "storage.open()",
        f"pool = storage.pool({_ENGINE}, np.full((64, 1 << 16), 7, np.uint8))",
        "pool.store([bytes([at]) * 32 for at in range(64)], range(64))",
    ]
    command = [sys.executable, "-c", "\n".join(lines)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    pages, keys = np.zeros((64, 1 << 16), np.uint8), [bytes([at]) * 32 for at in range(64)]
    with opened(f"file://{tmp_path}/store", pages) as (_, pool):
        assert all(pool.load(keys, range(64)).result(20))
    assert (pages == 7).all()


@pytest.mark.promise("Pages of an engine's host memory come back whole or not at all.")
@pytest.mark.parametrize("part", [0, 1])
def test_a_page_of_several_parts_counts_only_whole(empty_redis: RedisServer, part: int) -> None:
    values = pages_of(7, page_bytes=3000)
    states = np.zeros((8, 640), np.uint8)[:, :500]  # rows that do not touch
    states[:] = pages_of(8, page_bytes=500)
    with opened(empty_redis.url, values, states, ttl_s=600.0) as (_, pool):
        assert pool.store(KEYS, range(8)).result(_WAIT_S) == [True] * 8
        names = empty_redis.execute("KEYS", f"*:{part}of2")
        assert isinstance(names, list)
        assert len(names) == 8
        assert 0 < int(str(empty_redis.execute("TTL", names[0]))) <= 600
        before = values.copy(), states.copy()
        values[:], states[:] = 0, 0
        empty_redis.execute("DEL", names[0])
        there = pool.present(KEYS).result(_WAIT_S)
        assert sorted(there) == [False] + [True] * 7
        assert pool.count(KEYS).result(_WAIT_S) == there.index(False)
        assert pool.load(KEYS, range(8)).result(_WAIT_S) == there
    assert (values[there] == before[0][there]).all()
    assert (states[there] == before[1][there]).all()


def test_pools_of_one_storage_are_apart_and_cleared_apart(url: str) -> None:
    pages = pages_of(9)
    with opened(url, pages) as (storage, one):
        other = storage.pool(_ENGINE | {"pool": "window"}, pages)
        one.store(KEYS, range(8)).result(_WAIT_S)
        assert other.count(KEYS).result(_WAIT_S) == 0
        other.store(KEYS, range(8)).result(_WAIT_S)
        assert one.clear().result(_WAIT_S) == 8
        assert one.present(KEYS).result(_WAIT_S) == [False] * 8
        assert other.count(KEYS).result(_WAIT_S) == 8


def test_clearing_removes_pages_that_are_being_stored(url: str) -> None:
    pages = pages_of(11, num_pages=64, page_bytes=256 << 10)
    keys = [bytes([n]) * 32 for n in range(64)]
    with opened(url, pages) as (_, pool):
        for _ in range(4):
            stores = [pool.store(keys[at : at + 4], range(at, at + 4)) for at in range(0, 64, 4)]
            cleared = pool.clear()
            late = pool.store(keys[:1], [0])
            assert cleared.result(_WAIT_S) <= 64
            for one in (*stores, late):
                one.result(_WAIT_S)
            assert pool.present(keys[1:]).result(_WAIT_S) == [False] * 63
    with opened(url, pages) as (_, pool):  # nothing believes any more that a page is missing
        assert pool.present(keys[1:]).result(_WAIT_S) == [False] * 63


@pytest.mark.promise("No call on pages waits for ever.")
def test_a_thread_that_ends_leaves_no_call_waiting() -> None:
    async def end_the_thread() -> list[bool]:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        return []

    with opened("memory://", pages_of(10)) as (storage, pool):
        futures = [storage.run(end_the_thread())]
        futures += [pool.present([b"1"]) for _ in range(100)]
        assert not wait(futures, _WAIT_S).not_done
        assert {type(future.exception(0)) for future in futures[1:]} <= {LoopClosedError}
        assert isinstance(pool.present([b"1"]).exception(_WAIT_S), ShuttingDownError)


def test_wrong_use_is_refused_with_its_reason() -> None:
    with pytest.raises(ConfigError, match="storage URL"):
        PageStorage("nonsense")
    for wrong in ({"ttl_s": 0.0}, {"deadline_s": 0.0}, {"prefix": "a b"}):
        with pytest.raises(ConfigError):
            PageStorage("memory://", **wrong)
    with pytest.raises(StoreUnavailableError, match=r"127\.0\.0\.1:1"):
        PageStorage("redis://127.0.0.1:1/0").open()
    storage = PageStorage("memory://")
    with pytest.raises(ShuttingDownError):
        storage.pool(_ENGINE, pages_of(6))
    storage.open()
    with pytest.raises(ConfigError, match="model"):
        storage.pool({}, pages_of(6))
    with pytest.raises(LayoutError, match="num_pages"):
        storage.pool(_ENGINE, pages_of(6)[0])
    with pytest.raises(LayoutError, match="same number of rows"):
        storage.pool(_ENGINE, pages_of(6), pages_of(6, 7))
    pool = storage.pool(_ENGINE, pages_of(6))
    with pytest.raises(LayoutError, match="2 keys were given for 1 pages"):
        pool.load([b"a", b"b"], [1])
    storage.close()
