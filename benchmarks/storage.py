"""How near the stores come to what their server, or the disk, can do.

    python benchmarks/storage.py [--quick] [--json] [--only redis,lookup,cluster,file,mooncake]

Contenders of one figure take turns in one run, since on a shared machine the limit itself moves by
a third; "each round" compares within a turn. Redis: the socket alone, an ideal client in C
(compiled here, if there is a compiler; otherwise redis-benchmark), redis-py's asyncio client, and
tierkv with checksums, all on loopback.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import importlib
import mmap
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import (
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import redis.asyncio
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench import Row, row, show
from benchmarks.storage_lookup import measure_lookup
from tests.mooncake_server import mooncake_server
from tests.redis_groups import redis_cluster
from tests.redis_server import RedisServer, redis_server
from tierkv.clock import SystemClock
from tierkv.storage.base import WorkerThreads
from tierkv.storage.codec import PlainCodec, ValueIdentity
from tierkv.storage.factory import StoreSettings, open_store
from tierkv.storage.protocol import Buffer, GetItem, GetStatus, PutItem, PutStatus, Store
from tierkv.storage.redis.store import RedisSettings
from tierkv.transfer.storage_io import made_ahead

IDENTITY = ValueIdentity(bytes(32), bytes(32), 16)
CODEC = PlainCodec()
WORK_BYTES = 128 << 20
PART_BYTES = 16 << 20  # blocks of one call, as a fetch asks for them
CHECKED_ON_LOOP = 64
VERBS = ("get", "set", "set again")
MOONCAKE_BATCH = 8  # values in one call of its client, as in tierkv's
MOONCAKE_FILL_BYTES = 400 << 20
Measured = Callable[[], Awaitable[float]]  # GB/s
Move = Callable[[str], Awaitable[float]]  # "get" or "set" to GB/s
Contender = tuple[str, Measured, Measured]  # who, writing values, reading them


@dataclass(frozen=True)
class Scale:
    sizes: tuple[int, ...]
    connections: tuple[int, ...]
    rounds: int
    work_bytes: int


QUICK = Scale((512 << 10, 2 << 20), (2,), 3, 32 << 20)
FULL = Scale((64 << 10, 512 << 10, 2 << 20, 8 << 20), (1, 2, 4, 8), 21, WORK_BYTES)


@dataclass
class Lag:
    """How late the loop was, in milliseconds, each time it was due."""

    samples: list[float] = field(default_factory=list)

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(self._watch())
            try:
                yield
            finally:
                watcher.cancel()

    async def _watch(self) -> None:
        while True:
            started = time.perf_counter()
            await asyncio.sleep(0.001)
            self.samples.append((time.perf_counter() - started) * 1e3 - 1)

    def p99(self) -> float:
        return float(np.percentile(self.samples, 99)) if self.samples else 0.0


@contextmanager
def ideal_client() -> Iterator[Path | None]:
    """The C client, compiled; None where no compiler is."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as directory:
        program = Path(directory, "ideal_redis")
        source = Path(__file__).with_name("ideal_redis.c")
        subprocess.run([compiler, "-O2", "-o", str(program), str(source)], check=True)
        yield program


@dataclass(frozen=True)
class Job:
    """count values of num_bytes each, read or written over so many connections."""

    num_bytes: int
    count: int
    connections: int

    def rate(self, seconds: float) -> float:
        return self.num_bytes * self.count / seconds / 1e9


@dataclass
class Ideal:
    """The C client, which keeps its connections as the others do: over new ones congestion control
    is in its first, fastest phase (GET of 2 MiB with BBR: 2.2 to 3.4 GB/s, then 1.6 to 2.0)."""

    process: subprocess.Popen[str]
    job: Job

    async def move(self, verb: str) -> float:
        return await asyncio.to_thread(self._move, verb)

    def _move(self, verb: str) -> float:
        assert self.process.stdin is not None, "a pipe"
        assert self.process.stdout is not None, "a pipe"
        self.process.stdin.write(f"{verb}\n")
        self.process.stdin.flush()
        return self.job.rate(float(self.process.stdout.readline().split()[0]))


