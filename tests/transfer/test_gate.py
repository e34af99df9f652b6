"""A gate opens layer by layer, and tells every waiter the same, early or late."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future

import pytest

from tests.latch import ManualEvent, finish, turns
from tierkv.errors import DeviceFailedError, GateTimeoutError, TransferError
from tierkv.gpu.cpu import CpuDevice
from tierkv.gpu.protocol import Event
from tierkv.transfer.mover import EventPoller, LayerGate, Submitted

LAYERS = 3


@pytest.fixture
async def poller() -> AsyncIterator[EventPoller]:
    poller = EventPoller()
    async with poller.running():
        yield poller
        for event in MADE:  # of a test that failed: the poller would wait for it
            event.finish()
        MADE.clear()


MADE: list[ManualEvent] = []


def events() -> tuple[ManualEvent, ...]:
    MADE.extend(ManualEvent() for _ in range(LAYERS))
    return tuple(MADE[-LAYERS:])


async def test_a_failed_layer_fails_for_everyone_each_time_and_earlier_layers_stay_open(
    poller: EventPoller,
) -> None:  # fault 5
    layers = events()
    gate = LayerGate(LAYERS, [Submitted(layers)], poller)
    layers[0].finish()
    error = TransferError("the copy broke", blocks=(4, 5))
    for event in layers[1:]:
        event.finish(error)
    for _ in range(2):
        await finish(gate.layer(0, 20))
        for layer in (1, 2):
            with pytest.raises(TransferError, match="broke") as raised:
                await finish(gate.layer(layer, 20))
            assert raised.value.blocks == (4, 5)
            with pytest.raises(TransferError, match="broke"):
                gate.is_open(layer)
    with pytest.raises(TransferError, match="broke"):
        await finish(gate.all_layers(100.0))


async def test_a_gate_with_nothing_behind_it_is_open(poller: EventPoller) -> None:  # fault 5
    gate = LayerGate(LAYERS, [], poller)
    for layer in range(LAYERS):
        await finish(gate.layer(layer, 20))
        assert gate.is_open(layer)
        gate.wait_on(CpuDevice().compute_stream, layer, 0.0)
    await finish(gate.all_layers(100.0))


async def test_a_copy_that_is_not_submitted_yet_is_not_open(poller: EventPoller) -> None:
    submission: Future[tuple[Event, ...]] = Future()
    gate = LayerGate(LAYERS, [submission], poller)
    assert not gate.is_open(0)
    with pytest.raises(GateTimeoutError):
        await gate.layer(0, 0.001)
    submission.set_exception(DeviceFailedError("the device is gone"))
    for _ in range(2):
        with pytest.raises(DeviceFailedError):
            await finish(gate.layer(0, 20))


async def test_an_engines_thread_waits_on_its_stream(poller: EventPoller) -> None:
    layers = events()
    gate = LayerGate(LAYERS, [Submitted(layers)], poller)
    stream = CpuDevice().compute_stream
    waiting = asyncio.ensure_future(asyncio.to_thread(gate.wait_on, stream, 1, 20.0))
    await turns(3)
    assert not waiting.done()
    layers[0].finish()
    layers[1].finish()
    await finish(waiting)
    with pytest.raises(GateTimeoutError):
        await asyncio.to_thread(gate.wait_on, stream, 2, 0.001)
    layers[2].finish(TransferError("broke"))
    with pytest.raises(TransferError, match="broke"):
        await asyncio.to_thread(gate.wait_on, stream, 2, 20.0)
    unsubmitted = LayerGate(LAYERS, [Future()], poller)
    with pytest.raises(GateTimeoutError, match="was not submitted"):
        await asyncio.to_thread(unsubmitted.wait_on, stream, 0, 0.001)


@pytest.mark.parametrize("last", [0, 1])
async def test_every_movement_behind_a_gate_is_waited_for_in_each_of_its_ways(
    poller: EventPoller, last: int
) -> None:
    """By the loop and by an engine's thread, at the last layer."""
    both = [events(), events()]
    gate = LayerGate(LAYERS, [Submitted(layers) for layers in both], poller)
    stream = CpuDevice().compute_stream
    for event in (*both[1 - last], *both[last][:-1]):
        event.finish()
    assert not gate.is_open(LAYERS - 1)
    for wait in (
        asyncio.to_thread(gate.wait_on, stream, LAYERS - 1, 0.01),
        gate.layer(LAYERS - 1, 0.01),
        gate.all_layers(0.01),
    ):
        with pytest.raises(GateTimeoutError):
            await wait
    both[last][-1].finish()
    await asyncio.to_thread(gate.wait_on, stream, LAYERS - 1, 20.0)
    await finish(gate.all_layers(100.0))


async def test_the_movements_behind_a_gate_have_the_time_of_a_wait_together(
    poller: EventPoller,
) -> None:
    class Slow:
        """A stream that takes a moment, and notes how long it may take."""

        def __init__(self) -> None:
            self.timeouts: list[float] = []

        def record(self) -> ManualEvent:
            return ManualEvent()

        def wait(self, event: object, timeout_s: float) -> None:
            self.timeouts.append(timeout_s)
            time.sleep(0.02)

    stream = Slow()
    gate = LayerGate(LAYERS, [Submitted(events()) for _ in range(3)], poller)
    await asyncio.to_thread(gate.wait_on, stream, 0, 20.0)
    first, second, third = stream.timeouts
    assert first <= 20.0
    assert second <= first - 0.02
    assert third <= second - 0.02
