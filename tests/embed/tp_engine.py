"""An engine whose ranks are processes, on the CPU or on GPUs: steps, and what the ranks hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tests.embed.engine_rank import StepMessage, shard_planes
from tests.embed.steps import Steps
from tests.latch import PATIENCE_S
from tests.preloaded import ForkedProgram
from tests.world import BLOCK, GQA, kv_of
from tierkv.cache.keys import Fingerprint
from tierkv.cache.layout import Layout
from tierkv.embed import EngineCache, EngineCacheSettings, Finished, RankSocket
from tierkv.ranks.memory import side_by_side
from tierkv.sched.settings import CacheSettings

ROOT = Path(__file__).parents[2]
BLOCKS = 16


class Rank:
    """A rank's process, and its planes, which this one sees too."""

    def __init__(self, path: Path, rank: int, device: str = "cpu") -> None:
        self.rank = rank
        self.arrays = shard_planes(path.parent, rank, BLOCKS)
        arguments = (path, str(rank), path.parent, str(BLOCKS), device)
        self.process = ForkedProgram("tests.embed.engine_rank", *arguments)

    def step(self, message: StepMessage) -> list[Finished]:
        self.process.stdin.write(msgspec.json.encode(message) + b"\n")
        return msgspec.json.decode(self.process.stdout.readline(), type=list[Finished])


def kv(rank: int, tokens: Sequence[int]) -> list[np.ndarray]:
    """Another KV on every rank."""
    return [rows ^ np.uint8(rank * 37) for rows in kv_of(tokens, GQA)]


@dataclass
class TpEngine(Steps):
    """Steps that go to every rank that lives, and what has come of them."""

    ranks: list[Rank]

    def tokens_in(
        self, tokens: Sequence[int], blocks: Sequence[int], like: int | None = None
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Of each rank, plane and token where its KV lies, and what it is. like: the rank whose KV
        all have; None if each has its own."""
        for rank in self.ranks:
            of_rank = kv(rank.rank if like is None else like, tokens)
            for rows, array in zip(of_rank, rank.arrays, strict=True):
                for at, row in enumerate(rows):
                    yield array[blocks[at // BLOCK]].reshape(BLOCK, -1)[at % BLOCK], row

    def compute(self, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        for place, row in self.tokens_in(tokens, blocks):
            place[:] = row
        self.step(writes=True)

    def hold(
        self, tokens: Sequence[int], blocks: Sequence[int], *, like: int | None = None
    ) -> bool:
        """Whether these blocks of every rank have the KV of all of the tokens, every byte."""
        self.step(reads=True)
        return all(
            np.array_equal(place, row) for place, row in self.tokens_in(tokens, blocks, like)
        )

    def step(self, **message: object) -> None:
        """One step of all ranks, and a poll of the scheduler."""
        reports: list[Finished] = []
        for rank in self.ranks:
            if rank.process.poll() is None:
                reports += rank.step(StepMessage(**message))  # type: ignore[arg-type]
        self.poll(reports)

    def save(self, key: str, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        self.compute(tokens, blocks)
        self.step(saves=[self.plan_to_save(key, tokens, blocks)])
        self.until(lambda: key in dict(self.seen.stored))

    def load(self, key: str, blocks: Sequence[int]) -> None:
        self.step(loads=[self.plan_to_load(key, blocks)])
        self.until(lambda: (key, ()) in self.seen.loaded)


def a_cache(socket_: RankSocket, layout: Layout = GQA, **more: Any) -> EngineCache:
    options = {"cache": CacheSettings(block_size=BLOCK), **more}
    return EngineCache(
        Fingerprint("model", layout),
        [layout],
        host_bytes=64 * layout.block_bytes,
        ranks=socket_,
        settings=EngineCacheSettings(save_blocks=16),
        **options,
    )


@contextmanager
def engine(
    folder: Path, devices: Sequence[str], *, workers_first: bool = False
) -> Iterator[TpEngine]:
    """devices: of each rank, "cpu" or the number of a GPU."""
    path, num_ranks = folder / "ranks.sock", len(devices)
    with ExitStack() as stack:
        ranks: list[Rank] = []

        def start() -> None:
            for number, device in enumerate(devices):
                rank = Rank(path, number, device)
                ranks.append(rank)
                stack.callback(rank.process.communicate)
                stack.callback(rank.process.kill)

        if workers_first:
            start()
            for rank in ranks:  # it answers once it has begun to ask for the socket
                assert rank.step(StepMessage()) == []
        socket_ = RankSocket(str(path), [GQA] * num_ranks, connect_deadline_s=PATIENCE_S)
        with a_cache(socket_, side_by_side([GQA] * num_ranks)) as cache:
            if not workers_first:
                start()
            on = TpEngine(cache, ranks)
            yield on
            assert on.findings() == []
    assert not path.exists()
