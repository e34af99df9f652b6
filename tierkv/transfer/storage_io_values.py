"""Blocks as values, synchronous: what is read where, whether it is right, what is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from tierkv.cache.keys import StoredKey
from tierkv.cache.layout import Bytes1D
from tierkv.cache.shards import Shard
from tierkv.errors import StoreCorruptError
from tierkv.gpu.protocol import Ids
from tierkv.storage.codec import Codec
from tierkv.storage.protocol import GetItem, GetOutcome, GetStatus, PutItem
from tierkv.transfer.storage_io_slices import Slice, Slices

_NOT_ASKED = GetOutcome(GetStatus.FAILED, "not asked for yet")
_MAX_AT_ONCE = 64  # of values that are looked at on the loop
_WORST_FIRST = (GetStatus.FAILED, GetStatus.DAMAGED, GetStatus.MISS, GetStatus.HIT)


@dataclass(slots=True)
class Read:
    """One value on its way into a slot, or into a buffer from which slots are assembled."""

    at: int  # which of the keys
    shard: Shard
    item: GetItem
    header: bytearray
    payload: Bytes1D
    outcome: GetOutcome = _NOT_ASKED


class Values:
    """What blocks of one node are in storage. Safe from several threads.

    codec_of: how the blocks of a key's fingerprint become values. ttl_s: how long they live.
    """

    def __init__(
        self, slices: Slices, codec_of: Callable[[StoredKey], Codec], ttl_s: float | None
    ) -> None:
        self._slices = slices
        self._codec = codec_of
        self._ttl_s = ttl_s

    def reads(
        self, keys: Sequence[StoredKey], slot_ids: Ids, sizes: Sequence[int]
    ) -> Sequence[Read]:
        """Where the values of each block land. sizes: of how many ranks the node was that stored
        each of them."""
        return [
            self._read(at, key, shard, int(slot))
            for at, (key, slot, size) in enumerate(zip(keys, slot_ids, sizes, strict=True))
            for shard in self._slices.sources(size)
        ]

    def _read(self, at: int, key: StoredKey, shard: Shard, slot: int) -> Read:
        if shard.size == self._slices.size:
            payload = self._slices.parts[shard.rank].payload(slot, key.num_tokens)
        else:
            payload = np.empty(self._slices.layout(shard).stored_bytes(key.num_tokens), np.uint8)
        codec = self._codec(key)
        header = bytearray(codec.header_bytes)
        name = self._slices.names_of(key, shard.size)[shard.rank]
        item = GetItem(name, (memoryview(header), payload.data), partial(codec.digest, header))
        return Read(at, shard, item, header, payload)

    def reads_bytes(
        self, keys: Sequence[StoredKey], sizes: Sequence[int], reads: Sequence[Read]
    ) -> bool:
        """Whether `check` takes more than some 4 us for each of them: a digest that no store has
        made, a tail or a block of another size to be put together."""
        return (
            any(r.outcome.status is GetStatus.HIT and r.outcome.digest is None for r in reads)
            or any(key.is_tail for key in keys)
            or any(size != self._slices.size for size in sizes)
            or len(reads) > _MAX_AT_ONCE
        )

    def check(
        self,
        keys: Sequence[StoredKey],
        slot_ids: Ids,
        sizes: Sequence[int],
        reads: Sequence[Read],
    ) -> list[GetOutcome]:
        """What became of each block, which is in its slot if that is HIT. Blocks the thread."""
        of_block: list[list[Read]] = [[] for _ in keys]
        for read in reads:
            of_block[read.at].append(read)
            key = keys[read.at]
            if read.outcome.status is GetStatus.HIT:
                identity = self._slices.identity(key, read.shard)
                try:
                    self._codec(key).decode(
                        read.header, read.payload.data, identity, read.outcome.digest
                    )
                except StoreCorruptError as error:
                    read.outcome = GetOutcome(GetStatus.DAMAGED, str(error))
        blocks = []
        for key, slot, size, parts in zip(keys, slot_ids, sizes, of_block, strict=True):
            blocks.append(_worst_get([read.outcome for read in parts]))
            if blocks[-1].status is not GetStatus.HIT:
                continue
            if size != self._slices.size:
                payloads = {read.shard: read.payload for read in parts}
                self._slices.assemble(int(slot), payloads, key.num_tokens)
            if key.is_tail:
                for part in self._slices.parts:
                    payload = part.payload(int(slot), key.num_tokens).copy()
                    part.layout.paste_tail(payload, part.host.array[slot], key.num_tokens)
        return blocks

    def encode_later(
        self, keys: Sequence[StoredKey], slot_ids: Ids, worth: Sequence[float]
    ) -> list[PutItem] | None:
        """What `encode` with `is_late` returns; None if that takes a look at their bytes."""
        items = []
        for key, slot, value in zip(keys, slot_ids, worth, strict=True):
            for part in self._slices.parts:
                item = self._later(key, part, int(slot), value)
                if item is None:
                    return None
                items.append(item)
        return items

    def encode(
        self, keys: Sequence[StoredKey], slot_ids: Ids, worth: Sequence[float], *, is_late: bool
    ) -> list[PutItem]:
        """The values of each block, rank after rank. Blocks the thread. is_late: with as little of
        that as can be."""
        return [
            (self._later(key, part, int(slot), value) if is_late else None)
            or self._item(key, part, int(slot), value)
            for key, slot, value in zip(keys, slot_ids, worth, strict=True)
            for part in self._slices.parts
        ]

    def _later(self, key: StoredKey, part: Slice, slot: int, worth: float) -> PutItem | None:
        """The value of a block whose header is made by who sends it."""
        payload = part.host.array[slot].data
        header = None
        if not key.is_tail:
            identity = self._slices.identity(key, part.shard)
            header = self._codec(key).header_later(payload, identity)
        if header is None:
            return None
        name, given = self._name(key, part), (header.content, payload)
        return PutItem(name, given, ttl_s=self._ttl_s, worth=worth, complete=header)

    def _item(self, key: StoredKey, part: Slice, slot: int, worth: float) -> PutItem:
        payload = part.layout.cut_tail(part.host.array[slot], key.num_tokens)
        identity = self._slices.identity(key, part.shard)
        value = self._codec(key).encode(np.ascontiguousarray(payload).data, identity)
        return PutItem(self._name(key, part), value, ttl_s=self._ttl_s, worth=worth)

    def _name(self, key: StoredKey, part: Slice) -> str:
        return self._slices.names_of(key, part.shard.size)[part.shard.rank]


def _worst_get(outcomes: Sequence[GetOutcome]) -> GetOutcome:
    return min(outcomes, key=lambda outcome: _WORST_FIRST.index(outcome.status))
