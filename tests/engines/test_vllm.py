"""vLLM itself with its second tier in a tierkv store: the same tokens, and prefixes that last.

`./scripts/test --engines` runs these, with vLLM's CPU form installed beside tierkv. Each engine is
a process of its own; a small model with random weights, whose greedy tokens tell one prompt from
another. The negative control shows that what the tier brings is what the engine attends to.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.engines.processes import EngineProcess, process
from tests.engines.tiny_llama import save_tiny_llama
from tests.redis_server import RedisServer, empty_redis, module_redis, redis_server
from tierkv.storage.codec import HEADER_BYTES, PlainCodec, ValueIdentity

__all__ = ["empty_redis", "module_redis"]

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed (./scripts/test --engines)", allow_module_level=True)

import torch

pytestmark = [pytest.mark.timeout(600)]

_BLOCK = 32
_ON_GPU = {"spec_name": "TieringOffloadingSpec"}
_ON_CPU = {"spec_name": "CpuTieringSpec", "spec_module_path": "tests.engines.vllm_cpu_spec"}
Prompt = list[int]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_llama(tmp_path_factory.mktemp("model"), "bfloat16", positions=1024)


def tier(url: str, **more: object) -> dict[str, object]:
    """vLLM's configuration with a tierkv store below 64 MiB of its own host memory."""
    secondary = {"type": "TierKVTier", "module_path": "tierkv.adapters.vllm", "store": url}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": 64 << 20,
            "secondary_tiers": [secondary | more],
        }
        | (_ON_GPU if torch.cuda.is_available() else _ON_CPU),
    }


class Engine(EngineProcess):
    def generate(self, prompts: list[Prompt]) -> tuple[list[list[int]], list[int]]:
        """Greedy tokens of each prompt, and how many of its own came from a cache."""
        answers = self.answer(prompts)
        return [answer["tokens"] for answer in answers], [answer["cached"] for answer in answers]


@contextmanager
def engine(
    model: str, config: dict[str, object] | None = None, *, num_blocks: int = 256
) -> Iterator[Engine]:
    with process("vllm_process.py", model, config, num_blocks=num_blocks) as running:
        assert running.line() == "ready\n"
        yield Engine(running.process)


def prompt(seed: int, num_tokens: int) -> Prompt:
    draws = random.Random(seed)
    return [draws.randrange(500) for _ in range(num_tokens)]


@pytest.fixture(scope="session")
def prompts() -> list[Prompt]:
    """Ends within, before and at a block's end; three of them share 128 tokens."""
    lengths = [200, 6 * _BLOCK, 6 * _BLOCK - 1, 6 * _BLOCK + 1]
    shared = prompt(50, 4 * _BLOCK)
    return [prompt(n, length) for n, length in enumerate(lengths)] + [
        shared + prompt(60 + n, 40) for n in range(3)
    ]


@pytest.fixture(scope="session")
def expected(model: str, prompts: list[Prompt]) -> list[list[int]]:
    """What vLLM generates without tierkv."""
    with engine(model) as alone:
        tokens, _ = alone.generate(prompts)
    assert len({tuple(some) for some in tokens}) == len(tokens), "tokens tell prompts apart"
    return tokens


@pytest.mark.promise("vLLM's own offloading loads a prefix from a tierkv store.")
@pytest.mark.parametrize("kind", ["redis", "file"])
def test_a_prefix_comes_through_storage_into_a_fresh_process(
    model: str,
    prompts: list[Prompt],
    expected: list[list[int]],
    empty_redis: RedisServer,
    tmp_path: Path,
    kind: str,
) -> None:
    url = empty_redis.url if kind == "redis" else f"file://{tmp_path}/chunks"
    with engine(model, tier(url)) as first:
        assert first.generate(prompts)[0] == expected
    with engine(model, tier(url)) as second:
        tokens, cached = second.generate(prompts)
    assert tokens == expected
    assert cached[:4] == [len(tokens) // _BLOCK * _BLOCK for tokens in prompts[:4]]
    assert all(count >= 4 * _BLOCK for count in cached[4:])


def test_values_in_the_store_are_what_the_engine_attends_to(
    model: str, prompts: list[Prompt], expected: list[list[int]], empty_redis: RedisServer
) -> None:
    """The negative control: zeroed values with right checksums give other tokens."""
    with engine(model, tier(empty_redis.url)) as first:
        first.generate(prompts)
    names = empty_redis.execute("KEYS", "*")
    assert isinstance(names, list)
    for name in names:
        value = empty_redis.execute("GET", name)
        assert isinstance(value, bytes)
        zeroes = bytes(len(value) - HEADER_BYTES)
        identity = ValueIdentity(value[8:24], value[24:56], int.from_bytes(value[56:60], "little"))
        empty_redis.execute("SET", name, PlainCodec().encode(zeroes, identity)[0] + zeroes)
    with engine(model, tier(empty_redis.url)) as second:
        tokens, cached = second.generate(prompts)
    assert all(cached)
    assert all(some != right for some, right in zip(tokens, expected, strict=True))


@pytest.mark.parametrize("fault", ["killed", "hung"])
def test_a_store_that_fails_costs_time_and_no_token(
    model: str, prompts: list[Prompt], expected: list[list[int]], fault: str
) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(redis_server())
        with engine(model, tier(server.url)) as first:
            first.generate(prompts)
        second = stack.enter_context(engine(model, tier(server.url, deadline_s=0.5)))
        assert second.generate(prompts[:2])[0] == expected[:2]
        if fault == "killed":
            server.kill()
        else:
            server.pause()
        assert second.generate(prompts)[0] == expected
        if fault == "hung":
            server.resume()
            assert second.generate(prompts)[0] == expected


def test_fifty_requests_with_shared_prefixes_under_eviction_are_exact(
    model: str, empty_redis: RedisServer
) -> None:
    heads = [prompt(100 + n, 3 * _BLOCK) for n in range(5)]
    many = [heads[n % 5] + prompt(200 + n, 10 + 3 * n) for n in range(50)]
    with engine(model) as alone:
        right, _ = alone.generate(many)
    with engine(model, tier(empty_redis.url), num_blocks=40) as small:
        assert small.generate(many)[0] == right
        assert small.generate(many[::-1])[0] == right[::-1]
    with engine(model, tier(empty_redis.url), num_blocks=40) as fresh:
        tokens, cached = fresh.generate(many)
    assert tokens == right
    assert sum(cached) > 50 * 2 * _BLOCK


def test_models_that_differ_share_nothing(
    model: str, prompts: list[Prompt], expected: list[list[int]], empty_redis: RedisServer
) -> None:
    with engine(model, tier(empty_redis.url)) as first:
        first.generate(prompts)
    with engine(model, tier(empty_redis.url, revision="other weights")) as second:
        tokens, cached = second.generate(prompts[:4])
    assert tokens == expected[:4]
    assert cached == [0] * 4
