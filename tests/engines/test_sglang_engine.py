"""SGLang itself, scheduler and all, with its third level in a tierkv store: the same tokens.

`./scripts/test --engines` runs these. Each engine is a process of its own; a small model with
random weights, whose greedy tokens tell one prompt from another; what copies pages between device
and host is a stand-in (`sglang_on_cpu`), the rest is SGLang's.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engines import processes
from tests.engines.processes import EngineProcess, needs
from tests.engines.tiny_models import save_tiny
from tests.redis_server import RedisServer, redis_server

needs("sglang")

pytestmark = [pytest.mark.timeout(600)]

_ROOT = Path(__file__).parent.parent.parent
_PAGE = 16
Prompt = list[int]
Answers = list[dict[str, Any]]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny("llama", tmp_path_factory.mktemp("model"), "float32")


def third_level(url: str, **more: object) -> dict[str, object]:
    """SGLang's arguments for a tierkv store below its host memory."""
    extra = processes.third_level(url, prefetch_threshold=_PAGE, **more)
    return {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 1.1,
        "hicache_mem_layout": "page_first_direct",
        "hicache_io_backend": "direct",
        "hicache_write_policy": "write_through",
        "hicache_storage_backend": "dynamic",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend_extra_config": json.dumps(extra),
    }


class Engine(EngineProcess):
    def ask(self, prompts: list[Prompt], **how: object) -> Answers:
        return list(self.answer({"prompts": prompts} | how))


@contextmanager
def engines(model: str, *arguments: dict[str, object]) -> Iterator[list[Engine]]:
    """Started together, since most of a start is waiting for imports."""
    cores = sorted(os.sched_getaffinity(0))
    environment = os.environ | {
        "PYTHONPATH": str(_ROOT),
        "HF_HUB_OFFLINE": "1",
        "PYTHONFAULTHANDLER": "1",
        "OMP_NUM_THREADS": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}",  # of two ranks
    }
    command = [sys.executable, "-m", "tests.engines.sglang_process", model]
    sizes: dict[str, object] = {"max_total_tokens": 2048, "chunked_prefill_size": 256}
    running = [Engine([*command, json.dumps(sizes | mine)], environment) for mine in arguments]
    try:
        for one in running:
            assert one.line() == "ready\n"
        yield running
        for one in running:
            one.end()
    finally:
        for one in running:
            one.kill()


def prompt(seed: int, num_tokens: int) -> Prompt:
    draws = random.Random(seed)
    return [draws.randrange(3, 500) for _ in range(num_tokens)]


PROMPTS = [
    *(prompt(n, length) for n, length in enumerate([200, 6 * _PAGE, 6 * _PAGE - 1, 6 * _PAGE + 1])),
    prompt(9, 700),  # computed in several chunks
    *(prompt(50, 4 * _PAGE) + prompt(60 + n, 40) for n in range(3)),
]
MANY = [prompt(70 + n % 5, 8 * _PAGE) + prompt(100 + n, 10 + n) for n in range(50)]


def tokens(answers: Answers) -> list[Prompt]:
    return [answer["tokens"] for answer in answers]


def from_storage(answers: Answers) -> int:
    return sum(answer["from"][2] for answer in answers)


def wait_until_stored(server: RedisServer, prompts: list[Prompt]) -> None:
    """Keys and values of every whole page of these prompts."""
    pages = {tuple(p[:end]) for p in prompts for end in range(_PAGE, len(p) + 1, _PAGE)}
    give_up_at = time.monotonic() + 60
    while int(str(server.execute("DBSIZE"))) < 2 * len(pages):
        assert time.monotonic() < give_up_at, "pages were not stored"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def alone(model: str) -> tuple[list[Prompt], ...]:
    """What SGLang without tierkv answers."""
    with engines(model, {}) as (engine,):
        return tokens(engine.ask(PROMPTS)), tokens(engine.ask(MANY))


