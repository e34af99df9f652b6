"""Memory of processes, read by one system call for many pieces."""

from __future__ import annotations

import os

import numpy as np
import pytest

from tierkv.errors import TransferError
from tierkv.gpu.process_memory import RemotePiece, copy_here, is_possible, read

pytestmark = pytest.mark.skipif(not is_possible(), reason="this kernel has no process_vm_readv")

SIZE = 24


@pytest.mark.parametrize("way", ["of a process", "of this one"])
@pytest.mark.parametrize("count", [0, 1, 1024, 1025])
def test_every_piece_comes_to_its_place(count: int, way: str) -> None:
    source = np.random.default_rng(1).integers(1, 256, (count, SIZE), np.uint8)
    target = np.zeros_like(source)
    there = source.ctypes.data + SIZE * np.arange(count)[::-1]
    here = target.ctypes.data + SIZE * np.arange(count)
    if way == "of a process":
        pairs = zip(there.tolist(), here.tolist(), strict=True)
        read(os.getpid(), [RemotePiece(*pair, SIZE) for pair in pairs])
    else:
        sizes = np.full(count, SIZE, np.uint64)
        copy_here(here.astype(np.uint64), there.astype(np.uint64), sizes)
    assert np.array_equal(target, source[::-1])


def test_bytes_that_cannot_be_read_are_an_error() -> None:
    data, nowhere = np.zeros((2, SIZE), np.uint8), 4096
    good = RemotePiece(data.ctypes.data, data.ctypes.data + SIZE, SIZE)
    bad = RemotePiece(nowhere, data.ctypes.data, SIZE)
    with pytest.raises(TransferError, match=f"only {SIZE} of {2 * SIZE} bytes"):
        read(os.getpid(), [good, bad])
    with pytest.raises(TransferError, match="cannot be read"):
        read(os.getpid(), [bad])
