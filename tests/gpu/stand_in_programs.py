"""Programs on the stand-in for a GPU. Run as `python -m tests.gpu.stand_in_programs NAME SEED`."""

from __future__ import annotations

import gc
import mmap
import os
import random
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import product
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from click.testing import CliRunner

from tests.embed.engine import until
from tests.gpu.cuda import WAIT_S, opened
from tests.gpu.stand_in import ILLEGAL_ADDRESS, NOT_REGISTERED, CUDAError, Gpu
from tests.gpu.stand_in_cupy import Tensor, install
from tests.gpu.stand_in_world import LAYOUTS, ODD, SMALL, World, new_device
from tierkv.cache.keys import Fingerprint, Prompt, pack
from tierkv.cache.layout import Layout, layered
from tierkv.cli.doctor import doctor
from tierkv.embed import EngineCache, RankSocket, WorkerPlanes
from tierkv.embed.engine_cache import Polled
from tierkv.errors import (
    ConfigError,
    DeviceFailedError,
    GateTimeoutError,
    LayoutError,
    TransferError,
)
from tierkv.gpu import open_device
from tierkv.gpu.protocol import BlockCopy, Direction, Event, Planes
from tierkv.gpu.units import Order, UnitSizes
from tierkv.ranks.memory import SharedSlots, shared_memory, side_by_side
from tierkv.sched.settings import CacheSettings

OUT_OF_MEMORY = 2


def random_copies(gpu: Gpu, seed: int) -> None:
    """Copies on both lanes and within the device, and an engine that writes blocks, each behind
    those before it by events alone, against the same done with NumPy one after another."""
    for number in range(6):
        rng = random.Random(f"{seed} {number}")
        world = World(gpu, rng, rng.choice(LAYOUTS), rng.choice((7, 40, 150)))
        for _ in range(25):
            rng.choice((world.copy, world.copy, world.write, world.copy_within))()
        world.close()
        del world
        _everything_is_given_back(gpu)


def copies_that_begin_as_rectangles(gpu: Gpu, seed: int) -> None:
    """Of as many blocks as fit into the first unit, of more, and all of a copy: each of them comes,
    once what they wait for is there."""
    for layout in LAYOUTS:
        few = UnitSizes(first=3 * layout.block_bytes, min_unit=1, share=1, straight_row=1)
        for num_blocks in (5, 12, 13, 24, 25, 40):
            for direction, units in product(Direction, (UnitSizes(straight_row=1), few)):
                _copy_after_kernels(gpu, direction, layout, num_blocks, units)
    _everything_is_given_back(gpu)


def _copy_after_kernels(
    gpu: Gpu, direction: Direction, layout: Layout, num_blocks: int, units: UnitSizes
) -> None:
    device, count = new_device(units=units), 40
    blocks = np.arange(count, dtype=np.int32)[::-1][:num_blocks]
    slots = blocks[::-1]
    planes = device.allocate_planes(layout, count)
    with opened(device, planes, count, direction, order=Order.BLOCKS) as on:
        host = on.host.array
        random_bytes = np.random.default_rng(num_blocks).integers(1, 256, host.shape, np.uint8)
        host[:] = random_bytes if direction is Direction.LOAD else 0
        release = gpu.hold(0)
        end = on.submit(direction, slots, blocks, device.compute_stream.record())[-1]
        for array, start in zip(planes.arrays, layout.offsets, strict=True):
            array[:] = random_bytes[:, start : start + array.shape[1]]
            array[:] *= np.uint8(direction is Direction.OFFLOAD)
        release()
        end.block_until_done(WAIT_S)
        moved, still = np.concatenate(planes.arrays, axis=1), host
        if direction is Direction.OFFLOAD:
            moved, still, blocks, slots = still, moved, slots, blocks
        assert (moved[blocks] == still[slots]).all()
        others = np.setdiff1d(np.arange(count), blocks)
        assert not moved[others].any()


