"""Blocks of another process's GPU memory, straight into this one's: CUDA IPC.

    their planes --gather--> rows of staging --scatter--> our planes

The kernels are the lanes' own, on one stream; the rows lie on this process's GPU. Where the other
process uses another GPU, gather reads it over NVLink or PCIe.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tierkv.cache.layout import Layout
from tierkv.errors import ConfigError, LayoutError, TransferError
from tierkv.gpu.cuda import Gpu, gpu_uuid, is_reachable, new_stream
from tierkv.gpu.cuda_memory import CudaPlanes, DeviceMemory, opened_planes, shared_planes
from tierkv.gpu.kernels import PlaneKernels
from tierkv.gpu.protocol import Ids, Planes, SharedPlane, SharedPlanes
from tierkv.gpu.units import MAX_BLOCKS, Unit

_STAGING_BYTES = 64 << 20
_NUM_CTAS = 64


class CudaSharing:
    """See Sharing. place: the GPU's UUID."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.place = gpu_uuid(gpu.index)

    def share(self, planes: Planes) -> tuple[SharedPlane, ...]:
        try:
            return shared_planes(self._gpu, _ours(planes))
        except TransferError as error:
            raise ConfigError(
                f"the planes are in memory that CUDA IPC cannot share ({error}): it shares what "
                "cudaMalloc gave, not cudaMallocAsync or mapped segments (in PyTorch, "
                "backend:native without expandable_segments)"
            ) from error

    def open(self, own: Planes, shared: SharedPlanes) -> CudaPeer:
        if not is_reachable(self._gpu, shared.place):
            raise ConfigError(
                f"GPU {shared.place} is not visible to GPU {self._gpu.index} as a peer"
            )
        try:
            planes = opened_planes(self._gpu, own.layout, shared.num_blocks, shared.planes)
        except LayoutError as error:
            raise TransferError(str(error)) from error
        try:
            return CudaPeer(self._gpu, _ours(own), planes)
        except BaseException:
            planes.close()
            raise


class CudaPeer:
    """See PeerPlanes. Owns `theirs`, which it closes."""

    def __init__(self, gpu: Gpu, own: CudaPlanes, theirs: CudaPlanes) -> None:
        self._gpu = gpu
        self._theirs = theirs
        layout = own.layout
        self._layout = layout
        row_bytes = _unit(layout, 0, 1).row_bytes
        most = min(_STAGING_BYTES // row_bytes, MAX_BLOCKS, theirs.num_blocks)
        self._num_rows = max(most, 1)
        self._staging = DeviceMemory(self._gpu, self._num_rows * row_bytes)
        self._gather = PlaneKernels(self._gpu, theirs, num_ctas=_NUM_CTAS)
        self._scatter = PlaneKernels(self._gpu, own, num_ctas=_NUM_CTAS)
        self._stream = new_stream(self._gpu, is_urgent=True)

    def copy(self, source_ids: Ids, target_ids: Ids) -> None:
        _check(source_ids, self._theirs.num_blocks)
        try:
            with self._gpu.bound():
                for start in range(0, len(source_ids), self._num_rows):
                    stop = min(start + self._num_rows, len(source_ids))
                    unit, staging = _unit(self._layout, start, stop), self._staging.address
                    self._gather.gather(unit, source_ids[start:stop], staging, self._stream)
                    self._scatter.scatter(unit, target_ids[start:stop], staging, self._stream)
                end = self._stream.record_bound()
            end.block_until_done(math.inf)
        except BaseException:
            self._let_end()
            raise

    def _let_end(self) -> None:
        with self._gpu.bound_to_close():
            self._stream.raw.synchronize()

    def close(self) -> None:
        self._let_end()
        self._theirs.close()


def _unit(layout: Layout, start: int, stop: int) -> Unit:
    """All layers of blocks [start, stop) of a copy."""
    return Unit(range(layout.num_layers), 0, layout.block_bytes, start, stop)


def _check(ids: Ids, num_blocks: int) -> None:
    wrong: Sequence[int] = [i for i in ids.tolist() if not 0 <= i < num_blocks]
    if wrong:
        raise TransferError(f"the other process has no block {wrong[0]}, but {num_blocks}")


def _ours(planes: Planes) -> CudaPlanes:
    if not isinstance(planes, CudaPlanes):
        raise ConfigError("these planes are another device's")
    return planes
