"""Copies from the memory of another process on this machine, by the system call process_vm_readv.

With it, processes share CPU planes as they share GPU planes through CUDA IPC. The module also
copies many pieces within this process in one call.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from tierkv.errors import TransferError
from tierkv.gpu.protocol import Ids, PeerPlanes, Planes, SharedPlane, SharedPlanes

CPU_PLACE = "cpu"  # the `place` of planes in a process's memory
_MAX_PIECES = 1024  # IOV_MAX


@dataclass(frozen=True, slots=True)
class RemotePiece:
    """A range of another process's memory, and the address in this process to which it is copied.

    Attributes:
        theirs: address in the other process.
        ours: address in this process.
        num_bytes: number of bytes to copy.
    """

    theirs: int
    ours: int
    num_bytes: int


class NotPermittedError(TransferError):
    """The kernel does not permit this process to read the other process's memory; do not retry."""


def is_possible() -> bool:
    """Return whether this system has the call process_vm_readv."""
    return sys.platform == "linux" and hasattr(_libc(), "process_vm_readv")


def read(pid: int, pieces: Sequence[RemotePiece]) -> None:
    """Copy pieces of another process's memory to this process; block until all are copied.

    Args:
        pid: id of the other process; a process that is suspended (SIGSTOP) can be read, too.
        pieces: the pieces to copy.

    Raises:
        TransferError: a piece could not be read, for example because the process has ended; the
            content at the target addresses is then undefined.
    """
    rows = [(piece.ours, piece.theirs, piece.num_bytes) for piece in pieces]
    _copy(pid, *np.array(rows, np.uint64).reshape(-1, 3).T)


def copy_here(
    targets: npt.NDArray[np.uint64], sources: npt.NDArray[np.uint64], sizes: npt.NDArray[np.uint64]
) -> None:
    """Copy pieces of this process's memory by address, without the GIL; block until all are copied.

    Args:
        targets: uint64 [n], addresses to write.
        sources: uint64 [n], addresses to read.
        sizes: uint64 [n], number of bytes of each piece.

    Raises:
        TransferError: the kernel refused the copy.
    """
    _copy(os.getpid(), targets, sources, sizes)


def _copy(
    pid: int,
    targets: npt.NDArray[np.uint64],
    sources: npt.NDArray[np.uint64],
    sizes: npt.NDArray[np.uint64],
) -> None:
    pieces = np.empty((2, len(sizes), 2), np.uint64)
    pieces[0, :, 0], pieces[1, :, 0] = targets, sources
    pieces[:, :, 1] = sizes
    copy = _libc().process_vm_readv
    for at in range(0, len(sizes), _MAX_PIECES):
        ours, theirs = pieces[:, at : at + _MAX_PIECES]
        count, expected = len(ours), int(ours[:, 1].sum())
        came = copy(pid, ours.ctypes.data, count, theirs.ctypes.data, count, 0)
        if came < 0:
            code = ctypes.get_errno()
            kind = NotPermittedError if code in (errno.EPERM, errno.ENOSYS) else TransferError
            raise kind(f"the memory of process {pid} cannot be read: {os.strerror(code)}")
        if came != expected:
            raise TransferError(f"only {came} of {expected} bytes of process {pid} could be read")


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "process_vm_readv"):
        libc.process_vm_readv.restype = ctypes.c_ssize_t
        libc.process_vm_readv.argtypes = (
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_ulong,
            ctypes.c_void_p,
            ctypes.c_ulong,
            ctypes.c_ulong,
        )
    return libc


class CpuSharing:
    """The sharing of planes in CPU memory with other processes, through process_vm_readv."""

    place = CPU_PLACE

    def share(self, planes: Planes) -> tuple[SharedPlane, ...]:
        owner = str(os.getpid()).encode()
        return tuple(
            SharedPlane(owner, int(array.ctypes.data), int(array.strides[0]))
            for array in planes.arrays
        )

    def open(self, own: Planes, shared: SharedPlanes) -> PeerPlanes:
        if shared.place != self.place or len(shared.planes) != len(own.layout.planes):
            raise TransferError("the planes of the other process differ from this node's")
        return _CpuPeer(own, shared)


class _CpuPeer:
    def __init__(self, own: Planes, shared: SharedPlanes) -> None:
        self._own = own
        self._shared = shared

    def copy(self, source_ids: Ids, target_ids: Ids) -> None:
        pairs = list(zip(source_ids.tolist(), target_ids.tolist(), strict=True))
        pieces = []
        for theirs, ours in zip(self._shared.planes, self._own.arrays, strict=True):
            start, stride, num_bytes = int(ours.ctypes.data), int(ours.strides[0]), ours.shape[1]
            pieces += [
                RemotePiece(
                    theirs.offset + source * theirs.stride, start + target * stride, num_bytes
                )
                for source, target in pairs
            ]
        read(int(self._shared.planes[0].handle), pieces)

    def close(self) -> None:
        pass
