"""Reads and writes of scattered buffers, whatever number of bytes the kernel moves at a time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tierkv.storage.base import read_fully, write_fully


def cut(content: bytes, lengths: Sequence[int]) -> list[bytes]:
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    return [content[at : at + length] for at, length in zip(starts, lengths, strict=True)]


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
        write_fully(fd, cut(content, lengths))
        buffers = [bytearray(length) for length in lengths[::-1]]
        assert read_fully(fd, [memoryview(buffer) for buffer in buffers])
        assert b"".join(buffers) == content
        assert not read_fully(fd, [memoryview(bytearray(301))])
    finally:
        os.close(fd)
