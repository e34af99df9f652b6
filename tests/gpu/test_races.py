"""Copies against kernels of a model: no torn block with every wait, torn ones without any of them.

Pattern: in round r every byte is r % 250 + 1, so a block of two values has been torn.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest

from tests.gpu.cuda import cupy_or_skip
from tierkv.cache.layout import attention_layout
from tierkv.gpu.protocol import BlockCopy, Direction, Event

pytest.importorskip("cupy", reason="CuPy is not installed")
from tierkv.gpu.cuda import adopted_stream
from tierkv.gpu.cuda_device import CudaDevice
from tierkv.gpu.cuda_lane import LaneSettings
from tierkv.gpu.units import UnitSizes

pytestmark = pytest.mark.gpu

LAYOUT = attention_layout(
    num_layers=4, num_kv_heads=8, head_dim=128, dtype="bfloat16", item_bytes=2, block_size=64
)
BLOCKS = 8
WAYS = {  # of an offload of so many blocks
    "as rectangles": LaneSettings(),
    "staged": LaneSettings(units=UnitSizes(straight_row=1 << 30)),
}
WAIT_S = 20.0
_DELAY = r"""
// Keeps its stream busy for about so many nanoseconds.
extern "C" __global__ void delay(unsigned int nanoseconds) {
    for (unsigned int spent = 0; spent < nanoseconds; spent += 1000) __nanosleep(1000);
}
"""


class Model:
    """Kernels on a stream of their own, with random delays between them."""

    def __init__(self, seed: int, lanes: LaneSettings | None = None) -> None:
        self.cupy: ModuleType = cupy_or_skip()
        self.stream = self.cupy.cuda.Stream(non_blocking=True)
        self.device = CudaDevice(compute_stream=self.stream.ptr, lanes=lanes)
        self.planes = self.device.allocate_planes(LAYOUT, BLOCKS)
        self.host = self.device.allocate_host(LAYOUT, 2 * BLOCKS)
        self.pause_us = 15  # at most, between two planes
        self.blocks = np.arange(BLOCKS, dtype=np.int32)
        self._rng = np.random.default_rng(seed)
        self._delay = self.cupy.RawKernel(_DELAY, "delay")
        self._others = self.cupy.cuda.Stream(non_blocking=True)

    def delay(self, most_us: int) -> None:
        length = np.uint32(self._rng.integers(0, most_us) * 1000)
        self._delay((1,), (1,), (length,), stream=self.stream)

    def other_reader(self, microseconds: int) -> Event:
        """The end of a kernel of somebody else's that is at work for so long."""
        length = np.uint32(microseconds * 1000)
        self._delay((1,), (1,), (length,), stream=self._others)
        return adopted_stream(self.device.gpu, self._others.ptr).record()

    def write(self, value: int) -> None:
        with self.stream:
            for plane in self.planes.arrays:
                plane.fill(value)
                self.delay(self.pause_us)

    def read(self, layer_events: tuple[Event, ...] | None) -> list[object]:
        """Smallest and largest byte of each plane, layer by layer as they arrive."""
        seen: list[object] = []
        with self.stream:
            for layer, indices in enumerate(LAYOUT.planes_of_layer):
                if layer_events is not None:
                    self.device.compute_stream.wait(layer_events[layer], WAIT_S)
                for index in indices:
                    array = self.planes.arrays[index]
                    seen += [array.min(), array.max()]
                    self.delay(self.pause_us)
        return seen

    def slots(self, number: int) -> np.ndarray:
        return self.blocks + np.int32(number % 2 * BLOCKS)

    def close(self) -> None:
        self.host.close()
        self.planes.close()
        self.device.close()


def value_of(number: int) -> int:
    return number % 250 + 1


def torn_offloads(rounds: int, missing: str | None, way: str) -> int:
    """A kernel writes, an offload follows, the next kernel overwrites; rounds that came torn."""
    model = Model(seed=rounds, lanes=WAYS[way])
    lane = model.device.open_lane(Direction.OFFLOAD, model.planes, model.host)
    torn = 0
    before: tuple[int, Event] | None = None

    def is_torn(number: int, event: Event) -> bool:
        event.block_until_done(WAIT_S)
        return bool((model.host.array[model.slots(number)] != value_of(number)).any())

    for number in range(rounds):
        model.delay({"offload waits": 3000, "kernel waits": 1}.get(missing or "", 200))
        model.write(value_of(number))
        after = () if missing == "offload waits" else (model.device.compute_stream.record(),)
        if missing == "kernel waits":  # so that the offload is late, however slow this process is
            after = (*after, model.other_reader(2000))
        events = lane.submit(BlockCopy(Direction.OFFLOAD, model.slots(number), model.blocks, after))
        if missing != "kernel waits":
            model.device.compute_stream.wait(events[-1], WAIT_S)
        if before is not None:
            torn += is_torn(*before)
        before = (number, events[-1])
    lane.close()
    model.close()
    return torn


def torn_loads(rounds: int, missing: str | None) -> int:
    """A load follows the last reader of its blocks, a kernel reads it layer by layer."""
    model = Model(seed=rounds)
    lane = model.device.open_lane(Direction.LOAD, model.planes, model.host)
    torn = 0
    read_before: tuple[Event, ...] = ()
    seen: list[tuple[int, list[object]]] = []
    last: list[Event] = []
    for number in range(rounds):
        if len(last) > 1:
            last[-2].block_until_done(WAIT_S)  # the slots written now were read by that load
        model.host.array[model.slots(number)] = value_of(number)
        after = () if missing == "load waits" else read_before
        if missing == "kernel waits":  # so that the load is late, however slow this process is
            after = (*after, model.other_reader(2000))
        events = lane.submit(BlockCopy(Direction.LOAD, model.slots(number), model.blocks, after))
        last.append(events[-1])
        model.delay({"load waits": 500, "kernel waits": 1}.get(missing or "", 50))
        model.pause_us = 500 if missing == "load waits" else 15
        seen.append((number, model.read(None if missing == "kernel waits" else events)))
        read_before = (model.device.compute_stream.record(),)
    model.stream.synchronize()
    last[-1].block_until_done(WAIT_S)
    for number, values in seen:
        torn += {int(value) for value in values} != {value_of(number)}  # type: ignore[call-overload]
    lane.close()
    model.close()
    return torn


@pytest.mark.parametrize("way", WAYS)
def test_no_offload_is_torn_in_a_thousand_rounds(way: str) -> None:
    assert torn_offloads(1000, None, way) == 0


def test_no_load_is_torn_in_a_thousand_rounds() -> None:
    assert torn_loads(1000, None) == 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("missing", ["offload waits", "kernel waits"])
def test_offloads_are_torn_where_a_wait_is_missing(missing: str, way: str) -> None:
    assert torn_offloads(100, missing, way) > 0


@pytest.mark.parametrize("missing", ["load waits", "kernel waits"])
def test_loads_are_torn_where_a_wait_is_missing(missing: str) -> None:
    assert torn_loads(100, missing) > 0
