"""Transfers beside compute, and what either does to the other: for gpu_transfer.py."""

from __future__ import annotations

import importlib
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

from benchmarks.bench import Row, row
from benchmarks.gpu_bench import GIB, LAYOUTS, bench, finish, table
from tierkv.gpu.cuda_device import CudaDevice
from tierkv.gpu.protocol import Direction, Event
from tierkv.gpu.units import Order

# Beside these, compute takes ten times as long: one repetition and a warm-up tell enough.
_SLOW, _SLOW_REPS = "kernel over PCIe", 1


@dataclass
class Work:
    """Compute on a stream of its own: `count` steps, and half as many before them."""

    name: str
    count: int
    step: Callable[[], object]


def works(torch: ModuleType) -> list[Work]:
    n = 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty(n, n, device="cuda", dtype=torch.bfloat16)
    source = torch.empty(2 * GIB, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    # A stream takes about 1,000 launches; were there more, transfers would begin when most of the
    # compute is over.
    return [
        Work("bf16 8192^3 matmuls", 100, lambda: torch.matmul(a, b, out=c)),
        Work("decoder layers", 40, _decoder_layer(torch)),
        Work("HBM-bound copy", 110, lambda: target.copy_(source)),
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
    """Compute that runs for as long as transfers are repeated beside it; times of both.

    What is timed begins behind steps that are not: a GPU that was idle for some milliseconds runs
    6 % faster for a while, and transfers that end behind the compute leave it idle.
    """

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
            for _ in range(self._work.count // 2):
                self._work.step()
            began.record()
            for _ in range(self._work.count):
                self._work.step()
            ended.record()
        while not began.query():
            time.sleep(0.0005)
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
            "offload by layers": (1, lambda rep: [b.tierkv(offload, Order.LAYERS, rep)]),
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
            transfers[f"{_SLOW} load"] = (1, lambda rep: [b.ancestor(load, rep)])
            transfers[f"{_SLOW} offload"] = (1, lambda rep: [b.ancestor(offload, rep)])
        for direction in Direction:  # as when a node starts
            for order in Order:
                b.lane(direction, order)
        device.gpu.synchronize()
        for work in works(torch):
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
    everything = ["alone", "alone", "alone", *transfers]
    rng = random.Random(0)  # else each would always follow the same other
    for rep in range(reps + 1):
        for what in rng.sample(everything, len(everything)):
            if what.startswith(_SLOW) and rep > _SLOW_REPS:
                continue
            lanes, transfer = transfers.get(what, (0, None))
            seconds, count, took = beside.run(transfer)
            if rep:
                slowed[what].append(seconds * 1e3)
                if transfer is not None and count:
                    speeds[what].append(lanes * moved * count / took / 1e9)
    rows = []
    for limit, names in (
        ("limit load", ("load by layers", "load by blocks", "kernel over PCIe load")),
        ("limit offload", ("offload by blocks", "offload by layers", "kernel over PCIe offload")),
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
        ("limit offload", "offload by layers"),
        ("limit both", "both"),
    ):
        least = statistics.median(slowed[limit])
        more = [100 * (ours / least - 1) for ours in slowed[what]]
        rows.append(row(f"{name} beside {what}, slower than beside {limit} by", more, "%"))
    return rows
