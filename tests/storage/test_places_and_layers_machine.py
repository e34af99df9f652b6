"""Stores that consist of several stores, compared with a model while items fail at random."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

import pytest

from tests.storage.values import Routed, content_of, landing
from tierkv.clock import SystemClock
from tierkv.errors import StoreUnavailableError
from tierkv.storage.base import StoreWrapper
from tierkv.storage.layered import LayeredSettings, LayeredStore
from tierkv.storage.memory import MemorySettings, MemoryStore
from tierkv.storage.places import Places
from tierkv.storage.protocol import (
    Capabilities,
    GetItem,
    GetOutcome,
    GetStatus,
    PutItem,
    PutOutcome,
    PutStatus,
    Store,
)

T = TypeVar("T")
NAMES = [f"t:{group}:{index}:0" for index in range(6) for group in "abc"]
SIZE = 20


class Fickle(StoreWrapper):
    """A store that fails, loses or damages a random `share` of the items."""

    def __init__(self, rng: random.Random) -> None:
        self.inner = MemoryStore(MemorySettings(), SystemClock())
        self.share = 0.0
        self._rng = rng

    @property
    def url(self) -> str:
        return "fickle:"

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def running(self) -> AbstractAsyncContextManager[None]:
        return self.inner.running()

    def _fails(self) -> bool:
        return self._rng.random() < self.share

    async def _ask(self, ask: Callable[[Store], Awaitable[T]]) -> T:
        await self._wait()
        if self._fails():
            raise StoreUnavailableError("as it happens")
        return await ask(self.inner)

    async def get_into(self, items: Sequence[GetItem]) -> list[GetOutcome]:
        await self._wait()
        outcomes = await self.inner.get_into(items)
        for at, item in enumerate(items):
            if self._fails():
                for view in item.into:
                    view[:] = b"\xee" * len(view)
                bad = (GetStatus.FAILED, GetStatus.DAMAGED, GetStatus.MISS)
                outcomes[at] = GetOutcome(self._rng.choice(bad))
        return outcomes

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        await self._wait()
        bad = (PutStatus.FAILED, PutStatus.FULL)
        return [
            PutOutcome(self._rng.choice(bad))
            if self._fails()
            else (await self.inner.put([item]))[0]
            for item in items
        ]

    async def _wait(self) -> None:
        for _ in range(self._rng.randrange(3)):
            await asyncio.sleep(0)


class Model:
    """A store that consists of several stores, with access to the values in each of them."""

    def __init__(self, kind: str, rng: random.Random) -> None:
        self.rng = rng
        self.parts = [Fickle(rng) for _ in range(3)]
        one, two, three = self.parts
        self.kind = kind
        stores: dict[str, Store] = {
            "layered": LayeredStore(one, two, LayeredSettings()),
            "routed": Routed({"t:a": one}, three),
            "places": Places(one),
        }
        self.store = stores[kind]

    def parts_of(self, name: str) -> Sequence[Fickle]:
        one, two, three = self.parts
        if self.kind == "routed":
            return (one,) if name.startswith("t:a") else (three,)
        return {"layered": (one, two), "places": (one,)}[self.kind]

    async def have(self) -> dict[str, list[bool]]:
        return {
            name: [await part.inner.exists([name]) == 1 for part in self.parts_of(name)]
            for name in NAMES
        }

    async def step(self) -> None:
        for part in self.parts:
            part.share = self.rng.choice([0, 0, 0.2, 0.6, 1.0])
        self.is_well = not any(part.share for part in self.parts)
        names = [self.rng.choice(NAMES) for _ in range(self.rng.randrange(10))]
        work = (self.get, self.put, self.put_new, self.ask, self.delete, self.forget)
        try:
            await self.rng.choice(work)(names, await self.have())
        except StoreUnavailableError:
            assert not self.is_well

    async def get(self, names: Sequence[str], had: dict[str, list[bool]]) -> None:
        landings = [landing(name, SIZE) for name in names]
        outcomes = await self.store.get_into([item for item, _ in landings])
        for (item, [buffer]), outcome in zip(landings, outcomes, strict=True):
            if outcome.status is GetStatus.HIT:
                assert buffer == content_of(item.name, SIZE)
                assert any(had[item.name])
            elif self.is_well:
                assert not any(had[item.name])

    async def put(
        self, names: Sequence[str], had: dict[str, list[bool]], *, only_new: bool = False
    ) -> None:
        distinct = list(dict.fromkeys(names))
        outcomes = await self.store.put(
            [
                PutItem(n, (content_of(n, SIZE),), keep_existing=not only_new, only_new=only_new)
                for n in distinct
            ]
        )
        have = await self.have()
        for name, outcome in zip(distinct, outcomes, strict=True):
            if outcome.status in (PutStatus.STORED, PutStatus.EXISTED):
                assert any(have[name])
            else:
                assert not self.is_well
            if only_new and outcome.status is PutStatus.STORED and self.is_well:
                assert not any(had[name][1:] if self.kind == "layered" else had[name])

    async def put_new(self, names: Sequence[str], had: dict[str, list[bool]]) -> None:
        await self.put(names, had, only_new=True)

    async def ask(self, names: Sequence[str], had: dict[str, list[bool]]) -> None:
        found = await self.store.exists(names)
        each = await self.store.present(names)
        expected = [any(had[name]) for name in names]
        assert all(expected[:found])
        assert [there for there, is_there in zip(expected, each, strict=True) if is_there] == (
            [True] * sum(each)
        )
        if self.is_well:
            assert each == expected
            assert found == (expected.index(False) if False in expected else len(expected))

    async def delete(self, names: Sequence[str], had: dict[str, list[bool]]) -> None:
        deleted = await self.store.delete(names)
        have = await self.have()
        assert not any(any(have[name]) for name in names)
        if self.is_well:
            assert deleted == sum(any(had[name]) for name in set(names))

    async def forget(self, names: Sequence[str], had: dict[str, list[bool]]) -> None:
        """Check that `forget_damaged` removes one copy, and reports if another may be left."""
        items = [landing(name, SIZE)[0] for name in dict.fromkeys(names)]
        outcomes = await self.store.get_into(items)
        bad = (GetStatus.HIT, GetStatus.DAMAGED)  # the caller may find either damaged
        read = [i.name for i, one in zip(items, outcomes, strict=True) if one.status in bad]
        had = await self.have()
        others = await self.store.forget_damaged(read)
        have = await self.have()
        for name, has_other in zip(read, others, strict=True):
            assert sum(had[name]) - sum(have[name]) <= 1
            assert has_other or not (any(have[name]) and self.is_well)


@pytest.mark.parametrize("kind", ["layered", "routed", "places"])
async def test_outcomes_are_of_their_items_and_true_whatever_fails(kind: str) -> None:
    for seed in range(60):
        model = Model(kind, random.Random(seed))
        async with model.store.running():
            for _ in range(15):
                await model.step()
