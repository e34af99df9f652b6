"""An engine's own tensors on a GPU, moved by `WorkerPlanes`: what it costs the engine, how fast.

    python benchmarks/gpu_ranks.py [--quick] [--json] [--gib 4]

Needs a CUDA GPU and CuPy. Blocks of 4 MiB (32 layers) in tensors of separate allocations, random
block ids. Host slots that are shared memory, of which the rank has a half or all of each slot, are
pinned in place; beside them those that the device has for itself, in the same run, in turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import cupy
import numpy as np

from benchmarks.bench import Row, row, show
from tierkv.cache.layout import attention_layout
from tierkv.embed import WorkerPlanes
from tierkv.gpu.cuda_device import CudaDevice
from tierkv.gpu.pinned import PinnedSlots
from tierkv.gpu.protocol import HostSlots, Planes
from tierkv.ranks.link import Kind, Plan
from tierkv.ranks.memory import SharedSlots, shared_memory

LAYOUT = attention_layout(
    num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16", item_bytes=2, block_size=32
)
GIB = 1 << 30
OWN, WHOLE, HALF = "slots of its own", "shared slots", "half of shared slots"


def planes_of(device: CudaDevice, num_blocks: int) -> Planes:
    tensors = []
    for plane in LAYOUT.planes:
        memory = cupy.cuda.MemoryPointer(cupy.cuda.Memory(num_blocks * plane.block_bytes), 0)
        tensors.append(cupy.ndarray((num_blocks, plane.block_bytes), cupy.uint8, memory))
    return device.adopt_planes(LAYOUT, tensors)


def slots_of(device: CudaDevice, kind: str, num_slots: int) -> HostSlots:
    size = LAYOUT.block_bytes
    if kind == OWN:
        return device.allocate_host(LAYOUT, num_slots)
    whole = size if kind == WHOLE else 2 * size
    piece = slice(whole - size, whole)
    return SharedSlots(shared_memory(num_slots * whole), num_slots, whole, piece)


def pinning(device: CudaDevice, num_slots: int, reps: int) -> list[Row]:
    """Seconds until a GiB of a rank's bytes is pinned."""
    samples: dict[str, list[float]] = {OWN: [], WHOLE: [], HALF: []}
    for _ in range(reps):
        for kind, seconds in samples.items():
            host = None if kind == OWN else slots_of(device, kind, num_slots)
            array = None if host is None else host.array
            started = time.perf_counter()
            pinned = PinnedSlots(device.gpu, LAYOUT, num_slots, array=array)
            pinned.wait_until_pinned()
            gib = num_slots * LAYOUT.block_bytes / GIB
            seconds.append((time.perf_counter() - started) / gib)
            pinned.close()
            if host is not None:
                host.close()
    own = row(f"pinning a GiB, {OWN}", samples[OWN], "s")
    return [own, *(row(f"  {one}", samples[one], "s", against=own) for one in (WHOLE, HALF))]


@contextmanager
def attached(
    device: CudaDevice, planes: Planes, kind: str, num_slots: int
) -> Iterator[WorkerPlanes]:
    with ExitStack() as stack:
        host = slots_of(device, kind, num_slots)
        stack.callback(host.close)
        ranks = WorkerPlanes(device, planes)
        ranks.attach(host)
        stack.callback(ranks.close)
        yield ranks


def moving(device: CudaDevice, num_slots: int, reps: int) -> list[Row]:
    planes = planes_of(device, num_slots)
    numbers, rng, gib = iter(range(1 << 30)), np.random.default_rng(1), 0.0
    seconds: dict[tuple[str, str], list[float]] = {}
    calls: dict[str, list[float]] = {"load": [], "offload": []}
    with ExitStack() as stack:
        of = {
            kind: stack.enter_context(attached(device, planes, kind, num_slots))
            for kind in (OWN, WHOLE, HALF)
        }
        for rep in range(reps + 1):
            for way in ("offload", "load"):
                for kind, ranks in of.items():
                    source, target = (rng.permutation(num_slots).astype(np.int32) for _ in range(2))
                    gib = num_slots * LAYOUT.block_bytes / GIB
                    start = ranks.start_loads if way == "load" else ranks.start_saves
                    kind_of_plan: Kind = "load" if way == "load" else "offload"
                    packed = source.tobytes(), target.tobytes()
                    plan = Plan(next(numbers), kind_of_plan, *packed)
                    began = time.perf_counter()
                    start(plan)
                    called = time.perf_counter() - began
                    while not (reports := ranks.finished()):
                        time.sleep(20e-6)
                    took = time.perf_counter() - began
                    assert [one.problem for one in reports] == [None]
                    if rep:  # the first one waits for the pinning
                        seconds.setdefault((way, kind), []).append(took / gib)
                        calls[way].append(called * 1e6)
    rows = []
    for way in ("load", "offload"):
        own = row(f"{way} of a GiB, {OWN}", seconds[way, OWN], "s")
        rows.append(own)
        rows += [
            row(f"  {kind}", seconds[way, kind], "s", against=own, most=1.1)
            for kind in (WHOLE, HALF)
        ]
        rows.append(row(f"  the engine's call, of {gib:g} GiB", calls[way], "us"))
    planes.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--gib", type=float, default=4.0)
    options = parser.parse_args()
    reps = 3 if options.quick else 9
    num_slots = int(options.gib * GIB) // LAYOUT.block_bytes
    device = CudaDevice()
    rows = [*pinning(device, num_slots, reps), *moving(device, num_slots, reps)]
    device.close()
    show(rows, as_json=options.json)


if __name__ == "__main__":
    main()
