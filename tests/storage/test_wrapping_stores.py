"""Stores that consist of other stores report the capabilities and the health of these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace

import pytest

from tests.storage.values import Routed
from tierkv.clock import SystemClock
from tierkv.storage.base import StoreWrapper
from tierkv.storage.guard import GuardedStore, ResilienceSettings
from tierkv.storage.layered import LayeredSettings, LayeredStore, OpensLater
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.storage.places import Places
from tierkv.storage.protocol import Capabilities, Hub, Notifier, Store

ALL = Capabilities(*(True for _ in fields(Capabilities)))
HOW: dict[str, Callable[[Store], Store]] = {
    "guarded": lambda inner: GuardedStore(inner, ResilienceSettings(), SystemClock()),
    "layered": lambda far: LayeredStore(Odd(ALL), far, LayeredSettings()),
    "opens later": OpensLater,
    "places": Places,
    "a tenant's place": lambda inner: Routed({"t:a": Odd(ALL)}, inner),
    "another tenant's place": lambda inner: Routed({"t:a": inner}, Odd(ALL)),
    "all of a node's": lambda inner: Places(
        GuardedStore(
            LayeredStore(OpensLater(Odd(ALL)), inner, LayeredSettings()),
            ResilienceSettings(),
            SystemClock(),
        )
    ),
}


class Odd(MemoryStore):
    def __init__(self, capabilities: Capabilities) -> None:
        super().__init__(MemorySettings(), SystemClock())
        self.told = capabilities
        self.pools: Sequence[memoryview] = ()
        self.hub = Hub()

    @property
    def capabilities(self) -> Capabilities:
        return self.told

    def use_memory(self, pools: Sequence[memoryview]) -> None:
        self.pools = pools

    def notifier(self) -> Notifier:
        return self.hub


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("lacks", ["", *(field.name for field in fields(Capabilities))])
async def test_what_a_store_cannot_do_is_said_of_those_around_it(how: str, lacks: str) -> None:
    can = replace(ALL, **{lacks: False}) if lacks else ALL
    store = HOW[how](Odd(can))
    async with store.running():
        assert store.capabilities == can


@pytest.mark.parametrize("how", HOW)
async def test_a_store_around_another_passes_on_hints_and_where_memory_lies(how: str) -> None:
    inner = Odd(ALL)
    store, pools = HOW[how](inner), [memoryview(bytearray(1))]
    async with store.running():
        store.use_memory(pools)
        assert inner.pools is pools
        with store.notifier().listen("t:topic") as listener:
            await inner.hub.notify("t:topic", "a")
            if how != "another tenant's place":  # tickets are in the common store
                assert await listener.next(10) == "a"


def test_a_new_property_of_stores_is_passed_on_by_all_around_one() -> None:
    of_stores = {name for name in vars(Store) if not name.startswith("_")}
    for around in (StoreWrapper, Places):
        assert of_stores <= {*dir(around)}
