"""A service that is cancelled or broken while copies are on their way; errors that are asked for
again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress

import pytest

from tests.latch import CopyLatch, ManualEvent, finish, turns
from tests.transfer.test_mover import ids, memory_of
from tierkv.errors import TransferError
from tierkv.gpu.cpu import CpuDevice
from tierkv.transfer.mover import EventPoller, LayerGate, Mover, Submitted


class BodyError(Exception):
    pass


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_a_mover_whose_body_breaks_still_tells_everyone_of_the_end_of_copies(
    is_cancelled: bool,
) -> None:
    latch = CopyLatch()
    device = CpuDevice(before_copy=latch)
    told: list[str] = []
    waiting: list[asyncio.Task[None]] = []

    async def life(mover: Mover) -> None:
        async with mover.running():
            movement = mover.load(ids(0, 1), ids(0, 1))
            movement.when_ended(lambda: told.append("end"))
            waiting.append(group.create_task(movement.done()))
            gate = mover.gate([movement])
            waiting.append(group.create_task(gate.all_layers(100.0)))
            if not is_cancelled:
                raise BodyError
            await asyncio.Event().wait()

    latch.hold()
    with memory_of(device) as (planes, host):
        mover = Mover(device, planes, host)
        async with asyncio.TaskGroup() as group:
            living = group.create_task(_ended(life(mover)))
            await latch.until_held()
            if is_cancelled:
                living.cancel()
            await turns(20)
            assert not living.done(), "it waits for the copy"
            living.cancel()  # which a second cancel does not change
            await turns(20)
            assert not living.done()
            latch.release()
        assert told == ["end"]
        assert mover.num_in_flight == 0
        assert b"".join(array[1].tobytes() for array in planes.arrays) == bytes(host.array[1])


async def test_a_bug_of_one_who_hears_of_a_copys_end_keeps_it_from_nobody_else() -> None:
    told: list[str] = []

    async def life(mover: Mover) -> None:
        async with mover.running():
            movement = mover.load(ids(0), ids(0))
            movement.when_ended(lambda: 1 // 0)
            movement.when_ended(lambda: told.append("end"))
            await finish(movement.done())
            await asyncio.Event().wait()  # it ends with the poller

    device = CpuDevice()
    with memory_of(device) as (planes, host):
        mover = Mover(device, planes, host)
        with pytest.raises(ZeroDivisionError):
            await life(mover)
        assert told == ["end"]
        assert mover.num_in_flight == 0


async def _ended(life: Coroutine[None, None, None]) -> None:
    with suppress(asyncio.CancelledError, BodyError):
        await life


async def test_a_poller_whose_body_breaks_looks_on_until_all_events_are_done() -> None:
    poller, event = EventPoller(), ManualEvent()
    futures: list[asyncio.Future[None]] = []

    async def life() -> None:
        async with poller.running():
            futures.append(poller.done(event))
            raise BodyError

    async with asyncio.TaskGroup() as group:
        living = group.create_task(_ended(life()))
        await turns(20)
        assert not living.done()
        event.finish()
        await finish(futures[0])


async def test_a_failed_gate_that_is_asked_often_does_not_grow() -> None:
    """An error that is raised again has on it all that it came through before."""
    error = TransferError("the copy engine caught fire")
    gate = LayerGate(1, [Submitted((), error)], EventPoller())

    def ask() -> int:
        with pytest.raises(TransferError, match="caught fire"):
            gate.wait_on(CpuDevice().compute_stream, 0, 0.0)
        count, at = 0, error.__traceback__
        while at is not None:
            count, at = count + 1, at.tb_next
        return count

    once = ask()
    assert [ask() for _ in range(20)] == [once] * 20
