"""SGLang's backend factory and host pools over a tierkv store, call by call.

`./scripts/test --engines` runs these where SGLang is installed. Pages are filled, stored, and
brought into another pool as another process would have it: to the byte.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.engines.processes import needs, third_level
from tests.redis_server import RedisServer

needs("sglang")

from tests.engines.sglang_world import (
    PAGE,
    device_mha,
    host_mha,
    host_pools,
    memories,
    with_ranks,
)

with_ranks()

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName, PoolTransfer
from sglang.srt.mem_cache.storage import StorageBackendFactory

KEYS = [f"{n:064x}" for n in range(8)]


def config(
    url: str, *, rank: int = 0, size: int = 1, lcm: int = 0, **extra: object
) -> HiCacheStorageConfig:
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
        tp_lcm_size=lcm or None,
        should_split_heads=lcm > size,
        extra_config=third_level(url, **extra),
    )


@contextmanager
def backend(settings: HiCacheStorageConfig, pool: Any) -> Iterator[Any]:
    """As SGLang's controller makes it."""
    made = StorageBackendFactory.create_backend("dynamic", settings, pool)
    made.register_mem_pool_host(pool)
    made.on_host_pools_registered()
    try:
        yield made
    finally:
        made.close()


def filled(pool: Any, seed: int = 1) -> Any:
    draws = np.random.default_rng(seed)
    for memory in memories(pool):
        memory[:] = draws.integers(1, 256, memory.shape, np.uint8)
    return pool


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """To the byte: what is no number is the same as itself, too."""
    return bool((one.view(torch.int16) == other.view(torch.int16)).all())


def indices(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def test_pages_of_keys_and_values_go_wherever_sglang_says_and_nowhere_else(
    empty_redis: RedisServer,
) -> None:
    """Keys and values of different widths."""
    pools = [host_mha("page_first_direct", device=device_mha(value_width=8)) for _ in range(2)]
    filled(pools[0])
    with backend(config(empty_redis.url), pools[0]) as one:
        assert one.batch_exists(KEYS) == 0
        assert one.batch_set_v1(KEYS, indices(*range(8, 16))) == [True] * 8
    with backend(config(empty_redis.url), pools[1]) as other:
        assert other.batch_exists([*KEYS, "f" * 64]) == 8
        assert other.exists(KEYS[3])
        asked = [KEYS[5], "f" * 64, KEYS[0]]
        assert other.batch_get_v1(asked, indices(3, 9, 20)) == [True, False, True]
    keys, values = memories(pools[1])
    assert len(keys) == 2 * len(values)
    for mine, theirs in zip(memories(pools[1]), memories(pools[0]), strict=True):
        mine_pages, their_pages = (m.reshape(pools[0].page_num, -1) for m in (mine, theirs))
        assert (mine_pages[[3, 20]] == their_pages[[13, 8]]).all()
        assert not np.delete(mine_pages, [3, 20], axis=0).any()


def test_another_number_of_ranks_finds_pages_that_are_split_by_heads(
    empty_redis: RedisServer,
) -> None:
    """Two ranks of two heads each, then one of four and four of one."""
    halves = [filled(host_mha("page_head", num_heads=2), seed) for seed in range(2)]
    for rank, half in enumerate(halves):
        with backend(config(empty_redis.url, rank=rank, size=2, lcm=4), half) as one:
            assert one.batch_set_v1(KEYS, indices(*range(8))) == [True] * 8
    whole = host_mha("page_head", num_heads=4)
    with backend(config(empty_redis.url, lcm=4), whole) as one:
        assert one.batch_exists([*KEYS, "f" * 64]) == 8
        assert one.batch_get_v1(KEYS, indices(*range(8))) == [True] * 8
    heads = whole.kv_buffer[:, :8]  # keys and values: page, head, ...
    assert same(heads[:, :, :2], halves[0].kv_buffer[:, :8])
    assert same(heads[:, :, 2:], halves[1].kv_buffer[:, :8])
    for rank in range(4):
        quarter = host_mha("page_head", num_heads=1)
        with backend(config(empty_redis.url, rank=rank, size=4, lcm=4), quarter) as one:
            assert one.batch_get_v1(KEYS, indices(*range(8))) == [True] * 8
        assert same(quarter.kv_buffer[:, :8], heads[:, :, rank : rank + 1])


def test_a_draft_with_heads_beside_mla_is_each_ranks_own(empty_redis: RedisServer) -> None:
    """SGLang has rank 0 alone write it; its heads are not the others'."""
    _, pools = host_pools("latent")
    draft = filled(host_mha("page_first_direct"))
    for rank, found in ((0, [True] * 8), (1, [False] * 8)):
        settings = config(empty_redis.url, rank=rank, size=2)
        settings.is_mla_model = True
        with backend(settings, pools[PoolName.KV]) as one:
            one.register_mem_host_pool_v2(draft, PoolName.DRAFT)
            if rank == 0:
                one.batch_set_v1(KEYS, indices(*range(8)))
            transfer = one.batch_set_v2 if rank == 0 else one.batch_get_v2
            moved = transfer([PoolTransfer(PoolName.DRAFT, indices(*range(8)), keys=KEYS)])
            assert moved == {"draft": found}
            assert one.batch_exists(KEYS) == 8


def test_importing_tierkv_imports_no_engine() -> None:
    code = (
        "import sys, tierkv, tierkv.embed.page_storage\n"
        "assert not {'torch', 'sglang', 'vllm', 'transformers'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
