"""What a session has used stays on the host for its time, while what nobody asked to keep goes."""

from __future__ import annotations

import pytest

from tests.embed.test_engine_cache import Engine, blocks_for, engine, tokens_of
from tests.latch import PATIENCE_S
from tests.world import BLOCK
from tierkv.embed import EngineCacheSettings

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
def test_a_sessions_turn_outlives_prompts_that_came_after_it() -> None:
    with engine(slots=24, settings=EngineCacheSettings(save_blocks=4)) as on:
        on.save("turn", TURN, blocks_for(len(TURN)))
        on.cache.release("turn")
        on.cache.keep_session("session", on.prompt(TURN), 600.0)
        other_prompts(on, 12)
        assert found(on, "next turn") == len(TURN)


def test_a_turn_that_no_session_keeps_goes() -> None:
    with engine(slots=24, settings=EngineCacheSettings(save_blocks=4)) as on:
        on.save("turn", TURN, blocks_for(len(TURN)))
        on.cache.release("turn")
        other_prompts(on, 12)
        assert found(on, "next turn") == 0


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
