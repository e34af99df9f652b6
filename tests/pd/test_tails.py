"""A stored tail is found by longer and shorter prompts, and never a reason for a wrong byte."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.layouts import LAYOUTS
from tests.pd.nodes import computed, publish
from tests.storage.values import TurnedClock, put_one
from tests.world import BLOCK, World, fingerprint, tokens, world
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.keys import Names, Tail, pack
from tierkv.clock import SystemClock
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.transfer.storage_io import MAX_TAILS


@asynccontextmanager
async def two(**settings: Any) -> AsyncIterator[tuple[World, World]]:
    """Two nodes with one store, to which all is written that the first computes."""
    clock = settings.pop("clock", None) or SystemClock()
    store = MemoryStore(MemorySettings(), clock)
    chosen = {"storage_write": WritePolicy.WRITE_THROUGH} | settings
    async with (
        world(store=store, device_blocks=64, host_blocks=64, **chosen) as first,
        world(store=store, device_blocks=64, host_blocks=64, **settings) as second,
    ):
        yield first, second


def list_name(node: World, prompt: list[int]) -> str:
    """Where the tails under the last whole block of `prompt` are listed."""
    full = len(prompt) // BLOCK
    parent = node.keys(prompt)[full - 1].digest if full else node.service.fingerprint.root()
    return Names("tierkv", node.service.fingerprint.short).tails(parent)


@pytest.mark.parametrize("blocks", [0, 2])
@pytest.mark.parametrize("shared", [1, 2])
async def test_a_shorter_prompt_takes_the_first_tokens_of_a_longer_tail(
    blocks: int, shared: int
) -> None:
    async with two() as (first, second):
        await first.run(tokens(blocks * BLOCK + 3))
        asked = tokens(blocks * BLOCK + shared)
        matched = await second.run(asked)
        assert matched.storage_tokens == len(asked) - 1  # one is left to compute, for its logits
        assert (await first.run([*asked, 99])).total_tokens == len(asked)


@pytest.mark.parametrize("blocks", [0, 2])
@pytest.mark.parametrize(
    ("tails", "asked", "shared"),
    [
        ([[50, 51]], [50, 51, 1], 2),
        ([[50, 51]], [50, 51, *tokens(2 * BLOCK + 1, 60)], 2),
        ([[50, 51, 52]], [50, 51, 77, 78, 79], 2),
        ([[50, 51, 52]], [66, 67], 0),
        ([[50], [51, 52], [51, 52, 53], [54, 52, 53]], [51, 52, 53, 1, 2], 3),
    ],
    ids=["longer", "longer by blocks", "another way", "nothing", "of several"],
)
async def test_a_prompt_takes_the_tail_that_shares_most_as_far_as_it_does(
    blocks: int, tails: list[list[int]], asked: list[int], shared: int
) -> None:
    async with two() as (first, second):
        for tail in tails:
            await first.run([*tokens(blocks * BLOCK), *tail])
        matched = await second.run([*tokens(blocks * BLOCK), *asked])
        assert matched.total_tokens == matched.storage_tokens == blocks * BLOCK + shared


async def test_a_published_tail_is_found_too() -> None:
    async with two(storage_write=WritePolicy.NONE) as (first, second):
        await publish(first, tokens(10))
        assert (await second.run(tokens(15))).storage_tokens == 10


@pytest.mark.parametrize("has_prefixes", [True, False])
async def test_a_private_layout_lends_only_whole_tails_if_its_blocks_have_no_prefixes(
    has_prefixes: bool,
) -> None:
    planes = LAYOUTS["private"].planes
    first = dataclasses.replace(planes[0], has_prefixes=has_prefixes)
    layout = dataclasses.replace(LAYOUTS["private"], planes=(first, *planes[1:]))
    assert (layout.digest == LAYOUTS["private"].digest) is has_prefixes
    who = dataclasses.replace(fingerprint(), layout=layout)
    store = MemoryStore(MemorySettings(), SystemClock())
    async with world(store=store, who=who) as node:
        lists = node.service.tiers.copies.storage
        assert lists is not None
        root = who.root()
        for rest in (tokens(1), tokens(3)):
            await put_one(
                node.the_store,
                lists.names.name(
                    dataclasses.replace(node.keys(rest)[0], digest=Tail(root, pack(rest)).digest)
                ),
                b"x",
            )
            await lists.tails.note(node.keys(rest))
        best = await lists.tails.best(root, pack(tokens(2)), b"", "")
        assert best is not None
        assert best.num_shared == (2 if has_prefixes else 1)  # two of the three
        assert await lists.tails.best(root, pack([9, 9]), b"", "") is None


async def test_a_list_is_bounded_has_a_time_to_live_and_keeps_the_newest() -> None:
    clock = TurnedClock()
    async with two(clock=clock) as (first, second):
        for number in range(MAX_TAILS + 5):
            await first.run([*tokens(BLOCK), 100 + number, 7])
        name = list_name(first, tokens(BLOCK + 1))
        page = await first.the_store.list("tierkv", limit=1000)
        [listed] = [value for value in page.values if value.name == name]
        assert listed.expires_at is not None
        assert listed.num_bytes < 1024
        newest = 100 + MAX_TAILS + 4
        assert (await second.run([*tokens(BLOCK), newest, 7, 8])).storage_tokens == BLOCK + 2
        assert (await second.run([*tokens(BLOCK), 100, 7, 8])).storage_tokens == 0


async def test_a_longer_tail_takes_the_place_of_its_own_beginning() -> None:
    async with two() as (first, _):
        await first.run(tokens(BLOCK + 1))
        await first.run(tokens(BLOCK + 3))
        value = await first.the_store.get(list_name(first, tokens(BLOCK + 1)), max_bytes=1 << 16)
        assert value is not None
        assert value.count(pack(tokens(1, BLOCK))) == 1


@pytest.mark.parametrize("seed", range(5))
async def test_a_damaged_list_is_a_miss_and_never_a_wrong_byte(seed: int) -> None:
    rng = random.Random(seed)
    async with two() as (first, second):
        await first.run(tokens(BLOCK + 2))
        name = list_name(first, tokens(BLOCK + 1))
        content = bytearray(await first.the_store.get(name, max_bytes=1 << 16) or b"")
        if rng.random() < 0.3:
            del content[rng.randrange(len(content)) :]
        else:
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        await put_one(first.the_store, name, bytes(content), keep_existing=False)
        matched = await second.run(tokens(BLOCK + 4))  # checks every cached byte
        assert matched.storage_tokens == BLOCK
        assert second.storage_stats.damaged_lists == 1


async def test_a_list_that_names_what_is_gone_is_a_miss() -> None:
    async with two() as (first, second):
        await first.run(tokens(BLOCK + 2))
        await first.the_store.delete([first.names(tokens(BLOCK + 2))[-1]])
        assert (await second.run(tokens(BLOCK + 4))).storage_tokens == BLOCK
        assert (await second.run(tokens(BLOCK + 2))).storage_tokens == 0  # on the device by now


async def test_two_requests_for_one_tail_fetch_it_once() -> None:
    async with two() as (first, second):
        await first.run(tokens(2 * BLOCK + 2))
        async with asyncio.TaskGroup() as group:
            for last in (81, 82, 83):
                group.create_task(computed(second, [*tokens(2 * BLOCK + 2), last]))
        for request in second.service.scheduler.running_requests:
            second.service.scheduler.end(request)
        await second.settle()
        assert second.storage_stats.fetched_blocks == 3
