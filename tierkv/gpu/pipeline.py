"""The staged pipeline of a lane: units of a copy, brought to streams that events join.

    load      slots --copy engine--> ring --scatter--> planes       copy streams | kernel stream
    offload   slots <--copy engine-- ring <--gather--- planes       copy streams | kernel stream

The copy engine moves a block's bytes as one piece, the kernel spreads them over the planes; one
unit is copied while the one before is scattered.
Kernels that read host memory themselves were as fast alone, but fell to 66 % with both directions
at once and slowed a matmul beside them by 14 to 106 % (H200, 2026-11-21); this does neither.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from tierkv.gpu.cuda import CudaEvent, DeviceMemory, Gpu, new_stream
from tierkv.gpu.cuda_planes import CudaPlanes
from tierkv.gpu.driver import Addresses, load_driver
from tierkv.gpu.kernels import PlaneKernels
from tierkv.gpu.pinned import PinnedSlots
from tierkv.gpu.protocol import BlockCopy, Direction, Event, Ids
from tierkv.gpu.ring import Ring
from tierkv.gpu.units import Order, Unit, UnitPlanner, UnitSizes, joined

# A batch starts when its last piece is submitted, at 1 to 1.5 us a piece, and holds till then the
# driver's lock, on which the engine's launches wait. So a batch is small where little is under way
# and the copy engine would wait for it, and large where that loses less: pieces of 256 KiB reach
# 97.3 % of a contiguous copy with 32 to a batch, 98.8 % with 128 (to the host 95.3 and 96.5), and
# 84 and 90 with all 8,192 of 2 GiB in one (H100, 2026-11-21).
_FIRST_BATCH_PIECES = 32
_BATCH_PIECES = 128
_LEAST_STAGING = 1 << 20


@dataclass(frozen=True, slots=True)
class LaneSettings:
    """staging_bytes: the ring of a lane, in device memory; one for few blocks is smaller.
    num_ctas: blocks of threads of a gather or scatter kernel: with 32 it moves 128 MiB in 136 us,
        with 64 in 125, with 132 in 120 (H100, 2026-11-21).
    turn_bytes: what goes through one of the two copy streams before it is the other's turn. The
        copy engine goes on with a stream for as long as that has work for it: 8 bytes to the host
        on another stream, whatever its priority, waited 34 ms for the end of an offload of 2 GiB.
        At a turn they come in: 0.7 ms (32 MiB: 0.3 ms, but 2 % fewer GB/s; H200, 2026-11-21)."""

    staging_bytes: int = 512 << 20
    turn_bytes: int = 64 << 20
    num_ctas: int = 64
    units: UnitSizes = field(default_factory=UnitSizes)


class Pipeline:
    """Streams, ring and kernels of one direction between `planes` and `host`. For one thread at a
    time, which has the GPU bound."""

    def __init__(  # noqa: PLR0917 - what a pipeline is made of
        self,
        gpu: Gpu,
        direction: Direction,
        planes: CudaPlanes,
        host: PinnedSlots,
        settings: LaneSettings,
        order: Order,
    ) -> None:
        self._gpu = gpu
        self._direction = direction
        self._block_bytes = planes.layout.block_bytes
        self._host = host
        row = Unit(range(0), 0, self._block_bytes, 0, 1).row_bytes
        largest = 2 * row * min(planes.num_blocks, host.num_slots)
        capacity = max(min(settings.staging_bytes, largest), 2 * row, _LEAST_STAGING)
        sizes = replace(settings.units, most=min(settings.units.most, capacity // 4))
        if direction is Direction.OFFLOAD:
            sizes = replace(sizes, piece=max(sizes.piece, sizes.offload_piece))
        self._planner = UnitPlanner(planes.layout, order, sizes)
        self._copies, self._copies_next = (new_stream(gpu, is_urgent=False) for _ in range(2))
        self._turn_bytes = settings.turn_bytes
        self._since_turn = 0
        self._under_way: deque[CudaEvent] = deque()  # ends of batches
        self._kernel_stream = new_stream(gpu, is_urgent=True)
        self._kernels = PlaneKernels(gpu, planes, num_ctas=settings.num_ctas)
        self._ring: Ring[CudaEvent] = Ring(capacity)
        self._staging = DeviceMemory(gpu, capacity)

    def wait(self, event: Event, timeout_s: float) -> None:
        """Let no unit submitted after this start before `event`. See Stream.wait."""
        self._kernel_stream.wait(event, timeout_s)

    def submit(self, copy: BlockCopy) -> Iterator[tuple[Unit, CudaEvent]]:
        """Each unit with the event of its end, as soon as it is submitted. Within a unit, blocks
        move in the order of their slots."""
        slot_ids, block_ids = copy.slot_ids, copy.block_ids
        if len(copy) > 1:
            by_slot = np.argsort(slot_ids)
            slot_ids, block_ids = slot_ids[by_slot], block_ids[by_slot]
        slots = slot_ids.astype(np.uint64)
        slots *= np.uint64(self._block_bytes)
        slots += np.uint64(self._host.address)
        move = self._load if self._direction is Direction.LOAD else self._offload
        for unit in self._planner.plan(len(copy)):
            offset, freed_by = self._ring.take(unit.staging_bytes)
            part = slice(unit.start, unit.stop)
            pieces = slots[part] + np.uint64(unit.first_byte)
            end = move(unit, pieces, block_ids[part], self._staging.address + offset, freed_by)
            self._ring.use_until(end)
            yield unit, end

    def let_end(self) -> None:
        """Block until what was begun has ended; then the ring is free."""
        with self._gpu.bound_to_close():
            for stream in (self._copies, self._copies_next):
                stream.raw.synchronize()
            self._kernel_stream.raw.synchronize()
        self._ring.reset()
        self._under_way.clear()

    def _load(
        self, unit: Unit, pieces: Addresses, block_ids: Ids, staging: int, free: CudaEvent | None
    ) -> CudaEvent:
        if free is not None:
            self._copies.wait_bound(free)
        copied = self._copy(_rows(unit, staging), pieces, unit, host=pieces)
        self._kernel_stream.wait_bound(copied)
        self._kernels.scatter(unit, block_ids, staging, self._kernel_stream)
        return self._kernel_stream.record_bound()

    def _offload(
        self, unit: Unit, pieces: Addresses, block_ids: Ids, staging: int, free: CudaEvent | None
    ) -> CudaEvent:
        if free is not None:
            self._kernel_stream.wait_bound(free)
        self._kernels.gather(unit, block_ids, staging, self._kernel_stream)
        self._copies.wait_bound(self._kernel_stream.record_bound())
        return self._copy(pieces, _rows(unit, staging), unit, host=pieces)

    def _copy(
        self, targets: Addresses, sources: Addresses, unit: Unit, *, host: Addresses
    ) -> CudaEvent:
        """Submit the unit's pieces; the event of their end."""
        sizes = np.full(unit.num_blocks, unit.num_bytes, np.uint64)
        largest = unit.num_bytes
        if unit.num_blocks > 1 and unit.num_bytes == unit.row_bytes == self._block_bytes:
            firsts, sizes = joined(
                host,
                self._block_bytes,
                start=self._host.address,
                chunk_bytes=self._host.chunk_bytes,
                most_bytes=self._turn_bytes,
            )
            targets, sources = targets[firsts], sources[firsts]
            largest = int(sizes.max())
        most = max(self._turn_bytes // largest, 1)
        start = 0
        while start < len(sizes):
            stop = start + min(self._batch_pieces(), most)
            part = slice(start, stop)
            load_driver().copy_batch(
                targets[part], sources[part], sizes[part], stream=self._copies.address
            )
            self._under_way.append(self._copies.record_bound())
            self._since_turn += largest * len(sizes[part])
            if self._since_turn >= self._turn_bytes:
                self._take_turns()
            start = stop
        return self._under_way[-1]

    def _batch_pieces(self) -> int:
        while self._under_way and self._under_way[0].is_done:
            self._under_way.popleft()
        return min(_FIRST_BATCH_PIECES << len(self._under_way), _BATCH_PIECES)

    def _take_turns(self) -> None:
        """What is copied from now on goes through the other stream, behind what this one has."""
        self._copies_next.wait_bound(self._under_way[-1])
        self._copies, self._copies_next = self._copies_next, self._copies
        self._since_turn = 0


def _rows(unit: Unit, staging: int) -> Addresses:
    return np.uint64(staging) + np.arange(unit.num_blocks, dtype=np.uint64) * np.uint64(
        unit.row_bytes
    )
