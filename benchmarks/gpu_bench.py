"""What the benchmarks of a GPU's transfers share: layouts, planes and slots, lanes, other ways."""

from __future__ import annotations

import gc
import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType

import numpy as np
import numpy.typing as npt

from benchmarks.bench import Row, row
from tierkv.cache.layout import Layout, attention_layout, layered
from tierkv.gpu.cuda import CudaEvent, CudaStream, PendingEvent, new_stream
from tierkv.gpu.cuda_device import CudaDevice
from tierkv.gpu.cuda_lane import CudaLane
from tierkv.gpu.cuda_memory import CudaPlanes, DeviceMemory
from tierkv.gpu.driver import Column, load_driver
from tierkv.gpu.pinned import PinnedSlots
from tierkv.gpu.protocol import BlockCopy, Direction, Event
from tierkv.gpu.units import Order

cupy: ModuleType = importlib.import_module("cupy")

GIB = 1 << 30
PATIENCE_S = 60.0
Ids = npt.NDArray[np.int32]

LAYOUTS: dict[str, Layout] = {
    "GQA 64 x 128 KiB": attention_layout(
        num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16", item_bytes=2, block_size=64
    ),
    "GQA 64 x 32 KiB": attention_layout(
        num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16", item_bytes=2, block_size=16
    ),
    "MLA 61 x 72 KiB": layered(64, [("latent", "bfloat16", 1152)], num_layers=61),
    "fp8 32 x (64, 64, 2 KiB)": layered(
        64,
        [("key", "float8", 1024), ("value", "float8", 1024), ("scale", "float32", 32)],
        num_layers=32,
    ),
    "small 64 x 4 KiB": attention_layout(
        num_layers=32, num_kv_heads=1, head_dim=128, dtype="bfloat16", item_bytes=2, block_size=16
    ),
}

_ANCESTOR = r"""
// A warp per (block, plane) reads or writes host memory over PCIe itself, 8 bytes per lane.
extern "C" __global__ void over_pcie(
    unsigned long long* const* planes, const unsigned long long* words_before,
    const unsigned int* words_of, unsigned long long* host, const int* slots, const int* blocks,
    unsigned int num_blocks, unsigned int num_planes, unsigned long long words_per_slot, int load) {
    const unsigned int warps = gridDim.x * (blockDim.x / 32);
    for (unsigned int at = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
         at < num_blocks * num_planes; at += warps) {
        const unsigned int block = at / num_planes, plane = at % num_planes, n = words_of[plane];
        unsigned long long* slot = host + slots[block] * words_per_slot + words_before[plane];
        unsigned long long* there = planes[plane] + (unsigned long long)blocks[block] * n;
        for (unsigned int i = threadIdx.x % 32; i < n; i += 32)
            if (load) there[i] = slot[i]; else slot[i] = there[i];
    }
}
"""


def finish(*events: Event) -> None:
    """Block until all are done, in the driver: a loop here would keep the interpreter from the
    lanes' threads, and naps would be in the figures."""
    for event in events:
        if isinstance(event, PendingEvent):
            event = event.wait_until_submitted(PATIENCE_S)  # noqa: PLW2901
        assert isinstance(event, CudaEvent)
        event.raw.synchronize()


