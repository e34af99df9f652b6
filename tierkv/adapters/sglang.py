r"""A storage backend for SGLang's HiCache that keeps pages in a tierkv store.

SGLang copies pages (its blocks) between GPU and its own host memory. This backend copies pages from
that host memory to Redis, files or Mooncake and back, so that they outlive the process and other
instances find them. Made for SGLang 0.5.23 (`sglang.srt.mem_cache.hicache_storage.HiCacheStorage`),
for its interface v1 and, for models with several pools, v2:

    python -m sglang.launch_server --model-path ... --enable-hierarchical-cache \
        --hicache-mem-layout page_first_direct --hicache-storage-backend dynamic \
        --hicache-storage-backend-extra-config '{"backend_name": "tierkv",
            "module_path": "tierkv.adapters.sglang", "class_name": "TierKVHiCache",
            "interface_v1": 1, "store": "redis://127.0.0.1:6379/0"}'
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import sglang
import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.observability.metrics_collector import StorageMetrics
from sglang.srt.runtime_context import get_context

from tierkv.config import from_mapping
from tierkv.embed.page_storage import PagePool, Pages, PageStorage
from tierkv.errors import ConfigError, LayoutError, TierKVError
from tierkv.storage.codec import Trust
from tierkv.storage.factory import StorageSettings, StoreSettings

if TYPE_CHECKING:
    from sglang.srt.mem_cache.pool_host import HostKVCache

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_Ints = npt.NDArray[np.int64]
_NOT_V1 = (
    "tierkv's backend needs SGLang's storage interface v1: add \"interface_v1\": 1 to "
    "--hicache-storage-backend-extra-config"
)
# Keys of the extra config that SGLang itself reads.
_OF_SGLANG = {
    "allocator", "backend_name", "class_name", "file_storage_path", "interface_v1", "module_path",
}  # fmt: skip
# SGLang's arguments that decide on the bytes of a page and that its pools do not report.
_ARGUMENTS = (
    "revision", "quantization", "dtype", "kv_cache_dtype", "speculative_algorithm",
    "speculative_draft_model_path", "speculative_draft_model_revision",
)  # fmt: skip


class HiCacheSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Keys of the extra config, apart from SGLang's own.

    Attributes:
        store: URL of the store (docs/storage.md).
        ttl_s: seconds that a page stays in the store after its last use; None for as long as the
            store keeps it.
        deadline_s: seconds after which a lookup without an answer counts as a miss.
        revision: revision of the weights, if instances with other weights share the store under the
            same model name.
        tenant: owner of the pages; instances of different tenants never find each other's pages.
        prefix: prefix of all names in the store.
        trust: protection of stored pages against other writers of the store: trusted (only a
            checksum against damage), signed (a keyed digest) or sealed (encrypted); see
            docs/security.md.
        key_file: path of the file with the key of signed or sealed pages; "" for trusted pages.
        settings: settings of the store, the tables of docs/storage.md, such as {"redis":
            {"timeout_s": 0.5}}.
    """

    store: str
    ttl_s: float | None = 86_400.0
    deadline_s: float = 2.0
    revision: str = ""
    tenant: str = ""
    prefix: str = "tierkv"
    trust: Trust = Trust.TRUSTED
    key_file: str = ""
    settings: StoreSettings = StoreSettings()


