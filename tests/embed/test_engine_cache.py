"""An engine that owns its device blocks: what it saves comes back, byte for byte, wherever."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.embed.planes import plan_of
from tests.latch import PATIENCE_S, CopyLatch
from tests.layouts import LAYOUTS
from tests.redis_server import redis_server
from tests.world import BLOCK, GQA, fingerprint, kv_of
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.groups import NO_BLOCK
from tierkv.cache.keys import MediaItem, Prompt, pack
from tierkv.clock import SystemClock
from tierkv.embed import EngineCacheSettings
from tierkv.embed.engine_cache import EngineCache, Found, Polled
from tierkv.errors import BadRequestError, ConfigError, HandoffError, TierKVError
from tierkv.gpu.cpu import CpuDevice
from tierkv.gpu.protocol import Direction
from tierkv.pd.handoff import Published
from tierkv.pd.settings import HandoffSettings
from tierkv.ranks.memory import EnginePlanes
from tierkv.ranks.worker_planes import Finished, WorkerPlanes
from tierkv.sched.settings import CacheSettings
from tierkv.sched.worth import FetchPolicy
from tierkv.storage.factory import StoreSettings, open_store
from tierkv.storage.protocol import Store

BLOCKS = 64


def ask(call: Callable[[], Found | None]) -> Found:
    """Ask again, as an engine does in each step, until there is an answer."""
    deadline = time.monotonic() + PATIENCE_S
    while (found := call()) is None:
        assert time.monotonic() < deadline, "no answer"
        os.sched_yield()
    return found


@dataclass
class Engine:
    """Planes of its own, and what its blocks hold is a function of the tokens."""

    cache: EngineCache
    planes: WorkerPlanes
    arrays: list[np.ndarray]
    latch: CopyLatch
    seen: Polled = field(default_factory=Polled)

    def lookup(self, key: str, tokens: Sequence[int], have: int = 0, **more: Any) -> Found:
        return ask(lambda: self.cache.lookup(key, self.prompt(tokens), have, **more))

    def prompt(self, tokens: Sequence[int]) -> Prompt:
        return Prompt(pack(tokens), BLOCK)

    def compute(self, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        for rows, array in zip(kv_of(tokens, GQA), self.arrays, strict=True):
            for at, row in enumerate(rows):
                block = array[blocks[at // BLOCK]].reshape(BLOCK, -1)
                block[at % BLOCK] = row

    def holds(self, tokens: Sequence[int], blocks: Sequence[int]) -> bool:
        """Whether these blocks have the KV of all of the tokens, every byte."""
        for rows, array in zip(kv_of(tokens, GQA), self.arrays, strict=True):
            for at, row in enumerate(rows):
                block = array[blocks[at // BLOCK]].reshape(BLOCK, -1)
                if not np.array_equal(block[at % BLOCK], row):
                    return False
        return True

    def save(self, key: str, tokens: Sequence[int], blocks: Sequence[int], **more: Any) -> None:
        """Compute and save a whole prompt, and wait until it can be found."""
        self.compute(tokens, blocks)
        plan = self.cache.save(key, self.prompt(tokens), [blocks], **more)
        if plan is not None:
            self.planes.start_saves(plan)
            self.until(lambda: any(name == key for name, _ in self.seen.stored))

    def load(self, key: str, blocks: Sequence[int], first: int = 0) -> tuple[int, ...]:
        """Load what was promised; which positions failed."""
        plan = self.cache.load(key, [blocks], [first])
        assert plan is not None
        self.planes.start_loads(plan)
        self.until(lambda: any(name == key for name, _ in self.seen.loaded))
        [failed] = [failed for name, failed in self.seen.loaded if name == key]
        self.seen.loaded.clear()
        return failed[0] if failed else ()

    def poll(self, finished: Sequence[Finished] = ()) -> None:
        polled = self.cache.poll(finished)
        self.seen.loaded += polled.loaded
        self.seen.saved += polled.saved
        self.seen.stored += polled.stored
        self.seen.published += polled.published

    def until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        self.poll()
        while not is_so():
            assert time.monotonic() < deadline, "it did not come to that"
            os.sched_yield()
            self.poll()

    def published(self, key: str) -> Published | TierKVError:
        self.until(lambda: any(name == key for name, _ in self.seen.published))
        return dict(self.seen.published)[key]

    def findings(self) -> list[str]:
        def at_rest() -> bool:
            return not self.cache.verify().wait(PATIENCE_S)

        deadline = time.monotonic() + 5
        while not at_rest() and time.monotonic() < deadline:
            self.poll()
        return self.cache.verify().wait(PATIENCE_S)


@contextmanager
def engine(
    store: str | None = None,
    *,
    slots: int = 64,
    settings: EngineCacheSettings | None = None,
    write: WritePolicy = WritePolicy.WRITE_THROUGH,
    ends: bool = True,
    handoff: HandoffSettings | None = None,
) -> Iterator[Engine]:
    """ends: everything that was begun, before the cache is closed."""
    arrays = [np.zeros((BLOCKS, plane.block_bytes), np.uint8) for plane in GQA.planes]
    latch = CopyLatch()
    planes = WorkerPlanes(CpuDevice(before_copy=latch), EnginePlanes(GQA, arrays))
    rules = CacheSettings(
        block_size=BLOCK, storage_write=write, fetch_policy=FetchPolicy.WAIT_COMPLETE
    )

    def make() -> Store | None:
        return None if store is None else open_store(store, StoreSettings(), SystemClock())

    cache = EngineCache(
        fingerprint(),
        [GQA],
        host_bytes=slots * GQA.block_bytes,
        cache=rules,
        store=make,
        planes=planes,
        settings=settings or EngineCacheSettings(save_blocks=16),
        handoff=handoff or HandoffSettings(),
    )
    with cache:
        found = Engine(cache, planes, arrays, latch)
        try:
            yield found
        finally:
            latch.release()
        assert not ends or found.findings() == []


def tokens_of(length: int, seed: int = 1) -> list[int]:
    return [seed * 1000 + at for at in range(length)]


def blocks_for(length: int, first: int = 0) -> list[int]:
    return list(range(first, first + -(-length // BLOCK)))


def test_bytes_that_are_not_the_prompt_s_are_noticed() -> None:
    """What the other tests rely on: a zeroed tail and two blocks in each other's place."""
    tokens = tokens_of(2 * BLOCK + 1)
    with engine() as on:
        on.compute(tokens, [0, 1, 2])
        assert on.holds(tokens, [0, 1, 2])
        assert not on.holds(tokens, [1, 0, 2])
        for array in on.arrays:
            array[2] = 0
        assert not on.holds(tokens, [0, 1, 2])


