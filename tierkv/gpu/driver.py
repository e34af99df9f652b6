"""Calls of the CUDA driver, by ctypes, that CuPy lacks or makes while it holds the GIL.

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
    """An array of `capacity` addresses or sizes that the driver reads, at a fixed address.

    The address is computed once, since that takes NumPy up to 28 us.
    """

    __slots__ = ("address", "values")

    def __init__(self, capacity: int) -> None:
        self.values: Addresses = np.empty(capacity, np.uint64)
        self.address = self.values.ctypes.data


class DriverError(Exception):
    """A driver call failed; `Gpu.bound` translates the error to a TransferError."""

    def __init__(self, call: str, status: int) -> None:
        super().__init__(f"{call} failed with CUDA error {status}")
        self.status = status


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: access order, two (type, id) location hints, flags."""

    _fields_ = (
        ("source_order", ctypes.c_uint),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class Driver:
    """libcuda of this machine. Every call needs a bound GPU (see `Gpu.bound`)."""

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
        """True if `copy_batch` is one driver call instead of one for each piece."""
        return self._batch is not None

    def copy_batch(
        self, targets: Column, sources: Column, sizes: Column, pieces: range, *, stream: int
    ) -> None:
        """Submit a copy of sizes[i] bytes from sources[i] to targets[i] for each i of `pieces`.

        The order of the pieces is undefined. Pieces must not overlap, and host memory must stay
        pinned until the stream has passed this point. The columns may change as soon as this
        returns.

        Args:
            targets: addresses to write.
            sources: addresses to read.
            sizes: bytes of the pieces.
            pieces: indexes in the columns.
            stream: the cudaStream_t that orders the copy.

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
        """Copy as `copy_batch` does, with a call for each piece, for drivers older than CUDA 12.8.

        Args:
            targets: addresses to write.
            sources: addresses to read.
            sizes: bytes of the pieces.
            pieces: indexes in the columns.
            stream: the cudaStream_t that orders the copy.

        Raises:
            DriverError: the driver refused the copy.
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
        """Pin memory that is mapped already.

        Args:
            address: address of the memory, at the start of a page.
            num_bytes: bytes of the memory.

        Raises:
            DriverError: the driver refused.
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
        """Return whether this process has a primary context on GPU `index`."""
        flags, is_active = ctypes.c_uint(), ctypes.c_int()
        status = self._library.cuDevicePrimaryCtxGetState(
            ctypes.c_int(index), ctypes.byref(flags), ctypes.byref(is_active)
        )
        return status == _SUCCESS and bool(is_active.value)

    def allocation_of(self, address: int) -> tuple[int, int]:
        """Return the address and size of the GPU allocation that `address` lies in."""
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
    """Return the CUDA driver of this machine.

    Raises:
        ConfigError: the machine has no driver.
    """
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except OSError as error:
        raise ConfigError(f"this machine has no NVIDIA driver: {error}") from error
