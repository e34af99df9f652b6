"""vLLM itself with its second tier in a tierkv store: the same tokens, and prefixes that last.

`./scripts/test --engines` runs these, with vLLM's CPU form installed beside tierkv. Each engine is
a process of its own; a small model with random weights, whose greedy tokens tell one prompt from
another. The negative control shows that what the tier brings is what the engine attends to.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.engines.processes import needs
from tests.redis_server import RedisServer, redis_server

needs("vllm")

import torch

from tests.engines.test_vllm_connector import MANY, PROMPTS, Engine, alone, engine, zeroed

__all__ = ["alone"]

pytestmark = [pytest.mark.timeout(600)]

_BLOCK = 32
_ON_GPU = {"spec_name": "TieringOffloadingSpec"}
_ON_CPU = {"spec_name": "CpuTieringSpec", "spec_module_path": "tests.engines.vllm_cpu_spec"}


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


@pytest.mark.promise("vLLM's own offloading loads a prefix from a tierkv store.")
@pytest.mark.parametrize("kind", ["redis", "file"])
def test_a_prefix_comes_through_storage_into_a_fresh_process(
    model: str, alone: Engine, empty_redis: RedisServer, tmp_path: Path, kind: str
) -> None:
    right = alone.tokens(PROMPTS)
    url = empty_redis.url if kind == "redis" else f"file://{tmp_path}/chunks"
    with engine(model, tier(url)) as first:
        assert first.tokens(PROMPTS) == right
    with engine(model, tier(url)) as second:
        tokens, cached = second.answers(PROMPTS)
    assert tokens == right
    assert cached[:4] == [len(some) // _BLOCK * _BLOCK for some in PROMPTS[:4]]
    assert all(count >= 4 * _BLOCK for count in cached[4:])


def test_values_in_the_store_are_what_the_engine_attends_to(
    model: str, alone: Engine, empty_redis: RedisServer
) -> None:
    """The negative control: zeroed values with right checksums give other tokens."""
    right = alone.tokens(PROMPTS)
    assert len({tuple(some) for some in right}) == len(PROMPTS), "tokens tell prompts apart"
    with engine(model, tier(empty_redis.url)) as first:
        first.tokens(PROMPTS)
    zeroed(empty_redis)
    with engine(model, tier(empty_redis.url)) as second:
        tokens, cached = second.answers(PROMPTS)
    assert all(cached)
    assert all(some != ours for some, ours in zip(tokens, right, strict=True))


@pytest.mark.parametrize("fault", ["killed", "hung"])
def test_a_store_that_fails_costs_time_and_no_token(model: str, alone: Engine, fault: str) -> None:
    right = alone.tokens(PROMPTS)
    with ExitStack() as stack:
        server = stack.enter_context(redis_server())
        with engine(model, tier(server.url)) as first:
            first.tokens(PROMPTS)
        second = stack.enter_context(engine(model, tier(server.url, deadline_s=0.5)))
        assert second.tokens(PROMPTS[:2]) == right[:2]
        if fault == "killed":
            server.kill()
        else:
            server.pause()
        assert second.tokens(PROMPTS) == right
        if fault == "hung":
            server.resume()
            assert second.tokens(PROMPTS) == right


def test_fifty_requests_with_shared_prefixes_under_eviction_are_exact(
    model: str, alone: Engine, empty_redis: RedisServer
) -> None:
    right = alone.tokens(MANY)
    with engine(model, tier(empty_redis.url), num_gpu_blocks_override=40) as small:
        assert small.tokens(MANY) == right
        assert small.tokens(MANY[::-1]) == right[::-1]
    with engine(model, tier(empty_redis.url), num_gpu_blocks_override=40) as fresh:
        tokens, cached = fresh.answers(MANY)
    assert tokens == right
    assert sum(cached) > 50 * 2 * _BLOCK


def test_models_that_differ_share_nothing(
    model: str, alone: Engine, empty_redis: RedisServer
) -> None:
    with engine(model, tier(empty_redis.url)) as first:
        first.tokens(PROMPTS)
    with engine(model, tier(empty_redis.url, revision="other weights")) as second:
        assert second.answers(PROMPTS[:4]) == (alone.tokens(PROMPTS[:4]), [0] * 4)
