"""One process decides, others move: all ranks or none, and who dies is named."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.embed.engine import BLOCK, done, until
from tests.embed.planes import shard_planes
from tests.latch import PATIENCE_S
from tests.world import GQA, kv_of
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.keys import Fingerprint
from tierkv.clock import SystemClock
from tierkv.embed import Admitted, Embedded
from tierkv.errors import ConfigError, DeviceFailedError, LayoutError, StoreCorruptError
from tierkv.gpu.cpu import CpuDevice
from tierkv.pd.settings import HandoffSettings
from tierkv.ranks.link import MAGIC, VERSION, Alive, Link
from tierkv.ranks.memory import EnginePlanes, pieces, side_by_side
from tierkv.ranks.worker import Worker, serve_in_thread
from tierkv.ranks.workers import WorkerDevice
from tierkv.sched.settings import CacheSettings
from tierkv.service import Service
from tierkv.storage.codec import seal
from tierkv.storage.factory import StoreSettings, open_store

ROOT = Path(__file__).parents[2]
Left = tuple[set[str], int, int, set[str]]

PROMPT = list(range(18))
ALL = list(range(5000, 5032))
DEVICE_BLOCKS = 8


@dataclass
class Cluster:
    """A scheduler in this process, a worker process per rank."""

    cache: Embedded
    device: WorkerDevice
    processes: list[subprocess.Popen[bytes]]
    shards: list[list[np.ndarray]]  # of each rank, its planes

    def write(self, found: Admitted, tokens: Sequence[int], start: int = 0) -> None:
        """What each rank's kernels do: its own shard of every token."""
        for rank, planes in enumerate(self.shards):
            for plane, rows, array in zip(GQA.planes, _kv(rank, tokens), planes, strict=True):
                width = plane.token_bytes or 0
                for at in range(start, len(tokens)):
                    offset = at % BLOCK * width
                    array[found.block_table[at // BLOCK], offset : offset + width] = rows[at]

    def check(self, found: Admitted, tokens: Sequence[int], count: int) -> None:
        for rank, planes in enumerate(self.shards):
            for plane, rows, array in zip(GQA.planes, _kv(rank, tokens), planes, strict=True):
                width = plane.token_bytes or 0
                for at in range(count):
                    offset = at % BLOCK * width
                    kept = array[found.block_table[at // BLOCK], offset : offset + width]
                    assert np.array_equal(kept, rows[at]), f"rank {rank}, token {at}"

    def run(self, name: str, tokens: Sequence[int], *, publish: bool = False) -> Admitted:
        found = self.cache.admit(name, tokens, max_new_tokens=0).wait(PATIENCE_S)
        self.check(found, tokens, found.cached_tokens)
        self.write(found, tokens, found.cached_tokens)
        self.cache.commit(name, tokens).wait(PATIENCE_S)
        if publish:
            self.cache.publish(name, "ticket", [7]).wait(PATIENCE_S)
        self.cache.end(name).wait(PATIENCE_S)
        return found

    def is_all_on_the_host(self) -> bool:
        """Whether PROMPT and ALL are, so that nothing need be copied to make room for either."""
        num_blocks = sum(-(-len(tokens) // BLOCK) for tokens in (PROMPT, ALL))
        return self.cache.stats().wait(PATIENCE_S).tiers.offloaded_blocks == num_blocks


def _planes() -> EnginePlanes:
    return EnginePlanes(GQA, [np.zeros((4, plane.block_bytes), np.uint8) for plane in GQA.planes])


def _kv(rank: int, tokens: Sequence[int]) -> list[np.ndarray]:
    """Another KV on every rank."""
    return [rows ^ np.uint8(rank * 37) for rows in kv_of(tokens, GQA)]


def _worker(folder: Path, rank: int) -> subprocess.Popen[bytes]:
    program = [sys.executable, "-m", "tests.ranks.worker_process"]
    arguments = [str(folder / "socket"), str(rank), str(folder), str(DEVICE_BLOCKS)]
    return subprocess.Popen([*program, *arguments], cwd=ROOT)


@contextmanager
def cluster(
    folder: Path, *, ranks: int = 2, store: str | None = None, dead_s: float = 30.0
) -> Iterator[Cluster]:
    folder.mkdir(exist_ok=True)
    shards = [shard_planes(folder, rank, DEVICE_BLOCKS) for rank in range(ranks)]
    device = WorkerDevice(str(folder / "socket"), [GQA] * ranks, dead_s=dead_s)
    processes = [_worker(folder, rank) for rank in range(ranks)]

    def build() -> Service:
        return Service(
            device,
            Fingerprint("model", device.layout),
            CacheSettings(
                block_size=BLOCK,
                device_blocks=DEVICE_BLOCKS,
                host_blocks=16,
                host_write=WritePolicy.WRITE_THROUGH,
            ),
            HandoffSettings(),
            open_store(store, StoreSettings(), SystemClock()) if store else None,
        )

    try:
        device.accept(PATIENCE_S)
        with Embedded(build) as cache:
            yield Cluster(cache, device, processes, shards)
        for process in processes:
            assert process.wait(PATIENCE_S) in (0, -signal.SIGKILL)
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_blocks_go_down_and_come_back_on_every_rank(tmp_path: Path, ranks: int) -> None:
    with cluster(tmp_path / "node", ranks=ranks) as here:
        here.run("first", PROMPT)
        here.run("second", ALL)  # the first is on the host only, now
        found = here.run("third", [*PROMPT, 99])  # the tail is copied to a block of its own
        assert found.cached_tokens == len(PROMPT)
        assert found.matched.host_tokens > 0
        assert here.cache.verify().wait(PATIENCE_S) == []
        assert here.device.findings() == []


def test_a_prompt_is_handed_from_workers_to_workers_through_storage(tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store"
    with cluster(tmp_path / "prefill", store=store) as prefill:
        prefill.run("one", PROMPT, publish=True)
    with cluster(tmp_path / "decode", store=store) as decode:
        found = decode.cache.claim("one", "ticket", PROMPT, max_new_tokens=2).wait(PATIENCE_S)
        assert found.cached_tokens == len(PROMPT)
        decode.check(found, PROMPT, len(PROMPT))
        decode.cache.end("one").wait(PATIENCE_S)


def test_a_load_that_fails_on_one_rank_fails_on_all_and_is_computed_again(tmp_path: Path) -> None:
    folder = tmp_path / "node"
    with cluster(folder) as here:
        here.run("first", PROMPT)
        here.run("second", ALL)
        (folder / "fail-1").touch()
        found = here.run("third", PROMPT)
        assert (found.cached_tokens, found.failed_blocks) == (0, (0, 1, 2, 3, 4))
        assert "worker 1" in (found.load_problem or "")
        assert here.device.failure is None
        assert here.run("fourth", PROMPT).cached_tokens == len(PROMPT) - 1
        assert here.cache.verify().wait(PATIENCE_S) == []


def test_aborts_at_random_leave_nothing_on_any_rank(tmp_path: Path) -> None:
    rng = random.Random(5)
    with cluster(tmp_path / "node") as here:
        for turn in range(40):
            start = rng.randrange(3) * 1000
            tokens = list(range(start, start + rng.randrange(1, 30)))
            if rng.random() < 0.5:
                here.run(f"{turn}", tokens)
                continue
            call = here.cache.admit(f"{turn}", tokens, max_new_tokens=0)
            threading.Event().wait(rng.random() * 0.003)
            here.cache.abort(f"{turn}").wait(PATIENCE_S)
            done(call)
        until(lambda: here.cache.verify().wait(PATIENCE_S) == [])
        stats = here.cache.stats().wait(PATIENCE_S)
        assert (stats.running_requests, stats.waiting_requests) == (0, 0)


def test_a_worker_that_is_killed_is_named_and_nobody_hangs(tmp_path: Path) -> None:
    with cluster(tmp_path / "node") as here:
        here.cache.admit("one", ALL, max_new_tokens=0).wait(PATIENCE_S)
        waiting = here.cache.admit("two", PROMPT, max_new_tokens=0)
        victim = here.processes[1]
        victim.kill()
        error = done(waiting).error
        assert isinstance(error, DeviceFailedError)
        assert f"worker 1 (process {victim.pid}) is lost" in str(error)
        for call in (here.cache.lookup(PROMPT), here.cache.admit("x", PROMPT, max_new_tokens=0)):
            assert isinstance(done(call).error, DeviceFailedError)
        here.cache.end("one").wait(PATIENCE_S)
        assert any("rank 1 has left" in finding for finding in here.device.findings())


def test_a_worker_killed_in_the_middle_of_a_load_fails_that_request(tmp_path: Path) -> None:
    with cluster(tmp_path / "node") as here:
        here.run("first", PROMPT)
        here.run("second", ALL)
        until(here.is_all_on_the_host, "the copies that make room")
        victim = here.processes[0]
        victim.send_signal(signal.SIGSTOP)
        loading = here.cache.admit("third", PROMPT, max_new_tokens=0)
        until(lambda: here.cache.stats().wait(PATIENCE_S).running_requests == 1)
        assert not loading.is_done, "one rank has not reported"
        victim.kill()
        assert isinstance(done(loading).error, DeviceFailedError)
        assert f"process {victim.pid}" in str(loading.error)
        assert here.cache.stats().wait(PATIENCE_S).running_requests == 0


def test_a_worker_that_is_silent_and_owes_something_is_given_up(tmp_path: Path) -> None:
    with cluster(tmp_path / "node", dead_s=2.5) as here:
        here.run("first", PROMPT)
        here.run("second", ALL)
        until(here.is_all_on_the_host, "the copies that make room")
        victim = here.processes[0]
        victim.send_signal(signal.SIGSTOP)
        try:
            loading = here.cache.admit("third", PROMPT, max_new_tokens=0)
            error = done(loading).error
            assert isinstance(error, DeviceFailedError)
            assert f"worker 0 (process {victim.pid}) is lost: it is silent" in str(error)
        finally:
            victim.kill()


def test_who_connects_and_says_nothing_keeps_no_worker_out(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    device = WorkerDevice(path, [GQA])
    worker = Worker(path, 0, CpuDevice(), _planes())
    try:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(path)
            thread = serve_in_thread(worker)
            began = time.monotonic()
            device.accept(20.0)
            assert time.monotonic() - began < 10.0
    finally:
        device.close()
        thread.join(PATIENCE_S)


def test_a_worker_that_was_stopped_before_it_had_a_link_does_not_serve(tmp_path: Path) -> None:
    device = WorkerDevice(str(tmp_path / "socket"), [GQA])
    try:
        worker = Worker(str(tmp_path / "socket"), 0, CpuDevice(), _planes())
        worker.stop()
        thread = serve_in_thread(worker)
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    finally:
        device.close()


def test_nothing_is_left_when_worker_and_scheduler_have_gone(tmp_path: Path) -> None:
    def once(number: int) -> None:
        with cluster(tmp_path / str(number)) as here:
            here.run("first", PROMPT)
            if number % 2:
                here.processes[0].kill()

    once(0)
    before = _left()
    for number in range(1, 4):
        once(number)
    until(lambda: _is_no_more(_left(), before), "the end of threads, files and shared memory")


def _is_no_more(left: Left, before: Left) -> bool:
    """Less may be left: of tests before this one something may end only now."""
    threads, files, mapped, shared = left
    return (
        threads <= before[0] and files <= before[1] and mapped <= before[2] and shared <= before[3]
    )


def _left() -> Left:
    maps = Path("/proc/self/maps").read_text()
    return (
        {thread.name for thread in threading.enumerate()},
        len(os.listdir("/proc/self/fd")),
        maps.count("tierkv-host-slots"),
        {name for name in os.listdir("/dev/shm") if "tierkv" in name},
    )


def test_a_scheduler_refuses_what_does_not_fit(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    device = WorkerDevice(path, [GQA])
    with pytest.raises(ConfigError, match=r"workers \[0\] did not connect"):
        device.accept(0.05)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(path)
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(100))
        with pytest.raises(ConfigError, match="did not connect"):
            device.accept(0.2)
    other = side_by_side([GQA, GQA])
    arrays = [np.zeros((4, plane.block_bytes), np.uint8) for plane in other.planes]
    worker_device = CpuDevice()
    worker = Worker(path, 0, worker_device, EnginePlanes(other, arrays))
    refused: list[BaseException] = []

    def serve() -> None:
        try:
            worker.serve()
        except ConfigError as error:
            refused.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(ConfigError, match="another layout"):
        device.accept(PATIENCE_S)
    thread.join(PATIENCE_S)
    assert refused
    with pytest.raises(ConfigError, match="accept"):
        device.allocate_planes(GQA, 4)
    worker_device.close()
    device.close()
    with pytest.raises(ConfigError, match="no scheduler listens"):
        worker.serve()


def test_a_worker_on_a_thread_says_in_the_log_why_it_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device = CpuDevice()
    thread = serve_in_thread(Worker(str(tmp_path / "socket"), 0, device, _planes()))
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    device.close()
    assert "the worker has ended: no scheduler listens" in caplog.text


@pytest.mark.parametrize(
    "answer", [b"no record", seal(MAGIC, VERSION + 1, {}), seal(MAGIC, VERSION, Alive())]
)
def test_a_scheduler_that_cannot_be_understood_leaves_nothing_open(
    answer: bytes, tmp_path: Path
) -> None:
    """Another version of tierkv, say."""
    path = str(tmp_path / "socket")
    device = CpuDevice()
    worker = Worker(path, 0, device, _planes())
    with (
        open(os.memfd_create("sent-to-a-worker"), "rb") as memory,
        socket.socket(socket.AF_UNIX) as listener,
        ThreadPoolExecutor(1) as pool,
    ):
        listener.bind(path)
        listener.listen()
        serving = pool.submit(worker.serve)
        end, _ = listener.accept()
        with end:
            end.settimeout(PATIENCE_S)
            Link(end).send(answer, descriptors=[memory.fileno()])
            with pytest.raises(StoreCorruptError):
                serving.result(PATIENCE_S)
            assert end.recv(1 << 16), "its hello"
            assert end.recv(1) == b"", "it has closed its end"
    device.close()
    left = subprocess.run(["ls", "-l", f"/proc/{os.getpid()}/fd"], check=False, capture_output=True)
    assert b"sent-to-a-worker" not in left.stdout


def test_a_socket_that_a_killed_scheduler_left_is_taken_over_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))  # and never listens again
    device = WorkerDevice(str(path), [GQA])
    with pytest.raises(ConfigError, match="in use"):
        WorkerDevice(str(path), [GQA])
    device.close()
    assert not path.exists()
    path.write_text("a file of somebody's")
    with pytest.raises(ConfigError, match="cannot listen"):
        WorkerDevice(str(path), [GQA])
    assert path.read_text() == "a file of somebody's"


def test_shards_lie_whole_one_behind_the_other() -> None:
    whole = side_by_side([GQA, GQA])
    assert whole.num_layers == 2 * GQA.num_layers
    assert whole.block_bytes == 2 * GQA.block_bytes
    assert pieces([GQA, GQA]) == [
        slice(0, GQA.block_bytes),
        slice(GQA.block_bytes, 2 * GQA.block_bytes),
    ]
    assert side_by_side([GQA]).digest == GQA.digest
    with pytest.raises(LayoutError):
        side_by_side([])
