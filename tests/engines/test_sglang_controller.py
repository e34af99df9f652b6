"""SGLang's real controller, with host pools of every kind of model, over tierkv stores.

`./scripts/test --engines` runs these where SGLang is installed. Token equality says little of pages
(two that are swapped give the same tokens), so bytes are compared, as SGLang itself reads them.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.engines.processes import needs
from tests.redis_proxy import Proxy, proxy_on_a_thread
from tests.redis_server import RedisServer, redis_server

needs("sglang")

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName

from tests.engines.sglang_world import (
    KINDS,
    PAGE,
    World,
    host_mamba,
    memories,
    prompt,
    with_ranks,
)

with_ranks()

# What a store that fails may cost a call: SGLang waits 10 s for its threads when it detaches.
BOUND_S = 8.0


def saved(world: World, slots: dict[PoolName, torch.Tensor]) -> dict[PoolName, list[bytes]]:
    return {name: world.pages(name, indices) for name, indices in slots.items()}


def written(url: str, kind: str = "full", num_pages: int = 5, **more: Any) -> Any:
    """What an instance that is gone has stored of `prompt(1, num_pages)`."""
    with World(url, kind, **more) as world:
        world.fill(1)
        slots, count = world.write_back(prompt(1, num_pages))
        assert count == num_pages * PAGE
        return saved(world, slots)


@pytest.mark.promise("Every host pool of every SGLang rank comes back byte for byte.")
@pytest.mark.parametrize("store", ["redis", "file"])
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *((kind, layout) for kind in KINDS for layout in ("page_first_direct", "page_first")),
        ("full", "layer_first"),
        ("compressed", "layer_first"),
    ],
)
def test_every_pool_comes_back_to_the_byte(
    empty_redis: RedisServer, tmp_path: Path, kind: str, layout: str, store: str
) -> None:
    url = empty_redis.url if store == "redis" else f"file://{tmp_path}/pages"
    pages = written(url, kind, layout=layout)
    with World(url, kind, layout=layout) as world:
        got = world.prefetch(prompt(1, 7))
        assert (got.found_pages, got.num_pages) == (5, 5)
        assert saved(world, got.slots) == pages
        used = {name: set(indices.tolist()) for name, indices in got.slots.items()}
        for name, pool in world.pools.items():  # and nothing else was touched
            free = set(range(0, pool.size, pool.page_size)) - used[name]
            assert not any(any(world.page(name, slot)) for slot in free)
        stats = world.backend.get_stats()
        assert sum(stats.prefetch_pgs) >= (5 if kind != "compressed" else 10)
        assert all(rate > 0 for rate in stats.prefetch_bandwidth)
        assert not world.backend.get_stats().prefetch_pgs
    assert not [t for t in threading.enumerate() if t.name == "tierkv-pages"]
    if store == "redis":
        left = sorted(map(empty_redis.ttl, empty_redis.names()))
        assert 0 < left[0] <= left[-1] <= 86_400


@pytest.mark.promise("Every host pool of every SGLang rank comes back byte for byte.")
def test_two_ranks_have_each_their_own_bytes_and_what_is_the_same_once(
    empty_redis: RedisServer, tmp_path: Path
) -> None:
    def ranks(act: str) -> list[dict[str, Any]]:
        command = [sys.executable, "-m", "tests.engines.sglang_world"]
        processes = [
            subprocess.Popen(
                [*command, str(rank), "2", str(tmp_path), empty_redis.url, act],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        told = [process.communicate(timeout=240)[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0]
        return [json.loads(text.splitlines()[-1]) for text in told]

    wrote, read = ranks("write"), ranks("read")
    for kind in ("full", "hybrid"):
        assert wrote[0][kind]["bytes"] != wrote[1][kind]["bytes"]
        assert [of[kind] for of in read] == [of[kind] for of in wrote]
    for kind in ("latent", "compressed"):  # rank 0's, though rank 1 held others
        assert wrote[0][kind]["bytes"] != wrote[1][kind]["bytes"]
        assert read[0][kind] == read[1][kind] == wrote[0][kind]
        assert read[0][kind]["pages"] == 5


def test_prompts_of_other_namespaces_and_instances_of_others_find_nothing(
    empty_redis: RedisServer,
) -> None:
    url = empty_redis.url
    with World(url, tenant="a") as world:
        world.fill(1)
        salted, _ = world.write_back(prompt(1, 3), cache_salt="s")
        adapted, _ = world.write_back(prompt(1, 4), extra_key="lora")
        for namespace, pages in (({}, 0), ({"cache_salt": "t"}, 0), ({"extra_key": "s"}, 0)):
            assert world.prefetch(prompt(1, 4), **namespace).num_pages == pages
        with_salt = world.prefetch(prompt(1, 4), cache_salt="s")
        assert saved(world, with_salt.slots) == saved(world, salted)
        with_adapter = world.prefetch(prompt(1, 4), extra_key="lora")
        assert saved(world, with_adapter.slots) == saved(world, adapted)
    for other in (
        {"tenant": "b"},
        {"tenant": "a", "model": "other"},
        {"tenant": "a", "revision": "2"},
        {"tenant": "a", "prefix": "elsewhere"},
        {"tenant": "a", "layout": "page_first"},
        {"tenant": "a", "kind": "latent"},
    ):
        with World(url, **other) as world:  # type: ignore[arg-type]
            assert world.prefetch(prompt(1, 4), cache_salt="s").found_pages == 0
    with World(url, tenant="a") as world:
        assert world.prefetch(prompt(1, 4), cache_salt="s").num_pages == 3
        assert world.backend.clear()
        assert world.prefetch(prompt(1, 4), cache_salt="s").num_pages == 0
    assert empty_redis.names() == []


def test_a_prefix_ends_where_every_pool_has_what_it_needs(empty_redis: RedisServer) -> None:
    with World(empty_redis.url, "hybrid") as world:
        world.fill(1)
        three, _ = world.write_back(prompt(1, 3))
        five, _ = world.write_back(prompt(1, 5))
        pages = saved(world, three), saved(world, five)
        pages[1][PoolName.KV][:3] = pages[0][PoolName.KV]  # what is there is left as it is
        hashes = world.hashes(prompt(1, 5))
        state = stored_name(world, PoolName.MAMBA, hashes[4])
        in_window = stored_name(world, PoolName.SWA, hashes[1])
    with World(empty_redis.url, "hybrid") as world:
        got = world.prefetch(prompt(1, 7))
        assert got.num_pages == 5
        assert saved(world, got.slots) == pages[1]
        world.give_back(got.taken)

        assert empty_redis.execute("DEL", f"{state}:2of3")  # behind page 5: 3 has one, too
        got = world.prefetch(prompt(1, 7))
        assert (got.found_pages, got.num_pages) == (3, 3)
        assert saved(world, got.slots) == pages[0]
        world.give_back(got.taken)
        assert empty_redis.execute("DEL", f"{in_window}:0of2")  # of the window before page 3
        assert world.prefetch(prompt(1, 7)).found_pages == 0


def stored_name(world: World, pool: PoolName, key: str) -> str:
    """Of a page's values, without what tells its parts apart."""
    one = world.backend._pages[pool].pools[0]  # noqa: SLF001
    names = one.io.names
    return f"{names.prefix}:{names.fingerprint}:{one._stored([key.encode()])[0].digest.hex()}"  # noqa: SLF001


