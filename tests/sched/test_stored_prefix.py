"""What storage has of a long prompt is asked for in pieces, with the answer that one piece has."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.latch import finish
from tests.world import World, world
from tierkv.cache.eviction import WritePolicy
from tierkv.clock import SystemClock
from tierkv.sched.copies import PIECE_BLOCKS, count_stored, keys_beyond
from tierkv.storage.memory import MemorySettings, MemoryStore

THROUGH = WritePolicy.WRITE_THROUGH


async def filled(prompt: list[int], *, hole: int | None = None) -> MemoryStore:
    """A store that has this prompt, of which block `hole` has gone."""
    store = MemoryStore(MemorySettings(), SystemClock())
    async with world(
        store=store, host_write=THROUGH, storage_write=THROUGH, device_blocks=64, host_blocks=64
    ) as other:
        await other.run(prompt)
        names = other.names(prompt)
        assert await store.exists(names) == len(names)
        if hole is not None:
            await store.delete([names[hole]])
    return store


async def counted(here: World, prompt: list[int], piece_blocks: int) -> int:
    storage, index = here.service.tiers.copies.storage, here.service.index
    assert storage is not None
    asked = here.prompt(prompt)
    keys = keys_beyond(index, asked, index.match(asked))
    return await count_stored(storage, keys, piece_blocks=piece_blocks)


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 8, 11, 12, 23, 24, 25])  # blocks of 4
@pytest.mark.parametrize("num_near", [0, 8])
async def test_pieces_of_any_size_count_the_same(num_tokens: int, num_near: int) -> None:
    prompt = list(range(num_tokens))
    async with world(store=await filled(prompt)) as here:
        if num_near:
            await here.run(prompt[:num_near])
        near = min(num_near, num_tokens) // 4 * 4
        expected = len(here.keys(prompt)) - near // 4
        for piece_blocks in range(1, 9):
            assert await counted(here, prompt, piece_blocks) == expected


@pytest.mark.parametrize("hole", range(7))
async def test_what_is_behind_a_hole_does_not_count(hole: int) -> None:
    prompt = list(range(26))  # six blocks and a tail
    async with world(store=await filled(prompt, hole=hole)) as here:
        for piece_blocks in range(1, 9):
            assert await counted(here, prompt, piece_blocks) == hole


class CountingStore(MemoryStore):
    num_asked = 0

    async def exists(self, names: Sequence[str]) -> int:
        self.num_asked += len(names)
        return await super().exists(names)


async def test_of_a_prompt_that_was_never_stored_only_one_piece_is_asked_for() -> None:
    store = CountingStore(MemorySettings(), SystemClock())
    async with world(store=store) as here:
        prompt = here.prompt(list(range(4 * 5 * PIECE_BLOCKS)))
        found = await finish(here.service.lookup(prompt))
        assert (found.num_tokens, found.storage_tokens) == (prompt.num_tokens, 0)
        assert store.num_asked == PIECE_BLOCKS
