"""What must be quick beside big transfers: first layers, single blocks, the event loop, and the
copies that an engine makes itself. For gpu_transfer.py."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import numpy as np
import uvloop

from benchmarks.bench import Row, row
from benchmarks.gpu_bench import LAYOUTS, PATIENCE_S, Bench, bench, cupy, finish, in_turn, table
from tierkv.gpu.cuda import new_stream
from tierkv.gpu.cuda_device import CudaDevice
from tierkv.gpu.cuda_memory import DeviceMemory
from tierkv.gpu.protocol import BlockCopy, Direction, Event
from tierkv.gpu.units import Order
from tierkv.transfer.mover import EventPoller, Mover

ORDER = {Direction.LOAD: Order.LAYERS, Direction.OFFLOAD: Order.BLOCKS}  # as a device opens them


def latency(device: CudaDevice, total_bytes: int, reps: int) -> list[Row]:
    """The first layer of a big load, one block, and the loop while transfers go on."""
    rows = []
    with bench(device, LAYOUTS["GQA 64 x 128 KiB"], total_bytes) as b:
        rows += _first_layer(b, reps)
        for direction in Direction:
            rows += _one_block(b, direction, reps)
        b.close_lanes()  # with lanes of the mover's own only: as in a node
        rows += uvloop.run(_on_the_loop(b, reps))
    return rows


def _told(what: str) -> None:
    print(f"latency: {what} ...", file=sys.stderr, flush=True)


def _first_layer(b: Bench, reps: int) -> list[Row]:
    _told("first layer")

    def first_layer(rep: int) -> float:
        began = time.perf_counter()
        events = b.lane(Direction.LOAD, Order.LAYERS).submit(b.copy(Direction.LOAD, rep))
        finish(events[0])
        took = time.perf_counter() - began
        finish(events[-1])
        return took * 1e6

    least = "its bytes at the limit"
    samples = in_turn(
        {
            least: _limit_us(b, Direction.LOAD, b.moved_bytes // b.layout.num_layers),
            "tierkv": first_layer,
        },
        4 * reps,
    )
    return table("first layer of 2 GiB", samples, "us", least)


def _limit_us(b: Bench, direction: Direction, num_bytes: int) -> Callable[[int], float]:
    def measure(_: int) -> float:
        began = time.perf_counter()
        finish(b.limit(direction, num_bytes))
        return (time.perf_counter() - began) * 1e6

    return measure


def _one_block(b: Bench, direction: Direction, reps: int) -> list[Row]:
    _told(f"one block, {direction.value}")
    lane = b.lane(direction, ORDER[direction])
    first = 0 if direction is Direction.LOAD else b.num_blocks

    def one(rep: int) -> float:
        ids = np.array([first + rep % b.num_blocks], np.int32)
        copy = BlockCopy(direction, ids, ids)
        began = time.perf_counter()
        finish(lane.submit(copy)[-1])
        return (time.perf_counter() - began) * 1e6

    limit = _limit_us(b, direction, b.layout.block_bytes)
    samples = in_turn({"limit": limit, "tierkv": one}, 20 * reps)
    return table(f"one 8 MiB block, {direction.value}, by its lane", samples, "us", "limit")


# On the event loop


async def _on_the_loop(b: Bench, reps: int) -> list[Row]:
    mover = Mover(b.device, b.planes, b.host)
    rows: list[Row] = []
    async with mover.running():
        async with asyncio.timeout(PATIENCE_S):
            rows += await _resolved(mover, b, reps)
        async with asyncio.timeout(PATIENCE_S):
            rows += await _loop_lag(mover, b, reps)
    async with asyncio.timeout(PATIENCE_S):
        rows += await _events(b)
    return rows


async def _resolved(mover: Mover, b: Bench, reps: int) -> list[Row]:
    _told("one block, to a resolved future")
    limit = _limit_us(b, Direction.LOAD, b.layout.block_bytes)
    least, took = [], []
    for rep in range(20 * reps + 5):
        least.append(limit(rep))
        ids = np.array([rep % b.num_blocks], np.int32)
        began = time.perf_counter()
        await mover.load(ids, ids).done()
        took.append((time.perf_counter() - began) * 1e6)
        await asyncio.sleep(0.002)  # whatever the last one woke sleeps again
    base = row("one 8 MiB block on a loop, limit", least[5:], "us")
    return [base, row("one 8 MiB block, submit to resolved future", took[5:], "us", against=base)]


@asynccontextmanager
async def _probed(late: list[float]) -> AsyncIterator[None]:
    """Another thread calls the loop every 0.5 ms; appends how late it was heard, in us."""
    loop = asyncio.get_running_loop()
    is_over = threading.Event()

    def heard(sent: float) -> None:
        late.append((time.perf_counter() - sent) * 1e6)

    def probe() -> None:
        while not is_over.wait(0.0005):
            loop.call_soon_threadsafe(heard, time.perf_counter())

    thread = threading.Thread(target=probe)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        await asyncio.to_thread(thread.join)


async def _loop_lag(mover: Mover, b: Bench, reps: int) -> list[Row]:
    """How late the loop hears of other things: idle, and while 2 GiB are submitted and move."""
    _told("loop lag")
    idle: list[float] = []
    async with _probed(idle):
        await asyncio.sleep(1.0)
    late: list[float] = []
    submitting = []
    async with _probed(late):
        for rep in range(6 * reps):
            copy = b.copy(Direction.LOAD, rep)
            began = time.perf_counter()
            movement = mover.load(copy.slot_ids, copy.block_ids)
            submitting.append((time.perf_counter() - began) * 1e6)
            await movement.done()
    rows = []
    for share in (0.5, 0.99, 0.999):
        base = row(f"loop lag, idle, p{100 * share:g}", [_quantile(idle, share)], "us")
        what = f"loop lag beside loads of 2 GiB, p{100 * share:g}"
        rows += [base, row(what, [_quantile(late, share)], "us")]
    rows.append(row("submitting 2 GiB holds the loop's thread for", submitting, "us"))
    return rows


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


_HOLD = r"""
extern "C" __global__ void hold(const volatile int* word) {
    while (*word == 0) __nanosleep(500);
}
"""


async def _events(b: Bench) -> list[Row]:
    """What 1,000 events in flight cost, and how late a coroutine hears of the end of one."""
    _told("events")
    poller = EventPoller()
    memory = cupy.cuda.alloc_pinned_memory(4)
    word = np.frombuffer(memory, np.int32, 1)
    kernel = cupy.RawKernel(_HOLD, "hold")
    # Of several streams: one takes no 1,000 records behind a kernel that does not end, and then
    # the call that records, and with it this thread, waits for ever.
    streams = [new_stream(b.device.gpu, is_urgent=False) for _ in range(8)]
    late = []
    async with poller.running():
        for _ in range(100):
            word[0] = 0
            kernel((1,), (1,), (np.uint64(memory.ptr),), stream=streams[0].raw)
            future = poller.done(streams[0].record())
            await asyncio.sleep(0.01)
            began = time.perf_counter()
            word[0] = 1
            await future
            late.append((time.perf_counter() - began) * 1e6)
        busy = []
        for count in (0, 125):
            word[0] = 0
            for stream in streams:
                kernel((1,), (1,), (np.uint64(memory.ptr),), stream=stream.raw)
            futures = [poller.done(stream.record()) for stream in streams for _ in range(count)]
            await asyncio.sleep(0.05)
            cpu, wall = time.process_time(), time.perf_counter()
            await asyncio.sleep(2.0)
            busy.append(100 * (time.process_time() - cpu) / (time.perf_counter() - wall))
            word[0] = 1
            await asyncio.gather(*futures)
            b.device.gpu.synchronize()
    return [
        row("end of an event to its coroutine", late, "us"),
        row("no event in flight", busy[:1], "% core"),
        row("1,000 events in flight", busy[1:], "% core"),
    ]


# The engine's own copies

_SIZES = {"8 B": 8, "4 KiB": 4 << 10, "64 KiB": 64 << 10, "1 MiB": 1 << 20}


def engine_copies(device: CudaDevice, total_bytes: int, reps: int) -> list[Row]:
    """How long a copy of the engine's own takes, from pinned memory or to it, beside a transfer in
    the same direction: block tables go up, tokens come down."""
    rows = []
    with bench(device, LAYOUTS["GQA 64 x 128 KiB"], total_bytes) as b:
        for direction in Direction:
            _told(f"engine's copies beside {direction.value}s")
            beside: dict[str, Callable[[int], Event] | None] = {
                "nothing": None,
                "one contiguous copy": lambda _, d=direction: b.limit(d),  # type: ignore[misc]
                "tierkv": lambda rep, d=direction: b.tierkv(d, ORDER[d], rep),  # type: ignore[misc]
            }
            for name, num_bytes in _SIZES.items():
                what = "upload" if direction is Direction.LOAD else "download"
                rows += [
                    one
                    for other, start in beside.items()
                    for one in _copies_beside(
                        b, direction, num_bytes, start, f"{what} of {name} beside {other}", reps
                    )
                ]
    return rows


def _copies_beside(  # noqa: PLR0917 - one figure is made of all this
    b: Bench,
    direction: Direction,
    num_bytes: int,
    start: Callable[[int], Event] | None,
    name: str,
    reps: int,
) -> list[Row]:
    runtime = cupy.cuda.runtime
    host = cupy.cuda.alloc_pinned_memory(num_bytes)
    there = DeviceMemory(b.device.gpu, num_bytes)
    stream = new_stream(b.device.gpu, is_urgent=True)
    is_up = direction is Direction.LOAD
    target, source = (there.address, host.ptr) if is_up else (host.ptr, there.address)
    took: list[float] = []
    for rep in range(reps):
        end = start(rep) if start is not None else None
        time.sleep(0.004)
        for _ in range(10):
            time.sleep(0.0005)
            began = time.perf_counter()
            runtime.memcpyAsync(target, source, num_bytes, 1 if is_up else 2, stream.address)
            stream.raw.synchronize()
            took.append((time.perf_counter() - began) * 1e6)
            if end is not None and end.is_done:
                break
        if end is not None:
            finish(end)
    return [
        row(name, took, "us"),
        row(f"{name}, the longest", [max(took)], "us"),
    ]
