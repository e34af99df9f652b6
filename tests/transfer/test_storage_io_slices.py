"""Nodes of different tensor-parallel sizes read each other's blocks, whole or not at all."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest

from tests.faulty import FaultyStore
from tests.storage.values import put_one
from tests.stored import stored_keys
from tierkv.cache.keys import Fingerprint, Names, Prompt, StoredKey
from tierkv.cache.layout import Bytes1D, Layout, attention_layout
from tierkv.cache.shards import Shard, ShardScheme
from tierkv.clock import SystemClock
from tierkv.errors import LayoutError, StoreUnavailableError
from tierkv.gpu.cpu import CpuHostSlots
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.storage.protocol import GetStatus
from tierkv.transfer.storage_io import Slice, Slices, StorageIO

BLOCK = 4
NUM_SLOTS = 12
SIZES = (1, 2, 4)


def gqa(heads: int) -> ShardScheme:
    layout = attention_layout(
        num_layers=3, num_kv_heads=heads, head_dim=6, dtype="float16", item_bytes=2,
        block_size=BLOCK,
    )  # fmt: skip
    return ShardScheme(layout, {"key": heads, "value": heads})


FOUR = gqa(4)


class Node:
    """The storage side of one node of `size` ranks, each with slots of its own."""

    def __init__(self, store: FaultyStore, scheme: ShardScheme, size: int, peers: Sequence[int]):
        self.store = store
        self.scheme = scheme
        who = Fingerprint("model", scheme.whole)
        self.names = Names("tierkv", who.short)
        self.parts = [
            Slice(shard, layout, CpuHostSlots(layout, NUM_SLOTS))
            for shard in (Shard(rank, size) for rank in range(size))
            for layout in [scheme.layout(shard)]
        ]
        self.slices = Slices(self.names, self.parts, scheme, peers)
        self.io = StorageIO(
            store,
            self.names,
            scheme.whole,
            self.parts[0].host,
            block_ttl_s=None,
            slices=self.slices,
        )
        self.who = who

    def keys(self, num_tokens: int) -> list[StoredKey]:
        return stored_keys(self.who.root(), Prompt.of(range(num_tokens), BLOCK))

    def fill(self, slot: int, whole: Bytes1D) -> None:
        """Give every rank its heads of a whole block."""
        for part in self.parts:
            self.scheme.assemble(part.shard, {Shard(0, 1): whole}, part.host.array[slot])

    def check(self, slot: int, whole: Bytes1D) -> None:
        for part in self.parts:
            expected = np.empty(part.layout.block_bytes, np.uint8)
            self.scheme.assemble(part.shard, {Shard(0, 1): whole}, expected)
            assert np.array_equal(part.host.array[slot], expected), part.shard


@asynccontextmanager
async def nodes(
    scheme: ShardScheme,
    *sizes: int,
    peers: Sequence[int] = SIZES,
    kind: type[FaultyStore] = FaultyStore,
) -> AsyncIterator[list[Node]]:
    store = kind(MemoryStore(MemorySettings(), SystemClock()))
    made = [Node(store, scheme, size, peers) for size in sizes]
    async with store.running(), made[0].io.running(), made[-1].io.running():
        yield made


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def blocks(layout: Layout, count: int) -> list[Bytes1D]:
    rng = np.random.default_rng(count)
    return [rng.integers(1, 256, layout.block_bytes, np.uint8) for _ in range(count)]


@pytest.mark.parametrize("lost", range(4))
async def test_a_block_counts_only_when_the_slices_of_all_ranks_are_there(lost: int) -> None:
    async with nodes(FOUR, 4, 2) as (writes, reads):
        keys = writes.keys(3 * BLOCK)
        await writes.io.flush(keys, ids(0, 1, 2))
        await writes.store.delete([writes.slices.names_of(keys[1], 4)[lost]])
        assert await writes.io.count_present(keys) == 1
        assert await reads.io.count_present(keys) == 1
        assert await reads.io.count_present(keys[2:]) == 1
        [outcome] = await reads.io.fetch(keys[1:2], ids(5))
        assert outcome.status is GetStatus.MISS


async def test_a_prompt_that_several_sizes_have_written_in_turn_is_one_run() -> None:
    async with nodes(FOUR, 2, 1) as (two, one):
        four = Node(two.store, FOUR, 4, SIZES)
        async with four.io.running():
            keys = two.keys(6 * BLOCK)
            written = blocks(FOUR.whole, 6)
            for writer, part in ((two, (0, 1)), (four, (2, 3)), (one, (4,)), (two, (5,))):
                for slot in part:
                    writer.fill(slot, written[slot])
                await writer.io.flush([keys[i] for i in part], ids(*part))
            for reader in (one, two, four):
                assert await reader.io.count_present(keys) == 6
                got = await reader.io.fetch(keys, ids(*range(6, 12)))
                assert [outcome.status for outcome in got] == [GetStatus.HIT] * 6
                for slot, whole in enumerate(written):
                    reader.check(6 + slot, whole)


async def test_a_block_that_is_gone_and_stored_again_by_another_size_is_read() -> None:
    async with nodes(FOUR, 4, 1) as (four, one):
        [key] = keys = one.keys(BLOCK)
        await four.io.flush(keys, ids(0))
        assert await one.io.count_present(keys) == 1
        await one.store.delete(four.slices.names_of(key, 4))
        [gone] = await one.io.fetch(keys, ids(5))
        await one.io.flush(keys, ids(0))
        [again] = await one.io.fetch(keys, ids(5))
        assert (gone.status, again.status) == (GetStatus.MISS, GetStatus.HIT)


async def test_a_slice_of_another_rank_is_never_taken_for_ones_own() -> None:
    async with nodes(FOUR, 2, 2) as (writes, reads):
        [key] = writes.keys(BLOCK)
        [whole] = blocks(writes.scheme.whole, 1)
        writes.fill(0, whole)
        await writes.io.flush([key], ids(0))
        first, second = writes.slices.names_of(key, 2)
        value = await writes.store.get(first, max_bytes=1 << 20)
        assert value is not None
        await writes.store.delete([second])
        await put_one(writes.store, second, value)
        [outcome] = await reads.io.fetch([key], ids(5))
        assert outcome.status is GetStatus.DAMAGED
        assert "layout" in outcome.reason
        assert await reads.io.count_present([key]) == 0


@pytest.mark.parametrize("reader", [1, 2])
async def test_a_damaged_slice_damages_its_block_and_only_the_slice_is_deleted(
    reader: int,
) -> None:
    async with nodes(FOUR, 2, reader) as (writes, reads):
        keys = writes.keys(2 * BLOCK)
        await writes.io.flush(keys, ids(0, 1))
        assert await reads.io.count_present(keys) == 2
        reads.store.flip_next_get(8 * 100)
        got = await reads.io.fetch(keys, ids(4, 5))
        assert [outcome.status for outcome in got] == [GetStatus.DAMAGED, GetStatus.HIT]
        assert reads.io.stats.damaged_blocks == 1
        left = [value.name for value in (await reads.store.list("tierkv", limit=9)).values]
        assert sorted(left) == sorted(
            writes.slices.names_of(keys[0], 2)[1:] + writes.slices.names_of(keys[1], 2)
        )


def test_sizes_that_cannot_split_the_heads_are_not_looked_for() -> None:
    scheme = gqa(6)
    parts = [Slice(Shard(0, 1), scheme.whole, CpuHostSlots(scheme.whole, 1))]
    slices = Slices(Names("tierkv", "f" * 16), parts, scheme, (1, 2, 3, 4, 5, 6, 12))
    assert slices.peer_tensor_parallel == (2, 3, 6, 12)
    with pytest.raises(LayoutError):
        Slices(Names("tierkv", "f" * 16), parts * 2, scheme)


class LosesPeers(FaultyStore):
    """Answers for this node's own size, and not when asked for others'."""

    async def present(self, names: Sequence[str]) -> list[bool]:
        await super().present(names)
        raise StoreUnavailableError("the store has just died")


async def test_a_store_that_dies_between_the_sizes_is_a_miss_and_no_worse() -> None:
    async with nodes(FOUR, 1, 1, kind=LosesPeers) as (_, reads):
        keys = reads.keys(2 * BLOCK)
        with pytest.raises(StoreUnavailableError):
            await reads.io.count_present(keys)
        outcomes = await reads.io.fetch(keys, ids(1, 2))
        assert {outcome.status for outcome in outcomes} == {GetStatus.MISS}
