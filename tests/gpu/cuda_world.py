"""A service on a GPU, and an engine whose KV is a function of the tokens: tests/world.py there."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import cupy
import numpy as np

from tests.latch import CopyLatch
from tests.world import World, kv_of
from tierkv.cache.keys import Fingerprint
from tierkv.cache.layout import attention_layout
from tierkv.gpu.cuda_device import CudaDevice
from tierkv.pd.settings import HandoffSettings
from tierkv.sched.request import Request
from tierkv.sched.settings import CacheSettings
from tierkv.service import Service
from tierkv.storage.protocol import Store

# 32 planes of 32 KiB: blocks of 1 MiB, as an 8B model's are in a quarter of its layers.
LAYOUT = attention_layout(
    num_layers=16, num_kv_heads=8, head_dim=128, dtype="bfloat16", item_bytes=2, block_size=16
)


class CudaWorld(World):
    """What the engine's kernels do is done with CuPy, and has ended when it returns."""

    def compute(
        self, request: Request, tokens: Sequence[int], start: int = 0, *, weights: int = 0
    ) -> None:
        size = self.layout.block_size
        first, num_blocks = start // size, -(-len(tokens) // size)
        rows_of = kv_of(tokens, self.layout, weights)
        with self.service.device.computing():
            table = cupy.asarray(request.block_table[first:num_blocks])
            for rows, array in zip(rows_of, self.service.planes.arrays, strict=True):
                blocks = np.zeros((num_blocks - first, array.shape[1]), np.uint8)
                flat = np.ascontiguousarray(rows[first * size :]).reshape(-1)
                blocks.reshape(-1)[: len(flat)] = flat
                array[table] = cupy.asarray(blocks)
            cupy.cuda.runtime.deviceSynchronize()

    def read(self, request: Request, num_tokens: int) -> list[np.ndarray]:
        num_blocks = -(-num_tokens // self.layout.block_size)
        with self.service.device.computing():
            table = cupy.asarray(request.block_table[:num_blocks])
            return [
                cupy.asnumpy(array[table]).reshape(-1, plane.token_bytes or 0)[:num_tokens]
                for plane, array in zip(self.layout.planes, self.service.planes.arrays, strict=True)
            ]


@asynccontextmanager
async def cuda_world(
    *, store: Store | None, handoff: HandoffSettings, gpu: int = 0, **settings: Any
) -> AsyncIterator[CudaWorld]:
    """A running node. settings: fields of CacheSettings."""
    chosen = {"device_blocks": 64, "host_blocks": 64} | settings
    service = Service(
        CudaDevice(gpu),
        Fingerprint("model", LAYOUT),
        CacheSettings(block_size=LAYOUT.block_size, **chosen),
        handoff,
        store,
    )
    async with service.running():
        yield CudaWorld(service, CopyLatch())
