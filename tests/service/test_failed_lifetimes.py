"""A task that a service lives by fails: it is told at once, and closing does not wait for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable

import numpy as np
import pytest

from tests.api.nodes import here
from tests.latch import PATIENCE_S, finish
from tests.world import world
from tierkv.api.node import Node
from tierkv.errors import ShuttingDownError, TransferError
from tierkv.gpu.protocol import Direction
from tierkv.service import Service


class BrokenEvent:
    """Its first look is good, the next one is a fault in our own code."""

    def __init__(self) -> None:
        self.num_looks = 0
        self.line: object = self
        self.position = 0

    @property
    def is_done(self) -> bool:
        self.num_looks += 1
        if self.num_looks > 1:
            raise RuntimeError("nobody thought of this")
        return False

    def block_until_done(self, timeout_s: float) -> None:
        raise RuntimeError("nobody thought of this")


async def test_closing_does_not_wait_for_copies_that_only_the_dead_task_could_have_settled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lives: list[tuple[Service, Awaitable[None]]] = []

    async def live() -> None:
        async with world() as on:
            on.latch.hold(Direction.OFFLOAD)
            on.service.mover.offload(np.array([0], np.int32), np.array([0], np.int32))
            await on.latch.until_held()
            lives.append((on.service, on.service.mover.poller.done(BrokenEvent())))
            await asyncio.sleep(PATIENCE_S)  # it is cancelled

    with pytest.raises((RuntimeError, ExceptionGroup)) as failed:
        await finish(live())
    assert "nobody thought of this" in repr(failed.value)
    [(service, waiting)] = lives
    assert "nobody thought of this" in str(service.failure)
    told = [one for one in caplog.records if one.levelno == logging.CRITICAL]
    assert told[0].exc_info is not None, "the exception itself, before anything is closed"
    with pytest.raises(TransferError, match="nobody thought of this"):
        await waiting


async def test_a_node_that_has_failed_says_why_it_refuses() -> None:
    refused: list[str] = []

    async def live() -> None:
        async with here() as on:
            waiting = on.node.service.mover.poller.done(BrokenEvent())
            try:
                await asyncio.sleep(PATIENCE_S)  # it is cancelled
            finally:
                with pytest.raises(ShuttingDownError) as error:
                    await enter(on.node)
                refused.append(str(error.value))
                with pytest.raises(TransferError):
                    await waiting

    with pytest.raises((RuntimeError, ExceptionGroup)):
        await finish(live())
    assert ["nobody thought of this" in one for one in refused] == [True]


async def enter(node: Node) -> None:
    async with node.work():
        pass