@contextmanager
def ideal(program: Path, server: int | str, job: Job, window: int) -> Iterator[Ideal]:
    """server: its port, or "raw". window: values on their way on each connection."""
    command = [program, server, job.num_bytes, job.count, job.connections, window]
    with subprocess.Popen(
        list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Ideal(process, job)  # its input ends with the block, and then it does


def redis_benchmark(verb: str, port: int, job: Job) -> float:
    # fmt: off
    command = [
        "redis-benchmark", "-p", str(port), "-t", verb, "-d", str(job.num_bytes), "-n",
        str(job.count), "-c", str(job.connections), "--csv",
    ]
    # fmt: on
    done = subprocess.run(command, check=True, capture_output=True, timeout=120, text=True)
    per_second = float(done.stdout.splitlines()[-1].split(",")[1].strip('"'))
    return per_second * job.num_bytes / 1e9


@contextmanager
def limits(program: Path | None, port: int, job: Job) -> Iterator[tuple[Move, Move, Move | None]]:
    """What the server can do with three values on their way on each connection, and with one; and,
    over one connection, what a socket can."""
    with ExitStack() as stack:
        if program is None:
            limit = partial(asyncio.to_thread, partial(redis_benchmark, port=port, job=job))
            yield limit, limit, None
            return
        three = stack.enter_context(ideal(program, port, job, 3))
        one = stack.enter_context(ideal(program, port, job, 1))
        raw = None
        if job.connections == 1:
            raw = stack.enter_context(ideal(program, "raw", job, 3)).move
        yield three.move, one.move, raw


@dataclass
class RedisPy:
    """redis-py as its documentation has it: a pool, values gathered, copied where they belong.

    checks: values have a header with a checksum, as tierkv's, made and checked on the loop, where
        it costs least; without, it does less than the job.
    """

    client: redis.asyncio.Redis
    slots: Sequence[memoryview]
    checks: bool

    async def get(self, job: Job) -> float:
        return await self._spread(job, self._get)

    async def set(self, job: Job) -> float:
        return await self._spread(job, self._set)

    async def _get(self, index: int) -> None:
        content = await self.client.get(f"k:{index}")
        assert isinstance(content, bytes), "written before"
        payload = memoryview(content)
        if self.checks:
            header, payload = payload[: CODEC.header_bytes], payload[CODEC.header_bytes :]
            CODEC.decode(header, payload, IDENTITY)
        self.slots[index][:] = payload

    async def _set(self, index: int) -> None:
        value: bytes | memoryview = self.slots[index]
        if self.checks:
            value = b"".join(CODEC.encode(value, IDENTITY))
        await self.client.set(f"k:{index}", value)

    async def _spread(self, job: Job, one: Callable[[int], Awaitable[None]]) -> float:
        left = iter(range(job.count))

        async def work() -> None:
            for index in left:
                await one(index)

        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(job.connections):
                group.create_task(work())
        return job.rate(time.perf_counter() - started)


@dataclass
class Tierkv:
    """A store with checksums made and checked as storage I/O does it: in threads, but for a few
    values that were summed up as they landed.

    lag: watched meanwhile, which costs the loop what other contenders are spared.
    """

    store: Store
    slots: Sequence[memoryview]
    checkers: WorkerThreads
    headers: list[bytearray]
    replaces: bool = True
    lag: Lag | None = None

    async def get(self, job: Job) -> float:
        return await self._spread(job, self._get)

    async def set(self, job: Job) -> float:
        return await self._spread(job, self._set)

    async def _get(self, part: Sequence[int]) -> None:
        items = [self._item(i) for i in part]
        outcomes = await self.store.get_into(items)
        assert {outcome.status for outcome in outcomes} == {GetStatus.HIT}, outcomes

        def check() -> None:
            for i, outcome in zip(part, outcomes, strict=True):
                CODEC.decode(self.headers[i], self.slots[i], IDENTITY, outcome.digest)

        if len(part) > CHECKED_ON_LOOP or any(outcome.digest is None for outcome in outcomes):
            await self.checkers.run(check)
        else:
            check()

    def _item(self, index: int) -> GetItem:
        header = self.headers[index]
        into = memoryview(header), self.slots[index]
        return GetItem(f"v:{index}:a", into, partial(CODEC.digest, header))

    async def _set(self, part: Sequence[int]) -> None:
        def encode() -> list[PutItem]:
            return [self._value(i, CODEC.encode(self.slots[i], IDENTITY)) for i in part]

        is_late = self.store.capabilities.sends_from_loop
        late: list[PutItem] = []
        for at, i in enumerate(part if is_late else ()):
            if at and at % 8 == 0:
                await asyncio.sleep(0)
            header = CODEC.header_later(self.slots[i], IDENTITY)
            if header is not None:
                late.append(self._value(i, (header.content, self.slots[i]), header))
        items = late if len(late) == len(part) else await self.checkers.run(encode)
        async with made_ahead(self.checkers, items):
            outcomes = await self.store.put(items)
        assert {outcome.status for outcome in outcomes} == {PutStatus.STORED}, outcomes

    def _value(
        self, index: int, parts: tuple[Buffer, ...], complete: Callable[[], None] | None = None
    ) -> PutItem:
        is_kept = not self.replaces
        return PutItem(f"v:{index}:a", parts, keep_existing=is_kept, complete=complete)

    async def _spread(self, job: Job, one: Callable[[Sequence[int]], Awaitable[None]]) -> float:
        size = max(1, PART_BYTES // job.num_bytes)
        parts = iter([range(at, min(at + size, job.count)) for at in range(0, job.count, size)])

        async def work() -> None:
            for part in parts:
                await one(part)

        watched = nullcontext() if self.lag is None else self.lag.watched()
        started = time.perf_counter()
        async with watched, asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(work())
        return job.rate(time.perf_counter() - started)


def slots_for(job: Job) -> list[memoryview]:
    """Memory that has been touched, as pinned host slots have."""
    pool = np.full(job.num_bytes * job.count, 7, np.uint8).data
    return [pool[i * job.num_bytes : (i + 1) * job.num_bytes] for i in range(job.count)]


@asynccontextmanager
async def tierkv_at(
    url: str,
    job: Job,
    slots: Sequence[memoryview],
    settings: StoreSettings,
    *,
    replaces: bool = True,
) -> AsyncIterator[Tierkv]:
    store = open_store(url, settings, SystemClock())
    checkers = WorkerThreads("checkers", 2)
    async with store.running(), checkers.running():
        headers = [bytearray(CODEC.header_bytes) for _ in range(job.count)]
        yield Tierkv(store, slots, checkers, headers, replaces)


def patient(connections: int) -> StoreSettings:
    settings = RedisSettings(
        num_connections=connections, write_connections=connections, timeout_s=30.0
    )
    return StoreSettings(redis=settings)


async def redis_job(server: RedisServer, program: Path | None, job: Job, rounds: int) -> list[Row]:
    slots = slots_for(job)
    client = redis.asyncio.Redis(port=server.port, max_connections=job.connections)
    figures: dict[str, list[float]] = {}

    def note(what: str, rate: float) -> None:
        figures.setdefault(what, []).append(rate)

    async with (
        client,
        AsyncExitStack() as programs,
        tierkv_at(server.url, job, slots, patient(job.connections)) as ours,
    ):
        theirs, bare = RedisPy(client, slots, checks=True), RedisPy(client, slots, checks=False)
        limit, one_each, raw = programs.enter_context(limits(program, server.port, job))
        contenders: list[Contender] = [
            ("limit", lambda: limit("set"), lambda: limit("get")),
            ("limit, one value in flight", lambda: one_each("set"), lambda: one_each("get")),
            ("redis-py", lambda: theirs.set(job), lambda: theirs.get(job)),
            ("redis-py, no checksums", lambda: bare.set(job), lambda: bare.get(job)),
            ("tierkv", lambda: ours.set(job), lambda: ours.get(job)),
        ]
        for round_number in range(rounds + 1):
            # In no fixed order: what one leaves in the kernel's lists of pages is the next one's.
            for who, set_values, get_values in random.sample(contenders, len(contenders)):
                # Each writes into the same state: into memory that the kernel has yet to give to
                # the server, which is most of what that takes; then over what it has written, as
                # into a server that is full.
                server.execute("FLUSHALL", "SYNC")
                steps = (("set", set_values), ("set again", set_values), ("get", get_values))
                for verb, measured in steps:
                    rate = await measured()
                    if round_number:  # the first one warms up
                        note(f"{verb} {who}", rate)
            if raw is not None:
                note("get raw socket", await raw("get"))
        ours.lag = Lag()
        for _ in range(rounds):
            await ours.set(job)
            await ours.get(job)
        lag = ours.lag.p99()
    return [*_redis_rows(figures, job), row(f"{_label(job)} loop lag p99", [lag], "ms")]


def _label(job: Job) -> str:
    return f"{job.num_bytes >> 10} KiB x{job.connections}"


def _redis_rows(figures: dict[str, list[float]], job: Job) -> list[Row]:
    rows = []
    for verb in VERBS:
        limit = row(f"{_label(job)} {verb} limit", figures[f"{verb} limit"], "GB/s")
        one_each, theirs, bare = (
            row(f"{_label(job)} {verb} {who}", figures[f"{verb} {who}"], "GB/s")
            for who in ("limit, one value in flight", "redis-py", "redis-py, no checksums")
        )
        ours = figures[f"{verb} tierkv"]
        rows += [limit, one_each, theirs, bare]
        if raw := figures.get(f"{verb} raw socket"):
            rows.append(row(f"{_label(job)} raw socket", raw, "GB/s"))
        rows.append(row(f"{_label(job)} {verb} tierkv", ours, "GB/s"))
        # Within a round: between two the machine itself moves by more than clients differ.
        others = ("limit", "limit, one value in flight", "redis-py", "redis-py, no checksums")
        best_other = max(others, key=lambda who: median(figures[f"{verb} {who}"]))
        named = [(who, who) for who in others]
        for what, who in [*named, (f"the best other ({best_other})", best_other)]:
            pairs = zip(ours, figures[f"{verb} {who}"], strict=True)
            each = [mine / other for mine, other in pairs]
            rows.append(row(f"{_label(job)} {verb} tierkv over {what}", each, "x"))
    return rows


async def measure_redis(scale: Scale) -> list[Row]:
    rows: list[Row] = []
    with redis_server() as server, ideal_client() as program:
        for num_bytes in scale.sizes:
            for connections in scale.connections:
                count = max(8, min(1024, scale.work_bytes // num_bytes))
                job = Job(num_bytes, count, connections)
                rows += await redis_job(server, program, job, scale.rounds)
    return rows


async def measure_cluster(scale: Scale) -> list[Row]:
    rows: list[Row] = []
    job = Job(2 << 20, scale.work_bytes >> 21, 2)
    slots = slots_for(job)
    for num_masters in (1, 3, 6):
        with redis_cluster(num_masters) as cluster:
            async with tierkv_at(cluster.url, job, slots, patient(2)) as ours:
                sets = [await ours.set(job) for _ in range(scale.rounds)]
                gets = [await ours.get(job) for _ in range(scale.rounds)]
        rows.append(row(f"2 MiB get, {num_masters} masters", gets, "GB/s"))
        rows.append(row(f"2 MiB set, {num_masters} masters", sets, "GB/s"))
    return rows


def direct_disk(directory: Path, job: Job) -> tuple[float, float]:
    """Writing and reading whole files with O_DIRECT in 4 threads, GB/s."""
    buffers = [mmap.mmap(-1, job.num_bytes) for _ in range(4)]

    def one(flags: int, index: int) -> None:
        fd = os.open(directory / f"{index}", flags | os.O_DIRECT, 0o600)
        try:
            move = os.pwritev if flags & os.O_CREAT else os.preadv
            assert move(fd, [buffers[index % 4]], 0) == job.num_bytes
        finally:
            os.close(fd)

    rates = []
    with ThreadPoolExecutor(4) as pool:
        for flags in (os.O_WRONLY | os.O_CREAT, os.O_RDONLY):
            started = time.perf_counter()
            for _ in pool.map(lambda index, flags=flags: one(flags, index), range(job.count)):
                pass
            rates.append(job.rate(time.perf_counter() - started))
    for index in range(job.count):
        (directory / f"{index}").unlink()
    return rates[0], rates[1]


def forget_cached(root: Path) -> None:
    """Write what is not on the disk yet, then drop it from memory."""
    os.sync()
    for path in root.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            with suppress(OSError):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


async def measure_file(scale: Scale) -> list[Row]:
    job = Job(2 << 20, scale.work_bytes >> 21, 1)
    slots = slots_for(job)
    figures: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=os.environ.get("TIERKV_BENCH_DIR")) as text:
        directory = Path(text)
        (directory / "direct").mkdir()
        settings = StoreSettings()
        for _ in range(scale.rounds):
            write, read = await asyncio.to_thread(direct_disk, directory / "direct", job)
            figures.setdefault("direct write", []).append(write)
            figures.setdefault("direct read", []).append(read)
            url = (directory / "store").as_uri()
            async with tierkv_at(url, job, slots, settings) as ours:
                # Into new files, as the limit is measured: to write over old ones frees them.
                await ours.store.delete([f"v:{index}:a" for index in range(job.count)])
                await asyncio.to_thread(os.sync)
                figures.setdefault("plain write", []).append(await ours.set(job))
            async with tierkv_at(url, job, slots, settings) as ours:
                figures.setdefault("warm read", []).append(await ours.get(job))
                await asyncio.to_thread(forget_cached, directory / "store")
                figures.setdefault("cold read", []).append(await ours.get(job))
    writes = row("files: O_DIRECT write", figures["direct write"], "GB/s")
    reads = row("files: O_DIRECT read", figures["direct read"], "GB/s")
    return [
        writes,
        row("files: put", figures["plain write"], "GB/s", against=writes),
        reads,
        row("files: get, not cached", figures["cold read"], "GB/s", against=reads),
        row("files: get, cached", figures["warm read"], "GB/s", against=reads),
    ]


def address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class DirectMooncake:
    """Mooncake's own client, in batches of as many values as tierkv's; blocks."""

    def __init__(self, port: int, job: Job, slots: Sequence[memoryview]) -> None:
        package = importlib.import_module("mooncake.store")
        self._client = package.MooncakeDistributedStore()
        self._client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", f"127.0.0.1:{port}")
        self._config = package.ReplicateConfig()
        self._config.replica_num = 1
        self._job, self._slots = job, slots
        self._headers = [bytearray(CODEC.header_bytes) for _ in slots]
        self._keys = [f"d:{i}" for i in range(job.count)]

    def put(self) -> float:
        self._client.batch_remove(self._keys, True)  # noqa: FBT003
        return self._timed(self._client.batch_put_from)

    def get(self) -> float:
        return self._timed(self._client.batch_get_into)

    def put_checked(self) -> float:
        """With the header and the checksum that tierkv's values have."""
        self._client.batch_remove(self._keys, True)  # noqa: FBT003

        def put_part(part: slice) -> Sequence[int]:
            for header, slot in zip(self._headers[part], self._slots[part], strict=True):
                header[:] = CODEC.encode(slot, IDENTITY)[0]
            put: list[int] = self._client.batch_put_from_multi_buffers(
                self._keys[part], *self._pieces(part), self._config
            )
            return put

        return self._timed_parts(put_part)

    def get_checked(self) -> float:
        def get_part(part: slice) -> Sequence[int]:
            found: list[int] = self._client.batch_get_into_multi_buffers(
                self._keys[part], *self._pieces(part)
            )
            for header, slot in zip(self._headers[part], self._slots[part], strict=True):
                CODEC.decode(header, slot, IDENTITY)
            return found

        return self._timed_parts(get_part)

    def _pieces(self, part: slice) -> tuple[list[list[int]], list[list[int]]]:
        """Addresses and sizes, of a header and a payload for each value."""
        both = list(zip(self._headers[part], self._slots[part], strict=True))
        addresses = [[address_of(memoryview(one)) for one in pair] for pair in both]
        return addresses, [[len(one) for one in pair] for pair in both]

    def close(self) -> None:
        self._client.close()

    def _timed(self, call: Callable[[list[str], list[int], list[int]], list[int]]) -> float:
        def one(part: slice) -> Sequence[int]:
            slots = self._slots[part]
            addresses = [address_of(slot) for slot in slots]
            return call(self._keys[part], addresses, [slot.nbytes for slot in slots])

        return self._timed_parts(one)

    def _timed_parts(self, call: Callable[[slice], Sequence[int]]) -> float:
        started = time.perf_counter()
        for at in range(0, self._job.count, MOONCAKE_BATCH):
            statuses = call(slice(at, at + MOONCAKE_BATCH))
            assert min(statuses) >= 0, statuses
        return self._job.rate(time.perf_counter() - started)


async def touch_all_memory(ours: Tierkv, job: Job) -> None:
    """Fill the provider: memory that is used for the first time takes it as long as the bytes."""
    names = [f"f:{i}:a" for i in range(MOONCAKE_FILL_BYTES // job.num_bytes)]
    parts = [names[at : at + job.count] for at in range(0, len(names), job.count)]
    for part in parts:
        items = [PutItem(name, (slot,)) for name, slot in zip(part, ours.slots, strict=False)]
        assert {one.status for one in await ours.store.put(items)} == {PutStatus.STORED}
    for part in parts:
        await ours.store.delete(part)


async def measure_mooncake(scale: Scale) -> list[Row]:
    """tierkv as it is set by default; its client in one thread, as it waits by looking again and
    again: with two of them, what carries the bytes has none of two cores to itself. Many short
    rounds in turns; of them the middle half counts, and each round's ratio for itself. 64 values, a
    prompt of some thousand tokens."""
    rates: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    job = Job(2 << 20, 64, 1)
    slots = slots_for(job)
    settings = StoreSettings()
    with mooncake_server("512 MB") as server:
        # Made before the store, which gives the package settings of its own by the environment.
        direct = await asyncio.to_thread(DirectMooncake, server.master_port, job, slots)
        async with tierkv_at(server.url, job, slots, settings, replaces=False) as ours:
            await touch_all_memory(ours, job)

            async def put() -> float:
                await ours.store.delete([f"v:{i}:a" for i in range(job.count)])
                return await ours.set(job)

            contenders: list[Contender] = [
                (
                    "its client",
                    lambda: asyncio.to_thread(direct.put),
                    lambda: asyncio.to_thread(direct.get),
                ),
                (
                    "its client with checksums",
                    lambda: asyncio.to_thread(direct.put_checked),
                    lambda: asyncio.to_thread(direct.get_checked),
                ),
                ("tierkv", put, lambda: ours.get(job)),
            ]
            for round_number in range(4 * scale.rounds + 1):
                for who, put_values, get_values in contenders:
                    for verb, measured in (("put", put_values), ("get", get_values)):
                        before = time.process_time()
                        rate = await measured()
                        cpu_ms = (time.process_time() - before) / job.count * 1e3
                        if round_number:  # the first one warms up
                            rates.setdefault(f"{who}, {verb}", []).append(rate)
                            cpu.setdefault(f"{who}, {verb}", []).append(cpu_ms)
                contenders.append(contenders.pop(0))
            await asyncio.to_thread(direct.close)
    rows = []
    for verb in ("put", "get"):
        mine = f"tierkv, {verb}"
        clients = [f"its client{how}, {verb}" for how in ("", " with checksums")]
        theirs = [row(f"Mooncake: {who}", middle_half(rates[who]), "GB/s") for who in clients]
        # What no neighbour takes away: the CPU time of this process, its client's threads included.
        their_cpu = [
            row(f"Mooncake: {who}, CPU for 2 MiB", middle_half(cpu[who]), "ms") for who in clients
        ]
        rows += theirs
        for who, base in zip(clients, theirs, strict=True):
            pairs = zip(rates[mine], rates[who], strict=True)
            each = middle_half([ours / limit for ours, limit in pairs])
            rows += [
                row(f"Mooncake: {mine}", middle_half(rates[mine]), "GB/s", against=base),
                row(f"Mooncake: {mine}, each round to {who}", each, "x"),
            ]
        rows += their_cpu
        rows += [
            row(f"Mooncake: {mine}, CPU for 2 MiB", middle_half(cpu[mine]), "ms", against=base)
            for base in their_cpu
        ]
    return rows


def middle_half(samples: Sequence[float]) -> Sequence[float]:
    """Without the quarter below and the quarter above."""
    return sorted(samples)[len(samples) // 4 : len(samples) - len(samples) // 4]


PARTS: dict[str, Callable[[Scale], Awaitable[list[Row]]]] = {
    "redis": measure_redis,
    "lookup": lambda scale: measure_lookup(scale.rounds),
    "cluster": measure_cluster,
    "file": measure_file,
    "mooncake": measure_mooncake,
}


async def measure(names: Sequence[str], scale: Scale) -> list[Row]:
    rows: list[Row] = []
    for name in names:
        rows += await PARTS[name](scale)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default=",".join(PARTS), metavar="PART,PART")
    arguments = parser.parse_args()
    scale = QUICK if arguments.quick else FULL
    print(f"load before: {os.getloadavg()[0]:.1f}", file=sys.stderr)
    show(uvloop.run(measure(arguments.only.split(","), scale)), as_json=arguments.json)


if __name__ == "__main__":
    main()
