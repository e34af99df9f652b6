"""Moves blocks between Host slots and a store: fetch and flush, checked on the way in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import numpy as np

from tierkv.cache.keys import Names, StoredKey
from tierkv.cache.layout import Bytes1D, Layout
from tierkv.errors import StoreCorruptError, StoreUnavailableError
from tierkv.gpu.protocol import HostSlots, Ids
from tierkv.storage.codec import Codec, PlainCodec, ValueIdentity
from tierkv.storage.protocol import (
    GetItem,
    GetOutcome,
    GetStatus,
    PutItem,
    PutOutcome,
    PutStatus,
    Store,
)
from tierkv.storage.threads import WorkerThreads


@dataclass(slots=True)
class StorageStats:
    """Counts since the start; read by metrics and by the demo."""

    fetched_blocks: int = 0
    fetched_bytes: int = 0
    flushed_blocks: int = 0
    flushed_bytes: int = 0
    skipped_blocks: int = 0  # were in the store already
    damaged_blocks: int = 0
    failed_reads: int = 0
    failed_writes: int = 0


class StorageIO:
    """One fingerprint's blocks in one store. Concurrency and deadlines of single operations are
    the store's; the deadline of a whole question is the caller's.

    block_ttl_s: how long a stored block lives, None for as long as the store keeps it.
    codec: how blocks become values; None for the one with a plain checksum.
    """

    def __init__(  # noqa: PLR0913 - a block needs all of them to become a value
        self,
        store: Store,
        names: Names,
        layout: Layout,
        host: HostSlots,
        *,
        deadline_s: float,
        block_ttl_s: float | None,
        codec: Codec | None = None,
    ) -> None:
        self.store = store
        self.names = names
        self.stats = StorageStats()
        self._layout = layout
        self._host = host
        self._deadline_s = deadline_s
        self._block_ttl_s = block_ttl_s
        self._codec = PlainCodec() if codec is None else codec
        # Checksums of 2 MiB blocks would stop the loop for 70 us each.
        self._checkers = WorkerThreads("storage I/O", 2)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self._checkers.running():
            yield

    async def count_present(self, keys: Sequence[StoredKey]) -> int:
        """How many of `keys`, from the first on, the store has. StoreUnavailableError if it does
        not say so in time."""
        try:
            async with asyncio.timeout(self._deadline_s):
                return await self.store.exists([self.names.name(key) for key in keys])
        except TimeoutError as error:
            raise StoreUnavailableError(
                f"{self.store.url} did not answer within {self._deadline_s:g} s"
            ) from error

    async def fetch(self, keys: Sequence[StoredKey], slot_ids: Ids) -> list[GetOutcome]:
        """Bring blocks into host slots, which stay the caller's until this returns.

        HIT means that length, key, layout and checksum are right. A damaged value is deleted.
        """
        array = self._host.array
        headers = [bytearray(self._codec.header_bytes) for _ in keys]
        payloads = [
            array[slot][: self._layout.stored_bytes(key.num_tokens)]
            for key, slot in zip(keys, slot_ids, strict=True)
        ]
        outcomes = await self.store.get_into(
            [
                GetItem(self.names.name(key), (memoryview(header), payload.data))
                for key, header, payload in zip(keys, headers, payloads, strict=True)
            ]
        )
        outcomes = await self._checkers.run(
            lambda: self._verify(keys, slot_ids, headers, payloads, outcomes)
        )
        damaged = [
            self.names.name(key)
            for key, outcome in zip(keys, outcomes, strict=True)
            if outcome.status is GetStatus.DAMAGED
        ]
        if damaged:
            with suppress(StoreUnavailableError):  # then it will be found damaged again
                await self.store.delete(damaged)
        self._count_reads(keys, outcomes)
        return outcomes

    def _verify(
        self,
        keys: Sequence[StoredKey],
        slot_ids: Ids,
        headers: Sequence[bytearray],
        payloads: Sequence[Bytes1D],
        outcomes: Sequence[GetOutcome],
    ) -> list[GetOutcome]:
        checked = list(outcomes)
        for i, outcome in enumerate(outcomes):
            if outcome.status is not GetStatus.HIT:
                continue
            key, payload = keys[i], payloads[i]
            try:
                self._codec.decode(headers[i], payload.data, self._identity(key))
            except StoreCorruptError as error:
                checked[i] = GetOutcome(GetStatus.DAMAGED, str(error))
                continue
            if key.is_tail:
                self._layout.paste_tail(
                    payload.copy(), self._host.array[slot_ids[i]], key.num_tokens
                )
        return checked

    async def flush(self, keys: Sequence[StoredKey], slot_ids: Ids) -> list[PutOutcome]:
        """Write host slots to the store, which stay as they are until this returns."""
        items = await self._checkers.run(lambda: self._encode(keys, slot_ids))
        outcomes = await self.store.put(items)
        for item, outcome in zip(items, outcomes, strict=True):
            if outcome.status is PutStatus.STORED:
                self.stats.flushed_blocks += 1
                self.stats.flushed_bytes += sum(memoryview(part).nbytes for part in item.parts)
            elif outcome.status is PutStatus.EXISTED:
                self.stats.skipped_blocks += 1
            else:
                self.stats.failed_writes += 1
        return outcomes

    def _encode(self, keys: Sequence[StoredKey], slot_ids: Ids) -> list[PutItem]:
        items = []
        for key, slot in zip(keys, slot_ids, strict=True):
            payload = self._layout.cut_tail(self._host.array[slot], key.num_tokens)
            parts = self._codec.encode(np.ascontiguousarray(payload).data, self._identity(key))
            items.append(PutItem(self.names.name(key), parts, ttl_s=self._block_ttl_s))
        return items

    def _identity(self, key: StoredKey) -> ValueIdentity:
        return ValueIdentity(self._layout.digest, key.digest, key.num_tokens)

    def _count_reads(self, keys: Sequence[StoredKey], outcomes: Sequence[GetOutcome]) -> None:
        for key, outcome in zip(keys, outcomes, strict=True):
            if outcome.status is GetStatus.HIT:
                self.stats.fetched_blocks += 1
                self.stats.fetched_bytes += self._layout.stored_bytes(key.num_tokens)
            elif outcome.status is GetStatus.DAMAGED:
                self.stats.damaged_blocks += 1
            elif outcome.status is GetStatus.FAILED:
                self.stats.failed_reads += 1
