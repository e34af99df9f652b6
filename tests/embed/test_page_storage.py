"""Pages of an engine's own host memory in a store: exact, or a miss."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from tests.redis_server import RedisServer, empty_redis, module_redis, redis_server
from tierkv.embed.page_storage import PageStorage
from tierkv.errors import ConfigError, LayoutError, ShuttingDownError, StoreUnavailableError

__all__ = ["empty_redis", "module_redis"]

_ENGINE = {"model": "llama", "dtype": "bfloat16"}
_WAIT_S = 20.0


def pages_of(seed: int, num_pages: int = 8, page_bytes: int = 3000) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (num_pages, page_bytes), dtype=np.uint8)


@pytest.fixture(params=["redis", "file"])
def url(request: pytest.FixtureRequest, empty_redis: RedisServer, tmp_path: Path) -> str:
    return empty_redis.url if request.param == "redis" else f"file://{tmp_path}/pages"


@pytest.fixture
def written(url: str) -> tuple[str, list[bytes], np.ndarray]:
    """A store with eight pages that an engine, closed since, has stored."""
    pages = pages_of(1)
    keys = [bytes([n]) * 36 for n in range(8)]
    storage = PageStorage(url, pages, _ENGINE)
    storage.open()
    assert storage.store(keys, range(8)).result(_WAIT_S) == [True] * 8
    storage.close()
    return url, keys, pages


def test_what_one_engine_stored_another_reads_to_the_byte(
    written: tuple[str, list[bytes], np.ndarray],
) -> None:
    url, keys, pages = written
    there = np.zeros((16, pages.shape[1]), np.uint8)
    storage = PageStorage(url, there, _ENGINE)
    storage.open()
    other = b"never stored"
    assert storage.present([keys[3], other, keys[0]]).result(_WAIT_S) == [True, False, True]
    wanted, rows = [keys[5], other, keys[2]], [9, 1, 14]
    assert storage.load(wanted, rows).result(_WAIT_S) == [True, False, True]
    assert (there[9] == pages[5]).all()
    assert (there[14] == pages[2]).all()
    untouched = [row for row in range(16) if row not in rows]
    assert not there[untouched].any()
    storage.close()


@pytest.mark.parametrize("differs", ["model", "dtype", "ranks"])
def test_engines_that_differ_never_see_each_others_pages(
    written: tuple[str, list[bytes], np.ndarray], differs: str
) -> None:
    url, keys, pages = written
    storage = PageStorage(url, np.zeros_like(pages), _ENGINE | {differs: "another"})
    storage.open()
    assert storage.present(keys).result(_WAIT_S) == [False] * 8
    assert storage.load(keys, range(8)).result(_WAIT_S) == [False] * 8
    storage.close()


def test_a_damaged_page_is_a_miss_and_the_others_are_read(empty_redis: RedisServer) -> None:
    pages, keys = pages_of(2), [bytes([n]) * 32 for n in range(8)]
    storage = PageStorage(empty_redis.url, pages, _ENGINE)
    storage.open()
    storage.store(keys[:1], [0]).result(_WAIT_S)
    names = empty_redis.execute("KEYS", "*")
    assert isinstance(names, list)
    storage.store(keys[1:], range(1, 8)).result(_WAIT_S)
    empty_redis.execute("SETRANGE", names[0], 1000, b"\x00\xff\x00")
    before = pages.copy()
    pages[:] = 0
    assert storage.load(keys, range(8)).result(_WAIT_S) == [False] + [True] * 7
    assert (pages[1:] == before[1:]).all()
    assert storage.stats.damaged_blocks == 1
    storage.close()


def test_a_server_that_dies_is_a_miss_and_not_an_error() -> None:
    with redis_server() as server:
        pages, keys = pages_of(3), [bytes([n]) * 32 for n in range(8)]
        storage = PageStorage(server.url, pages, _ENGINE, deadline_s=1.0)
        storage.open()
        storage.store(keys, range(8)).result(_WAIT_S)
        server.kill()
        assert storage.present(keys).result(_WAIT_S) == [False] * 8
        assert storage.load(keys, range(8)).result(_WAIT_S) == [False] * 8
        assert storage.store(keys, range(8)).result(_WAIT_S) == [False] * 8
        storage.close()


def test_closing_lets_what_is_under_way_end_and_refuses_what_comes_later(url: str) -> None:
    pages, keys = pages_of(4, 200), [bytes([n]) * 32 for n in range(200)]
    storage = PageStorage(url, pages, _ENGINE)
    storage.open()
    future = storage.store(keys, range(200))
    storage.close()
    assert future.result(0) == [True] * 200
    with pytest.raises(ShuttingDownError):
        storage.present(keys).result(0)
    storage.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "tierkv-pages"]


def test_a_store_that_is_not_there_is_said_when_opening() -> None:
    storage = PageStorage("redis://127.0.0.1:1/0", pages_of(5), _ENGINE)
    with pytest.raises(StoreUnavailableError, match=r"127\.0\.0\.1:1"):
        storage.open()
    storage.close()


def test_wrong_use_is_refused_with_its_reason() -> None:
    with pytest.raises(ConfigError, match="storage URL"):
        PageStorage("nonsense", pages_of(6), _ENGINE)
    with pytest.raises(ConfigError, match="model"):
        PageStorage("memory://", pages_of(6), {})
    with pytest.raises(LayoutError, match="num_pages"):
        PageStorage("memory://", pages_of(6)[0], _ENGINE)
    storage = PageStorage("memory://", pages_of(6), _ENGINE)
    with pytest.raises(LayoutError, match="2 keys for 1 pages"):
        storage.load([b"a", b"b"], [1])
