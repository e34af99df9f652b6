"""How fast a GPU's lanes move scattered blocks, beside the limit and other ways, in one run.

    python benchmarks/gpu_transfer.py [--json] [--quick] [--only SECTION ...]

Needs a CUDA GPU, CuPy and PyTorch (for the compute beside which transfers run). The limit is one
contiguous pinned copy of as many bytes. All contenders of a table take turns in every repetition;
a figure is wall time from the call until the last byte is there, its median over repetitions.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType

import numpy as np
import numpy.typing as npt
import uvloop

from benchmarks.bench import Row, row, show
from tierkv.cache.layout import Layout, attention_layout, layered
from tierkv.gpu.cuda import CudaEvent, CudaStream, DeviceMemory, new_stream
from tierkv.gpu.cuda_device import CudaDevice
from tierkv.gpu.cuda_lane import CudaLane
from tierkv.gpu.cuda_planes import CudaPlanes
from tierkv.gpu.driver import load_driver
from tierkv.gpu.pending import PendingEvent
from tierkv.gpu.pinned import PinnedSlots
from tierkv.gpu.pipeline import LaneSettings
from tierkv.gpu.protocol import BlockCopy, Direction, Event
from tierkv.gpu.units import Order
from tierkv.transfer.completion import EventPoller
from tierkv.transfer.mover import Mover

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
    lanes: dict[tuple[Direction, Order], CudaLane]
    num_blocks: int
    copies: dict[Direction, list[BlockCopy]] = field(default_factory=dict)

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

    def tierkv(self, direction: Direction, order: Order, seed: int) -> Event:
        return self.lanes[direction, order].submit(self.copy(direction, seed))[-1]

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
        with self.device.gpu.bound():
            load_driver().copy_batch(target, source, np.concatenate(sizes), stream=stream.address)
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
    orders = (Order.BLOCKS, Order.LAYERS)
    lanes = {
        (direction, order): device.open_ordered_lane(direction, planes, host, order)
        for direction in Direction
        for order in orders
    }
    streams = {direction: new_stream(device.gpu, is_urgent=False) for direction in Direction}
    try:
        yield Bench(device, layout, planes, host, flat, streams, lanes, num_blocks)
    finally:
        for lane in lanes.values():
            lane.close()
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


def alone(device: CudaDevice, total_bytes: int, reps: int) -> list[Row]:
    """Each layout and direction, nothing else running."""
    rows = []
    for name, layout in LAYOUTS.items():
        print(f"alone: {name} ...", file=sys.stderr, flush=True)
        with bench(device, layout, total_bytes) as b:
            for direction in Direction:
                samples = in_turn(_contenders(b, direction), reps)
                rows += table(f"{name}, {direction.value}", samples, "GB/s", "limit")
            if name.startswith(("GQA 64 x 128", "MLA")):
                rows += _both_at_once(name, b, reps)
    return rows


def _contenders(b: Bench, direction: Direction) -> dict[str, Callable[[int], float]]:
    starts: dict[str, Callable[[int], Event]] = {
        "limit": lambda _: b.limit(direction),
        "tierkv by blocks": lambda rep: b.tierkv(direction, Order.BLOCKS, rep),
        "tierkv by layers": lambda rep: b.tierkv(direction, Order.LAYERS, rep),
        "tierkv by blocks, adjacent slots": lambda _: b.lanes[direction, Order.BLOCKS].submit(
            b.adjacent[direction]
        )[-1],
        "copy per plane": lambda rep: b.per_plane(direction, rep),
        "kernel over PCIe": lambda rep: b.ancestor(direction, rep),
    }

    def measured(start: Callable[[int], Event]) -> Callable[[int], float]:
        return lambda rep: gb_per_s(b.moved_bytes, lambda: (start(rep),))

    return {name: measured(start) for name, start in starts.items()}


def _both_at_once(name: str, b: Bench, reps: int) -> list[Row]:
    moved = b.moved_bytes

    def lanes(rep: int) -> float:
        return gb_per_s(
            2 * moved,
            lambda: (
                b.tierkv(Direction.LOAD, Order.LAYERS, rep),
                b.tierkv(Direction.OFFLOAD, Order.BLOCKS, rep),
            ),
        )

    samples = in_turn(
        {
            "limit": lambda _: gb_per_s(2 * moved, lambda: [b.limit(d) for d in Direction]),
            "tierkv": lanes,
            "kernels over PCIe": lambda rep: gb_per_s(
                2 * moved, lambda: [b.ancestor(d, rep) for d in Direction]
            ),
        },
        reps,
    )
    return table(f"{name}, both at once", samples, "GB/s", "limit")


# Beside compute


@dataclass
class Work:
    """Compute on a stream of its own. start enqueues `count` steps."""

    name: str
    count: int
    step: Callable[[], object]


def works(torch: ModuleType, *, quick: bool) -> list[Work]:
    n = 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty(n, n, device="cuda", dtype=torch.bfloat16)
    source = torch.empty(2 * GIB, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    factor = 1 if quick else 2
    return [
        Work("bf16 8192^3 matmuls", 100 * factor, lambda: torch.matmul(a, b, out=c)),
        Work("decoder layers", 80 * factor, _decoder_layer(torch)),
        Work("HBM-bound copy", 110 * factor, lambda: target.copy_(source)),
    ]


def _decoder_layer(torch: ModuleType) -> Callable[[], object]:
    """One layer of an 8B model over 4,096 tokens: norms, GQA attention, SwiGLU."""
    tokens, hidden, ffn, heads, kv_heads, dim = 4096, 4096, 14336, 32, 8, 128
    functional = torch.nn.functional

    def weight(rows: int, columns: int) -> object:
        return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) / columns**0.5

    qkv = weight((heads + 2 * kv_heads) * dim, hidden)
    out, gate_up, down = weight(hidden, hidden), weight(2 * ffn, hidden), weight(hidden, ffn)
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)

    def step() -> object:
        with torch.no_grad():
            normed = functional.rms_norm(x, (hidden,))
            parts = functional.linear(normed, qkv).view(tokens, heads + 2 * kv_heads, dim)
            q, k, v = parts.transpose(0, 1)[None].split([heads, kv_heads, kv_heads], dim=1)
            mixed = functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            )
            y = x + functional.linear(mixed[0].transpose(0, 1).reshape(tokens, hidden), out)
            gate, up = functional.linear(functional.rms_norm(y, (hidden,)), gate_up).chunk(2, dim=1)
            return y + functional.linear(functional.silu(gate) * up, down)

    return step


class Beside:
    """Compute that runs for as long as transfers are repeated beside it; times of both."""

    def __init__(self, torch: ModuleType, work: Work) -> None:
        self._torch = torch
        self._work = work
        self._stream = torch.cuda.Stream()

    def run(self, transfer: Callable[[int], Sequence[Event]] | None) -> tuple[float, int, float]:
        """Seconds of compute, transfers that ended meanwhile, and the seconds these took."""
        torch = self._torch
        torch.cuda.synchronize()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._stream):
            began.record()
            for _ in range(self._work.count):
                self._work.step()
            ended.record()
        time.sleep(0.01)  # the compute is running, its launches are over
        count, start = 0, time.perf_counter()
        last = start
        if transfer is not None:
            in_flight: list[Sequence[Event]] = [transfer(0), transfer(1)]
            submitted = 2
            while in_flight:
                finish(*in_flight.pop(0))
                if not ended.query():
                    count, last = count + 1, time.perf_counter()
                    in_flight.append(transfer(submitted))
                    submitted += 1
        torch.cuda.synchronize()
        return began.elapsed_time(ended) / 1e3, count, last - start


def beside(device: CudaDevice, total_bytes: int, reps: int, *, quick: bool) -> list[Row]:
    """Transfers beside compute, and what either does to the other."""
    torch = importlib.import_module("torch")
    rows: list[Row] = []
    with bench(device, LAYOUTS["GQA 64 x 128 KiB"], total_bytes) as b:
        moved = b.moved_bytes
        load, offload = Direction.LOAD, Direction.OFFLOAD
        transfers: dict[str, tuple[int, Callable[[int], Sequence[Event]]]] = {
            "limit load": (1, lambda _: [b.limit(load)]),
            "load by layers": (1, lambda rep: [b.tierkv(load, Order.LAYERS, rep)]),
            "load by blocks": (1, lambda rep: [b.tierkv(load, Order.BLOCKS, rep)]),
            "limit offload": (1, lambda _: [b.limit(offload)]),
            "offload by blocks": (1, lambda rep: [b.tierkv(offload, Order.BLOCKS, rep)]),
            "limit both": (2, lambda _: [b.limit(d) for d in Direction]),
            "both": (
                2,
                lambda rep: [
                    b.tierkv(load, Order.LAYERS, rep),
                    b.tierkv(offload, Order.BLOCKS, rep),
                ],
            ),
        }
        if not quick:
            transfers["kernel over PCIe load"] = (1, lambda rep: [b.ancestor(load, rep)])
            transfers["kernel over PCIe offload"] = (1, lambda rep: [b.ancestor(offload, rep)])
        for work in works(torch, quick=quick):
            print(f"beside {work.name} ...", file=sys.stderr)
            rows += _beside_one(Beside(torch, work), work.name, transfers, moved, reps)
    return rows


def _beside_one(
    beside: Beside,
    name: str,
    transfers: dict[str, tuple[int, Callable[[int], Sequence[Event]]]],
    moved: int,
    reps: int,
) -> list[Row]:
    speeds: dict[str, list[float]] = {what: [] for what in transfers}
    slowed: dict[str, list[float]] = {what: [] for what in ["alone", *transfers]}
    for rep in range(reps + 1):
        for what in ["alone", *transfers]:
            lanes, transfer = transfers.get(what, (0, None))
            seconds, count, took = beside.run(transfer)
            if rep:
                slowed[what].append(seconds * 1e3)
                if transfer is not None and count:
                    speeds[what].append(lanes * moved * count / took / 1e9)
    rows = []
    for limit, names in (
        ("limit load", ("load by layers", "load by blocks", "kernel over PCIe load")),
        ("limit offload", ("offload by blocks", "kernel over PCIe offload")),
        ("limit both", ("both",)),
    ):
        base = row(f"beside {name}, {limit}", speeds[limit], "GB/s")
        rows.append(base)
        rows += [
            row(f"beside {name}, {what}", speeds[what], "GB/s", against=base)
            for what in names
            if what in speeds
        ]
    rows += table(f"time of {name}", slowed, "ms", "alone")
    for limit, what in (
        ("limit load", "load by layers"),
        ("limit load", "load by blocks"),
        ("limit offload", "offload by blocks"),
        ("limit both", "both"),
    ):
        more = [
            100 * (ours / least - 1)
            for ours, least in zip(slowed[what], slowed[limit], strict=True)
        ]
        rows.append(row(f"{name} beside {what}, slower than beside {limit} by", more, "%"))
    return rows


# Latency


def latency(device: CudaDevice, total_bytes: int, reps: int) -> list[Row]:
    """The first layer of a big load, one block, and the loop while it goes on."""
    rows = []
    with bench(device, LAYOUTS["GQA 64 x 128 KiB"], total_bytes) as b:
        layer_bytes = b.moved_bytes // b.layout.num_layers

        def first_layer(rep: int) -> float:
            began = time.perf_counter()
            events = b.lanes[Direction.LOAD, Order.LAYERS].submit(b.copy(Direction.LOAD, rep))
            finish(events[0])
            took = time.perf_counter() - began
            finish(events[-1])
            return took * 1e6

        def limit_of(num_bytes: int) -> Callable[[int], float]:
            def measure(_: int) -> float:
                began = time.perf_counter()
                finish(b.limit(Direction.LOAD, num_bytes))
                return (time.perf_counter() - began) * 1e6

            return measure

        rows += table(
            "first layer of a big load",
            in_turn(
                {"its bytes at the limit": limit_of(layer_bytes), "tierkv": first_layer}, 3 * reps
            ),
            "us",
            "its bytes at the limit",
        )
        for d in Direction:
            lane = b.lanes[d, Order.LAYERS if d is Direction.LOAD else Order.BLOCKS]

            def one(
                rep: int,
                lane: CudaLane = lane,
                d: Direction = d,
            ) -> float:
                ids = np.array([rep], np.int32) + np.int32(
                    0 if d is Direction.LOAD else b.num_blocks
                )
                copy = BlockCopy(d, ids, ids)
                began = time.perf_counter()
                finish(lane.submit(copy)[-1])
                return (time.perf_counter() - began) * 1e6

            def limit_one(_: int, d: Direction = d) -> float:
                began = time.perf_counter()
                finish(b.limit(d, b.layout.block_bytes))
                return (time.perf_counter() - began) * 1e6

            rows += table(
                f"one 8 MiB block, {d.value}, lane",
                in_turn({"limit": limit_one, "tierkv": one}, 20 * reps),
                "us",
                "limit",
            )
        rows += uvloop.run(_on_the_loop(b, reps))
    return rows


async def _on_the_loop(b: Bench, reps: int) -> list[Row]:
    mover = Mover(b.device, b.planes, b.host)
    rows = []
    async with mover.running():
        one, gaps = [], []
        for rep in range(40 * reps):
            ids = np.array([rep % b.num_blocks], np.int32)
            began = time.perf_counter()
            await mover.load(ids, ids).done()
            one.append((time.perf_counter() - began) * 1e6)
        rows.append(row("one 8 MiB block, submit to resolved future", one[5:], "us"))
        slots, blocks = b.copy(Direction.LOAD, 1).slot_ids, b.copy(Direction.LOAD, 1).block_ids
        for _ in range(3):
            movement = mover.load(slots, blocks)
            before = time.perf_counter()
            while not movement.has_ended:
                await asyncio.sleep(0)
                now = time.perf_counter()
                gaps.append((now - before) * 1e6)
                before = now
        gaps.sort()
        rows += [
            row(f"loop lag, p{100 * share:g}", [gaps[int(share * len(gaps))]], "us")
            for share in (0.5, 0.99, 0.999)
        ]
    rows += await _events(b)
    return rows


_HOLD = r"""
extern "C" __global__ void hold(const volatile int* word) {
    while (*word == 0) __nanosleep(500);
}
"""


async def _events(b: Bench) -> list[Row]:
    """What 1,000 events in flight cost, and how late a coroutine hears of the end of one."""
    poller = EventPoller()
    memory = cupy.cuda.alloc_pinned_memory(4)
    word = np.frombuffer(memory, np.int32, 1)
    kernel = cupy.RawKernel(_HOLD, "hold")
    stream = new_stream(b.device.gpu, is_urgent=False)
    late = []
    async with poller.running():
        for _ in range(100):
            word[0] = 0
            kernel((1,), (1,), (np.uint64(memory.ptr),), stream=stream.raw)
            future = poller.done(stream.record())
            await asyncio.sleep(0.01)
            began = time.perf_counter()
            word[0] = 1
            await future
            late.append((time.perf_counter() - began) * 1e6)
        word[0] = 0
        kernel((1,), (1,), (np.uint64(memory.ptr),), stream=stream.raw)
        futures = [poller.done(stream.record()) for _ in range(1000)]
        await asyncio.sleep(0.05)
        cpu, wall = time.process_time(), time.perf_counter()
        await asyncio.sleep(1.0)
        busy = (time.process_time() - cpu) / (time.perf_counter() - wall)
        word[0] = 1
        await asyncio.gather(*futures)
    return [
        row("end of an event to its coroutine", late, "us"),
        row("1,000 events in flight", [100 * busy], "% core"),
    ]


def pinning(device: CudaDevice, num_bytes: int) -> list[Row]:
    layout = LAYOUTS["GQA 64 x 128 KiB"]
    samples: dict[str, list[float]] = {"cudaHostAlloc": [], "tierkv, 8 threads": []}
    first = 0.0
    for _ in range(2):
        began = time.perf_counter()
        memory = cupy.cuda.PinnedMemory(num_bytes // 4)
        samples["cudaHostAlloc"].append(num_bytes / 4 / GIB / (time.perf_counter() - began))
        del memory
        began = time.perf_counter()
        host = PinnedSlots(device.gpu, layout, num_bytes // layout.block_bytes)
        first = time.perf_counter() - began
        host.wait_until_pinned()
        samples["tierkv, 8 threads"].append(num_bytes / GIB / (time.perf_counter() - began))
        host.close()
    rows = table("pinning", samples, "GiB/s", "cudaHostAlloc")
    return [*rows, row("pinning, first slots usable", [first * 1e3], "ms")]


SECTIONS = ("alone", "beside", "latency", "pinning")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--ctas", type=int, default=LaneSettings().num_ctas)
    parser.add_argument("--reps", type=int)
    chosen = parser.parse_args()
    reps = chosen.reps or (3 if chosen.quick else 9)
    device = CudaDevice(lanes=LaneSettings(num_ctas=chosen.ctas))
    total = 2 * GIB
    sections: dict[str, Callable[[], list[Row]]] = {
        "alone": lambda: alone(device, total, reps),
        "beside": lambda: beside(device, total, reps, quick=chosen.quick),
        "latency": lambda: latency(device, total, reps),
        "pinning": lambda: pinning(device, 16 * GIB),
    }
    rows: list[Row] = []
    for name in chosen.only:
        found = sections[name]()
        rows += found
        if not chosen.json:
            show(found, as_json=False)
    if chosen.json:
        show(rows, as_json=True)
    device.close()


if __name__ == "__main__":
    main()
