"""An engine whose ranks are other processes: plans and reports are its own messages, the socket
brings memory, and whoever dies is named."""

from __future__ import annotations

import logging
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from tests.embed.engine import until
from tests.embed.engine_rank import StepMessage
from tests.embed.steps import Steps, ask, local_ranks, plan_of
from tests.embed.test_groups import hybrid
from tests.embed.tp_engine import BLOCKS, ROOT, TpEngine, a_cache, engine
from tests.latch import PATIENCE_S, CopyLatch, ManualEvent
from tests.world import BLOCK, GQA
from tierkv.cache.eviction import WritePolicy
from tierkv.cache.groups import CacheGroup, GroupKind
from tierkv.cache.keys import Fingerprint
from tierkv.cache.layout import Layout, Plane
from tierkv.clock import SystemClock
from tierkv.embed import EngineCache, Finished, RankSocket, WorkerPlanes
from tierkv.embed.engine_cache import Found
from tierkv.errors import ConfigError, DeviceFailedError, GateTimeoutError, TransferError
from tierkv.gpu.cpu import CpuDevice
from tierkv.ranks.link import MAGIC, VERSION, Goodbye, Link
from tierkv.ranks.memory import EnginePlanes, side_by_side
from tierkv.sched.settings import CacheSettings
from tierkv.storage.codec import seal
from tierkv.storage.factory import StoreSettings, open_store

TOKENS = list(range(3 * BLOCK + 1))
HERE, THERE = [0, 1, 2, 3], [8, 9, 10, 11]


@pytest.mark.promise("Ranks in other processes load their own bytes, whoever starts first.")
@pytest.mark.parametrize(("num_ranks", "workers_first"), [(1, False), (4, True)])
def test_what_all_ranks_saved_each_of_them_loads_byte_for_byte(
    tmp_path: Path, num_ranks: int, workers_first: bool
) -> None:
    with engine(tmp_path, ["cpu"] * num_ranks, workers_first=workers_first) as on:
        on.save("a", TOKENS, HERE)
        assert on.lookup("b", TOKENS) == Found(len(TOKENS))
        on.load("b", THERE)
        assert on.hold(TOKENS, THERE)
        assert num_ranks == 1 or not on.hold(TOKENS, THERE, like=0)


@pytest.mark.promise("Each rank saves and loads its own bytes of every group.")
@pytest.mark.parametrize("are_same", [False, True])
def test_each_rank_saves_and_loads_its_own_bytes_of_every_group(
    tmp_path: Path, are_same: bool
) -> None:
    layouts = [GQA, Layout(2 * BLOCK, (Plane(0, "state", "uint8", 640),))]
    whole = layouts if are_same else [side_by_side([one] * 2) for one in layouts]
    path, numbers = str(tmp_path / "ranks.sock"), np.random.default_rng(1)
    arrays = [
        [
            [numbers.integers(1, 256, (BLOCKS, one.block_bytes), np.uint8) for one in of.planes]
            for of in layouts
        ]
        for _ in range(2)
    ]
    cache = EngineCache(
        Fingerprint("m", whole[0]),
        [CacheGroup(whole[0]), CacheGroup(whole[1], GroupKind.WINDOW, window=BLOCK)],
        host_bytes=1 << 20,
        cache=CacheSettings(block_size=BLOCK),
        ranks=RankSocket(path, [layouts] * 2),
    )
    planes = [[EnginePlanes(*one) for one in zip(layouts, mine, strict=True)] for mine in arrays]
    with local_ranks(cache, path, planes) as on:
        tokens = list(range(4 * BLOCK))
        on.save("a", tokens, [0, 1, 2, 3], [0, 1])
        found = on.lookup("b", tokens)
        assert (found.num_tokens, found.blocks) == (4 * BLOCK, (range(4), range(1, 2)))
        on.load("b", [8, 9, 10, 11], [9], first=[0, 1])
        for rank, mine in enumerate(arrays):
            source = arrays[0 if are_same else rank]
            for one, other in zip(mine[0], source[0], strict=True):
                assert np.array_equal(one[8:12], other[:4]), rank
            assert np.array_equal(mine[1][0][9], source[1][0][1]), rank