class TierKVHiCache(HiCacheStorage):
    """Pages of SGLang's host pools in a tierkv store; `HiCacheSettings` lists the settings.

    A host pool is SGLang's host memory for one kind of layer. Several threads of SGLang call the
    methods, and a call may block its thread. If the store fails or does not answer, pages count as
    missing and SGLang computes them; no error is raised. Each rank stores the pages of its own
    heads. Pools with the same bytes on all ranks (MLA) are stored once, by SGLang's rank 0.

    Args:
        storage_config: model, ranks and extra config, from SGLang.
        kwargs: ignored.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, object]) -> None:
        """Open the store that `storage_config.extra_config["store"]` names.

        Raises:
            ConfigError: the extra config (SGLang's option --hicache-storage-backend-extra-config)
                names no store, does not set interface_v1, or has a wrong setting.
            StoreUnavailableError: the store cannot be used.
        """
        extra: Mapping[str, Any] = storage_config.extra_config or {}
        if not extra.get("interface_v1"):
            raise ConfigError(_NOT_V1)
        if not extra.get("store"):
            raise ConfigError(
                '--hicache-storage-backend-extra-config names no store: add "store": '
                '"redis://HOST:PORT/0", or another storage URL'
            )
        given = {name: value for name, value in extra.items() if name not in _OF_SGLANG}
        own = from_mapping(HiCacheSettings, given, "--hicache-storage-backend-extra-config")
        self.registered_pools: dict[str, HostKVCache] = {}
        self._config, self._own = storage_config, own
        self._pages: dict[str, _HostPages] = {}
        self._metrics = StorageMetrics()
        self._metrics_lock = threading.Lock()
        self._storage = PageStorage(
            own.store,
            settings=own.settings,
            ttl_s=own.ttl_s,
            deadline_s=own.deadline_s,
            prefix=own.prefix,
            codecs=StorageSettings(trust=own.trust, key_file=own.key_file).codecs(),
        )
        try:
            self._storage.open()
        except TierKVError:
            self._storage.close()
            raise
        log.info("SGLang's pages are kept in %s", self._storage.url)

    def register_mem_pool_host(self, mem_pool_host: HostKVCache) -> None:
        """Register SGLang's host pool of the layers with full attention.

        Raises:
            LayoutError: the pool's pages cannot be stored; the message says what to do.
        """
        super().register_mem_pool_host(mem_pool_host)
        self.register_mem_host_pool_v2(mem_pool_host, PoolName.KV)

    def register_mem_host_pool_v2(self, host_pool: HostKVCache, host_pool_name: str) -> None:
        """Register one of SGLang's host pools under a name.

        Args:
            host_pool: the pool with the pages to store and load.
            host_pool_name: SGLang's name of the pool; later calls name the pool by it.

        Raises:
            LayoutError: the pool's pages cannot be stored; the message says what to do.
        """
        if self.registered_pools.get(host_pool_name) is host_pool:
            return  # SGLang registers the pool of full attention in both ways
        try:
            self._pages[host_pool_name] = self._pages_of(host_pool, host_pool_name)
        except TierKVError:
            self.close()  # SGLang may not close it after it has attached other pools
            raise
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """Return how many leading pages of a prompt the store has, each with all its parts.

        The pages are those of full attention. The result is 0 if the store does not answer.

        Args:
            keys: SGLang's keys of the prompt's pages, in order.
            extra_info: ignored.
        """
        names = _names(keys)
        asked = [pool.count(names) for pool in self._pools(PoolName.KV)]
        return min([_answer(future, 0) for future in asked], default=len(keys))

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Return how many leading pages of a prompt can be restored from all pools together.

        Some pools need every page of the prefix, and some only its last pages.

        Args:
            keys: SGLang's keys of the prompt's pages, in order.
            pool_transfers: the pools besides the one for full attention, each with the pages that
                it needs (`hit_policy`); None for no other pools.
            extra_info: ignored.

        Returns:
            The largest number of leading pages that all pools can restore; the largest number that
                each pool alone can restore; and all numbers of leading pages that all pools can
                restore, in ascending order.
        """
        num_pages = self.batch_exists(keys)
        hits: dict[str, int] = {PoolName.KV: num_pages} if num_pages else {}
        restorable = set(range(1, num_pages + 1))
        names = _names(keys[:num_pages])
        # SGLang also holds the pages of block groups in another form, so none of them is needed.
        needed = [t for t in pool_transfers or () if t.hit_policy != PoolHitPolicy.BLOCK_GROUPS]
        asked = [[pool.present(names) for pool in self._pools(t.name)] for t in needed]
        for transfer, futures in zip(needed, asked, strict=True):
            ends = _ends(_all_of(futures, num_pages), transfer)
            if ends:
                hits[transfer.name] = max(ends)
            restorable &= ends
        return PoolTransferResult(max(restorable, default=0), hits, sorted(restorable))

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Load pages of full attention from the store into SGLang's host memory.

        Args:
            keys: SGLang's keys of the pages.
            host_indices: the tokens' indices in the host pool, page after page.
            extra_info: ignored.

        Returns:
            For each page, True if it was loaded.
        """
        transfer = PoolTransfer(PoolName.KV, host_indices, keys=keys)
        return self.batch_get_v2([transfer])[PoolName.KV]

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Store pages of full attention from SGLang's host memory.

        Args:
            keys: SGLang's keys of the pages.
            host_indices: the tokens' indices in the host pool, page after page.
            extra_info: ignored.

        Returns:
            For each page, True if the store has it now.
        """
        transfer = PoolTransfer(PoolName.KV, host_indices, keys=keys)
        return self.batch_set_v2([transfer])[PoolName.KV]

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Load pages of several pools from the store into SGLang's host memory.

        Args:
            transfers: for each pool, the keys of the pages and the tokens' indices in the pool.
            extra_info: ignored.

        Returns:
            By SGLang's name of the pool, one bool for each page: True if the page was loaded.
        """
        return self._move(transfers, PagePool.load, "prefetch")

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Store pages of several pools from SGLang's host memory.

        Args:
            transfers: for each pool, the keys of the pages and the tokens' indices in the pool.
            extra_info: ignored.

        Returns:
            By SGLang's name of the pool, one bool for each page: True if the store has the page
                now.
        """
        return self._move(transfers, PagePool.store, "backup")

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        """Raise ConfigError: SGLang makes this call only without its interface v1."""
        raise ConfigError(_NOT_V1)

    get = batch_get = set = batch_set = _refuse

    def clear(self) -> bool:
        """Delete every stored page of this model, layout and rank, also pages of other instances.

        Returns:
            False if the store does not answer; some pages may then remain.
        """
        futures = [pool.clear() for pages in self._pages.values() for pool in pages.pools]
        return -1 not in [_answer(future, -1) for future in futures]

    def get_stats(self) -> StorageMetrics:
        """Return, for SGLang's metrics, the pages and GB/s of the transfers since the last call.

        The result is empty unless SGLang was started with metrics.
        """
        with self._metrics_lock:
            metrics, self._metrics = self._metrics, StorageMetrics()
        return metrics

    def close(self) -> None:
        """Wait for running operations, and close the store."""
        self._storage.close()

    def _pages_of(self, host_pool: HostKVCache, name: str) -> _HostPages:
        ranks = _ranks_of(self._config, host_pool, name)
        pages = _HostPages(host_pool, len(ranks))
        identity = _identity(self._config, self._own, host_pool, name)
        for rank, parts in zip(ranks, pages.parts_by_rank, strict=False):  # none without bytes
            sizes = [part.shape[1] for part in parts]
            of_rank = {"rank": rank, "part_bytes": str(sizes)}
            pages.pools.append(self._storage.pool(identity | of_rank, *parts))
        return pages

    def _pools(self, name: str) -> list[PagePool]:
        """Return the tierkv pools of SGLang's host pool `name`, one for each slice of heads.

        The result is [] if SGLang's pool has no pages.
        """
        if name not in self._pages:
            raise ConfigError(
                f"SGLang used the host pool {str(name)!r} without registering it: report "
                "this with SGLang's version"
            )
        return self._pages[name].pools

    def _move(
        self,
        transfers: Sequence[PoolTransfer],
        act: Callable[[PagePool, Sequence[bytes], Sequence[int]], Future[list[bool]]],
        kind: str,
    ) -> dict[str, list[bool]]:
        """Call `act` for all transfers, and wait for all results, even if some calls fail.

        Return a list for each of SGLang's pool names, with True for every page that succeeded.
        """
        # All transfers are awaited: SGLang reuses a page as soon as this method returns.
        began_at = time.perf_counter()
        started: list[tuple[PoolTransfer, list[Future[list[bool]]] | None]] = []
        for transfer in transfers:
            keys = transfer.keys or []
            futures = None
            try:
                pools = self._pools(transfer.name)
                rows = self._pages[transfer.name].rows(transfer.host_indices, len(keys))
                futures = [act(pool, _names(keys), rows) for pool in pools]
            except Exception as error:  # noqa: BLE001 - other transfers run, and are waited for
                log.error(
                    "%d pages of the pool %s were not stored or loaded: %s",
                    len(keys),
                    transfer.name,
                    error,
                )
            started.append((transfer, futures))
        results, moved, num_bytes = {}, 0, 0
        for transfer, futures in started:
            count = len(transfer.keys or [])
            good = [False] * count if futures is None else _all_of(futures, count)
            results[str(transfer.name)] = good
            if futures:
                moved += sum(good)
                num_bytes += sum(good) * self._pages[transfer.name].page_bytes
        if moved and self._config.enable_storage_metrics:
            with self._metrics_lock:
                gb_per_s = num_bytes / (time.perf_counter() - began_at) / 1e9
                getattr(self._metrics, f"{kind}_pgs").append(moved)
                getattr(self._metrics, f"{kind}_bandwidth").append(gb_per_s)
        return results


class _HostPages:
    """The memory of all pages of one of SGLang's host pools.

    A page consists of parts, such as keys and values. Page n of part p begins at first[p] + n *
    strides[p].

    Attributes:
        pools: one `PagePool` for each slice of heads, which stores that slice of all pages.
        parts_by_rank: for each slice of heads, the memory of its parts, uint8 [number of pages,
            bytes of the part] each.
        page_bytes: bytes of a page, all parts together; 0 for a pool without bytes.

    Args:
        pool: SGLang's host pool.
        num_ranks: number of slices of heads into which this rank's pages are split; 1 for no split.
            Each slice is stored on its own, for instances with more ranks, which need only some
            heads of a page.

    Raises:
        LayoutError: the addresses of the pool's pages are unknown, or the pages are not evenly
            spaced.
    """

    def __init__(self, pool: HostKVCache, num_ranks: int) -> None:
        self._pool, self._num_ranks = pool, num_ranks
        self.pools: list[PagePool] = []
        self.parts_by_rank: list[list[Pages]] = []
        self.page_bytes = 0
        self._first = self._strides = np.zeros(0, np.int64)
        self._count = count = pool.size // pool.page_size
        try:
            first, sizes = self._at(0)
            if not len(first):
                return  # no bytes: they are in other pools
            second, last = self._at(1)[0], self._at(count - 1)[0]
        except (ValueError, NotImplementedError, AssertionError) as error:
            raise LayoutError(f"{self._where}: {error}") from error
        self._first, self._strides = first, second - first
        is_even = (first + (count - 1) * self._strides == last).all()
        if not is_even or (self._strides < sizes).any():
            raise LayoutError(f"{self._where}: its pages are not evenly spaced in memory")
        self.page_bytes = int(sizes.sum())
        parts = [
            _memory(int(address), count, int(stride), int(size))
            for address, stride, size in zip(first, self._strides, sizes, strict=True)
        ]
        per_rank = len(parts) // num_ranks
        self.parts_by_rank = [parts[at : at + per_rank] for at in range(0, len(parts), per_rank)]

    def rows(self, host_indices: torch.Tensor | None, num_pages: int) -> list[int]:
        """Return the numbers of the pages whose tokens are listed in `host_indices`, in order.

        LayoutError is raised if the indices are not `num_pages` whole pages.
        """
        count = 0 if host_indices is None else len(host_indices)
        if host_indices is None or count != num_pages * self._pool.page_size:
            raise LayoutError(
                f"{num_pages} pages of {self._pool.page_size} tokens need "
                f"{num_pages * self._pool.page_size} host indices, not {count}"
            )
        if not self.pools or not num_pages:
            return []
        parts = len(self._first)
        pointers, _ = self._meta(host_indices)
        at = pointers.reshape(num_pages, parts)
        rows = (at[:, 0] - self._first[0]) // self._strides[0]
        if (self._first + rows[:, None] * self._strides != at).any():
            raise LayoutError(
                f"{self._where}: the host indices {host_indices[:4].tolist()} ... do not "
                "start at a page"
            )
        return list(map(int, rows))

    def _at(self, page: int) -> tuple[_Ints, _Ints]:
        size = self._pool.page_size
        return self._meta(torch.arange(page * size, (page + 1) * size))

    def _meta(self, host_indices: torch.Tensor) -> tuple[_Ints, _Ints]:
        """Return the address and size in bytes of each part (keys, values ...) of each page."""
        if self._num_ranks > 1:
            meta = self._pool.get_split_heads_page_buffer_meta(host_indices, self._num_ranks)
        else:
            meta = self._pool.get_page_buffer_meta(host_indices)
        pointers, sizes = meta or ([], [])
        return np.array(pointers, np.int64), np.array(sizes, np.int64)

    @property
    def _where(self) -> str:
        pool = self._pool
        return (
            f"{type(pool).__name__} with the layout {pool.layout} cannot be stored "
            "(--hicache-mem-layout page_first_direct suits most pools)"
        )


def _memory(address: int, count: int, stride: int, size: int) -> Pages:
    """Return SGLang's memory, uncopied, as uint8 [count, size] with rows `stride` bytes apart."""
    memory = (ctypes.c_uint8 * ((count - 1) * stride + size)).from_address(address)
    return np.ndarray((count, size), np.uint8, memoryview(memory), strides=(stride, 1))


def _names(keys: Sequence[str]) -> list[bytes]:
    return [key.encode() for key in keys]


def _answer(future: Future[_T], failed: _T) -> _T:
    try:
        return future.result()
    except Exception as error:  # noqa: BLE001 - whatever fails in a cache is a miss to its engine
        log.warning("an operation of the store failed, which SGLang takes as a miss: %s", error)
        return failed


def _all_of(futures: Sequence[Future[list[bool]]], num_pages: int) -> list[bool]:
    none = [False] * num_pages
    answers = [_answer(future, none) for future in futures]
    return (
        [all(of_page) for of_page in zip(*answers, strict=True)] if answers else [True] * num_pages
    )


def _ends(there: Sequence[bool], transfer: PoolTransfer) -> set[int]:
    """Return the numbers of leading pages that could be reused, judged by one host pool.

    The argument `there` has one bool for each of the prompt's leading pages: True if this pool's
    page is stored.
    """
    # A sliding-window pool needs only the last pages of a prefix, other pools need all pages.
    is_window = transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES
    window = max(1, len(transfer.keys or ())) if is_window else len(there)
    ends, run = set(), 0
    for end, is_there in enumerate(there, 1):
        run = run + 1 if is_there else 0
        if run >= min(window, end):
            ends.add(end)
    return ends


def _ranks_of(config: HiCacheStorageConfig, pool: HostKVCache, name: str) -> list[str]:
    """Return the names under which this rank's slices of a pool's pages are stored.

    There is one name "n of N" for each slice of heads; ["any"] if all ranks have the same bytes.
    """
    has_heads = isinstance(pool, MHATokenToKVPoolHost)
    if config.is_mla_model and not has_heads and name != PoolName.MAMBA:
        return ["any"]
    split = 1
    if has_heads and config.should_split_heads and config.tp_lcm_size:
        split = config.tp_lcm_size // config.tp_size
    size = config.tp_size * split
    return [f"{config.tp_rank * split + n} of {size}" for n in range(split)]


def _identity(
    config: HiCacheStorageConfig, own: HiCacheSettings, pool: HostKVCache, name: str
) -> dict[str, str]:
    """Return the model, layout and settings that determine the bytes of the pages in a pool.

    Instances of SGLang share pages if these values are equal. `name` is SGLang's name of the pool.
    """
    return (
        {
            # The order of bytes within a page may change with each version of SGLang. cache_salt
            # and LoRA adapters are part of SGLang's page keys.
            "engine": f"sglang {sglang.__version__}",
            "pool": f"{name} {type(pool).__name__}",
            "model": config.model_name or "",
            "weights": own.revision,
            "tenant": own.tenant,
            "dtypes": f"{pool.dtype} {getattr(pool, 'temporal_dtype', '')}",
            "layout": f"{pool.layout} {envs.SGLANG_USE_HND_KVCACHE.get()} "
            f"{envs.SGLANG_AITER_KV_CACHE_LAYOUT.get()}",
            "format": str(pool.storage_format_tag),
            "page_size": str(pool.page_size),
            "layers": str([getattr(pool, side, None) for side in ("start_layer", "end_layer")]),
            "ranks": f"pp {config.pp_rank} of {config.pp_size} "
            f"cp {config.attn_cp_rank} of {config.attn_cp_size} "
            f"dcp {config.dcp_rank} of {config.dcp_size}",
        }
        | {argument: _argument(argument) for argument in _ARGUMENTS}
        | _overrides()
    )


def _overrides() -> dict[str, str]:
    name = "json_model_override_args"
    value = _argument(name)
    return {} if value in {"", "{}"} else {name: value}


def _argument(name: str) -> str:
    """Return the value of one of SGLang's command-line arguments; "" in a process without them."""
    try:
        return str(get_context().config_leaf(name))
    except ValueError:
        return ""
