"""SGLang's real host pools and its real controller on a processor, and the scheduler's part.

`HybridCacheController` runs its own threads; `write_back` and `prefetch` do what SGLang's
scheduler does around them (`unified_radix_cache.py`: allocate what was found, hand it to the
thread that reads, take the acknowledgements). Copies between GPU and host need CUDA and are not
here: host pages are filled by hand. As a process of its own:

    python -m tests.engines.sglang_world RANK SIZE DIRECTORY URL write|read

writes or reads prompts of every kind of model, as rank RANK of SIZE over gloo, and prints a line
of JSON with what came and a digest of its bytes.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Self

import numpy as np

from tests.engines import no_torchvision
from tests.engines.processes import third_level

no_torchvision.install()

import torch
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool, LogicalHostPool
from sglang.srt.mem_cache.pool_host import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost, make_dsa_indexer_pool_decl
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import get_mha_host_pool_cls
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_parallel

PAGE, LAYERS, TOKENS = 64, 3, 2048
ALL, LAST = PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES
KINDS = ("full", "hybrid", "latent", "compressed")
DEADLINE_S = 60.0  # of a test's own waits


def with_ranks(rank: int = 0, size: int = 1) -> None:
    """What SGLang knows of the processes beside this one."""
    parallel = {"tp": (rank, size), "attn_tp": (rank, size), "pp": (0, 1), "attn_dcp": (0, 1)}
    values = {f"{name}_rank": of for name, (of, _) in parallel.items()}
    values |= {f"{name}_size": num for name, (_, num) in parallel.items()}
    get_parallel().override_permanently(**values, attn_dp_rank=0, attn_dp_size=1, dcp_size=1)


def device_mha(num_heads: int = 2, value_width: int = 16) -> MHATokenToKVPool:
    return MHATokenToKVPool(
        size=TOKENS, page_size=PAGE, dtype=torch.bfloat16, head_num=num_heads, head_dim=16,
        v_head_dim=value_width, layer_num=LAYERS, device="cpu", enable_memory_saver=False,
        enable_alt_stream=False,
    )  # fmt: skip


def host_mha(layout: str, *, num_heads: int = 2, device: Any = None, tokens: int = TOKENS) -> Any:
    device = device or device_mha(num_heads)
    info = device._mha_buffer_info()  # noqa: SLF001 - SGLang's own builder does so
    return get_mha_host_pool_cls(info)(
        info, 1.0, 0, PAGE, layout, pin_memory=False, device="cpu",
        device_capacity_tokens=tokens, start_layer=0, end_layer=LAYERS,
    )  # fmt: skip


def host_mla(device: MLATokenToKVPool, layout: str) -> MLATokenToKVPoolHost:
    return MLATokenToKVPoolHost(
        device._mla_buffer_info(), 1.0, 0, PAGE, layout, pin_memory=False, device="cpu",  # noqa: SLF001
        override_kv_cache_dim=device.kv_cache_dim, device_capacity_tokens=TOKENS, start_layer=0,
        end_layer=LAYERS, target_layer_num=LAYERS,
    )  # fmt: skip


def host_mamba(layout: str, num_slots: int = 32) -> MambaPoolHost:
    conv = tuple(torch.zeros(LAYERS, 9, 3, width, dtype=torch.bfloat16) for width in (12, 6))
    info = MambaStateBufferInfo(temporal=torch.zeros(LAYERS, 9, 2, 8, 8), conv=conv)
    return MambaPoolHost(
        info, num_slots / 8, 0, device_capacity=8, pin_memory=False, device="cpu", layout=layout
    )


def host_paged(name: str, item_bytes: int, layout: str) -> DeepSeekV4PagedHostPool:
    pages = TOKENS // PAGE
    buffers = [torch.zeros(pages, item_bytes, dtype=torch.uint8) for _ in range(LAYERS)]
    return DeepSeekV4PagedHostPool(
        name, buffers, item_bytes, pages, PAGE, layout, pin_memory=False, page_aligned_only=True
    )


def host_pools(
    kind: str, layout: str = "page_first_direct", tokens: int = TOKENS
) -> tuple[Any, dict[PoolName, Any]]:
    """A model's device pool of full attention, and its host pools; KV is the first."""
    if kind == "full":
        device = device_mha()
        return device, {PoolName.KV: host_mha(layout, device=device, tokens=tokens)}
    if kind == "hybrid":  # sliding windows and Mamba states beside full attention
        device = device_mha()
        return device, {
            PoolName.KV: host_mha(layout, device=device),
            PoolName.SWA: host_mha(layout, num_heads=1),
            PoolName.MAMBA: host_mamba(layout),
        }
    if kind == "latent":  # DeepSeek V3.2: MLA with an indexer
        latent = DSATokenToKVPool(
            size=TOKENS, page_size=PAGE, dtype=torch.bfloat16, kv_lora_rank=32, qk_rope_head_dim=16,
            layer_num=LAYERS, device="cpu", enable_memory_saver=False, kv_cache_dim=48,
            index_head_dim=128,
        )  # fmt: skip
        kv = host_mla(latent, layout)
        decl = make_dsa_indexer_pool_decl(latent)
        indexer = DSAIndexerPoolHost(decl, kv, pin_memory=False, device="cpu")
        return latent, {PoolName.KV: kv, PoolName.INDEXER: indexer}
    # DeepSeek V4: no bytes under KV itself
    latent = MLATokenToKVPool(
        size=TOKENS, page_size=PAGE, dtype=torch.bfloat16, kv_lora_rank=32, qk_rope_head_dim=16,
        layer_num=LAYERS, device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    return latent, {
        PoolName.KV: LogicalHostPool(TOKENS, PAGE, layout),
        PoolName.DEEPSEEK_V4_C4: host_paged("c4", 640, layout),
        PoolName.DEEPSEEK_V4_C128: host_paged("c128", 96, layout),
    }


@dataclass
class Prefetched:
    """found_pages: what storage was said to have; num_pages: what came; slots: where, by pool.
    taken: slots that are to be given back."""

    found_pages: int
    num_pages: int = 0
    pool_pages: dict[str, int] = field(default_factory=dict)
    slots: dict[PoolName, torch.Tensor] = field(default_factory=dict)
    taken: dict[PoolName, torch.Tensor] = field(default_factory=dict)
    is_over: bool = True


class World:
    """One rank of one instance. window: pages of the sliding window. tokens: of full attention's
    host pool, where there is no other."""

    def __init__(
        self, url: str, kind: str = "full", *, layout: str = "page_first_direct", window: int = 2,
        group: Any = None, model: str = "llama", tokens: int = TOKENS, **extra: Any,
    ) -> None:  # fmt: skip
        device, self.pools = host_pools(kind, layout, tokens)
        self.kind, self.window = kind, window
        entries = [
            PoolEntry(name, pool, device, lambda layer: layer, name is PoolName.KV)
            for name, pool in self.pools.items()
        ]
        self._model = model
        self._settings = third_level(url, **extra)
        self.controller = HybridCacheController(
            SimpleNamespace(get_kvcache=lambda: device), HostPoolGroup(entries), PAGE, group,
            threading.Event(), io_backend="direct", enable_storage_metrics=True,
        )  # fmt: skip
        self.attach()

    def attach(self) -> None:
        """As when SGLang starts, and when its administrator asks for it."""
        self.controller.attach_storage_backend(
            "dynamic", PAGE, self._model, dict(self._settings),
            host_pools=self.controller.mem_pool_host.entries,
        )  # fmt: skip

    @property
    def backend(self) -> Any:
        return self.controller.storage_backend

    def close(self) -> None:
        self.controller.detach_storage_backend()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fill(self, seed: int) -> None:
        """Every byte of every pool, as a forward pass might have left it."""
        draws = np.random.default_rng(seed)
        for pool in self.pools.values():
            for memory in memories(pool):
                memory[:] = draws.integers(1, 256, memory.shape, np.uint8)

    def page(self, name: PoolName, slot: int) -> bytes:
        """A page's bytes as SGLang itself takes them out of its pool."""
        page = self.pools[name].get_data_page(slot, flat=True)
        return bytes(page.contiguous().view(torch.uint8).numpy())

    def pages(self, name: PoolName, slots: torch.Tensor) -> list[bytes]:
        size = self.pools[name].page_size
        return [self.page(name, int(slot)) for slot in slots[::size]]

    def hashes(self, tokens: Sequence[int], **namespace: str) -> list[str]:
        key = radix_key(tokens, **namespace)
        return list(get_storage_hash_str(key, None, page_size=PAGE))

    def _transfers(self, hashes: Sequence[str]) -> list[PoolTransfer]:
        """What a model of this kind needs beside KV, with slots where they are not KV's."""
        if self.kind == "hybrid":
            needed = {PoolName.SWA: hashes[-self.window :], PoolName.MAMBA: hashes[-1:]}
            return [
                PoolTransfer(
                    name,
                    self.pools[name].alloc(len(keys) * self.pools[name].page_size),
                    keys=list(keys),
                    hit_policy=LAST,
                )
                for name, keys in needed.items()
            ]
        return [
            PoolTransfer(name, indices_from_pool=PoolName.KV, hit_policy=ALL)
            for name in self.pools
            if name is not PoolName.KV
        ]

    def write_back(
        self, tokens: Sequence[int], **namespace: str
    ) -> tuple[dict[PoolName, torch.Tensor], int]:
        """Store the prompt's pages out of slots that are taken for it; which, and how many tokens
        SGLang was told are stored."""
        hashes = self.hashes(tokens, **namespace)
        slots = {PoolName.KV: self.pools[PoolName.KV].alloc(len(hashes) * PAGE)}
        assert slots[PoolName.KV] is not None, "the world is too small for its test"
        transfers = self._transfers(hashes)
        for transfer in transfers:
            slots[transfer.name] = slots[PoolName.KV]
            if transfer.host_indices is not None:
                slots[transfer.name] = transfer.host_indices
        key = radix_key(tokens, **namespace)
        self.controller.write_storage(
            slots[PoolName.KV], key, hash_value=hashes, extra_pools=transfers or None
        )
        done = self.controller.ack_backup_queue.get(timeout=DEADLINE_S)
        return slots, done.completed_tokens

    def begin_prefetch(self, name: str, tokens: Sequence[int], **namespace: str) -> Any:
        transfers = self._transfers(self.hashes(tokens, **namespace))
        return self.controller.prefetch(
            CacheRequestHandle(name, 0), radix_key(tokens, **namespace), extra_pools=transfers
        )

    def found(self) -> Any:
        """The next operation whose question storage has answered."""
        return self.controller.prefetch_hit_queue.get(timeout=DEADLINE_S)

    def begin_reads(self, operation: Any) -> bool:
        count = operation.storage_hit_count
        if not count:
            return False
        operation.host_indices, _ = self.controller.allocate_storage_hit(
            operation, count, allow_partial=False, min_tokens=PAGE, evict_host=lambda _: 0
        )
        assert operation.host_indices is not None, "the world is too small for its test"
        self.controller.prefetch_buffer.put(operation)
        return True

    def finish_reads(self, operation: Any) -> Prefetched:
        result = Prefetched(operation.storage_hit_count // PAGE, is_over=False)
        while not result.is_over:
            ack = self.controller.ack_prefetch_queue.get(timeout=DEADLINE_S)
            assert ack.operation is operation
            if ack.completed_tokens is not None:
                result.num_pages = ack.completed_tokens // PAGE
            result.pool_pages |= ack.pool_hits or {}
            result.is_over = bool(ack.completed_req)
        slots = {PoolName.KV: operation.host_indices[: result.num_pages * PAGE]}
        result.taken = {PoolName.KV: operation.host_indices}
        for transfer in operation.pool_transfers or ():
            if transfer.indices_from_pool is not None:
                slots[transfer.name] = slots[PoolName.KV]
            else:
                size = self.pools[transfer.name].page_size
                count = result.pool_pages.get(transfer.name.value, 0)
                slots[transfer.name] = transfer.host_indices[: count * size]
                result.taken[transfer.name] = transfer.host_indices
        result.slots = slots
        return result

    def give_back(self, slots: dict[PoolName, torch.Tensor]) -> None:
        """As when SGLang evicts from its host memory."""
        for name, indices in slots.items():
            if name is PoolName.KV or self.kind == "hybrid":
                self.pools[name].free(indices)

    def prefetch(self, tokens: Sequence[int], name: str = "r", **namespace: str) -> Prefetched:
        """What a request with this prompt finds and gets."""
        self.begin_prefetch(name, tokens, **namespace)
        operation = self.found()
        if self.begin_reads(operation):
            return self.finish_reads(operation)
        taken = {one.name: one.host_indices for one in operation.pool_transfers or ()}
        return Prefetched(
            0, taken={name: slots for name, slots in taken.items() if slots is not None}
        )


def radix_key(tokens: Sequence[int], **namespace: str) -> RadixKey:
    return RadixKey(array("q", tokens), **namespace)


def prompt(number: int, num_pages: int) -> list[int]:
    return [1000 * number + n % 997 for n in range(num_pages * PAGE)]


def memories(pool: Any) -> list[np.ndarray]:
    """A pool's memory as flat bytes, whatever the pool calls it."""
    found = {}
    for name in ("kv_buffer", "k_buffer", "v_buffer", "temporal_buffer", "conv_buffer",
                 "index_k_with_scale_buffer"):  # fmt: skip
        value = getattr(pool, name, None)
        for tensor in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(tensor, torch.Tensor) and tensor.is_contiguous() and tensor.numel():
                found[tensor.data_ptr()] = tensor.view(-1).view(torch.uint8).numpy()
    return list(found.values())


def digest(pages: Sequence[bytes]) -> str:
    return hashlib.sha256(b"".join(pages)).hexdigest()[:32]


def main() -> None:
    rank, size, directory, url, act = sys.argv[1:]
    with_ranks(int(rank), int(size))
    group = None
    if int(size) > 1:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{directory}/{act}", rank=int(rank), world_size=int(size)
        )
        group = torch.distributed.group.WORLD
    told: dict[str, Any] = {}
    for number, kind in enumerate(KINDS):
        tokens = prompt(number + 1, 5)
        with World(url, kind, group=group) as world:
            if act == "write":
                world.fill(100 * number + int(rank))
                slots, count = world.write_back(tokens)
                pages = count // PAGE
            else:
                result = world.prefetch(tokens)
                slots, pages = result.slots, result.num_pages
            bytes_of = {
                name.value: digest(world.pages(name, slots[name]))
                for name in world.pools
                if kind != "compressed" or name is not PoolName.KV
            }
            told[kind] = {"pages": pages, "bytes": bytes_of}
            if group is not None:
                torch.distributed.barrier(group)
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