def test_a_store_that_has_died_is_a_miss_with_a_reason_and_nothing_is_promised() -> None:
    tokens = tokens_of(2 * BLOCK)
    with redis_server() as redis, engine(redis.url) as on:
        on.save("a", tokens, [0, 1])
        on.until(lambda: not on.cache.verify().wait(PATIENCE_S))
        redis.kill()
        assert on.cache.reset().wait(PATIENCE_S) == 0
        found = on.lookup("b", tokens)
        assert found.num_tokens == 0
        assert found.problem


LONG = 8 * BLOCK + 2
NONE = WritePolicy.NONE


def save_some(on: Engine, tokens: Sequence[int], first: int, last: int, **more: Any) -> None:
    """As an engine does with each chunk that it has computed."""
    blocks = blocks_for(len(tokens))
    plan = on.cache.save("p", on.prompt(tokens), [blocks[first:last]], [first], **more)
    assert plan is not None
    on.planes.start_saves(plan)
    stored = len(on.seen.stored)
    on.until(lambda: len(on.seen.stored) > stored)


@pytest.mark.promise("A claimer fetches blocks while the engine computes the rest.")
def test_a_claimer_fetches_what_is_saved_while_the_rest_is_computed(tmp_path: Path) -> None:
    tokens, url = tokens_of(LONG), f"file://{tmp_path}"
    with engine(url, write=NONE) as producer, engine(url, write=NONE) as consumer:
        prompt = consumer.prompt(tokens)
        assert consumer.cache.lookup("c", prompt, ticket="t") is None
        producer.compute(tokens, blocks_for(LONG))
        save_some(producer, tokens, 0, 4, ticket="t")

        def fetched() -> int:
            stats = consumer.cache.stats().wait(PATIENCE_S)
            return stats.storage.fetched_blocks if stats.storage is not None else 0

        consumer.until(lambda: fetched() >= 4)
        assert consumer.cache.lookup("c", prompt, ticket="t") is None
        save_some(producer, tokens, 4, 7, ticket="t")
        consumer.until(lambda: fetched() >= 7)
        save_some(producer, tokens, 7, 9, ticket="t", first_tokens=[7])
        producer.cache.release("p")  # its saves are done, its ticket comes
        published = producer.published("p")
        assert isinstance(published, Published), published
        assert published.early_blocks >= 7
        assert consumer.lookup("c", tokens, ticket="t") == Found(LONG, first_tokens=(7,))
        assert consumer.load("c", blocks_for(LONG)) == ()
        assert consumer.holds(tokens, blocks_for(LONG))


