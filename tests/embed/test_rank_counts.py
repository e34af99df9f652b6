"""Engines of different numbers of ranks find each other's blocks if a scheme says which bytes of a
token belong to which head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.embed.steps import LocalRanks, ask, local_ranks
from tests.world import kv_of
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.groups import CacheGroup, GroupKind
from tierkv.cache.keys import Fingerprint, Prompt, pack
from tierkv.cache.layout import Layout, Plane, attention_layout
from tierkv.cache.shards import Shard, ShardScheme
from tierkv.clock import SystemClock
from tierkv.embed import EngineCache, EngineCacheSettings, RankSocket
from tierkv.embed.engine_cache import Found
from tierkv.errors import ConfigError
from tierkv.pd.handoff import Published
from tierkv.ranks.memory import EnginePlanes
from tierkv.sched.settings import CacheSettings
from tierkv.sched.worth import FetchPolicy
from tierkv.storage.factory import StoreSettings, open_store
from tierkv.transfer.tier import StorageOptions

SIZE, HEADS = 4, 4
WHOLE = attention_layout(
    num_layers=2, num_kv_heads=HEADS, head_dim=3, dtype="uint8", item_bytes=1, block_size=SIZE
)
SCHEME = ShardScheme(WHOLE, {"key": HEADS, "value": HEADS})
TOKENS = list(range(3 * SIZE + 2))


Arrays = list[list[np.ndarray]]


def tokens_in(arrays: Arrays, blocks: Sequence[int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Where each rank's heads of each token lie, and what they are."""
    for rank, mine in enumerate(arrays):
        for array, rows in zip(mine, kv_of(TOKENS, WHOLE), strict=True):
            width = rows.shape[1] // len(arrays)
            for at, row in enumerate(rows):
                block = array[blocks[at // SIZE]].reshape(SIZE, width)
                yield block[at % SIZE], row[rank * width : (rank + 1) * width]


@contextmanager
def engine(folder: Path, size: int) -> Iterator[tuple[LocalRanks, Arrays]]:
    shards = [SCHEME.layout(Shard(rank, size)) for rank in range(size)]
    path = str(folder / f"{size}.sock")
    arrays = [
        [np.zeros((12, plane.block_bytes), np.uint8) for plane in shard.planes] for shard in shards
    ]
    cache = EngineCache(
        Fingerprint("m", WHOLE),
        [WHOLE],
        host_bytes=64 * WHOLE.block_bytes,
        cache=CacheSettings(
            block_size=SIZE,
            storage_write=WritePolicy.WRITE_THROUGH,
            fetch_policy=FetchPolicy.WAIT_COMPLETE,
        ),
        store=lambda: open_store(f"file://{folder}/kv", StoreSettings(), SystemClock()),
        ranks=RankSocket(path, shards),
        settings=EngineCacheSettings(save_blocks=16),
        storage=StorageOptions(scheme=SCHEME, peer_tensor_parallel=(1, 2, 4)),
    )
    planes = [[EnginePlanes(*one)] for one in zip(shards, arrays, strict=True)]
    with local_ranks(cache, path, planes) as on:
        yield on, arrays


@pytest.mark.promise("Engines of other rank counts find every byte.")
@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 4), (4, 1), (2, 2)])
def test_another_number_of_ranks_finds_every_byte_tail_included(
    writers: int, readers: int, tmp_path: Path
) -> None:
    here, there = [0, 1, 2, 3], [8, 7, 6, 5]
    with engine(tmp_path, writers) as (first, arrays):
        for place, row in tokens_in(arrays, here):
            place[:] = row
        first.save("a", TOKENS, here, ticket="t")
        assert isinstance(first.published("a"), Published)
    with engine(tmp_path, readers) as (second, arrays):
        assert second.lookup("b", TOKENS, ticket="t") == Found(len(TOKENS))
        second.load("b", there)
        assert all(np.array_equal(*one) for one in tokens_in(arrays, there))


def test_of_several_groups_it_is_said_once_that_only_as_many_ranks_are_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = Layout(SIZE, (Plane(0, "state", "uint8", 48),))
    with EngineCache(
        Fingerprint("m", WHOLE),
        [CacheGroup(WHOLE), CacheGroup(other, GroupKind.WINDOW, window=SIZE)],
        host_bytes=1 << 16,
        cache=CacheSettings(block_size=SIZE),
        store=lambda: open_store(f"file://{tmp_path}/kv", StoreSettings(), SystemClock()),
        storage=StorageOptions(peer_tensor_parallel=(1, 2)),
    ) as cache:
        assert "only blocks stored by engines of 1 ranks are found" in caplog.text
        found = ask(lambda: cache.lookup("a", Prompt(pack(TOKENS), SIZE)))
        assert found == Found(0), "nothing went wrong"


def test_shards_that_are_not_the_scheme_s_are_refused(tmp_path: Path) -> None:
    shards = [SCHEME.layout(Shard(0, 4))] * 2
    with pytest.raises(ConfigError, match="scheme"):
        EngineCache(
            Fingerprint("m", WHOLE),
            [WHOLE],
            host_bytes=1 << 16,
            cache=CacheSettings(block_size=SIZE),
            ranks=RankSocket(str(tmp_path / "s"), shards),
            storage=StorageOptions(scheme=SCHEME),
        )