def tensors_in_allocations_of_their_own(gpu: Gpu, seed: int) -> None:
    """An engine's tensors, equally far apart: each an allocation of its own, or all in one pool, or
    pairs. Copies that go straight (1 and 4 blocks) and others (all 12) bring every block."""
    sizes = {"straight": UnitSizes(straight_row=1), "units": SMALL}
    for num_planes, planes_each, units in product((3, 8), (1, 2, 8), sizes):
        _copy_adopted(gpu, num_planes, planes_each, sizes[units])
    _everything_is_given_back(gpu)


def _copy_adopted(gpu: Gpu, num_planes: int, planes_each: int, units: UnitSizes) -> None:
    layout, count = layered(1, [("key", "uint8", 1024)], num_layers=num_planes), 12
    pitch = count * 1024
    raw = np.zeros(num_planes * pitch + 1024, np.uint8)
    first = raw.ctypes.data + -raw.ctypes.data % 512
    for at in range(0, num_planes, planes_each):
        size = min(planes_each, num_planes - at) * pitch
        gpu.memory[first + at * pitch] = np.empty(size + 512, np.uint8)
    device = new_device(units=units)
    tensors = [Tensor(first + at * pitch, (count, 1024)) for at in range(num_planes)]
    numbers = np.random.default_rng(num_planes)
    with opened(device, device.adopt_planes(layout, tensors), 2 * count) as on:
        for size in (1, 4, count):
            there, back = (numbers.permutation(count).astype(np.int32)[:size] for _ in range(2))
            blocks = numbers.integers(0, 256, (num_planes, count, 1024), np.uint8)
            for array, rows in zip(on.planes.arrays, blocks, strict=True):
                array[:] = rows
            slots = there + np.int32(count)
            on.copy(Direction.OFFLOAD, slots, there)
            on.copy(Direction.LOAD, slots, back)
            blocks[:, back] = blocks[:, there]
            assert (np.stack(on.planes.arrays) == blocks).all()
    for at in range(0, num_planes, planes_each):
        del gpu.memory[first + at * pitch]


def calls_that_fail(gpu: Gpu, seed: int) -> None:
    """Each kind of call fails once, at some time: what is on its way ends, well or not, in no
    longer than it takes, and everything is given back."""
    rng = random.Random(seed)
    for call in ("malloc", "stream", "event", "record", "wait", "launch", "copy", "register"):
        for status in (OUT_OF_MEMORY, ILLEGAL_ADDRESS):
            gpu.fail = {call: [*[0] * rng.randrange(12), status]}
            _copies_that_may_fail(gpu)
            gpu.fail.clear()
            _everything_is_given_back(gpu)
    # What should wait for the end of a broken copy fails as well, once the lanes are open.
    gpu.fail = {"copy": [0] * 12 + [OUT_OF_MEMORY], "synchronize": [0] * 10 + [OUT_OF_MEMORY]}
    _copies_that_may_fail(gpu, copies=1)
    assert not any(gpu.fail.values()), "they failed as they were told"


def _copies_that_may_fail(gpu: Gpu, copies: int = 3) -> None:
    closes: list[Callable[[], None]] = []
    events: list[Event] = []
    ids = np.arange(40, dtype=np.int32)
    try:
        device = new_device(staging_bytes=1, units=SMALL)
        closes.append(device.close)
        planes = device.allocate_planes(ODD, len(ids))
        closes.append(planes.close)
        host = device.allocate_host(ODD, len(ids))
        closes.append(host.close)
        for direction in Direction:
            lane = device.open_lane(direction, planes, host)
            closes.append(lane.close)
            for _ in range(copies):
                events += lane.submit(BlockCopy(direction, ids, ids))
    except (ConfigError, TransferError):
        pass
    for event in events:
        with suppress(TransferError):
            try:
                event.block_until_done(WAIT_S)
            except GateTimeoutError:
                sys.exit("a copy neither ends nor fails")
    for close in reversed(closes):
        with suppress(TransferError):  # where it is the waiting that fails
            close()