def test_a_prompt_counts_as_claimed_once_all_of_it_is_loaded(tmp_path: Path) -> None:
    tokens, url = tokens_of(LONG), f"file://{tmp_path}"
    with engine(url, write=NONE) as producer, engine(url, write=NONE) as consumer:
        producer.save("p", tokens, blocks_for(LONG), ticket="t", first_tokens=[7])
        assert isinstance(producer.published("p"), Published)
        for key, fails, num_claimed in (("a", True, 0), ("b", False, 1)):
            assert consumer.lookup(key, tokens, ticket="t").num_tokens == LONG
            if fails:
                consumer.latch.fail_next(Direction.LOAD)
            assert bool(consumer.load(key, blocks_for(LONG))) is fails
            stats = consumer.cache.stats().wait(PATIENCE_S)
            assert stats.handoff.claimed_prompts == num_claimed
        producer.cache.release("p")
        assert producer.cache.reset().wait(PATIENCE_S) == 0, "a publish that is over holds nothing"


@pytest.mark.parametrize("end", ["released", "closed", "failed"])
def test_who_waits_for_a_prompt_that_is_not_saved_to_its_end_is_told_why(
    end: str, tmp_path: Path
) -> None:
    tokens, url = tokens_of(LONG), f"file://{tmp_path}"
    reasons = {
        "released": "ended before",
        "closed": "closed",
        "failed": "prompt tokens are in host",
    }
    with engine(url, write=NONE) as consumer:
        with engine(url, write=NONE, ends=end != "closed") as producer:
            save_some(producer, tokens, 0, 4, ticket="t")
            assert consumer.cache.lookup("c", consumer.prompt(tokens), ticket="t") is None
            if end == "released":
                producer.cache.release("p")
            elif end == "failed":
                producer.latch.fail_next(Direction.OFFLOAD)
                blocks = blocks_for(LONG)[4:]
                prompt = producer.prompt(tokens)
                plan = producer.cache.save("p", prompt, [blocks], [4], ticket="t")
                assert plan is not None
                producer.planes.start_saves(plan)
            if end != "closed":
                assert isinstance(producer.published("p"), HandoffError)
        found = consumer.lookup("c", tokens, ticket="t")
        assert found.num_tokens == 0
        assert found.problem is not None
        assert reasons[end] in found.problem