@pytest.mark.promise("SGLang generates its own tokens under eviction and over failing stores.")
def test_tokens_are_sglangs_own_through_a_fresh_process_and_fifty_requests_under_eviction(
    model: str, alone: tuple[list[Prompt], ...], empty_redis: RedisServer
) -> None:
    mine = third_level(empty_redis.url)
    with engines(model, mine) as (first,):
        assert tokens(first.ask(PROMPTS)) == alone[0]
        wait_until_stored(empty_redis, PROMPTS)
        again = first.ask(PROMPTS, flushes=True)
        assert tokens(again) == alone[0]
        assert from_storage(again) > 1000
    assert min(map(empty_redis.ttl, empty_redis.names())) > 0
    control = {"class_name": "Zeroing", "module_path": "tests.engines.sglang_process"}
    with engines(model, mine, third_level(empty_redis.url, **control)) as (fresh, zeroing):
        answers = fresh.ask(PROMPTS)
        assert tokens(answers) == alone[0]
        assert from_storage(answers) > 1000
        # A control: what storage brings is what the model attends to.
        wrong = zeroing.ask(PROMPTS)
        assert from_storage(wrong) > 1000
        assert tokens(wrong) != alone[0]
        for _ in range(2):  # device and host memory hold a fraction of these
            assert tokens(fresh.ask(MANY)) == alone[1]
        answers = fresh.ask(MANY, flushes=True)
        assert tokens(answers) == alone[1]
        assert from_storage(answers) > 1000
        # Another salt finds nothing, and neither do prompts that are given up at once hurt.
        salted = fresh.ask(PROMPTS, salt="s", flushes=True)
        assert tokens(salted) == alone[0]
        assert from_storage(salted) == 0
        fresh.ask(MANY, aborts=0.05, flushes=True)
        assert tokens(fresh.ask(MANY)) == alone[1]


@pytest.mark.promise("SGLang generates its own tokens under eviction and over failing stores.")
def test_a_store_that_dies_hangs_forgets_or_is_damaged_costs_no_token(
    model: str, alone: tuple[list[Prompt], ...]
) -> None:
    with redis_server() as server, engines(model, third_level(server.url)) as (engine,):
        assert tokens(engine.ask(PROMPTS)) == alone[0]
        wait_until_stored(server, PROMPTS)
        for key in server.names():
            server.execute("SETRANGE", key, 300, bytes(200))
        damaged = engine.ask(PROMPTS, flushes=True)
        assert tokens(damaged) == alone[0]
        assert from_storage(damaged) == 0
        server.execute("FLUSHALL")
        assert tokens(engine.ask(PROMPTS, flushes=True)) == alone[0]
        server.pause()
        assert tokens(engine.ask(PROMPTS, flushes=True)) == alone[0]
        server.resume()
        server.kill()
        assert tokens(engine.ask(MANY, flushes=True)) == alone[1]


def test_a_model_that_is_told_to_compute_otherwise_shares_nothing(
    model: str, empty_redis: RedisServer
) -> None:
    """Its weights and their name are the same."""
    prompts = [prompt(900, 200)]
    with engines(model, third_level(empty_redis.url)) as [first]:
        first.ask(prompts)
        wait_until_stored(empty_redis, prompts)
    other = {"json_model_override_args": '{"rms_norm_eps": 0.5}'}
    with engines(model, third_level(empty_redis.url) | other) as [second]:
        assert from_storage(second.ask(prompts)) == 0


def test_two_ranks_share_a_prompt_of_two_ranks(model: str, empty_redis: RedisServer) -> None:
    mine = third_level(empty_redis.url) | {"tp_size": 2}
    with engines(model, mine) as (first,):
        expected = tokens(first.ask(PROMPTS))
        wait_until_stored(empty_redis, PROMPTS)
        again = first.ask(PROMPTS, flushes=True)
        assert tokens(again) == expected
        assert from_storage(again) > 1000
