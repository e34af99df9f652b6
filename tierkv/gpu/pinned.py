"""Pinned host memory for slots: near the GPU, on huge pages, pinned in chunks by threads."""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from math import gcd

import numpy as np
import numpy.typing as npt

from tierkv.cache.layout import Layout
from tierkv.errors import ConfigError, LayoutError, TransferError
from tierkv.gpu import numa
from tierkv.gpu.cuda import Gpu
from tierkv.gpu.driver import DriverError, load_driver
from tierkv.gpu.protocol import Ids
from tierkv.gpu.room import HOST_SETTING, HOST_TIER, memlock, require_room, size, track
from tierkv.threads import Threads

log = logging.getLogger(__name__)

_PAGE = mmap.PAGESIZE  # 64 KiB on some machines
_MAP_HUGETLB = 0x40000 | 21 << 26  # pages of 2 MiB, even if the machine's default is another size
_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_GIB = 1 << 30
# Registering memory holds the driver's lock, for which an engine's launches wait. While an engine
# computes, slots are registered in small chunks with a pause after each: once the time of the
# registration while a copy waits for a chunk, otherwise nine times. With once throughout, decoding
# was 10 % slower while 52 GiB were pinned (H200).
_GENTLE_CHUNK_BYTES = 16 << 20
_GENTLE_REST, _GENTLE_REST_FOR_COPIES = 9.0, 1.0


# Registered pages must not be unmapped, even if `close` is never called.
_pinned_pages: dict[int, npt.NDArray[np.uint8]] = {}


