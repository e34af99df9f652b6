"""Checksums are made in threads while other values are sent, and nothing is read afterwards."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tests.latch import PATIENCE_S, finish, turns, until
from tierkv.storage.base import WorkerThreads
from tierkv.storage.protocol import PutItem
from tierkv.transfer import storage_io
from tierkv.transfer.storage_io import made_ahead

NUM_THREADS = 2


async def test_a_cancel_waits_for_those_in_hand_and_begins_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(storage_io, "makes_ahead", True)
    may_go, begun, made = threading.Event(), list[int](), list[int]()

    def make() -> None:
        begun.append(threading.get_ident())
        assert may_go.wait(PATIENCE_S)
        made.append(threading.get_ident())

    async def send() -> None:
        items = [PutItem(f"t:f:{at}:0", (memoryview(b"x"),), complete=make) for at in range(10)]
        async with made_ahead(threads, items):
            await asyncio.Event().wait()

    threads = WorkerThreads("test", NUM_THREADS)
    async with threads.running():
        sending = asyncio.create_task(send())
        await until(lambda: len(begun) == NUM_THREADS)
        sending.cancel()
        await turns(20)
        assert not sending.done()
        may_go.set()
        with pytest.raises(asyncio.CancelledError):
            await finish(sending)
    assert len(made) == len(begun) == NUM_THREADS