@dataclass
class Bench:
    """One layout, with planes and slots for `num_blocks` in each direction."""

    device: CudaDevice
    layout: Layout
    planes: CudaPlanes
    host: PinnedSlots
    flat: DeviceMemory
    streams: dict[Direction, CudaStream]
    num_blocks: int
    copies: dict[Direction, list[BlockCopy]] = field(default_factory=dict)
    lanes: dict[tuple[Direction, Order], CudaLane] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.copies = {d: [self.make_copy(d, seed) for seed in range(5)] for d in Direction}
        self.adjacent = {
            copy.direction: BlockCopy(copy.direction, copy.slot_ids // np.int32(2), copy.block_ids)
            for copy in (self.copy(d, 0) for d in Direction)
        }

    @property
    def moved_bytes(self) -> int:
        """By one copy."""
        return self.num_blocks * self.layout.block_bytes

    def copy(self, direction: Direction, seed: int) -> BlockCopy:
        """Blocks of one half of the memory and every other slot, in random order on both sides;
        made before. No two slots are neighbours: those would travel as one piece."""
        return self.copies[direction][seed % len(self.copies[direction])]

    def make_copy(self, direction: Direction, seed: int) -> BlockCopy:
        rng = np.random.default_rng(seed)
        first = 0 if direction is Direction.LOAD else self.num_blocks
        slots = 2 * rng.permutation(self.num_blocks).astype(np.int32) + np.int32(first > 0)
        blocks = rng.permutation(self.num_blocks).astype(np.int32) + np.int32(first)
        return BlockCopy(direction, slots, blocks)

    def lane(self, direction: Direction, order: Order) -> CudaLane:
        """Open from the first call to `close_lanes`: a node has two of them, and streams share
        queues of the GPU where there are many."""
        key = (direction, order)
        if key not in self.lanes:
            self.lanes[key] = self.device.open_ordered_lane(
                direction, self.planes, self.host, order
            )
        return self.lanes[key]

    def close_lanes(self) -> None:
        while self.lanes:
            self.lanes.popitem()[1].close()

    def tierkv(self, direction: Direction, order: Order, seed: int) -> Event:
        return self.lane(direction, order).submit(self.copy(direction, seed))[-1]

    def limit(self, direction: Direction, num_bytes: int | None = None) -> Event:
        """One contiguous copy between pinned memory and device memory."""
        num_bytes = num_bytes or self.moved_bytes
        first = 0 if direction is Direction.LOAD else self.moved_bytes
        host, flat = self.host.address + first, self.flat.address
        stream = self.streams[direction]
        kind = 1 if direction is Direction.LOAD else 2
        target, source = (flat, host) if direction is Direction.LOAD else (host, flat)
        with self.device.gpu.bound():
            cupy.cuda.runtime.memcpyAsync(target, source, num_bytes, kind, stream.address)
        return stream.record()

    def per_plane(self, direction: Direction, seed: int) -> Event:
        """The copy engine straight between slots and planes, a piece per plane, as one batch."""
        copy = self.copy(direction, seed)
        host, device, sizes = [], [], []
        for plane, offset, place in zip(
            self.layout.planes, self.layout.offsets, self.planes.memory, strict=True
        ):
            host.append(
                self.host.address
                + copy.slot_ids.astype(np.uint64) * self.layout.block_bytes
                + offset
            )
            device.append(place.address + copy.block_ids.astype(np.uint64) * place.stride)
            sizes.append(np.full(len(copy), plane.block_bytes, np.uint64))
        ends = (np.concatenate(device), np.concatenate(host))
        target, source = ends if direction is Direction.LOAD else ends[::-1]
        stream = self.streams[direction]
        targets, sources, lengths = (Column(len(target)) for _ in range(3))
        targets.values[:], sources.values[:] = target, source
        lengths.values[:] = np.concatenate(sizes)
        with self.device.gpu.bound():
            pieces = range(len(target))
            load_driver().copy_batch(targets, sources, lengths, pieces, stream=stream.address)
        return stream.record()

    def ancestor(self, direction: Direction, seed: int) -> Event:
        copy = self.copy(direction, seed)
        words = np.array([plane.block_bytes // 8 for plane in self.layout.planes], np.uint32)
        stream = self.streams[direction]
        with self.device.gpu.bound(), stream.raw:
            arguments = (
                cupy.asarray(np.array([place.address for place in self.planes.memory], np.uint64)),
                cupy.asarray(np.array(self.layout.offsets, np.uint64) // np.uint64(8)),
                cupy.asarray(words),
                np.uint64(self.host.address),
                cupy.asarray(copy.slot_ids),
                cupy.asarray(copy.block_ids),
                np.uint32(len(copy)),
                np.uint32(len(words)),
                np.uint64(self.layout.block_bytes // 8),
                np.int32(direction is Direction.LOAD),
            )
            cupy.RawKernel(_ANCESTOR, "over_pcie")((128,), (1024,), arguments)
        return stream.record()


@contextmanager
def bench(device: CudaDevice, layout: Layout, total_bytes: int) -> Iterator[Bench]:
    num_blocks = total_bytes // layout.block_bytes
    planes = device.allocate_planes(layout, 2 * num_blocks)
    # In one chunk, since the limit's copy may not span two.
    host = PinnedSlots(device.gpu, layout, 2 * num_blocks, chunk_bytes=1 << 60)
    flat = DeviceMemory(device.gpu, total_bytes)
    streams = {direction: new_stream(device.gpu, is_urgent=False) for direction in Direction}
    made = Bench(device, layout, planes, host, flat, streams, num_blocks)
    try:
        yield made
    finally:
        made.close_lanes()
        host.close()
        planes.close()
        del flat
        gc.collect()


def in_turn(contenders: dict[str, Callable[[int], float]], reps: int) -> dict[str, list[float]]:
    """Every contender once per repetition, after one warm-up each."""
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for rep in range(reps + 1):
        for name, measure in contenders.items():
            value = measure(rep)
            if rep:
                samples[name].append(value)
    return samples


def gb_per_s(num_bytes: int, start: Callable[[], Sequence[Event]]) -> float:
    began = time.perf_counter()
    finish(*start())
    return num_bytes / (time.perf_counter() - began) / 1e9


def table(title: str, samples: dict[str, list[float]], unit: str, against: str) -> list[Row]:
    base = row(f"{title}, {against}", samples[against], unit)
    rest = [
        row(f"{title}, {name}", values, unit, against=base)
        for name, values in samples.items()
        if name != against
    ]
    return [base, *rest]
