"""An attach that nobody waits for any more."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tierkv.clock import SystemClock
from tierkv.errors import StoreUnavailableError
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.storage.places import Places


class ShutStore(MemoryStore):
    """Cannot be opened, and says so only when it is let."""

    def __init__(self) -> None:
        super().__init__(MemorySettings(), SystemClock())
        self.is_tried = asyncio.Event()
        self.may_say = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self.is_tried.set()
        await self.may_say.wait()
        raise StoreUnavailableError("shut")
        yield


async def test_a_store_that_cannot_be_opened_is_no_error_once_its_attach_was_cancelled() -> None:
    unseen: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: unseen.append(what))
    store, place = ShutStore(), Places()
    async with place.running():
        attach = asyncio.ensure_future(place.attach(store))
        await store.is_tried.wait()
        attach.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attach
        store.may_say.set()
    gc.collect()
    assert not unseen
    assert not place.attached