def test_blocks_are_found_only_once_the_last_rank_has_saved_them(tmp_path: Path) -> None:
    with engine(tmp_path, ["cpu"] * 2) as on:
        on.compute(TOKENS, HERE)
        plan = on.plan_to_save("a", TOKENS, HERE)
        slow, quick = on.ranks
        assert slow.step(StepMessage(saves=[plan], holds=True)) == []
        reports = quick.step(StepMessage(saves=[plan]))
        while not reports:
            reports = quick.step(StepMessage())
        on.poll(reports)
        assert on.lookup("b", TOKENS) == Found(0)
        assert on.cache.fence(HERE) == tuple(HERE)
        on.step(holds=False)
        on.until(lambda: on.seen.stored == [("a", len(HERE))])
        assert on.cache.fence(HERE) == ()
        assert on.lookup("c", TOKENS) == Found(len(TOKENS))
        on.cache.release("c")


@pytest.mark.promise("A save holds what its own step's kernels wrote.")
def test_a_step_scheduled_while_another_runs_saves_what_its_own_kernels_wrote(
    tmp_path: Path,
) -> None:
    """Plans come before the kernels have run: what is saved is what was there at their events, not
    what was there when the plan came."""
    first, second = TOKENS[: 2 * BLOCK], list(range(900, 900 + 2 * BLOCK))
    with engine(tmp_path, ["cpu"] * 2) as on:
        on.compute(second, [0, 1])  # what the blocks hold of somebody before
        on.step(saves=[on.plan_to_save("a", first, [0, 1])], after="step 1")
        on.step(saves=[on.plan_to_save("b", second, [2, 3])], after="step 2")
        assert on.cache.fence([0, 1, 2, 3]) == (0, 1, 2, 3), "no later step may write to them"
        on.compute(first, [0, 1])
        on.step(ended=["step 1"])
        on.until(lambda: on.seen.stored == [("a", 2)])
        assert on.lookup("x", second) == Found(0), "its step has not run"
        on.compute(second, [2, 3])
        on.step(ended=["step 2"])
        on.until(lambda: on.seen.stored == [("a", 2), ("b", 2)])
        for key, tokens in (("c", first), ("d", second)):
            assert on.lookup(key, tokens) == Found(2 * BLOCK)
            on.load(key, [12, 13])
            assert on.hold(tokens, [12, 13])


@pytest.mark.promise("A rank that dies fails its own copies and is named.")
def test_a_rank_that_is_killed_fails_what_it_owes_and_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with engine(tmp_path, ["cpu"] * 2) as on:
        on.save("a", TOKENS, HERE)
        assert on.lookup("b", TOKENS) == Found(len(TOKENS))
        other = list(range(500, 500 + BLOCK))
        load, save = on.plan_to_load("b", THERE), on.plan_to_save("c", other, [4])
        on.step(loads=[load], saves=[save], holds=True)
        assert on.lookup("d", TOKENS) == Found(len(TOKENS))
        victim = on.ranks[1].process
        victim.kill()
        victim.wait()
        on.step(holds=False)
        on.until(lambda: bool(on.seen.loaded) and "c" in on.seen.saved)
        assert on.seen.loaded == [("b", ((0, 1, 2, 3),))]
        assert on.cache.fence([*THERE, 4]) == ()
        assert ("c", 1) not in on.seen.stored
        found = on.lookup("e", TOKENS)
        assert found.num_tokens == 0
        assert f"rank 1 (process {victim.pid}) is lost" in str(found.problem)
        with pytest.raises(DeviceFailedError, match=f"process {victim.pid}"):
            on.plan_to_load("d", HERE)
        with pytest.raises(DeviceFailedError, match=f"process {victim.pid}"):
            on.plan_to_save("e", other, [5])
        for key in ("a", "b", "c", "d", "e"):
            on.cache.release(key)
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]


def test_a_rank_that_never_comes_is_lost_at_the_deadline(tmp_path: Path) -> None:
    socket_ = RankSocket(str(tmp_path / "s"), [GQA], connect_deadline_s=0.3)
    with a_cache(socket_) as cache:
        on = TpEngine(cache, [])
        on.plan_to_save("a", TOKENS, HERE)
        on.until(lambda: on.seen.saved == ["a"])
        assert "rank 0 is lost: it did not connect within 0.3 s" in str(
            on.lookup("b", TOKENS).problem
        )
        late = _planes()
        late.connect(str(tmp_path / "s"))
        assert "restart the engine" in str(_load(late).problem), "its slots are others' now"
        late.close()