@pytest.mark.promise("SGLang gets no page that was not stored under its name.")
@pytest.mark.parametrize("damage", ["swapped", "zeroed", "cut", "its other half"])
def test_values_that_are_not_what_was_stored_are_refused(
    empty_redis: RedisServer, damage: str
) -> None:
    pages = written(empty_redis.url)
    with World(empty_redis.url) as world:
        third, fourth = (
            stored_name(world, PoolName.KV, key) for key in world.hashes(prompt(1, 5))[2:4]
        )
        value, other = (empty_redis.execute("GET", f"{name}:0of2") for name in (third, fourth))
        values = empty_redis.execute("GET", f"{third}:1of2")
        assert isinstance(value, bytes)
        assert isinstance(other, bytes)
        assert isinstance(values, bytes)
        damaged = {
            "swapped": other,
            "zeroed": value[:-100] + bytes(100),
            "cut": value[: len(value) // 2],
            "its other half": values,
        }
        empty_redis.execute("SET", f"{third}:0of2", damaged[damage])
        if damage == "swapped":
            empty_redis.execute("SET", f"{fourth}:0of2", value)
        got = world.prefetch(prompt(1, 5))
        assert (got.found_pages, got.num_pages) == (5, 2)
        assert saved(world, got.slots)[PoolName.KV] == pages[PoolName.KV][:2]
        assert world.prefetch(prompt(1, 5)).found_pages == 2  # damage is not offered again


def test_sealed_pages_are_of_no_use_without_the_key(
    empty_redis: RedisServer, tmp_path: Path
) -> None:
    for name in ("key", "other"):
        (tmp_path / name).write_text(secrets.token_hex(32))
    sealed: dict[str, Any] = {"trust": "sealed", "key_file": str(tmp_path / "key")}
    pages = written(empty_redis.url, **sealed)[PoolName.KV]
    values = [empty_redis.execute("GET", key) for key in empty_redis.names()]
    assert not [page for page in pages for value in values if page[:64] in value]  # type: ignore[operator]
    with World(empty_redis.url, **sealed) as world:
        assert saved(world, world.prefetch(prompt(1, 5)).slots)[PoolName.KV] == pages
    for other in ({}, sealed | {"key_file": str(tmp_path / "other")}):
        with World(empty_redis.url, **other) as world:
            assert world.prefetch(prompt(1, 5)).num_pages == 0
    with pytest.raises(Exception, match="key_file"):
        World(empty_redis.url, trust="signed")


def strike(fault: str, server: RedisServer, proxy: Proxy) -> None:
    if fault == "killed":
        server.kill()
        server.popen.wait()
    elif fault == "hung":
        server.pause()
    elif fault == "slow":
        proxy.delay_s = 0.5
    else:
        server.execute("FLUSHALL")


@pytest.mark.promise("A failing store blocks SGLang's threads for a bounded time.")
@pytest.mark.parametrize("fault", ["killed", "hung", "slow", "flushed"])
@pytest.mark.parametrize("moment", ["before the question", "before the read"])
def test_a_store_that_fails_costs_a_bounded_time_and_never_a_byte(fault: str, moment: str) -> None:
    tokens, name = prompt(1, 5), PoolName.KV
    with redis_server() as server, proxy_on_a_thread(server.port) as proxy:
        pages = written(server.url)[name]
        world = World(proxy.url)
        world.fill(9)
        pool = world.pools[name]
        assert world.prefetch(tokens).num_pages == 5

        began_at = time.monotonic()
        if moment == "before the question":
            strike(fault, server, proxy)
        operation = world.begin_prefetch("r", tokens)
        assert world.found() is operation
        if moment == "before the read":
            assert operation.storage_hit_count == len(tokens)
            strike(fault, server, proxy)
        if world.begin_reads(operation):
            got = world.finish_reads(operation)
            assert world.pages(name, got.slots[name]) == pages[: got.num_pages]
            assert got.num_pages == 0 or fault == "slow"
        else:
            operation.host_indices = pool.alloc(5 * PAGE)
        _, count = world.write_back(prompt(2, 3))
        assert count in ({0, 3 * PAGE} if fault in ("slow", "flushed") else {0})
        assert time.monotonic() - began_at < 2 * BOUND_S

        # Nothing arrives late in pages that are somebody else's, and the store is used again.
        theirs = world.pages(name, operation.host_indices)
        server.resume()
        proxy.delay_s = 0.0
        give_up_at, stored = time.monotonic() + 30, 0
        while fault != "killed" and not stored:
            slots, stored = world.write_back(prompt(3, 3))
            world.give_back(slots)
            assert time.monotonic() < give_up_at
        assert world.pages(name, operation.host_indices) == theirs
        threads = (world.controller.prefetch_thread, world.controller.prefetch_io_aux_thread)
        assert all(thread.is_alive() for thread in threads)
        began_at = time.monotonic()
        world.close()
        assert time.monotonic() - began_at < BOUND_S


def test_fifty_requests_with_shared_prefixes_under_eviction(empty_redis: RedisServer) -> None:
    """Host memory holds a fifth of what is stored, so that every page goes and comes."""
    prompts = [prompt(100 + n % 5, 3) + prompt(200 + n, 1 + n % 3) for n in range(50)]
    of_page: dict[str, bytes] = {}
    with World(empty_redis.url) as world:
        world.fill(1)
        for number, tokens in enumerate(prompts):
            for memory in memories(world.pools[PoolName.KV]):
                memory[:] += 1 + number % 3
            slots, count = world.write_back(tokens)
            assert count == len(tokens)
            pages = saved(world, slots)[PoolName.KV]
            for key, page in zip(world.hashes(tokens), pages, strict=True):
                of_page.setdefault(key, page)  # what is there already is left as it is
            world.give_back(slots)
    with World(empty_redis.url) as world, World(empty_redis.url) as other:

        def ask(one: World, mine: list[list[int]]) -> None:
            for at in range(0, len(mine), 4):  # four at a time
                begun = [
                    one.begin_prefetch(f"r{at}-{n}", t) for n, t in enumerate(mine[at : at + 4])
                ]
                for operation, tokens in zip(begun, mine[at : at + 4], strict=True):
                    assert one.found() is operation
                    assert one.begin_reads(operation)
                    got = one.finish_reads(operation)
                    pages = saved(one, got.slots)[PoolName.KV]
                    assert pages == [of_page[key] for key in one.hashes(tokens)]
                    one.give_back(got.taken)

        with ThreadPoolExecutor(2) as threads:
            list(threads.map(ask, (world, other), (prompts, prompts[::-1]), timeout=120))
        for one in (world, other):
            assert one.pools[PoolName.KV].available_size() == one.pools[PoolName.KV].size


def test_an_abort_in_the_middle_of_a_prefetch_leaves_its_pages_alone(
    empty_redis: RedisServer,
) -> None:
    tokens = prompt(1, 300)  # SGLang reads 128 pages at a time
    pages = written(empty_redis.url, num_pages=300, tokens=320 * PAGE)[PoolName.KV]
    with World(empty_redis.url, tokens=320 * PAGE) as world:
        reads, may_go, begun = world.backend.batch_get_v1, threading.Event(), threading.Event()
        num_reads = 0

        def gated(*args: Any) -> Any:
            nonlocal num_reads
            num_reads += 1
            if num_reads == 2:
                begun.set()
                assert may_go.wait(60)
            return reads(*args)

        world.backend.batch_get_v1 = gated
        operation = world.begin_prefetch("r", tokens)
        assert world.found() is operation
        assert operation.storage_hit_count == 300 * PAGE
        world.begin_reads(operation)
        assert begun.wait(60)
        world.controller.terminate_prefetch(operation)
        may_go.set()
        got = world.finish_reads(operation)
        assert (num_reads, got.num_pages) == (2, 256)
        assert saved(world, got.slots)[PoolName.KV] == pages[:256]
        world.pools[PoolName.KV].free(operation.host_indices)
        for memory in memories(world.pools[PoolName.KV]):
            memory[:] = 7  # somebody else's now
        world.backend.batch_get_v1 = reads
        assert world.prefetch(prompt(2, 2)).found_pages == 0  # the threads go on
        assert all((memory == 7).all() for memory in memories(world.pools[PoolName.KV]))
        again = world.prefetch(tokens)
        assert saved(world, again.slots)[PoolName.KV] == pages


def test_the_backend_can_be_taken_off_a_running_engine_and_put_on_again(
    empty_redis: RedisServer,
) -> None:
    pages = written(empty_redis.url, "hybrid")
    with World(empty_redis.url, "hybrid") as world:
        for _ in range(3):
            got = world.prefetch(prompt(1, 5))
            assert saved(world, got.slots) == pages
            world.give_back(got.taken)
            world.close()
            assert not [t for t in threading.enumerate() if t.name == "tierkv-pages"]
            world.attach()


def test_what_cannot_be_kept_is_refused_when_it_starts(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/pages"
    for extra, said in (
        ({"tll_s": 5}, "ttl_s"),
        ({"ttl_s": 0}, "time to live"),
        ({"deadline_s": "soon"}, "deadline_s"),
        ({"interface_v1": 0}, "interface_v1"),
        ({"store": ""}, "names no store"),
        ({"store": "redis://127.0.0.1:1/0"}, r"127\.0\.0\.1:1"),
        ({"settings": {"redis": {"timeout": 1}}}, "timeout_s"),
    ):
        with pytest.raises(Exception, match=said):
            World(url, **extra)
    with pytest.raises(Exception, match="page_first_direct"):
        World(url, "latent", layout="layer_first")  # its indexer has no such pages
    with World(url) as world:
        states = host_mamba("page_first_direct")
        states.slot_state_device_tensors = (torch.zeros(1),)
        with pytest.raises(Exception, match="side"):
            world.backend.register_mem_host_pool_v2(states, PoolName.MAMBA)
        # A pool that is not known, and slots that are no pages: a miss and not an exception.
        bad = torch.arange(1, PAGE + 1)
        assert world.backend.batch_get_v1(["a"], bad) == [False]
        assert world.backend.batch_set_v1(["a", "b"], torch.arange(PAGE)) == [False, False]
    assert not [t for t in threading.enumerate() if t.name == "tierkv-pages"]
