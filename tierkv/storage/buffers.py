"""Bytes between values and the caller's scattered buffers, without a copy in between."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice

from tierkv.storage.protocol import Buffer, Digest

# As much as Linux reads ahead, unless told otherwise. Values of 2 MiB that were not in memory came
# at 1.4 GB/s in such pieces, with their checksums, and at 0.9 in one, when no byte of what was read
# ahead is asked for before all of it is there; those in memory at 7.8 and 11.
_READ_BYTES = 128 << 10
# Linux refuses more pieces than this in one call (UIO_MAXIOV).
_MAX_PIECES = 1024


def copy_into(content: Buffer, views: Sequence[memoryview]) -> None:
    """Fill `views`, in order, with `content`, which is exactly as long as they are together."""
    source, at = memoryview(content), 0
    for view in flat(views):
        view[:] = source[at : at + len(view)]
        at += len(view)
    assert at == len(source), "the caller compares the lengths first"


def flat(buffers: Iterable[Buffer]) -> list[memoryview]:
    """Each buffer as plain bytes; empty ones are left out (they cannot be cast)."""
    views = (memoryview(buffer) for buffer in buffers)
    return [view.cast("B") for view in views if view.nbytes]


def read_fully(fd: int, views: Sequence[memoryview], digest: Digest | None = None) -> bool:
    """Fill `views`, in order, from the start of the file. False if the file ends before that.

    digest: given each piece as it is read, while the processor has it in its cache.
    """
    total, offset = sum(view.nbytes for view in views), 0
    sizes = [min(_READ_BYTES, total - at) for at in range(0, total, _READ_BYTES)]
    for piece in cut_buffers(views, sizes):
        rest = [*piece]
        while rest:
            num_bytes = os.preadv(fd, list(islice(rest, _MAX_PIECES)), offset)
            if num_bytes == 0:
                return False
            offset += num_bytes
            rest = _after(rest, num_bytes)
        if digest is not None:
            for view in piece:
                digest.update(view)
    return True


def write_fully(fd: int, parts: Sequence[Buffer]) -> None:
    """Append `parts`, in order, to the file. Raises OSError, having written a part of them."""
    pieces = flat(parts)
    while pieces:
        pieces = _after(pieces, os.writev(fd, list(islice(pieces, _MAX_PIECES))))


def _after(pieces: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of `pieces` when their first `num_bytes` are done."""
    done = 0
    while done < len(pieces) and len(pieces[done]) <= num_bytes:
        num_bytes -= len(pieces[done])
        done += 1
    rest = pieces[done:]
    if num_bytes:
        rest[0] = rest[0][num_bytes:]
    return rest


def cut_buffers(buffers: Sequence[Buffer], sizes: Sequence[int]) -> list[tuple[memoryview, ...]]:
    """`buffers`, one after the other, in consecutive pieces of `sizes` bytes; nothing is copied."""
    rest = deque(flat(buffers))
    pieces = []
    for size in sizes:
        piece: list[memoryview] = []
        missing = size
        while missing:
            view = rest.popleft()
            if len(view) > missing:
                rest.appendleft(view[missing:])
            piece.append(view[:missing])
            missing -= len(piece[-1])
        pieces.append(tuple(piece))
    return pieces
