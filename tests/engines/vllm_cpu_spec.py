"""vLLM's tiering on a machine without a GPU: its spec with a worker that copies by the processor.

vLLM 0.32 refuses to make its own worker there. Loaded by vLLM itself, by the path of this module.
"""

from __future__ import annotations

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CpuTieringSpec(TieringOffloadingSpec):
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        return CopyWorker(self, kv_caches)


class CopyWorker(OffloadingWorker):
    def __init__(self, spec: CpuTieringSpec, kv_caches: CanonicalKVCaches) -> None:
        assert spec.blocks_per_chunk == 1
        self._region = SharedOffloadRegion(
            engine_id=spec.config.engine_id,
            num_chunks=spec.num_chunks,
            rank=spec.config.parallel.rank,
            kv_bytes_per_chunk=spec.kv_bytes_per_chunk,
            cpu_page_size=spec.cpu_page_size_per_worker,
        )
        self._pairs = []
        for plane in kv_caches.tensors:
            blocks = plane.tensor.flatten(1).view(torch.int8)
            assert blocks.shape[1] == plane.page_size_bytes
            self._pairs.append(
                (blocks, self._region.create_next_worker_view(plane.page_size_bytes))
            )
        self._done: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        for blocks, rows in self._pairs:
            rows[dst_spec.block_ids] = blocks[src_spec.block_ids]
        self._done.append(TransferResult(job_id, success=True))
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        for blocks, rows in self._pairs:
            blocks[dst_spec.block_ids] = rows[src_spec.block_ids]
        self._done.append(TransferResult(job_id, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Copies are done when they have been submitted."""

    def shutdown(self) -> None:
        self._pairs.clear()
        self._region.cleanup()
