"""Checksums are made in threads while other values are sent, and nothing is read afterwards."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import pytest

from tests.latch import PATIENCE_S, finish, turns, until
from tests.transfer.test_storage_io import ground, ids
from tierkv.cache.layout import layered
from tierkv.storage.base import WorkerThreads
from tierkv.storage.protocol import GetStatus, PutItem, PutStatus
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


@pytest.mark.parametrize("ahead", [True, False])
async def test_what_is_stored_is_the_same_byte_for_byte(
    monkeypatch: pytest.MonkeyPatch,
    ahead: bool,
) -> None:
    monkeypatch.setattr(storage_io, "makes_ahead", ahead)
    layout = layered(4, [("latent", "bfloat16", 32 << 10)], 4)  # 512 KiB a block
    async with ground(layout, 4 * 6, sends_from_loop=True) as here:
        assert layout.block_bytes == 512 << 10
        for _ in range(20):
            put = await here.io.flush(here.keys, ids(*range(6)))
            assert {one.status for one in put} == {PutStatus.STORED}
            got = await here.io.fetch(here.keys, ids(*range(6, 12)))
            assert {one.status for one in got} == {GetStatus.HIT}
            assert (here.host.array[:6] == here.host.array[6:12]).all()
            await here.store.delete([here.names.name(key) for key in here.keys])