@pytest.mark.parametrize("how", ["hangs", "is killed"])
def test_a_ticket_is_not_waited_for_in_a_store_that_is_gone(how: str) -> None:
    """Its engine would rather compute: see `ClaimPolicy.RECOMPUTE`."""
    patient = HandoffSettings(claim_deadline_s=1_000 * PATIENCE_S)
    with redis_server() as redis, engine(redis.url, write=NONE, handoff=patient) as on:
        assert on.cache.lookup("a", on.prompt(tokens_of(LONG)), ticket="t") is None
        (redis.pause if how == "hangs" else redis.kill)()
        began = time.monotonic()
        found = on.lookup("b", tokens_of(LONG), ticket="t")
        assert time.monotonic() - began < 20.0  # 1.3 on a machine that does nothing else
        assert found.num_tokens == 0
        assert found.problem is not None
        on.cache.release("a")
        if how == "hangs":
            redis.resume()


def test_closing_says_so_when_it_does_not_wait_for_what_is_being_stored(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with redis_server() as redis:
        with engine(redis.url) as on:
            save_some(on, tokens_of(LONG), 0, 4)
        assert "not all stored" not in caplog.text
        monkeypatch.setattr("tierkv.embed.host_side._CLOSING_S", 0.1)
        with engine(redis.url, ends=False) as on:
            redis.pause()
            save_some(on, tokens_of(LONG, seed=2), 0, 4)
        redis.resume()
    assert "not all stored" in caplog.text


def test_a_store_that_is_away_while_a_prompt_is_saved_delays_its_ticket_only() -> None:
    tokens = tokens_of(LONG)
    with redis_server() as redis, engine(redis.url, write=NONE) as on:
        redis.pause()
        save_some(on, tokens, 0, 4, ticket="t")
        redis.resume()
        save_some(on, tokens, 4, 9, ticket="t", first_tokens=[7])
        assert isinstance(on.published("p"), Published)


def test_nothing_that_was_being_saved_or_published_is_found_after_a_reset(tmp_path: Path) -> None:
    tokens, blocks = tokens_of(LONG), blocks_for(LONG)
    with engine(f"file://{tmp_path}", write=NONE) as on:
        on.compute(tokens, blocks)
        save_some(on, tokens, 0, 4, ticket="t")
        on.latch.hold(Direction.OFFLOAD)
        plan = on.cache.save("p", on.prompt(tokens), [blocks[4:6]], [4], ticket="t")
        assert plan is not None
        on.planes.start_saves(plan)
        on.cache.reset().wait(PATIENCE_S)
        on.latch.release()
        on.until(lambda: len(on.seen.saved) == 2)
        rest = on.cache.save("p", on.prompt(tokens), [blocks], ticket="t", first_tokens=[7])
        assert rest is None
        assert isinstance(on.published("p"), HandoffError)
        assert on.lookup("b", tokens).num_tokens <= 4 * BLOCK  # that the store was given before
        on.cache.release("p")
        on.save("c", tokens, blocks)
        assert on.lookup("d", tokens) == Found(LONG)
        on.cache.release("b")


def test_a_load_that_failed_is_not_offered_to_that_request_again() -> None:
    tokens, blocks = tokens_of(2 * BLOCK), blocks_for(2 * BLOCK)
    with engine() as on:
        on.save("a", tokens, blocks)
        on.lookup("b", tokens)
        on.latch.fail_next(Direction.LOAD)
        assert on.load("b", blocks) == (0, 1)
        assert on.lookup("b", tokens) == Found(0)
        assert on.lookup("c", tokens) == Found(2 * BLOCK)  # it may have been the device
        on.cache.release("c")


def test_promises_are_bounded_together_and_a_queue_of_requests_is_served_in_turn() -> None:
    """A thousand requests that wait do not pin the host tier."""
    tokens = [tokens_of(4 * BLOCK, seed) for seed in range(1, 9)]
    with engine(slots=48, settings=EngineCacheSettings(save_blocks=8, max_promised=0.25)) as on:
        for seed, one in enumerate(tokens):
            on.save(f"s{seed}", one, blocks_for(4 * BLOCK))
        waiting = {f"q{at}": on.prompt(tokens[at % len(tokens)]) for at in range(1000)}
        served = 0
        while served < 20:
            found = answered(on, waiting)
            assert len(found) * 4 <= 12, "more is held than may be"
            served += len(found)
            for key in found:  # who lets go lets the next one in
                on.cache.release(key)
                del waiting[key]
        for key in waiting:
            on.cache.release(key)


def answered(on: Engine, waiting: dict[str, Prompt]) -> list[str]:
    """Who has an answer, after all have been asked until somebody has."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        found = [key for key in waiting if on.cache.lookup(key, waiting[key]) is not None]
        if found:
            return found
    raise AssertionError("nobody is served")


def test_a_promise_that_nobody_loads_expires_and_holds_nothing() -> None:
    tokens = tokens_of(2 * BLOCK)
    with engine() as on:
        on.save("a", tokens, [0, 1])
        assert on.lookup("b", tokens, promise_ttl_s=0.05) == Found(2 * BLOCK)
        on.until(lambda: on.cache.lookup("b", on.prompt(tokens)) is None)
        assert on.lookup("b", tokens) == Found(2 * BLOCK)
        assert on.load("b", [5, 6]) == ()


@pytest.mark.promise("A preempted engine request finds its blocks again.")
def test_a_request_that_lost_its_own_blocks_is_told_anew_what_there_is() -> None:
    """A preempted one: while it had them there was nothing beyond, and no time has passed since."""
    tokens = tokens_of(2 * BLOCK)
    with engine() as on:
        on.save("a", tokens, [0, 1])
        assert on.lookup("b", tokens, 2 * BLOCK).num_tokens == 0
        assert on.lookup("b", tokens, 0) == Found(2 * BLOCK)
        assert on.load("b", [5, 6]) == ()
        assert on.holds(tokens, [5, 6])


def test_saves_are_told_over_once_for_each_key_however_they_end() -> None:
    with engine() as on:
        on.latch.hold()
        for key, blocks, length in (("a", [0], BLOCK), ("a", [0, 1], 2 * BLOCK), ("b", [2], BLOCK)):
            plan = on.cache.save(key, on.prompt(tokens_of(length, ord(key))), [blocks])
            assert plan is not None
            on.planes.start_saves(plan)
        on.poll()
        assert on.seen.saved == []
        on.latch.release()
        on.until(lambda: on.cache.fence([0, 1, 2]) == ())
        assert sorted(on.seen.saved) == ["a", "b"]


def test_a_cache_whose_planes_cannot_be_attached_leaves_no_service_behind() -> None:
    class NoLanes(CpuDevice):
        def open_lane(self, *_: object) -> Any:
            raise ConfigError("no lanes here")

    arrays = [np.zeros((4, plane.block_bytes), np.uint8) for plane in GQA.planes]
    cache = EngineCache(
        fingerprint(),
        [GQA],
        host_bytes=8 * GQA.block_bytes,
        cache=CacheSettings(block_size=BLOCK),
        planes=WorkerPlanes(NoLanes(), EnginePlanes(GQA, arrays)),
    )
    with pytest.raises(ConfigError, match="no lanes here"):
        cache.open()
    assert not any(thread.name == "tierkv-embed" for thread in threading.enumerate())


@pytest.mark.parametrize("count", [2, 300])
def test_a_block_that_the_engine_does_not_have_fails_its_load_and_no_other(count: int) -> None:
    tokens = tokens_of(2 * BLOCK)
    with engine() as on:
        on.save("a", tokens, [0, 1])
        on.lookup("b", tokens)
        assert on.load("b", [5, BLOCKS]) == (0, 1)
        beyond = range(BLOCKS - 1, BLOCKS - 1 + count)
        on.planes.start_saves(plan_of(1 << 20, "offload", beyond, beyond))
        [report] = on.planes.finished()
        assert "outside 0..63" in str(report.problem)
        on.lookup("c", tokens)
        assert on.load("c", [5, 6]) == ()
        assert on.holds(tokens, [5, 6])


@pytest.mark.parametrize("grows", [False, True])
def test_another_prompt_under_a_key_is_saved_whole_and_one_that_grew_goes_on(grows: bool) -> None:
    first = tokens_of(2 * BLOCK)
    second = [*first, *tokens_of(BLOCK, 2)] if grows else tokens_of(3 * BLOCK, 3)
    with engine() as on:
        on.save("a", first, [0, 1])
        on.compute(second, [4, 5, 6])
        plan = on.cache.save("a", on.prompt(second), [[4, 5, 6]])
        assert plan is not None
        assert len(plan.slots()[0]) == (1 if grows else 3)
        on.planes.start_saves(plan)
        on.until(lambda: len(on.seen.stored) == 2)
        assert on.lookup("b", second) == Found(3 * BLOCK)
        assert on.load("b", [7, 8, 9]) == ()
        assert on.holds(second, [7, 8, 9])


def test_a_load_that_was_cancelled_holds_nothing_and_may_be_made_again() -> None:
    tokens = tokens_of(2 * BLOCK)
    with engine() as on:
        on.save("a", tokens, [0, 1])
        assert on.lookup("b", tokens) == Found(2 * BLOCK)
        plan = on.cache.load("b", [[5, 6]])
        assert plan is not None
        on.cache.cancel(plan)
        assert on.cache.fence([5, 6]) == ()
        assert on.lookup("b", tokens) == Found(2 * BLOCK)
        assert on.load("b", [5, 6]) == ()
        assert on.holds(tokens, [5, 6])
        assert on.cache.reset().wait(PATIENCE_S) == 0


def test_the_same_tokens_of_another_image_or_space_are_another_prompt() -> None:
    tokens = tokens_of(3 * BLOCK)

    def showing(image: bytes, num_tokens: int) -> Prompt:
        return Prompt.of(tokens[:num_tokens], BLOCK, [MediaItem(1, 2, image * 16)])

    last = showing(b"b", 3 * BLOCK)
    with engine() as on:
        plans = []
        for prompt, num_new in (
            (showing(b"a", 2 * BLOCK), 2),
            (showing(b"b", 2 * BLOCK), 2),
            (last, 1),  # which goes on
            (Prompt(last.tokens, BLOCK, last.extras, "another space"), 3),
        ):
            plan = on.cache.save("a", prompt, [[*range(prompt.num_blocks)]])
            assert plan is not None
            assert len(plan.slots()[0]) == num_new
            plans.append(plan)
        for plan in plans:
            on.cache.cancel(plan)


def test_what_cannot_be_is_refused_in_the_caller_s_thread() -> None:
    with engine() as on:
        prompt = on.prompt(tokens_of(2 * BLOCK + 1))
        with pytest.raises(BadRequestError):
            on.cache.save("a", prompt, [[0, 1, 2, 3]])
        with pytest.raises(BadRequestError, match="first_blocks"):
            on.cache.save("a", prompt, [[0]], [0, 0])
        with pytest.raises(BadRequestError, match="have a gap"):
            on.cache.save("a", prompt, [[0, NO_BLOCK, 2]])
        with pytest.raises(BadRequestError):
            on.cache.save("a", prompt, [[0], [1]])
        assert on.cache.load("a", [[0]]) is None
    with pytest.raises(ConfigError, match="layout"):
        EngineCache(fingerprint(), [LAYOUTS["mla"]], host_bytes=1 << 20, cache=CacheSettings())
    with pytest.raises(ConfigError, match="too little for two blocks"):
        EngineCache(fingerprint(), [GQA], host_bytes=1, cache=CacheSettings(block_size=BLOCK))


def test_saves_whose_one_copy_has_failed_are_made_again() -> None:
    tokens = [tokens_of(2 * BLOCK, seed) for seed in (1, 2)]
    with engine() as on:
        on.latch.fail_next(Direction.OFFLOAD)
        for turn in range(2):
            plans = []
            for at, one in enumerate(tokens):
                on.compute(one, blocks_for(len(one), 10 * at))
                plan = on.cache.save(f"s{at}", on.prompt(one), [blocks_for(len(one), 10 * at)])
                assert plan is not None, f"turn {turn}: nothing of it is saved"
                plans.append(plan)
            on.planes.start_saves(on.cache.join(plans))
            on.until(lambda: {"s0", "s1"} <= set(on.seen.saved))
            on.seen.saved.clear()
        on.until(lambda: len(on.seen.stored) == len(tokens))


# What a session has used stays on the host for its time, while what nobody asked to keep goes.


TURN = tokens_of(4 * BLOCK, 99)


def other_prompts(on: Engine, count: int) -> None:
    """Save other prompts, more than the host has room for."""
    for seed in range(1, count):
        tokens = tokens_of(3 * BLOCK, seed)
        on.save(f"s{seed}", tokens, blocks_for(len(tokens), 8))
        on.cache.release(f"s{seed}")


def found(on: Engine, key: str) -> int:
    answer = on.lookup(key, TURN)
    on.cache.release(key)
    return answer.num_tokens


@pytest.mark.promise(
    "A session's last turn is evicted after all other blocks, until its time ends."
)
@pytest.mark.parametrize("is_kept", [True, False])
def test_a_sessions_turn_outlives_prompts_that_came_after_it(is_kept: bool) -> None:
    with engine(slots=24, settings=EngineCacheSettings(save_blocks=4)) as on:
        on.save("turn", TURN, blocks_for(len(TURN)))
        on.cache.release("turn")
        if is_kept:
            on.cache.keep_session("session", on.prompt(TURN), 600.0)
        other_prompts(on, 12)
        assert found(on, "next turn") == is_kept * len(TURN)


@pytest.mark.parametrize("ends", ["by its time", "by its end"])
def test_a_session_that_is_over_keeps_nothing(ends: str) -> None:
    with engine(slots=24, settings=EngineCacheSettings(save_blocks=4)) as on:
        on.save("turn", TURN, blocks_for(len(TURN)))
        on.cache.release("turn")
        on.cache.keep_session("session", on.prompt(TURN), 0.01)
        if ends == "by its end":
            on.cache.keep_session("session", on.prompt(TURN), 600.0)
            on.cache.keep_session("session", on.prompt(TURN), 0.0)
        pins = on.cache._host._thread.service.tiers.pins  # type: ignore[union-attr]  # noqa: SLF001
        on.cache.verify().wait(PATIENCE_S)
        on.until(lambda: not pins.soft_ends)
        other_prompts(on, 12)
        assert found(on, "next turn") == 0


def test_a_later_turn_replaces_the_one_before_it() -> None:
    """And a session whose blocks are gone keeps nothing, and is no error."""
    with engine(slots=24, settings=EngineCacheSettings(save_blocks=6)) as on:
        on.cache.keep_session("gone", on.prompt(tokens_of(2 * BLOCK, 50)), 600.0)
        on.save("turn", TURN[: 2 * BLOCK], blocks_for(2 * BLOCK))
        on.cache.keep_session("session", on.prompt(TURN[: 2 * BLOCK]), 600.0)
        on.save("turn 2", TURN, blocks_for(len(TURN)))
        on.cache.keep_session("session", on.prompt(TURN), 600.0)
        for key in ("turn", "turn 2"):
            on.cache.release(key)
        other_prompts(on, 12)
        assert found(on, "next turn") == len(TURN)


def test_a_save_that_was_cancelled_is_no_failure_and_its_blocks_are_saved_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokens = tokens_of(2 * BLOCK)
    with engine() as on:
        plan = on.cache.save("a", on.prompt(tokens), [[0, 1]])
        assert plan is not None
        on.cache.cancel(plan)
        assert on.cache.fence([0, 1]) == ()
        assert on.cache.poll().saved == ["a"]
        on.save("a", tokens, [0, 1])
        assert on.lookup("b", tokens) == Found(2 * BLOCK)
    assert caplog.messages == []
