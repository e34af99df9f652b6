"""SGLang's own host pools and backend factory over a tierkv store, on a processor.

`./scripts/test --engines` runs these where SGLang is installed. Pages are filled,
stored, and brought into another pool as another process would have it: to the byte.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.redis_server import RedisServer, empty_redis, module_redis, redis_server
from tierkv.errors import ConfigError

__all__ = ["empty_redis", "module_redis"]

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed (./scripts/test --engines)", allow_module_level=True)

from tests.engines import no_torchvision

no_torchvision.install()

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory

PAGE, LAYERS, TOKENS = 16, 3, 1024
LAYOUTS = ["page_first_direct", "page_first", "layer_first"]


def host_pool(layout: str, *, num_heads: int = 2) -> MHATokenToKVPoolHost:
    device = MHATokenToKVPool(
        size=TOKENS,
        page_size=PAGE,
        dtype=torch.bfloat16,
        head_num=num_heads,
        head_dim=16,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
        enable_alt_stream=False,
    )
    return MHATokenToKVPoolHost(
        device._mha_buffer_info(),  # noqa: SLF001 - SGLang's own builder does so
        2.0,
        0,
        PAGE,
        layout,
        pin_memory=False,
        device="cpu",
        device_capacity_tokens=TOKENS,
        start_layer=0,
        end_layer=LAYERS,
    )


def config(url: str, *, rank: int = 0, size: int = 1, **extra: object) -> HiCacheStorageConfig:
    settings = {
        "backend_name": "tierkv",
        "module_path": "tierkv.adapters.sglang",
        "class_name": "TierKVHiCache",
        "interface_v1": 1,
        "store": url,
    }
    return HiCacheStorageConfig(
        tp_rank=rank,
        tp_size=size,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name="llama",
        extra_config=settings | extra,
    )


@contextmanager
def backend(settings: HiCacheStorageConfig, pool: MHATokenToKVPoolHost) -> Iterator[Any]:
    """As SGLang's controller makes it."""
    made = StorageBackendFactory.create_backend("dynamic", settings, pool)
    made.register_mem_pool_host(pool)
    made.on_host_pools_registered()
    try:
        yield made
    finally:
        made.close()


def filled(layout: str, seed: int = 1) -> MHATokenToKVPoolHost:
    pool = host_pool(layout)
    draws = torch.Generator().manual_seed(seed)
    pool.kv_buffer.copy_(torch.rand(pool.kv_buffer.shape, generator=draws))
    return pool


def page_of(pool: MHATokenToKVPoolHost, page: int) -> torch.Tensor:
    return pool.get_data_page(page * PAGE)


def indices(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


KEYS = [f"{n:064x}" for n in range(8)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["redis", "file"])
def test_pages_come_back_to_the_byte_wherever_they_lay(
    empty_redis: RedisServer, tmp_path: Path, layout: str, kind: str
) -> None:
    url = empty_redis.url if kind == "redis" else f"file://{tmp_path}/pages"
    first, second = filled(layout), host_pool(layout)
    with backend(config(url), first) as one:
        assert one.batch_exists(KEYS) == 0
        assert one.batch_set_v1(KEYS, indices(*range(8, 16))) == [True] * 8
    with backend(config(url), second) as other:
        assert other.batch_exists([*KEYS, "f" * 64]) == 8
        asked = [KEYS[5], "f" * 64, KEYS[0]]
        assert other.batch_get_v1(asked, indices(3, 9, 20)) == [True, False, True]
    assert torch.equal(page_of(second, 3), page_of(first, 13))
    assert torch.equal(page_of(second, 20), page_of(first, 8))
    assert not page_of(second, 4).any()


def test_ranks_and_models_share_no_page(empty_redis: RedisServer) -> None:
    pool = filled(LAYOUTS[0])
    with backend(config(empty_redis.url, rank=0, size=2), pool) as one:
        one.batch_set_v1(KEYS, indices(*range(8)))
        assert one.batch_exists(KEYS) == 8
    for settings in (
        config(empty_redis.url, rank=1, size=2),
        config(empty_redis.url),
        config(empty_redis.url, rank=0, size=2, revision="other"),
    ):
        with backend(settings, pool) as other:
            assert other.batch_exists(KEYS) == 0
    with backend(config(empty_redis.url, rank=0, size=2), filled("layer_first")) as other:
        assert other.batch_exists(KEYS) == 0


def test_a_server_that_dies_is_a_miss_for_every_thread() -> None:
    pool = filled(LAYOUTS[0])
    with redis_server() as server, backend(config(server.url, deadline_s=0.5), pool) as one:
        one.batch_set_v1(KEYS, indices(*range(8)))
        server.kill()
        answers: list[object] = []

        def ask() -> None:
            answers.append(one.batch_exists(KEYS))
            answers.append(one.batch_get_v1(KEYS, indices(*range(8, 16))))
            answers.append(one.batch_set_v1(KEYS, indices(*range(8))))

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert sorted(map(str, answers)) == sorted(map(str, [0, [False] * 8, [False] * 8] * 4))


def test_a_wrong_configuration_is_one_sentence() -> None:
    pool = host_pool(LAYOUTS[0])
    with (
        pytest.raises(ConfigError, match="interface_v1"),
        backend(config("x", interface_v1=0), pool),
    ):
        pass
    with pytest.raises(ConfigError, match="names no store"), backend(config(None), pool):  # type: ignore[arg-type]
        pass
    with pytest.raises(ConfigError, match="storage URL"), backend(config("x"), pool):
        pass