@pytest.mark.parametrize("is_named", [False, True])
def test_copies_wait_for_all_that_the_stream_computes_unless_kernels_are_named(
    is_named: bool,
) -> None:
    latch, named, recorded = CopyLatch(), ManualEvent(), ManualEvent()
    device = CpuDevice(before_copy=latch)
    device.compute_stream = Mock(record=lambda: recorded)
    arrays = [np.zeros((4, plane.block_bytes), np.uint8) for plane in GQA.planes]
    planes = WorkerPlanes(device, EnginePlanes(GQA, arrays))
    planes.attach(device.allocate_host(GQA, 4))
    for event in (named, recorded):
        event.finish()
    planes.start_saves(plan_of(1, "offload", [0], [1]), [named] if is_named else [])
    planes.start_loads(plan_of(2, "load", [1], [2]), [named] if is_named else [])
    planes.close()
    assert [copy.after for copy in latch.seen] == [(named if is_named else recorded,)] * 2


def test_a_plan_that_comes_before_the_host_slots_waits_for_them(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    planes = _planes()
    with a_cache(RankSocket(path, [GQA])) as cache:
        on = TpEngine(cache, [])
        plan = on.plan_to_save("a", TOKENS[:BLOCK], [0])
        planes.start_saves(plan)
        assert planes.finished() == []
        assert not planes.is_attached
        with pytest.raises(GateTimeoutError):
            planes.wait_layer(plan.number, 0, timeout_s=0.01)
        planes.connect(path)
        planes.wait_layer(plan.number, 0, PATIENCE_S)
        report = _report(planes)
        assert report == Finished(plan.number)
        on.poll([report])
        on.until(lambda: on.seen.stored == [("a", 1)])
        planes.close()
    planes.close()


def test_plans_of_a_rank_that_reaches_nobody_are_refused_and_told(tmp_path: Path) -> None:
    planes = _planes()
    planes.start_loads(plan_of(1, "load", [0], [0]))
    planes.connect(str(tmp_path / "nobody"), connect_deadline_s=0.1)
    with pytest.raises(ConfigError, match="already"):
        planes.connect(str(tmp_path / "nobody"))
    with pytest.raises(TransferError, match="no scheduler listens"):
        planes.wait_layer(1, 0, PATIENCE_S)
    planes.start_saves(plan_of(2, "offload", [0], [0]))
    reports = planes.finished()
    assert [one.number for one in reports] == [1, 2]
    assert all("no scheduler listens" in str(one.problem) for one in reports)
    planes.close()


def test_a_rank_closes_at_any_moment_of_its_connecting(tmp_path: Path) -> None:
    """Before, while and after it is attached; what it was told before is told to be over."""
    path = str(tmp_path / "s")
    for delay_s in (0.0, 0.02, 0.05, 0.06):
        planes = _planes()
        planes.start_saves(plan_of(1, "offload", [0], [0]))
        planes.connect(path)
        with a_cache(RankSocket(path, [GQA])):
            until = time.monotonic() + delay_s
            while time.monotonic() < until:
                os.sched_yield()
            planes.close()
        [report] = planes.finished()
        assert report.problem in (None, "these planes are closed")
        planes.start_saves(plan_of(2, "offload", [0], [0]))
        assert planes.finished() == [Finished(2, 0, "these planes are closed")]


def test_a_rank_outlives_a_scheduler_that_is_killed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "s"
    code = (
        "import sys; from tests.embed.tp_engine import *\n"
        "with a_cache(RankSocket(sys.argv[1], [GQA])): sys.stdin.read()"
    )
    scheduler = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], cwd=ROOT, stdin=subprocess.PIPE
    )
    planes = _planes()
    planes.connect(str(path), PATIENCE_S)
    assert _load(planes) == Finished(1)
    scheduler.kill()
    scheduler.communicate()
    numbers = count(2)
    problem = ask(lambda: _load(planes, next(numbers)).problem)  # once it has heard of it
    assert "was lost" in problem
    planes.close()
    assert path.exists(), "it was killed"
    with a_cache(RankSocket(str(path), [GQA])):  # the next one takes its place
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]


def test_a_rank_that_closes_while_it_owes_a_plan_finishes_it_first(tmp_path: Path) -> None:
    with engine(tmp_path, ["cpu"]) as on:
        on.compute(TOKENS, HERE)
        on.save("first", list(range(700, 700 + BLOCK)), [7])  # it is attached
        [rank] = on.ranks
        plan = on.plan_to_save("a", TOKENS, HERE)
        reports = rank.step(StepMessage(saves=[plan], closes=True))
        assert reports == [Finished(plan.number)]
        on.poll(reports)
        on.until(lambda: ("a", len(HERE)) in on.seen.stored)
        on.until(lambda: "has closed its planes" in str(on.lookup("b", TOKENS).problem))


