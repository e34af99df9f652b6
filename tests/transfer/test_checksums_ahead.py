"""Checksums are made in threads while other values are sent, and nothing is read afterwards."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import pytest

from tests.latch import PATIENCE_S, finish, turns, until
from tierkv.storage.base import WorkerThreads
from tierkv.storage.protocol import PutItem
from tierkv.transfer import storage_io
from tierkv.transfer.storage_io import made_ahead

NUM_THREADS = 2


class Values:
    """Each is made once a test lets it; `made` says by whom."""

    def __init__(self, count: int) -> None:
        self.may_go = threading.Event()
        self.begun: list[int] = []
        self.made: dict[int, int] = {}
        self.items = [
            PutItem(f"t:f:{at}:0", (memoryview(b"x"),), complete=self._maker(at))
            for at in range(count)
        ]

    def _maker(self, at: int) -> Callable[[], None]:
        def make() -> None:
            self.begun.append(at)
            assert self.may_go.wait(PATIENCE_S)
            self.made[at] = threading.get_ident()

        return make


@pytest.fixture
async def threads(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[WorkerThreads]:
    monkeypatch.setattr(storage_io, "makes_ahead", True)
    threads = WorkerThreads("test", NUM_THREADS)
    async with threads.running():
        yield threads


async def test_a_cancel_waits_for_those_in_hand_and_begins_no_other(
    threads: WorkerThreads,
) -> None:
    values = Values(10)

    async def send() -> None:
        async with made_ahead(threads, values.items):
            await asyncio.Event().wait()

    sending = asyncio.create_task(send())
    await until(lambda: len(values.begun) == NUM_THREADS)
    sending.cancel()
    await turns(20)
    assert not sending.done()
    values.may_go.set()
    with pytest.raises(asyncio.CancelledError):
        await finish(sending)
    assert len(values.made) == len(values.begun) == NUM_THREADS