def memory_that_is_refused(gpu: Gpu, seed: int) -> None:
    """A chunk that cannot be pinned: the first one refuses the memory, whatever the reason is, a
    later one only its slots. Too many blocks for the GPU are a setting that is wrong."""
    from tierkv.gpu.pinned import PinnedSlots  # noqa: PLC0415

    device = new_device()
    layout = layered(1, [("key", "uint8", 4096)], num_layers=1)

    def pinned() -> PinnedSlots:
        return PinnedSlots(device.gpu, layout, 8, chunk_bytes=1 << 14, num_threads=1)

    gpu.fail = {"register": [OUT_OF_MEMORY]}
    _expect(ConfigError, "cache.host_blocks", pinned)
    gpu.fail = {"register": [0, OUT_OF_MEMORY]}
    host = pinned()
    _expect(TransferError, "cache.host_blocks", host.wait_until_pinned)
    assert host.pinned_bytes == 1 << 14
    host.wait_until_pinned(np.arange(4, dtype=np.int32))
    assert not host.is_pinned
    host.close()
    gpu.fail = {"malloc": [OUT_OF_MEMORY]}
    _expect(ConfigError, "cache.device_blocks", lambda: device.allocate_planes(layout, 8))
    device.gpu.failure = "the GPU is lost"
    _expect(DeviceFailedError, "is lost", pinned)
    gc.collect()
    _everything_is_given_back(gpu)


