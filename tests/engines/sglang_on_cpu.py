"""Lets SGLang's engine run on a processor with a host tier: import it first, in every process.

SGLang 0.5.23 runs on a processor without its kernels (`attention_backend="torch_native"`), but what
pins host memory and copies pages between it and the device is CUDA's alone. Here that is a copy by
index, which does the same; everything else (scheduler, radix tree, controller, its threads) is
SGLang's own.
"""

from __future__ import annotations

from typing import Any

from tests.engines import no_torchvision

no_torchvision.install()

import torch
from sglang.srt.mem_cache.pool_host import common
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost


def _no_pinning(*_: object, **__: object) -> None:
    """Memory of a processor needs none."""


def _host_rows(pool: Any, layer: int, host: torch.Tensor, is_value: bool) -> tuple[Any, Any]:
    """Where a layer's tokens lie in the host pool: a tensor and its indices."""
    buffer = pool.kv_buffer[int(is_value)]
    if pool.layout == "layer_first":
        return buffer[layer], (host,)
    if pool.layout == "page_first":
        return buffer, (host, layer)
    assert pool.layout == "page_first_direct", pool.layout
    return buffer, (host // pool.page_size, layer, host % pool.page_size)


def _load(
    self: Any, device_pool: Any, host_indices: Any, device_indices: Any, layer_id: int,
    io_backend: str, *, is_draft: bool = False,
) -> None:  # fmt: skip
    for is_value, planes in enumerate((self.device_k_buffers, self.device_v_buffers)):
        rows, at = _host_rows(self, layer_id, host_indices.cpu(), bool(is_value))
        planes[layer_id][device_indices] = rows[at]


def _back_up(
    self: Any, device_pool: Any, host_indices: Any, device_indices: Any, io_backend: str
) -> None:
    for is_value, planes in enumerate((self.device_k_buffers, self.device_v_buffers)):
        for layer, plane in enumerate(planes):
            rows, at = _host_rows(self, layer, host_indices.cpu(), bool(is_value))
            rows[at] = plane[device_indices]


common._cuda_host_register = _no_pinning  # noqa: SLF001
MHATokenToKVPoolHost.load_to_device_per_layer = _load
MHATokenToKVPoolHost.backup_from_device_all_layer = _back_up
