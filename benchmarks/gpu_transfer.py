"""How fast a GPU's lanes move scattered blocks, beside the limit and other ways, in one run.

    python -m benchmarks.gpu_transfer [--json] [--quick] [--only SECTION ...]

Needs a CUDA GPU, CuPy and PyTorch (for the compute beside which transfers run). The limit is one
contiguous pinned copy of as many bytes. All contenders of a table take turns in every repetition;
a figure is wall time from the call until the last byte is there, its median over repetitions.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product

import numpy as np

from benchmarks.bench import Row, row, show
from benchmarks.gpu_bench import (
    GIB,
    LAYOUTS,
    Bench,
    bench,
    cupy,
    finish,
    gb_per_s,
    in_turn,
    table,
)
from benchmarks.gpu_beside import beside
from benchmarks.gpu_latency import engine_copies, latency
from tierkv.cache.layout import layered
from tierkv.gpu.cuda_device import CudaDevice
from tierkv.gpu.cuda_lane import LaneSettings
from tierkv.gpu.cuda_memory import DeviceMemory
from tierkv.gpu.pinned import PinnedSlots
from tierkv.gpu.protocol import BlockCopy, Direction, Event, Lane
from tierkv.gpu.units import Order


def alone(device: CudaDevice, total_bytes: int, reps: int, *, quick: bool) -> list[Row]:
    """Each layout and direction, nothing else running. quick: the first layout only."""
    rows = []
    for name, layout in list(LAYOUTS.items())[: 1 if quick else None]:
        print(f"alone: {name} ...", file=sys.stderr, flush=True)
        with bench(device, layout, total_bytes) as b:
            for direction in Direction:
                what = f"{name}, {direction.value}"
                rows += table(what, in_turn(_lanes(b, direction), reps), "GB/s", "limit")
                b.close_lanes()
                samples = in_turn(_other_ways(b, direction), reps)
                rows += table(f"{what}, other ways", samples, "GB/s", "limit")
            if name.startswith(("GQA 64 x 128", "MLA")):
                rows += _both_at_once(name, b, reps)
    return rows


def large(device: CudaDevice, total_bytes: int, reps: int) -> list[Row]:
    """The same of so many bytes that the first and the last fraction of a millisecond, in which a
    lane begins and ends, are little of it."""
    rows = []
    for name, layout in LAYOUTS.items():
        print(f"large: {name} ...", file=sys.stderr, flush=True)
        what = f"{name}, {total_bytes // GIB} GiB"
        with bench(device, layout, total_bytes) as b:
            for direction in Direction:
                lanes = _lanes(b, direction)
                few = {n: lanes[n] for n in ("limit", "tierkv by blocks", "tierkv by layers")}
                samples = in_turn(few, reps)
                rows += table(f"{what}, {direction.value}", samples, "GB/s", "limit")
                b.close_lanes()
            if name.startswith(("GQA 64 x 128", "MLA")):
                rows += _both_at_once(what, b, reps, kernels=False)
    return rows


def _lanes(b: Bench, direction: Direction) -> dict[str, Callable[[int], float]]:
    return _measured(
        b,
        {
            "limit": lambda _: b.limit(direction),
            "tierkv by blocks": lambda rep: b.tierkv(direction, Order.BLOCKS, rep),
            "tierkv by layers": lambda rep: b.tierkv(direction, Order.LAYERS, rep),
            "tierkv by blocks, adjacent slots": lambda _: b.lane(direction, Order.BLOCKS).submit(
                b.adjacent[direction]
            )[-1],
        },
    )


def _other_ways(b: Bench, direction: Direction) -> dict[str, Callable[[int], float]]:
    """In turns of their own, beside the same limit: what comes behind a batch of 65,000 pieces
    loses 0.1 to 0.4 % (H200, 2026-11-23)."""
    return _measured(
        b,
        {
            "limit": lambda _: b.limit(direction),
            "copy per plane": lambda rep: b.per_plane(direction, rep),
            "kernel over PCIe": lambda rep: b.ancestor(direction, rep),
        },
    )


def _measured(
    b: Bench, starts: dict[str, Callable[[int], Event]]
) -> dict[str, Callable[[int], float]]:
    def measured(start: Callable[[int], Event]) -> Callable[[int], float]:
        return lambda rep: gb_per_s(b.moved_bytes, lambda: (start(rep),))

    return {name: measured(start) for name, start in starts.items()}


def _both_at_once(name: str, b: Bench, reps: int, *, kernels: bool = True) -> list[Row]:
    moved = b.moved_bytes

    def lanes(rep: int) -> float:
        return gb_per_s(
            2 * moved,
            lambda: (
                b.tierkv(Direction.LOAD, Order.LAYERS, rep),
                b.tierkv(Direction.OFFLOAD, Order.BLOCKS, rep),
            ),
        )

    def kernels_over_pcie(rep: int) -> float:
        return gb_per_s(2 * moved, lambda: [b.ancestor(d, rep) for d in Direction])

    def limit(_: int) -> float:
        return gb_per_s(2 * moved, lambda: [b.limit(d) for d in Direction])

    what = f"{name}, both at once"
    rows = table(what, in_turn({"limit": limit, "tierkv": lanes}, reps), "GB/s", "limit")
    if kernels:
        samples = in_turn({"limit": limit, "kernels over PCIe": kernels_over_pcie}, reps)
        rows += table(f"{what}, other ways", samples, "GB/s", "limit")
    return rows


def adopted(device: CudaDevice, reps: int) -> list[Row]:
    """Few blocks of an engine's tensors, which are allocations of their own or lie in one pool: a
    copy engine refuses to cross allocations, so one by one they are a rectangle each."""
    rows = []
    for tensor_mib, num_planes in ((1, 3), (64, 3), (512, 3), (64, 32)):
        print(f"adopted: {num_planes} tensors of {tensor_mib} MiB ...", file=sys.stderr, flush=True)
        block_bytes = min(tensor_mib << 16, 1 << 20)  # of each tensor, which has 16 blocks or more
        layout = layered(1, [("key", "uint8", block_bytes)], num_layers=num_planes)
        shape = (num_planes, (tensor_mib << 20) // block_bytes, block_bytes)
        with cupy.cuda.using_allocator(None):  # straight from cudaMalloc
            tensors = {
                "one pool": list(cupy.empty(shape, cupy.uint8)),
                "alone": [cupy.empty(shape[1:], cupy.uint8) for _ in range(num_planes)],
            }
        planes = {kind: device.adopt_planes(layout, given) for kind, given in tensors.items()}
        host = PinnedSlots(device.gpu, layout, 16, chunk_bytes=1 << 60)
        flat = DeviceMemory(device.gpu, 16 * layout.block_bytes)
        for direction, count in product(Direction, (1, 4, 16)):
            lanes = {kind: device.open_lane(direction, one, host) for kind, one in planes.items()}
            num_bytes = count * layout.block_bytes
            ways: dict[str, Callable[[int], float]] = {}
            ways["limit"] = partial(_contiguous_us, device, direction, flat, host, num_bytes)
            ways |= {
                kind: partial(_lane_us, lane, direction, count) for kind, lane in lanes.items()
            }
            what = f"{num_planes} tensors of {tensor_mib} MiB, {direction.value} of {count} blocks"
            rows += table(what, in_turn(ways, 10 * reps), "us", "limit")
            for lane in lanes.values():
                lane.close()
        host.close()
        for one in planes.values():
            one.close()
    return rows


def _lane_us(lane: Lane, direction: Direction, count: int, _rep: int) -> float:
    ids = np.arange(count, dtype=np.int32)
    copy = BlockCopy(direction, ids, ids)
    began = time.perf_counter()
    finish(lane.submit(copy)[-1])
    return (time.perf_counter() - began) * 1e6


def _contiguous_us(
    device: CudaDevice,
    direction: Direction,
    flat: DeviceMemory,
    host: PinnedSlots,
    num_bytes: int,
    _rep: int,
) -> float:
    ends = (flat.address, host.address)
    target, source = ends if direction is Direction.LOAD else ends[::-1]
    runtime = cupy.cuda.runtime
    began = time.perf_counter()
    with device.gpu.bound():
        address = device.compute_stream.address
        runtime.memcpyAsync(target, source, num_bytes, runtime.memcpyDefault, address)
    finish(device.compute_stream.record())
    return (time.perf_counter() - began) * 1e6


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


SECTIONS = ("alone", "large", "beside", "latency", "engine", "adopted", "pinning")
QUICK = ("alone", "latency", "adopted", "pinning")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--quick", action="store_true", help="fewer parts and repetitions: a minute"
    )
    parser.add_argument("--only", nargs="+", choices=SECTIONS)
    parser.add_argument("--ctas", type=int, default=LaneSettings().num_ctas)
    parser.add_argument("--reps", type=int)
    chosen = parser.parse_args()
    names = chosen.only or (QUICK if chosen.quick else SECTIONS)
    reps = chosen.reps or (3 if chosen.quick else 9)
    device = CudaDevice(lanes=LaneSettings(num_ctas=chosen.ctas))
    total = 2 * GIB
    sections: dict[str, Callable[[], list[Row]]] = {
        "alone": lambda: alone(device, total, reps, quick=chosen.quick),
        "large": lambda: large(device, 8 * GIB, reps),
        "beside": lambda: beside(device, total, reps, quick=chosen.quick),
        "latency": lambda: latency(device, total, reps),
        "engine": lambda: engine_copies(device, total, reps),
        "adopted": lambda: adopted(device, reps),
        "pinning": lambda: pinning(device, GIB if chosen.quick else 16 * GIB),
    }
    rows: list[Row] = []
    for name in names:
        found = sections[name]()
        rows += found
        if not chosen.json:
            show(found, as_json=False)
    if chosen.json:
        show(rows, as_json=True)
    device.close()


if __name__ == "__main__":
    main()
