"""Shared parts of stores: short reads and writes of scattered buffers, and threads for work.

A cancelled call waits only for work that uses its buffers.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.latch import finish, until
from tierkv.errors import StoreUnavailableError
from tierkv.storage.base import WorkerThreads, cut_buffers, read_fully, write_fully


@pytest.mark.parametrize("most_at_once", [1, 2, 7, 1_000])
def test_short_reads_and_writes_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_at_once: int
) -> None:
    content, lengths = os.urandom(300), [0, 1, 99, 0, 0, 150, 50]
    writev, preadv = os.writev, os.preadv

    def short_writev(fd: int, pieces: Sequence[memoryview]) -> int:
        return writev(fd, [b"".join(pieces)[:most_at_once]])

    def short_preadv(fd: int, pieces: Sequence[memoryview], offset: int) -> int:
        return preadv(fd, [pieces[0][:most_at_once]], offset)

    monkeypatch.setattr(os, "writev", short_writev)
    monkeypatch.setattr(os, "preadv", short_preadv)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        write_fully(fd, [piece for cut in cut_buffers([content], lengths) for piece in cut])
        buffers = [bytearray(length) for length in lengths[::-1]]
        assert read_fully(fd, [memoryview(buffer) for buffer in buffers])
        assert b"".join(buffers) == content
        assert not read_fully(fd, [memoryview(bytearray(301))])
    finally:
        os.close(fd)


async def test_a_cancelled_caller_waits_for_its_thread_but_not_for_one_it_has_not_got() -> None:
    threads = WorkerThreads("here", 1)
    is_stuck, release = threading.Event(), threading.Event()
    begun: list[str] = []

    def hang() -> None:
        is_stuck.set()
        assert release.wait(20)

    async with threads.running():
        stuck = asyncio.ensure_future(threads.run(hang))
        try:
            await until(is_stuck.is_set, "a thread in a call that does not return")
            later = asyncio.ensure_future(threads.run_each(begun.append, ["a", "b"]))
            await asyncio.sleep(0)
            later.cancel()
            with pytest.raises(asyncio.CancelledError):
                await finish(later)
            stuck.cancel()
            await asyncio.sleep(0.01)
            assert not stuck.done()
        finally:
            release.set()
        with pytest.raises(asyncio.CancelledError):
            await finish(stuck)
    assert begun == []


async def test_after_a_cancel_no_further_item_is_begun() -> None:
    threads = WorkerThreads("here", 1)
    release = threading.Event()
    begun: list[int] = []

    def work(number: int) -> None:
        begun.append(number)
        assert release.wait(20)

    async with threads.running():
        working = asyncio.ensure_future(threads.run_each(work, range(3)))
        await until(lambda: begun == [0], "the first item")
        working.cancel()
        await asyncio.sleep(0.01)
        assert not working.done()
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await finish(working)
    assert begun == [0]


async def test_items_that_fail_as_expected_keep_no_other_from_being_done() -> None:
    """More items fail than there are threads."""
    threads = WorkerThreads("here", 2)
    ended: list[int] = []

    def work(number: int) -> None:
        if number < 5:
            raise StoreUnavailableError("refused")
        ended.append(number)

    async with threads.running():
        with pytest.raises(StoreUnavailableError, match="refused"):
            await finish(threads.run_each(work, range(20)))
    assert sorted(ended) == [*range(5, 20)]
