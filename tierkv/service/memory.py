"""The memory of a service: planes on the device, slots on the host; taken and given back."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager

from tierkv.cache.layout import Layout
from tierkv.errors import ShuttingDownError
from tierkv.gpu.protocol import Device, HostSlots, Planes
from tierkv.tasks import outlast


class Memory:
    """Owns the device's planes and the host slots. `take_planes` replaces `planes`; `host` never
    changes."""

    planes: Planes
    host: HostSlots

    def __init__(self, device: Device, layout: Layout) -> None:
        self._device = device
        self._layout = layout
        self._has_planes = False
        self._is_open = False  # to changes
        self._changes: set[asyncio.Future[None]] = set()

    @asynccontextmanager
    async def running(self, device_blocks: int, host_slots: int) -> AsyncIterator[None]:
        """Takes it in a thread: pinning takes 0.1 s and more. A cancel waits for its end, so that
        what was taken is given back."""
        with ExitStack() as stack:
            loop = asyncio.get_running_loop()
            memory = self._taken(device_blocks, host_slots)
            opening = loop.run_in_executor(None, stack.enter_context, memory)
            await outlast({opening}, on_cancel=lambda: None)
            opening.result()
            yield

    @contextmanager
    def _taken(self, device_blocks: int, host_slots: int) -> Iterator[None]:
        self.planes = self._device.allocate_planes(self._layout, device_blocks)
        self._has_planes = True
        try:
            self.host = self._device.allocate_host(self._layout, host_slots)
            try:
                yield
            finally:
                self.host.close()
        finally:
            if self._has_planes:
                self.planes.close()

    @asynccontextmanager
    async def open_to_changes(self) -> AsyncIterator[None]:
        """`changing` is possible in the body. Leaving waits until none is under way: lanes and
        planes that come later would be nobody's to close."""
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False
            await outlast(self._changes, on_cancel=lambda: None)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """The planes may be given back, or others taken, in the body. Raises ShuttingDownError if
        it is too late for that."""
        if not self._is_open:
            raise ShuttingDownError("this node has shut down")
        end = self._begin_change()
        try:
            yield
        finally:
            end()

    def _begin_change(self) -> Callable[[], None]:
        change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changes.add(change)

        def end() -> None:
            self._changes.remove(change)
            change.set_result(None)

        return end

    async def new_planes(self, device_blocks: int) -> Planes:
        """Planes for so many blocks, which are not in use before `use`. Raises ConfigError if
        there is no room for them."""
        allocate = functools.partial(self._device.allocate_planes, self._layout, device_blocks)
        opening = asyncio.get_running_loop().run_in_executor(None, allocate)
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            end = self._begin_change()
            opening.add_done_callback(_close_again)
            opening.add_done_callback(lambda _: end())
            raise

    def use(self, planes: Planes) -> None:
        self.planes, self._has_planes = planes, True

    def give_planes_back(self) -> None:
        self._has_planes = False
        self.planes.close()


def _close_again(opening: asyncio.Future[Planes]) -> None:
    """Memory that came for somebody who has gone."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