def memory_of_an_engine_is_pinned_where_a_copy_waits(gpu: Gpu, seed: int) -> None:
    """One thread pins it, slot after slot, and next of all what a copy needs."""
    from tierkv.gpu.pinned import PinnedSlots  # noqa: PLC0415

    device, order = new_device(), list[int]()
    second, goes_on, register = threading.Event(), threading.Event(), gpu.register
    mapped = mmap.mmap(-1, 40 * 4096)
    array = np.frombuffer(mapped, np.uint8).reshape(40, 4096)
    first: int = array.ctypes.data

    def registered(address: int, size: int) -> int:
        order.append((address - first) // size)
        if len(order) == 2:
            second.set()
            assert goes_on.wait(60)
        return register(address, size)

    gpu.register = registered  # type: ignore[method-assign]
    layout = layered(1, [("key", "uint8", 4096)], num_layers=1)
    host = PinnedSlots(device.gpu, layout, 40, array=array, chunk_bytes=1 << 14)
    assert second.wait(60)
    assert order == [0, 1], "no second thread pins beside"
    copy = threading.Thread(target=host.wait_until_pinned, args=(np.array([37, 25], np.int32),))
    copy.start()
    while len(host._wanted) < 2:  # noqa: SLF001 - nothing else shows that it waits
        os.sched_yield()
    goes_on.set()
    copy.join()
    host.wait_until_pinned()
    assert order == [0, 1, 6, 9, 2, 3, 4, 5, 7, 8]
    assert host.is_pinned
    host.close()
    gpu.register = register  # type: ignore[method-assign]
    del array
    _everything_is_given_back(gpu)


def slots_that_others_have_mapped(gpu: Gpu, seed: int) -> None:
    """A lane pins them, once for all lanes, while it uses them; what lies beside a rank's piece
    stays as it is, and the memory is its owner's to close."""
    for before in (0, 3, 4096, 5000):
        _copy_pieces(gpu, before)
        _everything_is_given_back(gpu)


def _copy_pieces(gpu: Gpu, before: int) -> None:
    count, size = 40, before + ODD.block_bytes + 77
    memory = shared_memory(count * size)
    whole = SharedSlots(os.dup(memory), count, size, slice(0, size))
    piece = SharedSlots(memory, count, size, slice(before, before + ODD.block_bytes))
    whole.array[:] = np.random.default_rng(before).integers(1, 256, whole.array.shape, np.uint8)
    expected = whole.array.copy()
    device = new_device()
    planes = device.allocate_planes(ODD, count)
    lanes = {way: device.open_lane(way, planes, piece) for way in Direction}
    assert len(gpu.registered) == 1
    ids = np.arange(count, dtype=np.int32)
    loaded = lanes[Direction.LOAD].submit(BlockCopy(Direction.LOAD, ids, ids[::-1]))[-1]
    copy = BlockCopy(Direction.OFFLOAD, ids[:30], ids[5:35], (loaded,))
    lanes[Direction.OFFLOAD].submit(copy)[-1].block_until_done(WAIT_S)
    mine = slice(before, before + ODD.block_bytes)
    expected[:30, mine] = expected[ids[::-1][5:35], mine]
    assert np.array_equal(whole.array, expected)
    lanes[Direction.LOAD].close()
    assert gpu.registered, "the other lane uses them"
    lanes[Direction.OFFLOAD].close()
    lanes[Direction.OFFLOAD].close()
    assert not gpu.registered
    for made in (piece, whole, planes, device):
        made.close()


def an_engine_that_owns_its_blocks(gpu: Gpu, seed: int) -> None:
    """Its tensors on the GPU, its ranks at a socket: what they save they load, every byte."""
    for num_ranks in (0, 1, 2):
        _save_and_load(gpu, num_ranks)
        _everything_is_given_back(gpu)


def _save_and_load(gpu: Gpu, num_ranks: int) -> None:
    """num_ranks: at a socket; 0 is one in the same process without."""
    layout, count, tokens = LAYOUTS[2], 16, list(range(14))
    devices = [new_device() for _ in range(max(num_ranks, 1))]
    made = [device.allocate_planes(layout, count) for device in devices]
    ranks = [
        WorkerPlanes(device, planes, rank=rank)
        for rank, (device, planes) in enumerate(zip(devices, made, strict=True))
    ]
    whole = side_by_side([layout] * len(ranks))
    with TemporaryDirectory() as folder:
        path = f"{folder}/s"
        for rank in ranks[:num_ranks]:
            rank.connect(path)
        with EngineCache(
            Fingerprint("model", whole),
            [whole],
            host_bytes=64 * whole.block_bytes,
            cache=CacheSettings(block_size=layout.block_size),
            planes=None if num_ranks else ranks[0],
            ranks=RankSocket(path, [layout] * num_ranks) if num_ranks else None,
        ) as cache:
            prompt = Prompt(pack(tokens), layout.block_size)
            expected = _filled(made, num_ranks)
            plan = cache.save("a", prompt, [[0, 1, 2, 3]])
            assert plan is not None
            for rank in ranks:
                rank.start_saves(plan)
            until(lambda: bool(_polled(cache, ranks[:num_ranks]).stored))
            until(lambda: cache.lookup("b", prompt) is not None)
            plan = cache.load("b", [[9, 8, 7, 6]])
            assert plan is not None
            for rank in ranks:
                rank.start_loads(plan)
                for layer in range(layout.num_layers):
                    rank.wait_layer(plan.number, layer, WAIT_S)
            until(lambda: _polled(cache, ranks[:num_ranks]).loaded == [("b", ())])
            for planes, blocks in zip(made, expected, strict=True):
                found = np.concatenate(planes.arrays, axis=1)
                assert np.array_equal(found[[9, 8, 7, 6]], blocks[:4])
            for rank in ranks:
                rank.close()
    for planes in made:
        planes.close()
    for device in devices:
        device.close()


def _filled(made: Sequence[Planes], seed: int) -> list[np.ndarray]:
    """Of each its blocks, in the order of a host slot."""
    numbers = np.random.default_rng(seed)
    for planes in made:
        for array in planes.arrays:
            array[:] = numbers.integers(0, 256, array.shape, np.uint8)
    return [np.concatenate(planes.arrays, axis=1) for planes in made]


def _polled(cache: EngineCache, ranks: Sequence[WorkerPlanes]) -> Polled:
    return cache.poll([report for rank in ranks for report in rank.finished()])


def memory_that_is_closed(gpu: Gpu, seed: int) -> None:
    """A copy that comes when its slots or planes are closed fails, and touches nothing: also on a
    lane that has moved blocks before, and so would begin at once."""
    for count in (1, 4):
        for closed in ("planes", "host"):
            _copy_when_closed(closed, count)
            assert not gpu.lost
    _everything_is_given_back(gpu)


def _copy_when_closed(closed: str, count: int) -> None:
    ids = np.arange(count, dtype=np.int32)
    device = new_device()
    planes, host = device.allocate_planes(ODD, 8), device.allocate_host(ODD, 8)
    lane = device.open_lane(Direction.LOAD, planes, host)
    copy = BlockCopy(Direction.LOAD, ids, ids)
    lane.submit(copy)[-1].block_until_done(WAIT_S)
    first, then = (planes, host) if closed == "planes" else (host, planes)
    first.close()
    gc.collect()
    late = lane.submit(copy)[-1]
    _expect(TransferError, "closed", lambda: late.block_until_done(WAIT_S))
    if closed == "planes":
        _expect(LayoutError, "closed", lambda: device.copy_blocks(planes, ids, ids + np.int32(4)))
    lane.close()
    then.close()
    device.close()


def errors(gpu: Gpu, seed: int) -> None:
    """Which errors cost the GPU, and which only the call."""
    from tierkv.gpu.cuda import Gpu as Ours  # noqa: PLC0415 - once the stand-in is there

    for status, is_lost in {2: False, 226: True, 700: True, 719: True}.items():
        assert isinstance(Ours(0).translated(CUDAError(status)), DeviceFailedError) is is_lost
    for status in (1, 711, 712, NOT_REGISTERED, 720):
        ours = Ours(0)
        assert not isinstance(ours.translated(CUDAError(status)), DeviceFailedError)
        assert ours.failure is None


class _Fp8Tensor:
    """As torch's are: in neither of the two ways can they be had."""

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        raise KeyError("torch.float8_e4m3fn")

    def __dlpack__(self, **_: object) -> object:
        raise BufferError("float8 types are not supported by dlpack")

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def what_cannot_be_opened(gpu: Gpu, seed: int) -> None:
    """A GPU that is not there, or a tensor that cannot be adopted, is refused with what to do."""
    _expect(ConfigError, "there is no GPU 99", lambda: open_device("cuda:99"))
    device, layout = new_device(), layered(1, [("key", "float8", 1)], num_layers=1)
    _expect(ConfigError, "a view of its bytes", lambda: device.adopt_planes(layout, [_Fp8Tensor()]))
    point = np.array(7, np.uint8)
    _expect(LayoutError, "no dimensions", lambda: device.adopt_planes(layout, [point]))


def hardware_queues(gpu: Gpu, seed: int) -> None:
    """A lane beside an engine that has computed before needs as many as the driver makes."""
    from tierkv.gpu.cuda_device import num_queues  # noqa: PLC0415 - once the stand-in is there

    told = {None: 8, "": 8, "1": 1, "32": 32, "99": 32, "0": 1, "many": 8, "-4": 8}
    for value, expected in told.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
            if value is not None:
                patch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", value)
            assert num_queues() == expected, value


def a_doctor(gpu: Gpu, seed: int) -> None:
    """A GPU that cannot be used is bad news of this GPU; one that can is measured."""
    gpu.fail = {"properties": [46]}
    found = CliRunner().invoke(doctor, ["--storage", "none"])
    assert found.exit_code == 1
    assert "GPU 0 is lost" in found.stdout
    assert "nvidia-smi" in found.stdout
    assert "driver 13.0" in found.stdout
    found = CliRunner().invoke(doctor, ["--storage", "none"])
    assert found.exit_code == 0, found.output
    assert "GPU 0 device to host" in found.stdout
    assert "[bad]" not in found.stdout


def _expect(kind: type[Exception], words: str, call: Callable[[], object]) -> None:
    with pytest.raises(kind, match=words):
        call()


def _everything_is_given_back(gpu: Gpu) -> None:
    was_lost, gpu.lost = bool(gpu.lost), 0
    gc.collect()
    if was_lost:  # what a lost GPU had is gone with it
        gpu.registered.clear()
    assert not gpu.memory
    assert not gpu.registered
    names = [one.name for one in threading.enumerate() if one.name.startswith("tierkv")]
    # Every event loop of a process shares the threads of `in_thread`, which stay.
    assert not [name for name in names if not name.startswith("tierkv-shared")]


if __name__ == "__main__":
    _, name, seed = sys.argv
    number = int(seed)
    stand_in = install(number)
    globals()[name](stand_in, number)
    sys.stdout.write("as promised\n")
