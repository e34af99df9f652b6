"""An engine's thread knows at once what lookups find on the host, by the engine's own names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.embed.test_engine_cache import engine
from tests.embed.test_groups import SIZE, Hybrid, tokens_of
from tests.faulty import FaultyStore
from tests.latch import PATIENCE_S
from tests.redis_server import redis_server
from tierkv.embed.engine_cache import Found
from tierkv.gpu.protocol import Direction


def names_of(tokens: Sequence[int]) -> list[str]:
    """Name each whole block by all tokens up to its end."""
    ends = range(SIZE, len(tokens) + 1, SIZE)
    return [str(tokens[:end]) for end in ends]


def save(on: Hybrid, tokens: Sequence[int]) -> None:
    tail = [None] if len(tokens) % SIZE else []
    on.save(tokens, external_ids=[[*names_of(tokens), *tail]])


def test_saved_blocks_count_until_the_first_that_is_not_there() -> None:
    tokens = tokens_of(3 * SIZE + 1)
    other = tokens[: 2 * SIZE] + tokens_of(SIZE, 7)
    with engine() as on:
        assert on.cache.sees_host
        assert on.cache.num_on_host(names_of(tokens)) == 0
        save(on, tokens)
        assert on.cache.num_on_host(names_of(tokens)) == 3
        assert on.cache.num_on_host(names_of(other)) == 2
        assert on.cache.num_on_host([]) == 0


def test_blocks_count_from_the_moment_that_a_lookup_would_find_them() -> None:
    """The call that keeps them is under way: a lookup would be answered after it."""
    tokens = tokens_of(2 * SIZE)
    names = names_of(tokens)
    with engine() as on:
        on.cache.hold_calls()
        plan = on.plan_to_save("a", tokens, [0, 1], external_ids=[names])
        assert on.cache.num_on_host(names) == 0
        on.planes.start_saves(plan)
        on.planes.wait(plan.number, PATIENCE_S)
        on.poll()
        assert not on.seen.stored, "nothing has been sent yet"
        assert on.cache.num_on_host(names) == 2
        on.cache.flush()
        on.until(lambda: on.seen.stored)
        assert on.cache.num_on_host(names) == 2


def test_blocks_need_no_save_while_another_save_of_them_is_under_way() -> None:
    tokens = tokens_of(2 * SIZE)
    names = names_of(tokens)
    with engine() as on:
        plans = [on.plan_to_save(key, tokens, [0, 1], external_ids=[names]) for key in "ab"]
        assert on.cache.num_saved(names) == 2
        assert on.cache.num_on_host(names) == 0, "a lookup would not find them"
        on.latch.fail_next(Direction.OFFLOAD)
        for plan in plans:
            assert on.cache.num_saved(names) == 2
            on.planes.start_saves(plan)
            on.planes.wait(plan.number, PATIENCE_S)
        on.until(lambda: sorted(on.seen.saved) == ["a", "b"])
        assert on.cache.num_saved(names) == 2, "one of the two has come"
        on.cache.reset().wait(PATIENCE_S)
        on.until(lambda: on.cache.num_saved(names) == 0)


def test_blocks_that_storage_has_brought_count_once_they_are_named() -> None:
    tokens = tokens_of(3 * SIZE)
    with redis_server() as redis:
        with engine(redis.url) as first:
            save(first, tokens)
        with engine(redis.url) as on:
            found = on.lookup("b", tokens)
            assert (found.num_tokens, found.storage_tokens) == (3 * SIZE, 3 * SIZE)
            on.cache.name_blocks(on.prompt(tokens), names_of(tokens))
            on.until(lambda: on.cache.num_on_host(names_of(tokens)) == 3)
            on.cache.release("b")


def test_blocks_that_left_the_host_before_they_were_stored_do_not_count(tmp_path: Path) -> None:
    tokens = tokens_of(3 * SIZE)
    with engine(f"file://{tmp_path}", around=FaultyStore) as on:
        on.store.hold_writes()
        save(on, tokens)
        on.until(lambda: on.store.num_held)
        assert on.cache.reset().wait(PATIENCE_S) == 0
        on.store.release()

        def is_stored() -> bool:
            on.cache.stats().wait(PATIENCE_S)
            return any(event.tier == "storage" for event in on.cache.read_events())

        on.until(is_stored)
        assert on.cache.num_on_host(names_of(tokens)) == 0


def test_a_lookup_may_end_alone_and_its_request_goes_on_saving() -> None:
    tokens = tokens_of(4 * SIZE)
    with engine() as on:
        on.save(tokens[: 2 * SIZE])
        assert on.lookup("b", tokens) == Found(2 * SIZE)
        on.cache.end_lookup("b")
        assert on.cache.load("b", [[5, 6]]) is None, "nothing is promised any more"
        plan = on.plan_to_save("b", tokens, [8, 9, 10, 11])
        on.cache.end_lookup("b")
        on.planes.start_saves(plan)
        on.until(lambda: "b" in dict(on.seen.stored))
        assert on.cache.save("b", on.prompt(tokens), [[8, 9, 10, 11]]) is None


def test_an_engine_that_has_nothing_else_to_do_waits_for_the_answer() -> None:
    tokens = tokens_of(2 * SIZE)
    with engine() as on:
        on.save(tokens)
        on.cache.hold_calls()
        assert on.cache.lookup("b", on.prompt(tokens)) is None
        on.cache.wait_for_lookup("b", PATIENCE_S)
        assert on.cache.lookup("b", on.prompt(tokens)) == Found(2 * SIZE)
        on.cache.release("b")
