"""An embedded service for tests, and what an engine does between its calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.latch import PATIENCE_S, CopyLatch
from tests.world import GQA, kv_of
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.keys import Fingerprint
from tierkv.clock import SystemClock
from tierkv.embed import Admitted, Call, Embedded, EmbedSettings
from tierkv.gpu.cpu import CpuDevice
from tierkv.gpu.protocol import Direction
from tierkv.pd.settings import HandoffSettings
from tierkv.sched.settings import CacheSettings
from tierkv.service import Service
from tierkv.storage.factory import StoreSettings, open_store

BLOCK = GQA.block_size
PROMPT = list(range(18))
ALL = list(range(5000, 5032))  # all of a device of 8 blocks


@dataclass
class Engine:
    """An embedded service over the CPU device, with latches in its lanes."""

    cache: Embedded
    latch: CopyLatch

    def run(self, name: str, tokens: Sequence[int], new: int = 0) -> Admitted:
        """A whole request that computes what is not cached."""
        found = self.cache.admit(name, tokens, max_new_tokens=new).wait(PATIENCE_S)
        self.check(found, tokens, found.cached_tokens)
        self.compute(found, tokens, found.cached_tokens)
        self.check(found, tokens, len(tokens))
        self.cache.commit(name, tokens).wait(PATIENCE_S)
        self.cache.end(name).wait(PATIENCE_S)
        return found

    def compute(self, found: Admitted, tokens: Sequence[int], start: int = 0) -> None:
        """Write the KV of tokens [start, len(tokens))."""
        for place, row in self._tokens(found, tokens, start):
            place[:] = row

    def check(self, found: Admitted, tokens: Sequence[int], count: int) -> None:
        """KV of the first `count` tokens is in the block table, every byte."""
        for at, (place, row) in enumerate(self._tokens(found, tokens[:count])):
            assert np.array_equal(place, row), f"row {at}"

    def _tokens(
        self, found: Admitted, tokens: Sequence[int], start: int = 0
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Where the KV of each token from `start` on lies in each plane, and what it is."""
        arrays = self.cache.service.planes.arrays
        for array, rows in zip(arrays, kv_of(tokens, GQA), strict=True):
            for at in range(start, len(tokens)):
                yield array[found.block_table[at // BLOCK]].reshape(BLOCK, -1)[at % BLOCK], rows[at]

    def findings(self) -> list[str]:
        """What `verify` finds once everything has come to rest."""
        until(lambda: self.cache.run("rest", _num_tasks).wait(PATIENCE_S) == 0, "rest")
        return self.cache.verify().wait(PATIENCE_S)


async def _num_tasks(service: Service) -> int:
    return service.tiers.work.num_tasks


@contextmanager
def engine(
    *, store: str | None = None, settings: EmbedSettings | None = None, **cache: Any
) -> Iterator[Engine]:
    """cache: fields of CacheSettings. store: a URL."""
    latch = CopyLatch()

    def build() -> Service:
        return Service(
            CpuDevice(before_copy=latch),
            Fingerprint("model", GQA),
            CacheSettings(block_size=BLOCK, **({"device_blocks": 32, "host_blocks": 32} | cache)),
            HandoffSettings(),
            open_store(store, StoreSettings(), SystemClock()) if store else None,
        )

    with Embedded(build, settings) as embedded:
        try:
            yield Engine(embedded, latch)
        finally:
            latch.release()


@contextmanager
def engine_that_loads(settings: EmbedSettings | None = None) -> Iterator[Engine]:
    """As `engine`; PROMPT is on the host only, and its load will wait at the latch."""
    with engine(device_blocks=8, host_write=WritePolicy.WRITE_THROUGH, settings=settings) as here:
        here.run("first", PROMPT)
        here.run("second", ALL)
        here.latch.hold(Direction.LOAD)
        yield here


def until(condition: Callable[[], bool], what: str = "the condition") -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true"
        time.sleep(0.002)


def done(call: Call[Any]) -> Call[Any]:
    """`call` once it has an answer, good or bad."""
    bell = threading.Event()
    call.when_done(bell.set)
    assert bell.wait(PATIENCE_S), f"{call} hangs"
    return call