class PinnedSlots:
    """Pinned host slots, which a GPU's copy engines can read and write.

    The memory is pinned in chunks. The constructor returns when the first chunk is pinned; threads
    pin the other chunks in the background. The CPU can use all memory at once, and a copy waits
    only until its own slots are pinned.

    Args:
        gpu: the GPU near which the memory is placed.
        layout: layout of a block.
        num_slots: number of slots.
        array: mapped memory to pin, uint8 [num_slots, block_bytes]; it must stay mapped until these
            slots are closed. One thread pins it, and pauses between chunks while `is_busy` returns
            True. None to map new memory.
        is_busy: returns True while the engine computes.
        num_threads: number of threads that pin new memory.
        chunk_bytes: approximate number of bytes of a chunk.

    Attributes:
        address: address of slot 0.
        stride: bytes from one slot to the next.
        num_bytes: bytes to pin.
        chunk_bytes: exact number of bytes of a chunk.
        pinned_bytes: bytes that are pinned already.
        refusal: the reason why a chunk could not be pinned; None if there was no such chunk.
        is_pinned: True once all chunks are known to be pinned.

    Raises:
        ConfigError: there is too little memory, or it cannot be pinned. The text names the remedy.
        LayoutError: the shape of `array` does not fit the layout.
    """

    def __init__(  # noqa: PLR0913 - what is pinned, and how fast
        self,
        gpu: Gpu,
        layout: Layout,
        num_slots: int,
        *,
        array: npt.NDArray[np.uint8] | None = None,
        is_busy: Callable[[], bool] = lambda: True,
        num_threads: int = 8,
        chunk_bytes: int = 256 << 20,
    ) -> None:
        self.num_slots = num_slots
        self._gpu = gpu
        self._rest = 0.0  # seconds of pause for each second of pinning
        self._is_busy = is_busy
        if array is None:
            array = _mapped(gpu, num_slots, layout.block_bytes)
        elif array.shape != (num_slots, layout.block_bytes):
            raise LayoutError(f"host slots of the shape {array.shape} do not fit the layout")
        else:
            num_threads, chunk_bytes = 1, min(chunk_bytes, _GENTLE_CHUNK_BYTES)
            self._rest = _GENTLE_REST
        self._array: npt.NDArray[np.uint8] | None = array
        self.address = array.ctypes.data
        self.stride = array.strides[0]
        _pinned_pages[self.address] = array
        # If the slots are parts of larger ones, the bytes between them are pinned too.
        self._first_byte = self.address // _PAGE * _PAGE
        self._end = self.address + max(num_slots - 1, 0) * self.stride + layout.block_bytes
        self.num_bytes = self._end - self._first_byte if num_slots else 0
        if self.address - self._first_byte + layout.block_bytes > self.stride:
            chunk_bytes = 1 << 60  # one chunk, since a slot could reach into the next one
        self._chunks = _chunks(num_slots, self.stride, chunk_bytes)
        self._slots_per_chunk = len(self._chunks[0])
        self.chunk_bytes = max(self._slots_per_chunk, 1) * self.stride
        self._registered: list[int] = []  # addresses
        self.pinned_bytes = 0  # the part of `num_bytes` that is pinned
        self.refusal: str | None = None  # reason why a chunk cannot be pinned
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._threads = Threads(num_threads, "tierkv-pin")
        self._pins: list[Future[None]] = [Future() for _ in self._chunks]
        self._left = dict.fromkeys(range(len(self._chunks)))  # chunks that no thread has begun
        self._wanted: deque[int] = deque()  # chunks that copies wait for
        self.is_pinned = False  # True once every chunk is pinned
        try:
            for _ in range(num_threads):
                self._threads.submit(self._pin_all)
            self._pins[0].result()
        except BaseException:
            self.close()
            raise

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        if self._array is None:
            raise LayoutError("these host slots are closed")
        return self._array

    @property
    def is_closed(self) -> bool:
        return self._array is None

    def wait_until_pinned(self, slot_ids: Ids | None = None) -> None:
        """Block until these slots are pinned; None for all slots.

        Raises:
            TransferError: the slots cannot be pinned. The text names the remedy.
            LayoutError: the slots are closed.
        """
        if self._array is None:
            raise LayoutError("these host slots are closed")
        if self.is_pinned:
            return
        wanted = range(len(self._pins))
        if slot_ids is not None:
            wanted = np.unique(slot_ids // self._slots_per_chunk).tolist()
        self._wanted.extend(index for index in wanted if not self._pins[index].done())
        try:
            for index in wanted:
                self._pins[index].result()
        except ConfigError as error:
            raise TransferError(str(error)) from error
        self.is_pinned = all(_is_good(pin) for pin in self._pins)

    def close(self) -> None:
        """Unpin the memory, which is unmapped once no array refers to it. No copy may be running.

        Raises:
            LayoutError: the slots are closed already.
        """
        if self._array is None:
            raise LayoutError("these host slots are closed already")
        self._closing.set()
        self._threads.shutdown(wait=True)
        with self._gpu.bound_to_close():
            while self._registered:
                load_driver().unregister_host(self._registered.pop())
        self._array = None
        del _pinned_pages[self.address]

    def _pin_all(self) -> None:
        """Pin chunks until none is left, in each of the pinning threads."""
        while (index := self._next()) is not None:
            began, pin = time.monotonic(), self._pins[index]
            try:
                self._pin(self._chunks[index])
            except Exception as error:  # noqa: BLE001 - copies must get the error
                pin.set_exception(error)
            else:
                pin.set_result(None)
            if self._rest and self._is_busy():
                rest = _GENTLE_REST_FOR_COPIES if self._wanted else self._rest
                self._closing.wait(rest * (time.monotonic() - began))
        if self._closing.is_set():
            for pin in self._pins:
                pin.cancel()  # no copy waits any longer

    def _next(self) -> int | None:
        with self._lock:
            index = next(iter(self._left), -1)
            while self._wanted:
                wanted = self._wanted.popleft()
                if wanted in self._left:
                    index = wanted
                    break
            if index < 0 or self._closing.is_set():
                return None
            del self._left[index]
            self._pins[index].set_running_or_notify_cancel()
            return index

    def _pin(self, chunk: range) -> None:
        address = self._first_byte + chunk.start * self.stride
        num_bytes = min(self._first_byte + chunk.stop * self.stride, self._end) - address
        _populate(address, num_bytes)
        try:
            with self._gpu.bound():
                try:
                    load_driver().register_host(address, num_bytes)
                except DriverError as error:
                    raise _cannot_pin(error, self.num_bytes) from error
        except (ConfigError, TransferError) as error:
            log.error("%s", error)
            self.refusal = str(error)
            raise
        with self._lock:
            self._registered.append(address)
            self.pinned_bytes += num_bytes
            pinned = len(self._registered)
        log.debug("host tier: %d of %d chunks pinned", pinned, len(self._chunks))
        if pinned == len(self._chunks):
            log.info("host tier: %.1f GiB pinned", self.num_bytes / _GIB)


def _is_good(pin: Future[None]) -> bool:
    return pin.done() and not pin.cancelled() and pin.exception() is None


def _chunks(num_slots: int, stride: int, chunk_bytes: int) -> list[range]:
    """Divide the slots into chunks to pin, each of whole slots and from a page boundary on.

    No slot lies in two chunks, since the copy engine cannot copy a piece that lies in two chunks.
    """
    least = _PAGE // gcd(stride, _PAGE)
    step = max(chunk_bytes // (stride * least), 1) * least
    return [
        range(start, min(start + step, num_slots)) for start in range(0, max(num_slots, 1), step)
    ]


def _mapped(gpu: Gpu, num_slots: int, block_bytes: int) -> npt.NDArray[np.uint8]:
    """Map memory near the GPU, uint8 [num_slots, block_bytes], aligned to huge pages.

    The kernel allocates each page when the page is first used.
    """
    num_bytes = num_slots * block_bytes
    length = -(-max(num_bytes, 1) // numa.HUGE_PAGE) * numa.HUGE_PAGE
    pages = _huge_pages(length)
    if pages is None:
        require_room(num_bytes, HOST_TIER, HOST_SETTING)
        try:
            pages = mmap.mmap(-1, length + numa.HUGE_PAGE, flags=_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"{size(num_bytes)} of host memory cannot be mapped ({error}): lower {HOST_SETTING}"
            ) from error
        track(pages, np.frombuffer(pages, np.uint8).ctypes.data, length)
    raw = np.frombuffer(pages, np.uint8)
    start = -raw.ctypes.data % numa.HUGE_PAGE
    array = raw[start : start + num_bytes].reshape(num_slots, block_bytes)
    address = raw.ctypes.data + start
    numa.libc().madvise(
        ctypes.c_void_p(address), ctypes.c_size_t(length), ctypes.c_int(mmap.MADV_HUGEPAGE)
    )
    node = numa.numa_node_of(gpu.pci_bus_id)
    if node is not None and not numa.prefer_node(address, length, node):
        log.warning(
            "the host tier could not be placed on NUMA node %d, so copies may be "
            "slower: run `tierkv doctor`",
            node,
        )
    return array


def _huge_pages(length: int) -> mmap.mmap | None:
    """Map reserved huge pages, which memory limits of containers do not count.

    Return None if too few pages are free.
    """
    if numa.free_huge_pages() * numa.HUGE_PAGE < length:
        return None
    try:
        return mmap.mmap(-1, length, flags=_ANONYMOUS | _MAP_HUGETLB)
    except OSError as error:
        log.warning(
            "the host tier uses ordinary memory pages, since no huge pages are available: %s", error
        )
        return None


def _populate(address: int, num_bytes: int) -> None:
    """Allocate every page of a memory range without changing its content.

    Before Linux 5.14 the call does nothing, and registering allocates the pages more slowly.
    """
    start = address // _PAGE * _PAGE
    length = -(-(address + num_bytes) // _PAGE) * _PAGE - start
    numa.libc().madvise(
        ctypes.c_void_p(start), ctypes.c_size_t(length), ctypes.c_int(_MADV_POPULATE_WRITE)
    )


def _cannot_pin(error: DriverError, num_bytes: int) -> ConfigError:
    remedy = f"lower {HOST_SETTING}, or free memory on this machine"
    limit = memlock()
    if limit.left_bytes is not None and limit.left_bytes < num_bytes:
        # Not every driver obeys the limit, so it may not be the cause.
        may_lock = size(limit.left_bytes)
        remedy += f" (this process may lock {may_lock}: if that is the cause, {limit.remedy})"
    return ConfigError(f"{size(num_bytes)} of host memory cannot be pinned ({error}): {remedy}")