@pytest.mark.promise("Blocks that ranks copied before they ended are kept and stored.")
@pytest.mark.parametrize("is_reported", [False, True])
def test_copies_that_no_step_reports_any_more_are_kept_and_stored(
    tmp_path: Path, is_reported: bool
) -> None:
    """As vLLM ends: its workers close first, and its scheduler hears of no further step."""
    store, path = f"file://{tmp_path}/store", str(tmp_path / "ranks.sock")
    planes = _planes()
    with a_cache(
        RankSocket(path, [GQA]),
        cache=CacheSettings(block_size=BLOCK, storage_write=WritePolicy.WRITE_THROUGH),
        store=lambda: open_store(store, StoreSettings(), SystemClock()),
    ) as cache:
        planes.connect(path, PATIENCE_S)
        until(lambda: planes.is_attached, "the rank has its host slots")
        planes.start_saves(Steps(cache).plan_to_save("a", TOKENS, HERE))
        reports: list[Finished] = []
        while is_reported and not reports:  # and vLLM's worker has not handed it on
            reports = planes.finished()
        planes.close(reports)
    with hybrid([CacheGroup(GQA)], store, model="model") as on:
        assert on.lookup("b", TOKENS) == Found(len(TOKENS))
        on.cache.release("b")


def test_who_is_no_rank_of_this_cache_is_told_so_and_holds_nothing_up(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with a_cache(RankSocket(str(path), [GQA])) as cache:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(path))
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(100))
            assert stranger.recv(1) == b""
        both = side_by_side([GQA, GQA])
        wrong = WorkerPlanes(CpuDevice(), EnginePlanes(both, _arrays(both)))
        second = _planes(rank=1)
        for planes, why in ((wrong, "layout differs"), (second, "rank 1 was refused")):
            planes.connect(str(path))
            assert why in str(_load(planes).problem)
            planes.close()
        right = _planes()
        right.connect(str(path))
        assert _load(right) == Finished(1)
        with pytest.raises(ConfigError, match="in use"):
            a_cache(RankSocket(str(path), [GQA])).open()
        right.close()
        assert cache.verify().wait(PATIENCE_S) == []
    with pytest.raises(ConfigError, match="side_by_side"):
        a_cache(RankSocket(str(path), [GQA]), side_by_side([GQA, GQA]))


@pytest.mark.parametrize(
    "answer", [b"no record", seal(MAGIC, VERSION + 1, {}), seal(MAGIC, VERSION, Goodbye())]
)
def test_a_rank_refuses_plans_and_keeps_no_descriptor_after_an_answer_it_cannot_read(
    answer: bytes, tmp_path: Path
) -> None:
    path = str(tmp_path / "s")
    planes = _planes()
    with (
        open(os.memfd_create("sent-to-a-rank"), "rb") as memory,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        listener.bind(path)
        listener.listen()
        planes.connect(path)
        end, _ = listener.accept()
        with end:
            end.settimeout(PATIENCE_S)
            Link(end).send(answer, descriptors=[memory.fileno()])
            assert "rank 0 has no host slots" in str(_load(planes).problem)
            assert end.recv(1 << 16), "the hello"
            assert end.recv(1) == b"", "the rank has closed its end"
    planes.close()
    left = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    assert not [one for one in left if one.is_symlink() and "sent-to-a-rank" in os.readlink(one)]


def test_nothing_is_left_when_ranks_and_scheduler_have_gone(tmp_path: Path) -> None:
    def once(number: int) -> None:
        folder = tmp_path / str(number)
        folder.mkdir()
        with engine(folder, ["cpu"]) as on:
            on.save("a", TOKENS, HERE)
            if number == 1:
                on.ranks[0].process.send_signal(signal.SIGKILL)
                on.ranks[0].process.wait()

    once(0)
    before = len(os.listdir("/proc/self/fd"))
    once(1)
    once(2)
    assert len(os.listdir("/proc/self/fd")) <= before
    assert "tierkv-host-slots" not in Path("/proc/self/maps").read_text()


def _arrays(layout: Layout) -> list[np.ndarray]:
    return [np.zeros((BLOCKS, one.block_bytes), np.uint8) for one in layout.planes]


def _planes(rank: int = 0) -> WorkerPlanes:
    return WorkerPlanes(CpuDevice(), EnginePlanes(GQA, _arrays(GQA)), rank=rank)


def _report(planes: WorkerPlanes) -> Finished:
    [report] = ask(lambda: planes.finished() or None)
    return report


def _load(planes: WorkerPlanes, number: int = 1) -> Finished:
    """The report of a load, good or bad."""
    planes.start_loads(plan_of(number, "load", [0], [0]))
    return _report(planes)
