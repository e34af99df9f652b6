"""A GPU as a device: copies of blocks to and from pinned host memory, and within the GPU.

Planes of other processes are read through CUDA IPC.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from tierkv.cache.layout import Layout
from tierkv.errors import ConfigError, LayoutError, TransferError
from tierkv.gpu.cpu import check_copy_within, done_event
from tierkv.gpu.cuda import (
    ARRAY_MODULE,
    CudaStream,
    Gpu,
    adopted_stream,
    gpu_uuid,
    is_reachable,
    new_stream,
)
from tierkv.gpu.cuda_lane import CudaLane, LaneSettings
from tierkv.gpu.cuda_memory import (
    CudaPlanes,
    DeviceMemory,
    adopted_planes,
    allocated_planes,
    opened_planes,
    shared_planes,
)
from tierkv.gpu.kernels import PlaneKernels, launch_nothing
from tierkv.gpu.pinned import PinnedSlots
from tierkv.gpu.protocol import (
    BlockCopy,
    Direction,
    Event,
    HostSlots,
    Ids,
    Lane,
    Planes,
    SharedPlane,
    SharedPlanes,
)
from tierkv.gpu.units import MAX_BLOCKS, Order, Unit

_AT_ONCE_S = 0.0005
_STAGING_BYTES = 64 << 20
_NUM_CTAS = 64


class CudaSharing:
    """The sharing of planes in GPU memory with other processes, through CUDA IPC.

        planes of the other process --gather--> staging memory --scatter--> planes of this process

    The staging memory is on this process's GPU. If the other process uses another GPU, the gather
    kernel reads that GPU's memory over NVLink or PCIe.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.place = gpu_uuid(gpu.index)

    def share(self, planes: Planes) -> tuple[SharedPlane, ...]:
        try:
            return shared_planes(self._gpu, _ours(planes))
        except TransferError as error:
            raise ConfigError(
                f"CUDA IPC cannot share the planes' memory ({error}): allocate it with "
                "cudaMalloc, not cudaMallocAsync or mapped segments (in PyTorch: "
                "backend:native without expandable_segments)"
            ) from error

    def open(self, own: Planes, shared: SharedPlanes) -> CudaPeer:
        if not is_reachable(self._gpu, shared.place):
            raise ConfigError(
                f"GPU {self._gpu.index} cannot read the memory of GPU {shared.place} as a peer"
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
    """The KV memory of another process, opened to copy its blocks to this process's blocks."""

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
            self._drain()
            raise

    def _drain(self) -> None:
        with self._gpu.bound_to_close():
            self._stream.raw.synchronize()

    def close(self) -> None:
        self._drain()
        self._theirs.close()


def _unit(layout: Layout, start: int, stop: int) -> Unit:
    return Unit(range(layout.num_layers), 0, layout.block_bytes, start, stop)


def _check(ids: Ids, num_blocks: int) -> None:
    wrong: Sequence[int] = [i for i in ids.tolist() if not 0 <= i < num_blocks]
    if wrong:
        raise TransferError(
            f"the other process has no block {wrong[0]}: it has {num_blocks} blocks"
        )


def _ours(planes: Planes) -> CudaPlanes:
    if not isinstance(planes, CudaPlanes):
        raise ConfigError("these planes belong to another device")
    return planes


_DEFAULT_QUEUES, _MAX_QUEUES = 8, 32  # of CUDA


class CudaDevice:
    """One GPU of this process, which allocates planes and host slots, and opens lanes.

    Args:
        index: number of the GPU among those that this process sees.
        compute_stream: the cudaStream_t of the engine's kernels; 0 for the legacy default stream.
        lanes: sizes of lanes; None for the defaults.
        before_copy: called before every copy of a lane; tests delay copies with it, or let them
            fail. None for no call.

    Raises:
        ConfigError: there is no such GPU.
    """

    def __init__(
        self,
        index: int = 0,
        *,
        compute_stream: int = 0,
        lanes: LaneSettings | None = None,
        before_copy: Callable[[BlockCopy], None] | None = None,
    ) -> None:
        self.gpu = Gpu(index)
        self.name = f"cuda:{index} ({self.gpu.model})"
        self.compute_stream = adopted_stream(self.gpu, compute_stream)
        self.array_module = ARRAY_MODULE
        self.quick_copy_bytes = 0  # kernels may have to be compiled
        self._lane_settings = lanes or LaneSettings()
        self._before_copy = before_copy
        self._host: PinnedSlots | None = None  # the slots made last
        # By address, with the number of lanes that use them.
        self._pins: dict[int, tuple[PinnedSlots, int]] = {}
        self._pinning = threading.Lock()
        self._within = new_stream(self.gpu, is_urgent=True)
        self._kernels: tuple[CudaPlanes, PlaneKernels] | None = None
        self._queues: tuple[CudaStream, ...] = ()  # see used_queues; () before the first lane

    @property
    def failure(self) -> str | None:
        """The reason why this process can no longer use the GPU; None while the GPU works."""
        return self.gpu.failure

    @property
    def status(self) -> str:
        """One line of text with the GPU's failure, or with its name and the pinned memory."""
        if self.gpu.failure is not None:
            return self.gpu.failure
        host = self._host
        if host is None or host.is_closed or host.pinned_bytes == host.num_bytes:
            return self.name
        others = "copies to unpinned slots wait" if host.refusal is None else host.refusal
        return (
            f"{self.name}, {host.pinned_bytes / _GIB:.1f} of {host.num_bytes / _GIB:.1f} GiB of "
            f"host slots pinned; {others}"
        )

    @contextmanager
    def computing(self) -> Iterator[None]:
        with self.gpu.bound(), self.compute_stream.raw:
            yield

    def allocate_planes(self, layout: Layout, num_blocks: int) -> CudaPlanes:
        return allocated_planes(self.gpu, layout, num_blocks)

    def adopt_planes(self, layout: Layout, tensors: Sequence[object]) -> CudaPlanes:
        """Use an engine's KV tensors as planes, without a copy.

        Args:
            layout: layout of a block.
            tensors: one tensor for each plane of the layout. The first dimension is the block, and
                the bytes of one block must be contiguous.

        Raises:
            LayoutError: a tensor does not fit the layout, or is on another GPU.
            ConfigError: CuPy cannot use a tensor.
        """
        return adopted_planes(self.gpu, layout, tensors)

    @property
    def sharing(self) -> CudaSharing:
        return CudaSharing(self.gpu)

    def allocate_host(self, layout: Layout, num_slots: int) -> PinnedSlots:
        self._host = PinnedSlots(self.gpu, layout, num_slots)
        return self._host

    def open_lane(self, direction: Direction, planes: Planes, host: HostSlots) -> Lane:
        """Open a lane that loads layer by layer, or offloads block by block.

        Host slots that are not pinned yet, such as slots that several processes share, are pinned
        in the background while a lane uses them. A copy waits until its own slots are pinned.

        Args:
            direction: LOAD copies slots to blocks, OFFLOAD blocks to slots.
            planes: planes that this device has made.
            host: host slots for blocks of the same layout.

        Raises:
            LayoutError: the planes are closed, or belong to another device.
            ConfigError: the host slots cannot be pinned.
        """
        order = Order.LAYERS if direction is Direction.LOAD else Order.BLOCKS
        return self.open_ordered_lane(direction, planes, host, order)

    def open_ordered_lane(
        self, direction: Direction, planes: Planes, host: HostSlots, order: Order
    ) -> CudaLane:
        """Open a lane that copies in the given order.

        Args:
            direction: LOAD copies slots to blocks, OFFLOAD blocks to slots.
            planes: planes that this device has made.
            host: host slots for blocks of the same layout.
            order: layer by layer, or block by block.

        Raises:
            LayoutError: the planes are closed, or belong to another device.
            ConfigError: the host slots cannot be pinned.
        """
        ours = self._ours(planes)
        self._queues = self._queues or used_queues(self.gpu)
        pinned, unpin = self._pinned(ours.layout, host)
        settings, before = self._lane_settings, self._before_copy
        try:
            return CudaLane(self.gpu, direction, ours, pinned, settings, order, before, unpin)
        except BaseException:
            unpin()
            raise

    def _pinned(self, layout: Layout, host: HostSlots) -> tuple[PinnedSlots, Callable[[], None]]:
        """Return `host` as pinned memory, and a function that ends this use of the memory.

        All lanes of the device share the pinned memory.
        """
        if isinstance(host, PinnedSlots):
            return host, lambda: None
        address = host.array.ctypes.data
        with self._pinning:
            pinned, count = self._pins.get(address, (None, 0))
            if pinned is None:
                pinned = PinnedSlots(
                    self.gpu,
                    layout,
                    host.num_slots,
                    array=host.array,
                    is_busy=self._is_computing,
                )
                self._host = pinned
            self._pins[address] = (pinned, count + 1)
        return pinned, partial(self._unpin, address)

    def _is_computing(self) -> bool:
        try:
            event = self.compute_stream.record()
            time.sleep(_AT_ONCE_S)
            return not event.is_done
        except TransferError:  # the GPU is lost, which callers that wait for a copy will see
            return True

    def _unpin(self, address: int) -> None:
        with self._pinning:
            pinned, count = self._pins.pop(address)
            if count > 1:
                self._pins[address] = (pinned, count - 1)
            else:
                pinned.close()

    def copy_blocks(self, planes: Planes, source_ids: Ids, target_ids: Ids) -> Event:
        ours = self._ours(planes)
        check_copy_within(source_ids, target_ids, ours.num_blocks)
        if not len(source_ids):
            return done_event()
        try:
            with self.gpu.bound():
                if self._kernels is None or self._kernels[0] is not ours:
                    num_ctas = self._lane_settings.num_ctas
                    self._kernels = (ours, PlaneKernels(self.gpu, ours, num_ctas=num_ctas))
                self._within.wait(self.compute_stream.record(), 0.0)
                self._kernels[1].within(source_ids, target_ids, self._within)
                return self._within.record()
        except TransferError as error:
            error.blocks = tuple(target_ids.tolist())
            raise

    def _ours(self, planes: Planes) -> CudaPlanes:
        if not isinstance(planes, CudaPlanes):
            raise LayoutError("these planes belong to another device")
        if planes.is_closed:
            raise LayoutError("these planes are closed")
        return planes

    def close(self) -> None:
        with self.gpu.bound_to_close():
            self._within.raw.synchronize()
        self._kernels = None
        self._queues = ()


def num_queues() -> int:
    """Return the driver's number of hardware queues: 8, or CUDA_DEVICE_MAX_CONNECTIONS up to 32."""
    given = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    return min(max(int(given), 1), _MAX_QUEUES) if given.isdecimal() else _DEFAULT_QUEUES


def used_queues(gpu: Gpu) -> tuple[CudaStream, ...]:
    """Return one stream for each hardware queue of the GPU, each of which has run one kernel.

    Keep these streams for as long as lanes (queues of copies) are open: they keep copies at full
    speed while an engine's streams work. Without them, a lane that was opened after the engine's
    first kernels copies 50.5 instead of 54.2 GB/s (H200). The call blocks until the GPU has
    finished its present work.
    """
    gpu.synchronize()
    streams = tuple(new_stream(gpu, is_urgent=True) for _ in range(num_queues()))
    for stream in streams:
        launch_nothing(gpu, stream)
    for stream in streams:
        stream.synchronize()
    return streams


_GIB = 1 << 30
