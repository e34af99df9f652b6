"""The driver's library over the stand-in of stand_in.py, as tierkv.gpu.driver calls it."""

from __future__ import annotations

import ctypes
from typing import Any

from tests.gpu.stand_in import INVALID_VALUE, NOT_REGISTERED, Gpu


class Library:
    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def cuMemcpyBatchAsync_v2(self, *arguments: Any) -> int:  # noqa: N802 - CUDA's name
        targets, sources, sizes, count, _, _, _, stream = arguments
        columns = [
            list((ctypes.c_uint64 * count.value).from_address(one.value))
            for one in (targets, sources, sizes)
        ]
        pieces = list(zip(*columns, strict=True))
        self._gpu.random.shuffle(pieces)
        status = self._gpu.status("copy")
        if not status:
            self._gpu.submit(stream.value, self._gpu.pieces(pieces))
        return status

    def cuMemcpyAsync(self, target: Any, source: Any, size: Any, stream: Any) -> int:  # noqa: N802
        status = self._gpu.status("copy")
        if not status:
            piece = (target.value, source.value, size.value)
            self._gpu.submit(stream.value, self._gpu.pieces([piece]))
        return status

    def cuMemHostRegister_v2(self, address: Any, size: Any, _flags: Any) -> int:  # noqa: N802
        return self._gpu.status("register") or self._gpu.register(address.value, size.value)

    def cuMemHostUnregister(self, address: Any) -> int:  # noqa: N802
        found = self._gpu.registered.pop(address.value, None)
        return self._gpu.status("unregister") or (NOT_REGISTERED if found is None else 0)

    def cuMemGetAddressRange_v2(self, start: Any, size: Any, address: Any) -> int:  # noqa: N802
        found = self._gpu.allocation_of(address.value)
        if found is None:
            return INVALID_VALUE
        for told, value in zip((start, size), found, strict=True):
            ctypes.cast(told, ctypes.POINTER(ctypes.c_uint64)).contents.value = value
        return 0

    def cuDevicePrimaryCtxGetState(self, *_: Any) -> int:  # noqa: N802
        return 0
