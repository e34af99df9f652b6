"""An engine that owns its device blocks: what it saves comes back, byte for byte, wherever."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.embed.steps import ask, plan_of
from tests.embed.test_groups import FULL, SIZE, Hybrid, hybrid, tokens_of
from tests.latch import PATIENCE_S
from tests.layouts import LAYOUTS
from tests.redis_server import redis_server
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.groups import NO_BLOCK
from tierkv.cache.keys import Fingerprint, MediaItem, Prompt
from tierkv.embed import EngineCacheSettings
from tierkv.embed.engine_cache import EngineCache, Found
from tierkv.errors import BadRequestError, ConfigError, HandoffError
from tierkv.gpu.cpu import CpuDevice
from tierkv.gpu.protocol import Direction
from tierkv.pd.handoff import Published
from tierkv.pd.settings import HandoffSettings
from tierkv.ranks.memory import EnginePlanes
from tierkv.ranks.worker_planes import WorkerPlanes
from tierkv.storage.factory import StoreSettings

LAYOUT = FULL.layout
LONG = 8 * SIZE + 2
NONE = WritePolicy.NONE


def engine(
    store: str | None = None, *, slots: int = 64, save_blocks: int = 16, **more: Any
) -> AbstractContextManager[Hybrid]:
    options = EngineCacheSettings(save_blocks=save_blocks)
    more = {"options": options, "stores": StoreSettings(), **more}
    return hybrid([FULL], store, host_bytes=slots * LAYOUT.block_bytes, **more)


def test_a_store_that_has_died_is_a_miss_with_a_reason_and_nothing_is_promised() -> None:
    tokens = tokens_of(2 * SIZE)
    with redis_server() as redis, engine(redis.url) as on:
        on.save(tokens)
        assert on.findings() == []
        redis.kill()
        assert on.cache.reset().wait(PATIENCE_S) == 0
        found = on.lookup("b", tokens)
        assert found.num_tokens == 0
        assert found.problem


def save_some(on: Hybrid, tokens: Sequence[int], first: int, last: int, **more: Any) -> None:
    """As an engine does with each chunk that it has computed."""
    blocks = [*range(-(-len(tokens) // SIZE))]
    on.start_save("p", tokens, blocks[first:last], first=[first], **more)
    stored = len(on.seen.stored)
    on.until(lambda: len(on.seen.stored) > stored)


@pytest.mark.promise("A claimer fetches blocks while the engine computes the rest.")
def test_a_claimer_fetches_what_is_saved_while_the_rest_is_computed(tmp_path: Path) -> None:
    tokens, url = tokens_of(LONG), f"file://{tmp_path}"
    with engine(url, write=NONE) as producer, engine(url, write=NONE) as consumer:
        prompt = consumer.prompt(tokens)
        assert consumer.cache.lookup("c", prompt, ticket="t") is None
        producer.compute(tokens, producer.whole(tokens, first=0))
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
        consumer.check("c", tokens, LONG, ticket="t")


def test_a_prompt_counts_as_claimed_once_all_of_it_is_loaded(tmp_path: Path) -> None:
    tokens, url = tokens_of(LONG), f"file://{tmp_path}"
    with engine(url, write=NONE) as producer, engine(url, write=NONE) as consumer:
        key = producer.save(tokens, ticket="t", first_tokens=[7])
        assert isinstance(producer.published(key), Published)
        for key, fails, num_claimed in (("a", True, 0), ("b", False, 1)):
            found = consumer.lookup(key, tokens, ticket="t")
            assert found.num_tokens == LONG
            if fails:
                consumer.latch.fail_next(Direction.LOAD)
            _, failed = consumer.load(key, found)
            assert bool(failed) is fails
            stats = consumer.cache.stats().wait(PATIENCE_S)
            assert stats.handoff.claimed_prompts == num_claimed
        assert producer.cache.reset().wait(PATIENCE_S) == 0, "a publish that is over holds nothing"


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("released", "ended before"),
        ("closed", "closed"),
        ("failed", "prompt tokens are in host"),
    ],
)
def test_who_waits_for_a_prompt_that_is_not_saved_to_its_end_is_told_why(
    end: str, reason: str, tmp_path: Path
) -> None:
    tokens, url = tokens_of(LONG), f"file://{tmp_path}"
    with engine(url, write=NONE) as consumer:
        with engine(url, write=NONE, ends=end != "closed") as producer:
            save_some(producer, tokens, 0, 4, ticket="t")
            assert consumer.cache.lookup("c", consumer.prompt(tokens), ticket="t") is None
            if end == "released":
                producer.cache.release("p")
            elif end == "failed":
                producer.latch.fail_next(Direction.OFFLOAD)
                producer.start_save("p", tokens, [4, 5, 6, 7, 8], first=[4], ticket="t")
            if end != "closed":
                assert isinstance(producer.published("p"), HandoffError)
        found = consumer.lookup("c", tokens, ticket="t")
        assert found.num_tokens == 0
        assert reason in str(found.problem)


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
        handoff = on.cache.stats().wait(PATIENCE_S).handoff
        assert handoff is not None
        assert handoff.claims_without_ticket >= 1
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
    tokens = tokens_of(LONG)
    with engine(f"file://{tmp_path}", write=NONE) as on:
        [blocks] = on.whole(tokens, first=0)
        on.compute(tokens, [blocks])
        save_some(on, tokens, 0, 4, ticket="t")
        on.latch.hold(Direction.OFFLOAD)
        on.start_save("p", tokens, blocks[4:6], first=[4], ticket="t")
        of_the_released = tokens_of(SIZE, 2)
        on.start_save("released", of_the_released, [50])
        on.cache.release("released")
        on.cache.reset().wait(PATIENCE_S)
        on.latch.release()
        on.until(lambda: len(on.seen.saved) == 3)
        rest = on.cache.save("p", on.prompt(tokens), [blocks], ticket="t", first_tokens=[7])
        assert rest is None
        assert isinstance(on.published("p"), HandoffError)
        assert on.lookup("b", tokens).num_tokens <= 4 * SIZE  # that the store was given before
        assert on.lookup("c", of_the_released).num_tokens == 0
        on.cache.release("p")
        on.save(tokens)
        on.check("d", tokens, LONG)


def test_promises_are_bounded_together_and_a_queue_of_requests_is_served_in_turn() -> None:
    """A thousand requests that wait do not pin the host tier."""
    tokens = [tokens_of(4 * SIZE, seed) for seed in range(1, 9)]
    settings = EngineCacheSettings(save_blocks=8, max_promised=0.25)
    with engine(slots=48, options=settings) as on:
        for one in tokens:
            on.save(one)
        waiting = {f"q{at}": on.prompt(tokens[at % len(tokens)]) for at in range(1000)}

        def answered() -> list[str] | None:
            lookup = on.cache.lookup
            return [key for key in waiting if lookup(key, waiting[key]) is not None] or None

        served = 0
        while served < 20:
            found = ask(answered)
            assert len(found) * 4 <= 12, "more is held than may be"
            served += len(found)
            for key in found:  # who lets go lets the next one in
                on.cache.release(key)
                del waiting[key]
        for key in waiting:
            on.cache.release(key)


def test_a_promise_that_nobody_loads_expires_and_holds_nothing() -> None:
    tokens = tokens_of(2 * SIZE)
    with engine() as on:
        on.save(tokens)
        assert on.lookup("b", tokens, promise_ttl_s=0.05) == Found(2 * SIZE)
        on.until(lambda: on.cache.lookup("b", on.prompt(tokens)) is None)
        on.check("b", tokens, 2 * SIZE)


def test_what_a_lookup_found_for_a_request_that_ended_meanwhile_is_not_held() -> None:
    """The engine releases the request before it has read the answer."""
    tokens = tokens_of(2 * SIZE)
    with engine() as on:
        on.save(tokens)
        assert on.cache.lookup("b", on.prompt(tokens)) is None
        on.cache.wait_for_lookup("b", PATIENCE_S)
        on.cache.release("b")
        assert on.cache.reset().wait(PATIENCE_S) == 0


@pytest.mark.promise("A preempted engine request finds its blocks again.")
def test_a_request_that_lost_its_own_blocks_is_told_anew_what_there_is() -> None:
    """A preempted one: while it had them there was nothing beyond, and no time has passed since."""
    tokens = tokens_of(2 * SIZE)
    with engine() as on:
        on.save(tokens)
        assert on.lookup("b", tokens, 2 * SIZE).num_tokens == 0
        on.check("b", tokens, 2 * SIZE)


def test_saves_are_told_over_once_for_each_key_however_they_end() -> None:
    with engine() as on:
        on.latch.hold()
        for key, blocks, length in (("a", [0], SIZE), ("a", [0, 1], 2 * SIZE), ("b", [2], SIZE)):
            on.start_save(key, tokens_of(length, ord(key)), blocks)
        on.poll()
        assert on.seen.saved == []
        on.latch.release()
        on.until(lambda: on.cache.fence([0, 1, 2]) == ())
        assert sorted(on.seen.saved) == ["a", "b"]


def test_a_cache_whose_planes_cannot_be_attached_leaves_no_service_behind() -> None:
    class NoLanes(CpuDevice):
        def open_lane(self, *_: object) -> Any:
            raise ConfigError("no lanes here")

    arrays = [np.zeros((4, plane.block_bytes), np.uint8) for plane in LAYOUT.planes]
    cache = EngineCache(
        Fingerprint("model", LAYOUT),
        [LAYOUT],
        host_bytes=8 * LAYOUT.block_bytes,
        planes=WorkerPlanes(NoLanes(), EnginePlanes(LAYOUT, arrays)),
    )
    with pytest.raises(ConfigError, match="no lanes here"):
        cache.open()
    assert not any(thread.name == "tierkv-embed" for thread in threading.enumerate())


@pytest.mark.parametrize("count", [2, 300])
def test_a_block_that_the_engine_does_not_have_fails_its_load_and_no_other(count: int) -> None:
    tokens = tokens_of(2 * SIZE)
    with engine() as on:
        on.save(tokens)
        on.lookup("b", tokens)
        on.planes.start_loads(on.plan_to_load("b", [5, 100]))
        on.until(lambda: on.seen.loaded == [("b", ((0, 1),))])
        on.planes.start_saves(
            plan_of(1 << 20, "offload", range(99, 99 + count), range(99, 99 + count))
        )
        [report] = on.planes.finished()
        assert "outside 0..99" in str(report.problem)
        on.check("c", tokens, 2 * SIZE)


@pytest.mark.parametrize(
    ("num_first", "grows"), [(2 * SIZE, False), (2 * SIZE, True), (2 * SIZE + 1, True)]
)
def test_another_prompt_under_a_key_is_saved_whole_and_one_that_grew_goes_on(
    num_first: int, grows: bool
) -> None:
    """A partial block that has grown is saved again."""
    first, rest = tokens_of(num_first), 3 * SIZE - num_first
    second = [*first, *tokens_of(rest, 2)] if grows else tokens_of(3 * SIZE, 3)
    with engine() as on:
        on.save(first, key="a")
        on.compute(second, [[4, 5, 6]])
        plan = on.plan_to_save("a", second, [4, 5, 6])
        assert len(plan.slots()[0]) == (1 if grows else 3)
        on.planes.start_saves(plan)
        on.until(lambda: len(on.seen.stored) == 2)
        on.check("b", second, 3 * SIZE)


def test_a_lookup_that_has_found_nothing_is_answered_from_memory_for_a_while() -> None:
    tokens = tokens_of(2 * SIZE)
    with engine() as on:
        assert on.lookup("a", tokens, promise_ttl_s=0.2) == Found(0)
        began = time.monotonic()
        found = on.cache.lookup("a", on.prompt(tokens), promise_ttl_s=0.2)
        assert found == Found(0) or time.monotonic() > began + 0.1
        time.sleep(0.25)
        on.save(tokens)
        assert on.lookup("a", tokens).num_tokens == 2 * SIZE


def test_the_same_tokens_of_another_image_or_space_are_another_prompt() -> None:
    tokens = tokens_of(3 * SIZE)

    def showing(image: bytes, num_tokens: int) -> Prompt:
        return Prompt.of(tokens[:num_tokens], SIZE, [MediaItem(1, 2, image * 16)])

    last = showing(b"b", 3 * SIZE)
    with engine() as on:
        plans = []
        for prompt, num_new in (
            (showing(b"a", 2 * SIZE), 2),
            (showing(b"b", 2 * SIZE), 2),
            (last, 1),  # which goes on
            (Prompt(last.tokens, SIZE, last.extras, "another space"), 3),
        ):
            plan = on.cache.save("a", prompt, [[*range(prompt.num_blocks)]])
            assert plan is not None
            assert len(plan.slots()[0]) == num_new
            plans.append(plan)
        for plan in plans:
            on.cache.cancel(plan)


def test_what_cannot_be_is_refused_in_the_caller_s_thread() -> None:
    with engine() as on:
        prompt = on.prompt(tokens_of(2 * SIZE + 1))
        with pytest.raises(BadRequestError):
            on.cache.save("a", prompt, [[0, 1, 2, 3]])
        with pytest.raises(BadRequestError, match="first_blocks"):
            on.cache.save("a", prompt, [[0]], [0, 0])
        with pytest.raises(BadRequestError, match="have a gap"):
            on.cache.save("a", prompt, [[0, NO_BLOCK, 2]])
        with pytest.raises(BadRequestError):
            on.cache.save("a", prompt, [[0], [1]])
        assert on.cache.load("a", [[0]]) is None
    fingerprint = Fingerprint("model", LAYOUT)
    with pytest.raises(ConfigError, match="layout"):
        EngineCache(fingerprint, [LAYOUTS["mla"]], host_bytes=1 << 20)
    with pytest.raises(ConfigError, match="too little for two blocks"):
        EngineCache(fingerprint, [LAYOUT], host_bytes=1)


def test_saves_whose_one_copy_has_failed_are_made_again() -> None:
    tokens = [tokens_of(2 * SIZE, seed) for seed in (1, 2)]
    with engine() as on:
        on.latch.fail_next(Direction.OFFLOAD)
        for _ in range(2):
            plans = [on.plan_to_save(f"s{at}", one, [0, 1]) for at, one in enumerate(tokens)]
            on.planes.start_saves(on.cache.join(plans))
            on.until(lambda: {"s0", "s1"} <= set(on.seen.saved))
            on.seen.saved.clear()
        on.until(lambda: len(on.seen.stored) == len(tokens))


# What a session has used stays on the host for its time, while what nobody asked to keep goes.


TURN = tokens_of(4 * SIZE, 99)


@pytest.mark.promise(
    "A session's last turn is evicted after all other blocks, until its time ends."
)
@pytest.mark.parametrize(
    ("lives_s", "num_left"),
    [
        pytest.param([600.0], len(TURN), id="kept"),
        pytest.param([], 0, id="not kept"),
        pytest.param([0.01], 0, id="its time is over"),
        pytest.param([0.01, 600.0, 0.0], 0, id="ended"),
    ],
)
def test_a_sessions_turn_outlives_later_prompts_while_it_is_kept(
    lives_s: list[float], num_left: int
) -> None:
    with engine(slots=24, save_blocks=4) as on:
        on.save(TURN)
        for ttl_s in lives_s:
            on.cache.keep_session("session", on.prompt(TURN), ttl_s)
        if not num_left:
            pins = on.cache._host._thread.service.tiers.pins  # type: ignore[union-attr]  # noqa: SLF001
            on.cache.verify().wait(PATIENCE_S)
            on.until(lambda: not pins.soft_ends)
        outlived(on, num_left)


def outlived(on: Hybrid, num_left: int) -> None:
    """More other prompts are saved than the host has room for."""
    for seed in range(1, 12):
        on.save(tokens_of(3 * SIZE, seed))
    on.check("next turn", TURN, num_left)


def test_a_later_turn_replaces_the_one_before_it() -> None:
    """And a session whose blocks are gone keeps nothing, and is no error."""
    with engine(slots=24, save_blocks=6) as on:
        on.cache.keep_session("gone", on.prompt(tokens_of(2 * SIZE, 50)), 600.0)
        for turn in (TURN[: 2 * SIZE], TURN):
            on.save(turn)
            on.cache.keep_session("session", on.prompt(turn), 600.0)
        outlived(on, len(TURN))


def test_a_save_that_was_cancelled_is_no_failure_and_its_blocks_are_saved_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokens = tokens_of(2 * SIZE)
    with engine() as on:
        on.cache.cancel(on.plan_to_save("a", tokens, [0, 1]))
        assert on.cache.fence([0, 1]) == ()
        assert on.cache.poll().saved == ["a"]
        on.save(tokens, key="a")
        on.check("b", tokens, 2 * SIZE)
    assert caplog.messages == []
