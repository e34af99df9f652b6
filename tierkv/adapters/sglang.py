"""SGLang's third cache level in a tierkv store: a dynamic storage backend of HiCache.

SGLang copies pages between GPU and its own host memory; this backend keeps the host memory's pages
in Redis, files or Mooncake, so that they outlive the process and other instances find them. Made
for SGLang 0.5.23 (`sglang.srt.mem_cache.hicache_storage.HiCacheStorage`), its interface v1:

    python -m sglang.launch_server --model-path ... --enable-hierarchical-cache \\
        --hicache-mem-layout page_first_direct --hicache-storage-backend dynamic \\
        --hicache-storage-backend-extra-config '{"backend_name": "tierkv",
            "module_path": "tierkv.adapters.sglang", "class_name": "TierKVHiCache",
            "interface_v1": 1, "store": "redis://127.0.0.1:6379/0"}'
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
)

from tierkv.embed.page_storage import PageStorage
from tierkv.errors import ConfigError, LayoutError, TierKVError

if TYPE_CHECKING:
    from sglang.srt.mem_cache.pool_host import HostKVCache

log = logging.getLogger("tierkv.adapters.sglang")

# A read or write has the deadlines of the store's settings; nothing waits longer than this.
_MOST_S = 120.0
_NOT_V1 = 'tierkv is a backend of interface v1: put "interface_v1": 1 into the extra config'


class TierKVHiCache(HiCacheStorage):
    """Pages of SGLang's host pool in a tierkv store, one value per piece of a page.

    In the extra config: store (a URL of docs/storage.md), and where wanted ttl_s (how long a page
    lives there), deadline_s (after so long a question counts as "not there") and revision (of the
    weights, where two share a model's name).

    SGLang calls from several threads of its own, which may wait. What fails is a miss and is
    computed: no call here raises for a store that does not answer. Each rank keeps its own heads'
    pages; a model whose ranks hold the same bytes (MLA) has them once, written by SGLang's rank 0.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, object]) -> None:
        """Raises ConfigError if the extra config names no store or another interface."""
        extra: Mapping[str, Any] = storage_config.extra_config or {}
        if not extra.get("interface_v1"):
            raise ConfigError(_NOT_V1)
        if not isinstance(extra.get("store"), str):
            raise ConfigError('the extra config names no store: "store": "redis://HOST:PORT/0"')
        self._config = storage_config
        self._extra = extra
        self._pages: PageStorage | None = None
        self._first = 0  # address of the pool's memory
        self._piece_bytes = 0
        self._pieces_per_page = 0

    def register_mem_pool_host(self, mem_pool_host: HostKVCache) -> None:
        """Open the store for the pool's pages. Raises LayoutError if they are not in one tensor,
        StoreUnavailableError if the store cannot be used."""
        super().register_mem_pool_host(mem_pool_host)
        memory = getattr(mem_pool_host, "kv_buffer", None)
        if not isinstance(memory, torch.Tensor) or not memory.is_contiguous():
            raise LayoutError(
                f"the pages of {type(mem_pool_host).__name__} are not in one tensor; pools of full "
                "attention and MLA are supported"
            )
        page = torch.arange(mem_pool_host.page_size)
        pointers, sizes = mem_pool_host.get_page_buffer_meta(page)
        if len(set(sizes)) != 1:
            raise LayoutError(f"the pieces of a page differ in size: {sorted(set(sizes))}")
        self._first, self._piece_bytes = memory.data_ptr(), sizes[0]
        self._pieces_per_page = len(pointers)
        pieces = memory.view(-1).view(torch.uint8).numpy().reshape(-1, self._piece_bytes)
        self._pages = PageStorage(
            self._extra["store"],
            pieces,
            _identity(self._config, mem_pool_host) | {"revision": str(self._extra.get("revision"))},
            ttl_s=self._extra.get("ttl_s"),
            deadline_s=self._extra.get("deadline_s", 2.0),
        )
        self._pages.open()
        log.info("SGLang's pages are kept in %s", self._pages.url)

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """How many pages, from the first on, are there whole."""
        there = self._whole(keys, self._open().present(self._named(keys)))
        return there.index(False) if False in there else len(there)

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        return self._whole(keys, self._open().load(self._named(keys), self._ids(host_indices)))

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        return self._whole(keys, self._open().store(self._named(keys), self._ids(host_indices)))

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: object = None, target_sizes: object = None) -> None:
        raise ConfigError(_NOT_V1)

    def batch_get(
        self, keys: list[str], target_locations: object = None, target_sizes: object = None
    ) -> int:
        raise ConfigError(_NOT_V1)

    def set(
        self,
        key: str,
        value: object = None,
        target_location: object = None,
        target_sizes: object = None,
    ) -> bool:
        raise ConfigError(_NOT_V1)

    def batch_set(
        self,
        keys: list[str],
        values: object = None,
        target_locations: object = None,
        target_sizes: object = None,
    ) -> bool:
        raise ConfigError(_NOT_V1)

    def close(self) -> None:
        """Let what is under way end, and close the store."""
        if self._pages is not None:
            self._pages.close()

    def _named(self, keys: Sequence[str]) -> list[bytes]:
        pieces = range(self._pieces_per_page)
        return [f"{key}:{piece}".encode() for key in keys for piece in pieces]

    def _ids(self, host_indices: torch.Tensor) -> list[int]:
        pointers, _ = self.mem_pool_host.get_page_buffer_meta(host_indices)
        return [(pointer - self._first) // self._piece_bytes for pointer in pointers]

    def _open(self) -> PageStorage:
        if self._pages is None:
            raise ConfigError("SGLang has not registered its host pool yet")
        return self._pages

    def _whole(self, keys: Sequence[str], future: Future[list[bool]]) -> list[bool]:
        """For each page whether all of its pieces are good."""
        try:
            pieces = future.result(_MOST_S)
        except (TierKVError, TimeoutError) as error:
            log.warning("a call to %s failed: %s", self._open().url, error)
            return [False] * len(keys)
        per_page = self._pieces_per_page
        return [all(pieces[at : at + per_page]) for at in range(0, len(pieces), per_page)]


def _identity(config: HiCacheStorageConfig, pool: HostKVCache) -> dict[str, str]:
    """What makes pages of one instance usable in another: all that shapes their bytes."""
    rank = "" if config.is_mla_model else f"{config.tp_rank} of {config.tp_size}"
    return {
        "engine": "sglang",
        "model": config.model_name or "",
        "dtype": str(pool.dtype),
        "layout": pool.layout,
        "format": str(getattr(pool, "storage_format_tag", None)),
        "page_size": str(pool.page_size),
        "layers": f"{pool.start_layer} to {pool.end_layer}",
        "bytes_per_token": str(pool.size_per_token),
        "ranks": f"tp {rank} pp {config.pp_rank} of {config.pp_size} "
        f"cp {config.attn_cp_rank} of {config.attn_cp_size} "
        f"dcp {config.dcp_rank} of {config.dcp_size}",
    }
