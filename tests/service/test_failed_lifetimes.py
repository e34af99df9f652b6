"""A task that a service lives by fails: it is told at once, and closing does not wait for it."""

from __future__ import annotations

import asyncio
import logging

import numpy as np
import pytest

from tests.api.nodes import here
from tests.latch import PATIENCE_S, finish, until
from tests.world import world
from tierkv.api.node import Node
from tierkv.errors import ShuttingDownError, TransferError
from tierkv.gpu.protocol import Direction


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
    async def live() -> None:
        async with world() as on:
            on.latch.hold(Direction.OFFLOAD)
            on.service.mover.offload(np.array([0], np.int32), np.array([0], np.int32))
            await on.latch.until_held()
            waiting = on.service.mover.poller.done(BrokenEvent())
            await until(lambda: on.service.failure is not None, "its failure")
            assert "nobody thought of this" in str(on.service.failure)
            told = [one for one in caplog.records if one.levelno == logging.CRITICAL]
            assert told[0].exc_info is not None, "the exception itself, before anything is closed"
            assert on.service.is_draining
            on.latch.release()
            with pytest.raises(TransferError, match="nobody thought of this"):
                await waiting
            await asyncio.sleep(PATIENCE_S)

    with pytest.raises((RuntimeError, ExceptionGroup)) as failed:
        await finish(live())
    assert "nobody thought of this" in repr(failed.value)


async def test_a_node_that_has_failed_says_why_it_refuses() -> None:
    async def live() -> None:
        async with here() as on:
            waiting = on.node.service.mover.poller.done(BrokenEvent())
            await until(lambda: on.node.service.failure is not None, "its failure")
            with pytest.raises(ShuttingDownError, match="nobody thought of this"):
                await enter(on.node)
            await waiting

    with pytest.raises((RuntimeError, ExceptionGroup)):
        await finish(live())


async def enter(node: Node) -> None:
    async with node.work():
        pass
