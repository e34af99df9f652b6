"""An engine with several groups of blocks: full attention, windows, states, other sizes."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.embed.steps import Steps
from tests.faulty import FaultyStore
from tests.latch import EVERY, PATIENCE_S, CopyLatch
from tests.redis_server import PATIENT, redis_server
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.groups import (
    NO_BLOCK,
    CacheGroup,
    FlatBlock,
    FlatBlocks,
    GroupKind,
    longest_of_all,
    main_group,
    slots_of,
)
from tierkv.cache.keys import Fingerprint, StoredKey, pack
from tierkv.cache.layout import Layout, Plane, layered
from tierkv.clock import SystemClock
from tierkv.embed import EngineCacheSettings
from tierkv.embed.engine_cache import EngineCache, Found
from tierkv.embed.external import NodeHost
from tierkv.errors import BadRequestError, ConfigError, HandoffError
from tierkv.gpu.cpu import CpuDevice
from tierkv.gpu.protocol import Direction
from tierkv.pd.handoff import Published
from tierkv.pd.settings import HandoffSettings
from tierkv.ranks.memory import EnginePlanes
from tierkv.ranks.worker_planes import WorkerPlanes
from tierkv.sched.settings import CacheSettings
from tierkv.sched.worth import FetchPolicy
from tierkv.service.kv_events import EventsSection
from tierkv.storage.base import StoreWrapper
from tierkv.storage.factory import StoreSettings, open_store
from tierkv.storage.protocol import Store

SIZE = 4
ROW = 8  # bytes of a token in every attention group, and of a state


def attention(block_size: int, num_layers: int = 1) -> Layout:
    return layered(block_size, [("key", "uint8", ROW)], num_layers)


def private(block_size: int) -> Layout:
    """Where a token lies is private; the first tokens of a block are right all the same."""
    return Layout(block_size, (Plane(0, "key", "uint8", block_size * ROW),))


def state(every: int) -> Layout:
    return Layout(every, (Plane(0, "state", "uint8", ROW, has_prefixes=False),))


FULL = CacheGroup(attention(SIZE, 2))
WINDOW = CacheGroup(attention(SIZE), GroupKind.WINDOW, window=2 * SIZE)
STATE = CacheGroup(state(8), GroupKind.STATE)
INDEXER = CacheGroup(attention(16))
MODELS = {
    "window": [FULL, WINDOW],
    "state": [FULL, STATE],
    "indexer": [FULL, INDEXER],
    "private": [CacheGroup(private(SIZE)), CacheGroup(private(6), GroupKind.WINDOW, window=9)],
    "all": [WINDOW, FULL, STATE, INDEXER],
    "no full attention": [WINDOW, STATE],
    "a window alone": [WINDOW],
}


def rows_of(tokens: Sequence[int], group: int) -> np.ndarray:
    """What the engine computes for each token, a function of the whole prefix and of the group."""
    rows, prefix = [], b"start %d" % group
    for token in tokens:
        prefix = hashlib.sha256(prefix + token.to_bytes(4, "little")).digest()
        rows.append(np.frombuffer(prefix[:ROW], np.uint8))
    return np.array(rows, np.uint8).reshape(len(rows), ROW)


@dataclass
class Hybrid(Steps):
    """A fake engine: blocks in arrays of its own, what they hold is a function of the tokens."""

    planes: WorkerPlanes
    arrays: list[list[np.ndarray]]
    latch: CopyLatch
    store: Any = None
    numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def write(self, tokens: Sequence[int], group: int, position: int, block: int) -> None:
        self.put(self.block_of(tokens, group, position), group, block)

    def block_of(self, tokens: Sequence[int], group: int, position: int) -> np.ndarray:
        """The bytes of one layer's block, what comes after the prompt being zeros."""
        size, rows = self.cache.groups[group].block_size, rows_of(tokens, group)
        mine: np.ndarray = rows[position * size : (position + 1) * size]
        if self.cache.groups[group].kind is GroupKind.STATE:
            return np.array(mine[-1])
        content = np.zeros((size, ROW), np.uint8)
        content[: len(mine)] = mine
        return content.ravel()

    def put(self, content: np.ndarray, group: int, block: int) -> None:
        for layer, array in enumerate(self.arrays[group]):
            array[block] = content ^ layer

    def holds(self, tokens: Sequence[int], group: int, position: int, block: int) -> bool:
        """Whether the block has every byte of the tokens of `position` that there are."""
        content = self.block_of(tokens, group, position)
        if self.cache.groups[group].kind is not GroupKind.STATE:
            size = self.cache.groups[group].block_size
            content = content[: min(len(tokens) - position * size, size) * ROW]
        return all(
            np.array_equal(array[block][: len(content)] ^ layer, content)
            for layer, array in enumerate(self.arrays[group])
        )

    def whole(self, tokens: Sequence[int], first: int = 1) -> list[list[int]]:
        """A block for every position, in every group."""
        return [
            list(range(first, first - (-len(tokens) // group.block_size)))
            for group in self.cache.groups
        ]

    def compute(self, tokens: Sequence[int], ids: Sequence[Sequence[int]]) -> None:
        for group, blocks in enumerate(ids):
            for position, block in enumerate(blocks):
                if block != NO_BLOCK:
                    self.write(tokens, group, position, block)

    def start_save(self, key: str, tokens: Sequence[int], *ids: Sequence[int], **more: Any) -> None:
        self.planes.start_saves(self.plan_to_save(key, tokens, *ids, **more))

    def save(
        self,
        tokens: Sequence[int],
        block_ids: Sequence[Sequence[int]] | None = None,
        *,
        key: str = "",
        **more: Any,
    ) -> str:
        """Compute what these blocks hold and save it, and wait until it can be found. The request
        ends then, if it was not given a key."""
        name = key or f"save {next(self.numbers)}"
        ids = self.whole(tokens) if block_ids is None else block_ids
        self.compute(tokens, ids)
        plan = self.cache.save(name, self.prompt(tokens), ids, **more)
        if plan is not None:
            self.planes.start_saves(plan)
            self.until(lambda: name in dict(self.seen.stored))
        if not key:
            self.cache.release(name)
        return name

    def load(self, key: str, found: Found) -> tuple[list[list[int]], tuple[tuple[int, ...], ...]]:
        """Load what was found into blocks that had other bytes; which blocks, and what failed."""
        ids = [[50 + at for at in range(len(part))] for part in found.blocks]
        for group, blocks in enumerate(ids):
            for block in blocks:
                self.put(np.full_like(self.arrays[group][0][block], 0xEE), group, block)
        first = [part.start for part in found.blocks]
        self.planes.start_loads(self.plan_to_load(key, *ids, first=first))
        self.until(lambda: key in dict(self.seen.loaded))
        failed = dict(self.seen.loaded)[key]
        self.seen.loaded.clear()
        return ids, failed

    def check(self, key: str, tokens: Sequence[int], expected: int, **more: Any) -> None:
        """So many tokens are found, and every byte of them that the engine needs is loaded."""
        found = self.lookup(key, tokens, **more)
        assert found.num_tokens == expected, (key, found)
        if expected:
            ids, failed = self.load(key, found)
            assert failed == ()
            for group, (part, blocks) in enumerate(zip(found.blocks, ids, strict=True)):
                assert part == self.cache.groups[group].needed(expected)
                for position, block in zip(part, blocks, strict=True):
                    assert self.holds(tokens[:expected], group, position, block), (group, position)
        self.cache.release(key)


@contextmanager
def hybrid(
    groups: Sequence[CacheGroup],
    store: str | None = None,
    *,
    host_bytes: int = 1 << 18,
    options: EngineCacheSettings | None = None,
    write: WritePolicy = WritePolicy.WRITE_THROUGH,
    model: str = "hybrid",
    around: Callable[[Store], Store] = lambda store: store,
    kv_events: EventsSection | None = None,
    node: NodeHost | None = None,
    policy: FetchPolicy = FetchPolicy.WAIT_COMPLETE,
    fetch_deadline_s: float = 10.0,
    stores: StoreSettings = PATIENT,
    handoff: HandoffSettings | None = None,
    ends: bool = True,
) -> Iterator[Hybrid]:
    """node: the tiers are another process's. ends: everything that was begun, before the cache is
    closed."""
    latch = CopyLatch()
    arrays = [
        [np.zeros((100, plane.block_bytes), np.uint8) for plane in group.layout.planes]
        for group in groups
    ]
    planes = WorkerPlanes(
        CpuDevice(before_copy=latch),
        [EnginePlanes(group.layout, mine) for group, mine in zip(groups, arrays, strict=True)],
    )

    made = None if store is None else around(open_store(store, stores, SystemClock()))

    main = groups[main_group(groups)]
    cache = EngineCache(
        Fingerprint(model, main.layout),
        groups,
        host_bytes=host_bytes,
        cache=CacheSettings(
            block_size=main.block_size,
            storage_write=write,
            fetch_policy=policy,
            fetch_deadline_s=fetch_deadline_s,
        ),
        store=lambda: made,
        planes=planes,
        settings=options or EngineCacheSettings(save_blocks=32),
        handoff=handoff,
        kv_events=kv_events,
        node=node,
    )
    with cache:
        engine = Hybrid(cache, planes, arrays, latch, made)
        try:
            yield engine
        finally:
            latch.release()
        assert not ends or engine.findings() == []


def tokens_of(length: int, seed: int = 1) -> list[int]:
    return [seed * 1000 + at for at in range(length)]


# What is needed, and the longest length at which every group is valid


@given(
    st.lists(
        st.tuples(
            st.sampled_from(list(GroupKind)), st.integers(1, 5), st.integers(1, 9), st.booleans()
        ),
        min_size=1,
        max_size=3,
    ),
    st.integers(0, 24),
    st.data(),
)
def test_the_longest_length_at_which_every_group_is_valid_is_found(
    kinds: list[tuple[GroupKind, int, int, bool]], limit: int, data: st.DataObject
) -> None:
    """Against trying all lengths, by what each group needs."""
    made, groups = [], []
    for kind, size, window, has_prefixes in kinds:
        plane = Plane(0, "key", "uint8", size, has_prefixes=has_prefixes)
        is_window = kind is GroupKind.WINDOW
        group = CacheGroup(Layout(size, (plane,)), kind, window=window if is_window else 0)
        positions = -(-limit // size)
        counts = st.lists(st.integers(0, size), min_size=positions, max_size=positions)
        groups.append(group)
        made.append((group, data.draw(counts)))

    def is_valid(group: CacheGroup, valid: list[int], length: int) -> bool:
        for at in group.needed(length):
            wanted = min(length - at * group.block_size, group.block_size)
            if valid[at] != wanted and not (group.has_prefixes and valid[at] > wanted):
                return False
        return True

    lengths = [n for n in range(limit + 1) if all(is_valid(*one, n) for one in made)]
    assert longest_of_all(made, limit) == max(lengths)


@pytest.mark.parametrize(
    ("group", "length", "have", "expected"),
    [
        (FULL, 10, 0, range(3)),
        (FULL, 10, 4, range(1, 3)),
        (FULL, 10, 10, range(3, 3)),
        (WINDOW, 16, 0, range(2, 4)),  # ceil(window / block) blocks
        (WINDOW, 18, 0, range(2, 5)),  # and the block that has begun
        (WINDOW, 4, 0, range(1)),
        (WINDOW, 16, 12, range(3, 4)),
        (STATE, 16, 0, range(1, 2)),
        (STATE, 20, 0, range(2, 3)),  # the end of a prompt
        (STATE, 16, 16, range(2, 2)),
        (INDEXER, 20, 0, range(2)),
    ],
)
def test_a_group_needs_these_blocks(
    group: CacheGroup, length: int, have: int, expected: range
) -> None:
    assert group.needed(length, have) == expected


def test_of_the_blocks_of_a_used_prompt_the_last_one_is_evicted_first() -> None:
    evicted: list[int] = []
    blocks = FlatBlocks("host", 3, lambda block: evicted.append(block.position))
    keys = [StoredKey(bytes([at]) * 32, SIZE, is_tail=False, space="") for at in range(3)]
    for at, slot in enumerate(blocks.allocate(3)):
        assert blocks.put(FlatBlock(keys[at], b"", pack([at] * SIZE), b"", at, slot))
    blocks.use([key.digest for key in keys])
    blocks.allocate(3)
    assert evicted == [2, 1, 0]


def test_host_memory_is_divided_so_that_every_group_holds_as_many_tokens() -> None:
    slots = slots_of([FULL, WINDOW, STATE], 1 << 20)
    tokens = [n * g.block_size for n, g in zip(slots, [FULL, WINDOW, STATE], strict=True)]
    assert max(tokens) - min(tokens) <= 8
    said = [replace(FULL, share=0.5), WINDOW, STATE]
    assert slots_of(said, 1 << 20)[0] == (1 << 19) // FULL.layout.block_bytes
    with pytest.raises(ConfigError, match="leaves nothing"):
        slots_of([replace(FULL, share=0.9), replace(WINDOW, share=0.4)], 1 << 20)
    with pytest.raises(ConfigError, match="window"):
        CacheGroup(FULL.layout, GroupKind.WINDOW)
    with pytest.raises(ConfigError, match="window"):
        CacheGroup(FULL.layout, window=3)


# The whole way, bytes compared


@pytest.mark.parametrize("model", ["all", "private", "no full attention"])
def test_saves_that_were_joined_bring_each_group_its_own_bytes(model: str) -> None:
    texts = [tokens_of(16 + 3 * seed, seed) for seed in range(1, 4)]
    with hybrid(MODELS[model]) as on:
        plans, first = [], 0
        for number, tokens in enumerate(texts):
            ids = on.whole(tokens, first)
            first += max(map(len, ids))
            on.compute(tokens, ids)
            plans.append(on.plan_to_save(f"s{number}", tokens, *ids))
        on.planes.start_saves(on.cache.join(plans))
        on.until(lambda: len(on.seen.stored) == len(texts))
        for number, tokens in enumerate(texts):
            on.check(f"l{number}", tokens, len(tokens))
            on.cache.release(f"s{number}")


def test_a_window_is_found_without_the_blocks_before_it_and_says_from_where_to_load() -> None:
    tokens = tokens_of(32)
    with hybrid([FULL, WINDOW]) as on:
        full, window = on.whole(tokens)
        on.save(tokens, [full, [NO_BLOCK] * 6 + window[6:]])
        found = on.lookup("a", tokens)
        assert found.num_tokens == 32
        assert found.blocks == (range(8), range(6, 8))
        with pytest.raises(
            BadRequestError,
            match="blocks 5 to 5 of group 1 cannot be loaded: lookup promised blocks 6 to 7",
        ):
            on.cache.load("a", [[50], [50]], [0, 5])
        on.cache.release("a")
        on.check("b", tokens, 32)
        on.check("c", tokens[:28], 0)  # its window would begin at block 5
        on.check("d", [*tokens, 1, 2], 32)


def test_only_what_the_engine_lacks_is_to_be_loaded() -> None:
    tokens = tokens_of(32)
    with hybrid([FULL, WINDOW, STATE]) as on:
        on.save(tokens)
        found = on.lookup("a", tokens, have=16)
        assert found.num_tokens == 16
        assert found.blocks == (range(4, 8), range(6, 8), range(3, 4))
        assert on.lookup("a", tokens, have=28).blocks == (range(7, 8), range(7, 8), range(3, 4))
        on.cache.release("a")


@pytest.mark.promise("Every group of an engine loads byte for byte, or the hit is shorter.")
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_what_storage_has_lost_in_one_group_makes_what_is_found_shorter(lost: int) -> None:
    """Of the values of one group the last is gone: what is valid everywhere is still found."""
    groups, tokens = [FULL, WINDOW, STATE], tokens_of(32)
    with redis_server() as redis:
        with hybrid(groups, redis.url) as first:
            first.save(tokens)
            events = [event for event in first.cache.read_events() if event.group == lost]
        last = max(events, key=lambda event: event.stop).digests[-1].hex()
        names = redis.execute("KEYS", f"*:{last}:*")
        assert isinstance(names, list)
        assert len(names) == 1
        redis.execute("DEL", *names)
        with hybrid(groups, redis.url) as second:
            second.check("a", tokens, 24)


BESIDE = [MODELS[name] for name in ("all", "no full attention")]


@contextmanager
def filled(
    groups: Sequence[CacheGroup], texts: Sequence[list[int]], **more: Any
) -> Iterator[Hybrid]:
    """An engine that has another one's texts in its store, which can be late, or hang."""
    with redis_server() as redis:
        with hybrid(groups, redis.url) as first:
            for text in texts:
                first.save(text)
        more = {"policy": FetchPolicy.BEST_EFFORT, **more}
        with hybrid(groups, redis.url, around=FaultyStore, **more) as second:
            try:
                yield second
            finally:
                second.store.release()


@pytest.mark.parametrize("groups", BESIDE)
def test_a_store_faster_than_computing_is_fetched_from_for_every_group(
    groups: list[CacheGroup],
) -> None:
    texts = [tokens_of(32, seed) for seed in range(1, 5)]
    with filled(groups, texts) as on:
        on.cache.note_prefill(32, 20.0)
        for number, text in enumerate(texts):
            on.check(f"r{number}", text, 32)
        on.check("again", texts[0], 32)


@pytest.mark.parametrize("policy", [FetchPolicy.BEST_EFFORT, FetchPolicy.DEADLINE])
@pytest.mark.parametrize("groups", BESIDE)
def test_what_the_host_has_is_promised_whatever_ends_the_wait_for_the_rest(
    groups: list[CacheGroup], policy: FetchPolicy
) -> None:
    text = tokens_of(32)
    with filled(groups, [text], policy=policy, fetch_deadline_s=0.2) as on:
        on.save(text[:16])
        on.cache.note_prefill(32, 100.0)
        on.store.hold()
        assert on.lookup("a", text).problem == "storage took too long"
        on.cache.release("a")
        on.check("b", text, 16)


@pytest.mark.parametrize("groups", BESIDE)
@pytest.mark.parametrize("late_s", [0.0, 0.02])
def test_a_request_that_goes_while_it_waits_for_the_store_leaves_nothing(
    groups: list[CacheGroup], late_s: float
) -> None:
    text = tokens_of(32)
    with filled(groups, [text]) as on:
        on.cache.note_prefill(32, 20.0)
        on.store.hold()
        for number in range(3):
            assert on.cache.lookup(f"gone {number}", on.prompt(text)) is None
            time.sleep(late_s)
            on.cache.release(f"gone {number}")
        on.store.release()
        assert on.findings() == []
        on.check("stays", text, 32)


def test_a_fetch_that_failed_is_no_problem_if_the_host_has_the_whole_prompt_by_then() -> None:
    text = tokens_of(32)
    with filled([FULL], [text], policy=FetchPolicy.WAIT_COMPLETE) as on:
        on.store.hold()
        assert on.cache.lookup("a", on.prompt(text)) is None
        on.until(lambda: on.store.num_held > 0)
        on.save(text)
        on.store.fail_next(EVERY)
        on.store.release()
        assert on.lookup("a", text) == Found(32)
        on.cache.release("a")
        on.store.fail_next(0)


@pytest.mark.parametrize("groups", [[FULL], [WINDOW, STATE]])
def test_a_lookup_says_why_stored_blocks_could_not_be_used(groups: list[CacheGroup]) -> None:
    text = tokens_of(32)
    with filled(groups, [text], policy=FetchPolicy.WAIT_COMPLETE) as on:
        on.store.flip_next_get(*[0] * 100)
        assert "fewer than a header" in (on.lookup("a", text).problem or "")


class Counting(StoreWrapper):
    """Counts the names that are asked for, and the rounds of questions: questions that are under
    way at the same time are one round. lies: whether the answer is that all names are there."""

    num_names = num_rounds = num_asking = 0
    lies = False

    async def exists(self, names: Sequence[str]) -> int:
        async with self.asking(names):
            return await self.inner.exists(names)

    async def present(self, names: Sequence[str]) -> list[bool]:
        async with self.asking(names):
            if self.lies:
                return [True] * len(names)
            return await self.inner.present(names)

    @asynccontextmanager
    async def asking(self, names: Sequence[str]) -> AsyncIterator[None]:
        self.num_names += len(names)
        self.num_rounds += not self.num_asking
        self.num_asking += 1
        await asyncio.sleep(0.01)
        try:
            yield
        finally:
            self.num_asking -= 1


@pytest.mark.parametrize(
    ("model", "shared", "length"),
    [
        *((model, 19, 40) for model in ("all", "private", "no full attention")),
        *(("all", shared, length) for shared, length in ((32, 32), (32, 48), (0, 32))),
    ],
)
def test_storage_is_asked_once_whatever_the_number_of_groups(
    model: str, shared: int, length: int
) -> None:
    """A prompt of `length` tokens, the first `shared` of which are those of the stored prompt."""
    tokens = tokens_of(32)
    with redis_server() as redis:
        with hybrid(MODELS[model], redis.url) as first:
            first.save(tokens)
        wanted = [*tokens[:shared], *tokens_of(length - shared, 2)]
        with hybrid(MODELS[model], redis.url, around=Counting) as second:
            found = second.lookup("a", wanted)
            assert shared - 16 <= found.num_tokens <= shared
            assert second.store.num_rounds == 1


@pytest.mark.parametrize(("num_lookups", "num_stored"), [(1, 0), (2, 32)])
def test_blocks_of_all_groups_are_stored_once_they_were_found_often_enough(
    num_lookups: int, num_stored: int, tmp_path: Path
) -> None:
    tokens, url = tokens_of(32), f"file://{tmp_path}"
    with hybrid(MODELS["all"], url, write=WritePolicy.SELECTIVE) as first:
        first.save(tokens)
        for number in range(num_lookups):
            first.check(f"lookup {number}", tokens, 32)
    with hybrid(MODELS["all"], url) as second:
        second.check("a", tokens, num_stored)


def test_of_a_long_prompt_storage_is_asked_only_for_what_may_matter() -> None:
    """A window and a state need what is at the end: not every block before it is asked for."""
    tokens = tokens_of(400 * SIZE)
    with redis_server() as redis:
        with hybrid([WINDOW, STATE], redis.url) as first:
            none = [NO_BLOCK]
            first.save(tokens, [none * 398 + [1, 2], none * 199 + [1]])
            first.save(tokens[: 8 * SIZE], [none * 6 + [1, 2], none * 3 + [1]])
        with hybrid([WINDOW, STATE], redis.url, around=Counting) as second:
            second.check("a", tokens, 400 * SIZE)
            assert second.store.num_names <= 2 * 64
            # What is far from the end is found too, at the price of asking.
            second.check("b", [*tokens[: 8 * SIZE], *tokens_of(392 * SIZE, 2)], 8 * SIZE)
            assert second.store.num_names >= 400


def test_what_a_store_says_it_has_and_does_not_bring_is_not_relied_on_again() -> None:
    tokens = tokens_of(32)
    with hybrid([WINDOW, STATE], "memory://", around=Counting) as on:
        on.store.lies = True
        found = on.lookup("a", tokens)
        assert found.num_tokens == 0
        assert found.problem
        on.store.lies = False
        on.save(tokens[:16])
        on.store.lies = True
        on.check("b", tokens, 16)


@pytest.mark.parametrize(
    ("groups", "length"), [(MODELS["private"], 23), ([CacheGroup(private(64))], 200)]
)
def test_a_longer_stored_tail_of_private_blocks_serves_a_shorter_prompt(
    groups: list[CacheGroup], length: int
) -> None:
    """Each block is copied whole, and its first tokens are right: none has to be computed again."""
    tokens = tokens_of(length)
    with redis_server() as redis:
        with hybrid(groups, redis.url) as first:
            first.save(tokens)
        with hybrid(groups, redis.url) as second:
            second.check("a", tokens[:-1], length - 1)
        with hybrid(groups, redis.url) as third:
            third.check("b", [*tokens[:-2], 7, 8, 9], length - 2)


def test_groups_of_another_model_share_nothing() -> None:
    """Not even full attention: it may have been computed beside other layers."""
    tokens = tokens_of(16)
    with redis_server() as redis:
        with hybrid([FULL, WINDOW], redis.url) as first:
            first.save(tokens)
        for groups in ([FULL], [FULL, replace(WINDOW, window=4)], [FULL, WINDOW, STATE]):
            with hybrid(groups, redis.url) as second:
                second.check("a", tokens, 0)


@pytest.mark.promise("A ticket promises every group.")
@pytest.mark.parametrize("model", ["all", "private", "no full attention"])
def test_a_ticket_promises_every_group(model: str) -> None:
    tokens = tokens_of(23)
    with redis_server() as redis:
        none = WritePolicy.NONE
        with (
            hybrid(MODELS[model], redis.url, write=none) as producer,
            hybrid(MODELS[model], redis.url, write=none) as consumer,
        ):
            prompt = consumer.prompt(tokens)
            assert consumer.cache.lookup("c", prompt, ticket="t") is None
            key = producer.save(tokens, ticket="t", first_tokens=[7])
            published = producer.published(key)
            assert isinstance(published, Published), published
            found = consumer.lookup("c", tokens, ticket="t")
            assert (found.num_tokens, found.first_tokens, found.problem) == (23, (7,), None)
            consumer.cache.release("c")
            consumer.check("d", tokens, 23)


def test_a_ticket_for_a_prompt_one_group_of_which_is_not_there_is_refused_and_says_so() -> None:
    tokens = tokens_of(20)
    with hybrid([FULL, STATE], "memory://") as on:
        full, _ = on.whole(tokens)
        key = on.save(tokens, [full, [NO_BLOCK, 1, NO_BLOCK]], ticket="t")
        problem = on.published(key)
        assert isinstance(problem, HandoffError)
        assert "only 16 of 20 prompt tokens are in host memory" in str(problem)


def test_a_load_that_failed_in_one_plan_is_not_offered_again_in_any_group() -> None:
    tokens = tokens_of(24)
    with hybrid([FULL, STATE]) as on:
        on.save(tokens)
        found = on.lookup("a", tokens)
        on.latch.fail_next(Direction.LOAD, 2)
        _, failed = on.load("a", found)
        assert failed == (tuple(range(6)), (2,))
        assert on.lookup("a", tokens) == Found(0)
        on.cache.release("a")
        on.check("c", tokens, 24)  # it may have been the device


def test_fences_tell_the_groups_apart() -> None:
    tokens = tokens_of(16)
    with hybrid([FULL, WINDOW]) as on:
        on.latch.hold(Direction.OFFLOAD)
        plan = on.plan_to_save("a", tokens, [1, 2], [8, 9], first=[0, 2])
        assert plan.groups == (2, 2)
        on.planes.start_saves(plan)
        assert on.cache.fence([1, 8], 0) == (1,)
        assert on.cache.fence([1, 8], 1) == (8,)
        assert on.cache.fence([1, 8, 3]) == (1, 8)
        on.latch.release()
        on.until(lambda: on.seen.saved == ["a"])
        assert on.cache.fence([1, 8]) == ()


def test_a_reset_forgets_every_group_and_events_name_it_and_what_the_engine_calls_its_blocks() -> (
    None
):
    tokens = tokens_of(16)
    with hybrid([FULL, STATE]) as on:
        names = [[f"full {at}" for at in range(4)], [None, 77]]
        on.save(tokens, external_ids=names)
        events = on.cache.read_events()
        told = {(one.group, one.start): one.external_ids for one in events}
        assert told[0, 0] == ("full 0", "full 1", "full 2", "full 3")
        assert told[1, 1] == (77,)
        assert told[1, 0] == ()
        assert on.cache.reset().wait(PATIENCE_S) == 0
        gone = {(one.group, one.kind.value): one.external_ids for one in on.cache.read_events()}
        assert gone[0, "evicted"] == ("full 0", "full 1", "full 2", "full 3")
        assert gone[1, "evicted"] in ((), (77,))
        on.check("a", tokens, 0)


# Against a model that remembers all


@pytest.mark.promise("Every group of an engine loads byte for byte, or the hit is shorter.")
@pytest.mark.parametrize("store", [None, "memory://"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(sorted(MODELS)), st.data())
def test_lookups_find_what_a_model_that_remembers_every_block_finds(
    store: str | None, model: str, data: st.DataObject
) -> None:
    """Prompts that share beginnings, saved with gaps; the longest valid length by trying all. Of a
    whole block in storage only tails that are listed serve a prompt that shares its beginning."""
    groups = MODELS[model]
    saved: Saved = [{} for _ in groups]
    with hybrid(groups, store) as on:
        was_reset, deadline = False, time.monotonic() + PATIENCE_S
        for step in range(data.draw(st.integers(1, 5))):
            tokens = data.draw(st.sampled_from([[1], [2]])) * data.draw(st.integers(0, 14))
            tokens += data.draw(st.sampled_from([[3], [4]])) * data.draw(st.integers(1, 14))
            if data.draw(st.booleans()):
                ids = [draw_ids(data, group, len(tokens)) for group in groups]
                on.save(tokens, ids)
                remember(saved, groups, tokens, ids)
            if store is not None and data.draw(st.booleans()):
                assert on.findings() == []
                on.cache.reset().wait(PATIENCE_S)
                was_reset = True
            most = longest_saved(saved, groups, tokens)
            least = longest_saved(saved, groups, tokens, by_key=was_reset)
            found = look(on, f"{step}", tokens)
            while found < least and was_reset and time.monotonic() < deadline:
                found = look(
                    on, f"{step}", tokens
                )  # a block was on its way to the store at a reset
            assert least <= found <= most
            on.check(f"{step}", tokens, found)


def look(on: Hybrid, key: str, tokens: list[int]) -> int:
    found = on.lookup(key, tokens).num_tokens
    on.cache.release(key)
    return found


def draw_ids(data: st.DataObject, group: CacheGroup, length: int) -> list[int]:
    ids = list(range(1, 1 - (-length // group.block_size)))
    if group.kind is GroupKind.FULL:
        return ids[: data.draw(st.integers(0, len(ids)))]
    return [block if data.draw(st.integers(0, 3)) else NO_BLOCK for block in ids]


Saved = list[dict[tuple[int, ...], set[int]]]


def remember(
    saved: Saved, groups: Sequence[CacheGroup], tokens: list[int], ids: list[list[int]]
) -> None:
    for group, blocks, kept in zip(groups, ids, saved, strict=True):
        for at, block in enumerate(blocks):
            if block != NO_BLOCK:
                stop = min((at + 1) * group.block_size, len(tokens))
                kept.setdefault(tuple(tokens[:stop]), set()).add(at)


def longest_saved(
    saved: Saved, groups: Sequence[CacheGroup], tokens: list[int], *, by_key: bool = False
) -> int:
    """by_key: only by whole blocks, and by the tail of just this prompt."""

    def is_there(group: CacheGroup, kept: dict[tuple[int, ...], set[int]], n: int) -> bool:
        for at in group.needed(n):
            stop = min((at + 1) * group.block_size, n)
            wanted = tuple(tokens[:stop])
            if by_key or group.kind is GroupKind.STATE:
                if wanted not in kept or (stop % group.block_size and stop != len(tokens)):
                    return False
            elif not any(
                at in places and len(one) >= stop and one[:stop] == wanted
                for one, places in kept.items()
            ):
                return False
        return True

    pairs = list(zip(groups, saved, strict=True))
    return max(n for n in range(len(tokens) + 1) if all(is_there(*one, n) for one in pairs))
