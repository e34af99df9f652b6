"""Engines of different numbers of ranks find each other's blocks if a scheme says which bytes of a
token belong to which head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.embed.test_engine_cache import ask
from tests.latch import PATIENCE_S
from tests.world import kv_of
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.groups import CacheGroup, GroupKind
from tierkv.cache.keys import Fingerprint, Prompt, pack
from tierkv.cache.layout import Layout, Plane, attention_layout
from tierkv.cache.shards import Shard, ShardScheme
from tierkv.clock import SystemClock
from tierkv.embed import EngineCache, EngineCacheSettings, Finished, RankSocket, WorkerPlanes
from tierkv.embed.engine_cache import Found, Polled
from tierkv.errors import ConfigError
from tierkv.gpu.cpu import CpuDevice
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


@dataclass
class Ranks:
    """An engine of several ranks, here each in a thread of this process."""

    cache: EngineCache
    planes: list[WorkerPlanes]
    arrays: list[list[np.ndarray]]
    layouts: list[Layout]

    def compute(self, blocks: Sequence[int]) -> None:
        for at, view, row in self._tokens(blocks):
            view[at] = row

    def holds(self, blocks: Sequence[int]) -> bool:
        return all(np.array_equal(view[at], row) for at, view, row in self._tokens(blocks))

    def _tokens(self, blocks: Sequence[int]) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Each rank's heads of each token, and where they lie."""
        whole = kv_of(TOKENS, WHOLE)
        size = len(self.planes)
        for rank, arrays in enumerate(self.arrays):
            for array, rows in zip(arrays, whole, strict=True):
                width = rows.shape[1] // size
                for at, row in enumerate(rows):
                    view = array[blocks[at // SIZE]].reshape(SIZE, width)
                    yield at % SIZE, view, row[rank * width : (rank + 1) * width]

    def carry_out(self, polled: Polled) -> None:
        reports: list[Finished] = []
        for planes in self.planes:
            reports += planes.finished()
        now = self.cache.poll(reports)
        polled.stored += now.stored
        polled.loaded += now.loaded
        polled.published += now.published

    def save(self, blocks: Sequence[int], ticket: str) -> Published:
        plan = self.cache.save("save", Prompt(pack(TOKENS), SIZE), [blocks], ticket=ticket)
        assert plan is not None
        for planes in self.planes:
            planes.start_saves(plan)
        polled = Polled()

        def done() -> Found | None:
            self.carry_out(polled)
            return Found(0) if polled.published else None

        ask(done)
        [(_, published)] = polled.published
        assert isinstance(published, Published), published
        self.cache.release("save")
        return published

    def lookup(self, ticket: str) -> Found:
        prompt = Prompt(pack(TOKENS), SIZE)
        return ask(lambda: self.cache.lookup("load", prompt, ticket=ticket))

    def load(self, blocks: Sequence[int]) -> None:
        plan = self.cache.load("load", [blocks])
        assert plan is not None
        for planes in self.planes:
            planes.start_loads(plan)
        polled = Polled()

        def done() -> Found | None:
            self.carry_out(polled)
            return Found(0) if polled.loaded else None

        ask(done)
        assert polled.loaded == [("load", ())]


@contextmanager
def engine(folder: Path, size: int) -> Iterator[Ranks]:
    shards = [SCHEME.layout(Shard(rank, size)) for rank in range(size)]
    path = str(folder / f"{size}.sock")
    arrays = [
        [np.zeros((12, plane.block_bytes), np.uint8) for plane in shard.planes] for shard in shards
    ]
    with ExitStack() as stack:
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
        stack.enter_context(cache)
        ranks = []
        for rank, (shard, mine) in enumerate(zip(shards, arrays, strict=True)):
            planes = WorkerPlanes(CpuDevice(), EnginePlanes(shard, mine), rank=rank)
            planes.connect(path, connect_deadline_s=PATIENCE_S)
            stack.callback(planes.close)
            ranks.append(planes)
        yield Ranks(cache, ranks, arrays, shards)
        assert cache.verify().wait(PATIENCE_S) == []


@pytest.mark.promise("Engines of other rank counts find every byte.")
@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 4), (4, 1), (2, 2)])
def test_another_number_of_ranks_finds_every_byte_tail_included(
    writers: int, readers: int, tmp_path: Path
) -> None:
    here, there = [0, 1, 2, 3], [8, 7, 6, 5]
    with engine(tmp_path, writers) as first:
        first.compute(here)
        assert first.holds(here)
        first.save(here, "t")
    with engine(tmp_path, readers) as second:
        assert not second.holds(there)
        assert second.lookup("t") == Found(len(TOKENS))
        second.load(there)
        assert second.holds(there)


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
