"""A service on the CPU device with latches, and an engine whose KV is a function of the tokens."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.faulty import FaultyStore
from tests.latch import CopyLatch, finish, until
from tests.layouts import LAYOUTS
from tests.sessions import begin_request
from tests.stored import stored_keys
from tierkv.cache.keys import Fingerprint, Names, Prompt, StoredKey, pack
from tierkv.cache.layout import Layout
from tierkv.clock import Clock, SystemClock
from tierkv.gpu.cpu import CpuDevice
from tierkv.gpu.protocol import Event
from tierkv.pd.settings import HandoffSettings
from tierkv.sched.request import Matched, Request
from tierkv.sched.settings import CacheSettings
from tierkv.sched.worth import FetchPolicy
from tierkv.service import Service
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.storage.protocol import Store
from tierkv.transfer.storage_io import StorageStats
from tierkv.transfer.tier import StorageOptions

GQA = LAYOUTS["gqa"]
BLOCK = GQA.block_size


def tokens(count: int, base: int = 0) -> list[int]:
    """So many, no two of them the same."""
    return list(range(base, base + count))


def kv_of(tokens: Sequence[int], layout: Layout, weights: int = 0) -> list[np.ndarray]:
    """For each plane uint8 [num_tokens, token_bytes]: what an engine computes, prefix and all."""
    planes = [np.zeros((len(tokens), plane.token_bytes or 0), np.uint8) for plane in layout.planes]
    prefix = b"start" + bytes([weights]) if weights else b"start"
    for at, token in enumerate(tokens):
        prefix = hashlib.sha256(prefix + token.to_bytes(4, "little")).digest()
        for index, rows in enumerate(planes):
            seed = prefix + index.to_bytes(2, "little")
            rows[at] = np.frombuffer(hashlib.shake_128(seed).digest(rows.shape[1]), np.uint8)
    return planes


@dataclass
class World:
    """One node and what a test may turn on it."""

    service: Service
    latch: CopyLatch
    store: FaultyStore | None = None
    num_requests: int = field(default=0)

    @property
    def layout(self) -> Layout:
        return self.service.fingerprint.layout

    @property
    def the_store(self) -> FaultyStore:
        assert self.store is not None, "this world has a store"
        return self.store

    @property
    def storage_stats(self) -> StorageStats:
        stats = self.service.stats().storage
        assert stats is not None, "this world has a store"
        return stats

    def prompt(self, tokens: Sequence[int]) -> Prompt:
        return Prompt.of(list(tokens), self.layout.block_size)

    def keys(self, tokens: Sequence[int]) -> list[StoredKey]:
        return stored_keys(self.service.fingerprint.root(), self.prompt(tokens))

    def names(self, tokens: Sequence[int]) -> list[str]:
        names = Names("tierkv", self.service.fingerprint.short)
        return [names.name(key) for key in self.keys(tokens)]

    async def admit(
        self,
        tokens: Sequence[int],
        *,
        name: str = "",
        new: int = 0,
        uses_cache: bool = True,
        priority: int = 0,
        space: str = "",
        session_id: str = "",
    ) -> Request:
        self.num_requests += 1
        return await finish(
            begin_request(
                self.service,
                name or f"request {self.num_requests}",
                Prompt.of(list(tokens), self.layout.block_size, space=space),
                max_new_tokens=new,
                uses_cache=uses_cache,
                priority=priority,
                session_id=session_id,
            )
        )

    def compute(
        self, request: Request, tokens: Sequence[int], start: int = 0, *, weights: int = 0
    ) -> None:
        """What the engine's kernels do: write KV of tokens [start, len(tokens))."""
        for plane, rows, array in zip(
            self.layout.planes,
            kv_of(tokens, self.layout, weights),
            self.service.planes.arrays,
            strict=True,
        ):
            width = plane.token_bytes or 0
            for at in range(start, len(tokens)):
                block, offset = divmod(at, self.layout.block_size)
                row = array[request.block_table[block]]
                row[offset * width : (offset + 1) * width] = rows[at]

    def read(self, request: Request, num_tokens: int) -> list[np.ndarray]:
        """KV of the first tokens as the engine's kernels would read it."""
        size = self.layout.block_size
        num_blocks = -(-num_tokens // size)
        return [
            array[request.block_table[:num_blocks]].reshape(
                num_blocks * size, plane.token_bytes or 0
            )[:num_tokens]
            for plane, array in zip(self.layout.planes, self.service.planes.arrays, strict=True)
        ]

    def check_kv(
        self, request: Request, tokens: Sequence[int], num_tokens: int, *, weights: int = 0
    ) -> None:
        """The first `num_tokens` tokens have exactly the KV they should have."""
        found = self.read(request, num_tokens)
        wanted = kv_of(tokens[:num_tokens], self.layout, weights)
        for plane, (rows, expected) in enumerate(zip(found, wanted, strict=True)):
            wrong = np.flatnonzero((rows != expected).any(axis=1))
            assert not len(wrong), f"plane {plane}: wrong bytes at tokens {wrong.tolist()}"

    async def prefill(self, request: Request, tokens: Sequence[int]) -> None:
        """Wait for what is cached, check every byte of it, compute and commit the rest."""
        await request.gate.all_layers(100.0)
        self.check_kv(request, tokens, request.cached_tokens)
        await self.commit(request, tokens, request.cached_tokens)

    async def commit(
        self,
        request: Request,
        tokens: Sequence[int],
        start: int = 0,
        *,
        after: Sequence[Event] = (),
    ) -> None:
        """Compute tokens [start, len(tokens)) and commit all; `after` ends the kernels."""
        self.compute(request, tokens, start)
        await finish(self.service.scheduler.commit(request, pack(list(tokens)), after=after))

    async def run(self, tokens: Sequence[int], *, uses_cache: bool = True) -> Matched:
        """A whole request; afterwards its copies have settled."""
        request = await self.computed(tokens, uses_cache=uses_cache)
        self.check_kv(request, tokens, len(tokens))
        await self.ended(request)
        return request.matched

    async def computed(self, tokens: Sequence[int], **how: Any) -> Request:
        """Admitted as `how` says, every cached byte checked, the rest computed and committed."""
        request = await self.admit(tokens, **how)
        await self.prefill(request, tokens)
        return request

    async def ended(self, *requests: Request) -> None:
        """The requests end, and all that they have begun."""
        for request in requests:
            self.service.scheduler.end(request)
        await self.settle()

    async def settle(self) -> None:
        """Every copy and task of the node has ended, and its books are right."""
        await until(lambda: self.service.tiers.work.num_tasks == 0, "an idle node")
        assert self.service.verify() == []

    @property
    def free_device_blocks(self) -> int:
        return self.service.stats().device.free


def fingerprint(**fields: Any) -> Fingerprint:
    return Fingerprint("model", GQA, **fields)


@asynccontextmanager
async def world(
    *,
    store: Store | None = None,
    with_store: bool = False,
    handoff: HandoffSettings | None = None,
    clock: Clock | None = None,
    who: Fingerprint | None = None,
    storage: StorageOptions | None = None,
    **settings: Any,
) -> AsyncIterator[World]:
    """A running node with its latches open; on leaving they are opened again.

    with_store: give it a memory store of its own, unless `store` is given (of another node).
    settings: fields of CacheSettings.
    """
    latch = CopyLatch()
    clock = clock or SystemClock()
    if store is None and with_store:
        store = MemoryStore(MemorySettings(), clock)
    faulty = FaultyStore(store) if store is not None else None
    who = who or fingerprint()
    chosen: dict[str, Any] = {
        "device_blocks": 32,
        "host_blocks": 32,
        # What a fetch is worth depends on how fast the machine is; tests of that say so.
        "fetch_policy": FetchPolicy.WAIT_COMPLETE,
    } | settings
    service = Service(
        CpuDevice(before_copy=latch),
        who,
        CacheSettings(block_size=who.layout.block_size, **chosen),
        handoff or HandoffSettings(),
        faulty,
        storage=storage,
    )
    async with service.running():
        try:
            yield World(service, latch, faulty)
        finally:
            latch.release()
            if faulty is not None:
                faulty.release()


def background_tasks() -> set[str]:
    """Names of the tasks that are alive, this one aside."""
    return {task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()}
