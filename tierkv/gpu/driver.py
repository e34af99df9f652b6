"""Calls of the CUDA driver through ctypes, where CuPy lacks the call or holds the GIL during it.

A call through ctypes lets other Python threads run, and reads addresses from NumPy arrays.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt

from tierkv.errors import ConfigError

Addresses = npt.NDArray[np.uint64]

_SUCCESS = 0
_PORTABLE = 1  # registered for every GPU of the process
_STREAM_ORDER = 1  # a copy reads its source when the stream gets there


class Column:
    """An array of `capacity` addresses or byte counts that the driver reads.

    `address` is the array's own address, computed once, since NumPy takes up to 28 us for that.
    """

    __slots__ = ("address", "values")

    def __init__(self, capacity: int) -> None:
        self.values: Addresses = np.empty(capacity, np.uint64)
        self.address = self.values.ctypes.data


class DriverError(Exception):
    """A call of the CUDA driver failed.

    The context manager `Gpu.bound` raises a TransferError or DeviceFailedError in its place.
    """

    def __init__(self, call: str, status: int) -> None:
        super().__init__(f"{call} failed with CUDA error {status}")
        self.status = status


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("source_order", ctypes.c_uint),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class Driver:
    """The CUDA driver (libcuda) of this machine.

    Call the methods inside the context `gpu.bound()`, in which a GPU is the thread's current one.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._attributes = _Attributes(source_order=_STREAM_ORDER)
        self._zero = ctypes.c_size_t(0)
        self._batch, self._has_fail_index = self._find_batch()

    def _find_batch(self) -> tuple[Callable[..., int] | None, bool]:
        # CUDA 12.8 has a variant that reports a failed index; 13.0 dropped that argument.
        try:
            return self._library.cuMemcpyBatchAsync_v2, False
        except AttributeError:
            pass
        try:
            return self._library.cuMemcpyBatchAsync, True
        except AttributeError:
            return None, False

    @property
    def has_batch_copy(self) -> bool:
        """True if the driver can copy many pieces in one call (CUDA 12.8 and later)."""
        return self._batch is not None

    def copy_batch(
        self, targets: Column, sources: Column, sizes: Column, pieces: range, *, stream: int
    ) -> None:
        """Submit a copy of sizes[i] bytes from sources[i] to targets[i] for each i in `pieces`.

        The pieces are copied in any order and must not overlap. Host memory must stay pinned until
        the copy has ended. The three arrays may be changed as soon as this call returns.

        Args:
            targets: addresses to write.
            sources: addresses to read.
            sizes: number of bytes of each piece.
            pieces: the range of indices to copy.
            stream: the cudaStream_t to which the copy is submitted.

        Raises:
            DriverError: the driver refused the copy.
        """
        if self._batch is None or len(pieces) == 1:
            self.copy_each(targets, sources, sizes, pieces, stream=stream)
            return
        skipped = 8 * pieces.start
        fail_index = (ctypes.c_void_p(None),) if self._has_fail_index else ()
        _check(
            "cuMemcpyBatchAsync",
            self._batch(
                ctypes.c_void_p(targets.address + skipped),
                ctypes.c_void_p(sources.address + skipped),
                ctypes.c_void_p(sizes.address + skipped),
                ctypes.c_size_t(len(pieces)),
                ctypes.byref(self._attributes),
                ctypes.byref(self._zero),
                ctypes.c_size_t(1),
                *fail_index,
                ctypes.c_void_p(stream),
            ),
        )

    def copy_each(
        self, targets: Column, sources: Column, sizes: Column, pieces: range, *, stream: int
    ) -> None:
        """Submit a copy of sizes[i] bytes from sources[i] to targets[i] for each i in `pieces`.

        Each piece is one call of the driver, so this also works with drivers that cannot copy
        batches.

        Args:
            targets: addresses to write.
            sources: addresses to read.
            sizes: number of bytes of each piece.
            pieces: the range of indices to copy.
            stream: the cudaStream_t to which the copies are submitted.

        Raises:
            DriverError: the driver refused a copy.
        """
        copy = self._library.cuMemcpyAsync
        for at in pieces:
            _check(
                "cuMemcpyAsync",
                copy(
                    ctypes.c_uint64(targets.values.item(at)),
                    ctypes.c_uint64(sources.values.item(at)),
                    ctypes.c_size_t(sizes.values.item(at)),
                    ctypes.c_void_p(stream),
                ),
            )

    def register_host(self, address: int, num_bytes: int) -> None:
        """Pin mapped memory, for all GPUs of this process.

        Args:
            address: address of the memory, at the start of a page.
            num_bytes: number of bytes to pin.

        Raises:
            DriverError: the driver refused the call.
        """
        _check(
            "cuMemHostRegister",
            self._library.cuMemHostRegister_v2(
                ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_uint(_PORTABLE)
            ),
        )

    def unregister_host(self, address: int) -> None:
        _check("cuMemHostUnregister", self._library.cuMemHostUnregister(ctypes.c_void_p(address)))

    def has_context(self, index: int) -> bool:
        """Return whether this process has a primary context on the GPU with this index."""
        flags, is_active = ctypes.c_uint(), ctypes.c_int()
        status = self._library.cuDevicePrimaryCtxGetState(
            ctypes.c_int(index), ctypes.byref(flags), ctypes.byref(is_active)
        )
        return status == _SUCCESS and bool(is_active.value)

    def allocation_of(self, address: int) -> tuple[int, int]:
        """Return the start address and the size of the GPU allocation that contains `address`.

        Raises:
            DriverError: no such allocation is known.
        """
        start, size = ctypes.c_uint64(), ctypes.c_size_t()
        _check(
            "cuMemGetAddressRange",
            self._library.cuMemGetAddressRange_v2(
                ctypes.byref(start), ctypes.byref(size), ctypes.c_uint64(address)
            ),
        )
        return start.value, size.value


def _check(call: str, status: int) -> None:
    if status != _SUCCESS:
        raise DriverError(call, status)


@cache
def load_driver() -> Driver:
    """Return the CUDA driver of this machine; further calls return the same object.

    Raises:
        ConfigError: the machine has no driver.
    """
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except OSError as error:
        raise ConfigError(f"this machine has no NVIDIA driver: {error}") from error
