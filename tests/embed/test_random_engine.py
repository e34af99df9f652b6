"""Engines at random, with stores that fail: every byte that is loaded is right, nothing leaks."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from tests.embed.driver import Driver, Running, WrongBytesError
from tests.embed.engine import until
from tests.embed.test_groups import MODELS, hybrid
from tests.redis_proxy import Proxy, proxy_on_a_thread
from tests.redis_server import RedisServer, redis_server
from tierkv.embed import EngineCacheSettings
from tierkv.ranks.link import Plan


def faults_of(redis: RedisServer, proxy: Proxy) -> list[Callable[[bool], None]]:
    def hangs(begins: bool) -> None:
        (redis.pause if begins else redis.resume)()

    def is_slow(begins: bool) -> None:
        proxy.delay_s = 0.5 if begins else 0.0

    def is_flushed(begins: bool) -> None:
        if begins:
            redis.execute("FLUSHALL")

    def breaks_off(begins: bool) -> None:
        proxy.cut_after = 100 if begins else None

    return [hangs, is_slow, is_flushed, breaks_off]


def own_threads() -> set[str]:
    """Return the names of threads, but for the pool that the whole process shares."""
    names = {one.name for one in threading.enumerate()}
    return {name for name in names if not name.startswith("tierkv-shared")}


def drive(
    model: str, seed: int, num_steps: int, *, store: str, host_bytes: int = 3 << 10, **more: Any
) -> Driver:
    with ExitStack() as stack:
        url, faults = store, list[Callable[[bool], None]]()
        if store == "redis":
            redis = stack.enter_context(redis_server())
            proxy = stack.enter_context(proxy_on_a_thread(redis.port))
            url, faults = proxy.url, faults_of(redis, proxy)
        threads = own_threads()
        groups = MODELS[model]
        settings = EngineCacheSettings(save_blocks=4)
        with hybrid(groups, url, host_bytes=host_bytes, options=settings) as on:
            driver = Driver(on, random.Random(seed), faults, **more)
            driver.run(num_steps)
            assert (found := on.findings()) == [], found
        until(lambda: own_threads() <= threads, "threads end")
    return driver


@pytest.mark.promise("An engine over a failing store loads right bytes and leaks no block.")
@pytest.mark.parametrize("model", sorted(MODELS))
def test_an_engine_at_random_loads_right_bytes_and_leaves_nothing(model: str) -> None:
    driver = drive(model, 1, 250, store="redis")
    assert driver.num_steps >= 250


@pytest.mark.slow
@pytest.mark.parametrize("model", sorted(MODELS))
@pytest.mark.parametrize("seed", range(4))
def test_an_engine_at_random_for_long(model: str, seed: int) -> None:
    driver = drive(model, seed, 4000, store="redis", host_bytes=1 << (11 + seed))
    assert driver.loaded_tokens > 0
    assert driver.failed_loads > 0


def zeroes_the_tail(driver: Driver, one: Running, kind: str, plan: Plan) -> Plan:
    if kind == "save" and len(one.text.tokens) % driver.size and one.blocks[0]:
        for array in driver.on.arrays[0]:
            array[one.blocks[0][-1]] = 0
    return plan


def swaps_blocks(driver: Driver, one: Running, kind: str, plan: Plan) -> Plan:
    if kind == "save" and len(one.blocks[0]) > 1:
        for array in driver.on.arrays[0]:
            array[one.blocks[0][:2]] = array[one.blocks[0][1::-1]]
    return plan


@pytest.mark.parametrize("meddle", [zeroes_the_tail, swaps_blocks, None])
def test_a_zeroed_tail_swapped_blocks_and_a_stale_save_are_noticed(
    meddle: Callable[[Driver, Running, str, Plan], Plan] | None,
) -> None:
    """None: blocks are given to others while a save reads them."""
    with pytest.raises(WrongBytesError):
        drive(
            "indexer",
            2,
            4000,
            store="memory://",
            host_bytes=1 << 13,
            meddle=meddle,
            honours_fences=meddle is not None,
        )
