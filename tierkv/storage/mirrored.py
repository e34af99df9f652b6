"""Several stores with the same values: written to all, read from the first that has them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeVar

from tierkv.errors import ConfigError, StoreUnavailableError
from tierkv.storage.host_memory import use_memory
from tierkv.storage.protocol import (
    Capabilities,
    GetItem,
    GetOutcome,
    GetStatus,
    ListPage,
    PutItem,
    PutOutcome,
    PutStatus,
    Store,
    Usage,
    check_names,
)
from tierkv.tasks import task_group

T = TypeVar("T")


class MirroredStore:
    """`Store`. A value is stored if one store has it. The first store is preferred; another
    answers where it fails or has none. A failed store is filled again only by what is put later.
    Of several who put one name at once more than one can be told STORED: each store chooses.
    """

    def __init__(self, stores: Sequence[Store]) -> None:
        if len(stores) < 2:  # noqa: PLR2004
            raise ConfigError("mirroring needs two stores or more, as mirrored:URL|URL")
        self._stores = tuple(stores)

    def use_memory(self, pools: Sequence[memoryview]) -> None:
        for store in self._stores:
            use_memory(store, pools)

    @property
    def url(self) -> str:
        return "mirrored:" + "|".join(store.url for store in self._stores)

    @property
    def capabilities(self) -> Capabilities:
        every = [store.capabilities for store in self._stores]
        return Capabilities(
            is_shared=all(one.is_shared for one in every),
            is_durable=any(one.is_durable for one in every),
            has_ttl=all(one.has_ttl for one in every),
            has_listing=every[0].has_listing,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for store in self._stores:
                await stack.enter_async_context(store.running())
            yield

    async def ping(self) -> None:
        """Returns if any store answers: the others' values are there, then, and new ones kept."""
        failures = []
        for store in self._stores:
            try:
                await store.ping()
            except StoreUnavailableError as error:
                failures.append(error)
        if len(failures) == len(self._stores):
            raise failures[0]

    async def exists(self, names: Sequence[str]) -> int:
        """A run may lie partly in one store and partly in another."""
        check_names(names)
        found = 0
        failures: dict[Store, StoreUnavailableError] = {}
        is_longer = True
        while is_longer and found < len(names):
            is_longer = False
            for store in self._stores:
                if store in failures or found == len(names):
                    continue
                try:
                    more = await store.exists(names[found:])
                except StoreUnavailableError as error:
                    failures[store] = error
                    continue
                found += more
                is_longer |= more > 0
        if len(failures) == len(self._stores):
            raise next(iter(failures.values()))
        return found

    async def get_into(self, items: Sequence[GetItem]) -> list[GetOutcome]:
        outcomes = await self._stores[0].get_into(items)
        for store in self._stores[1:]:
            left = [i for i, outcome in enumerate(outcomes) if outcome.status is not GetStatus.HIT]
            if not left:
                break
            others = await store.get_into([items[i] for i in left])
            for i, outcome in zip(left, others, strict=True):
                if outcome.status is not GetStatus.FAILED:
                    outcomes[i] = outcome
        return outcomes

    async def get(self, name: str, *, max_bytes: int) -> bytes | None:
        return await self._first(lambda store: store.get(name, max_bytes=max_bytes), None)

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        async with task_group() as group:
            puts = [group.create_task(store.put(items)) for store in self._stores]
        return [_best(outcomes) for outcomes in zip(*(put.result() for put in puts), strict=True)]

    async def delete(self, names: Sequence[str]) -> int:
        return max(await self._all(lambda store: store.delete(names)))

    async def touch(self, names: Sequence[str], *, ttl_s: float) -> int:
        return max(await self._all(lambda store: store.touch(names, ttl_s=ttl_s)))

    async def list(self, prefix: str, *, limit: int, cursor: str | None = None) -> ListPage:
        """Of the first store."""
        return await self._stores[0].list(prefix, limit=limit, cursor=cursor)

    async def usage(self, prefix: str) -> Usage:
        """Of the first store."""
        return await self._stores[0].usage(prefix)

    async def _all(self, ask: Callable[[Store], Awaitable[T]]) -> Sequence[T]:
        """Every store's answer; raises the first one's error after all have been asked."""
        answers, failures = [], []
        for store in self._stores:
            try:
                answers.append(await ask(store))
            except StoreUnavailableError as error:
                failures.append(error)
        if failures:
            raise failures[0]
        return answers

    async def _first(self, ask: Callable[[Store], Awaitable[T]], nothing: T) -> T:
        """The first answer that is not `nothing`. Raises if all stores fail."""
        failures = []
        for store in self._stores:
            try:
                answer = await ask(store)
            except StoreUnavailableError as error:
                failures.append(error)
                continue
            if answer != nothing:
                return answer
        if len(failures) == len(self._stores):
            raise failures[0]
        return nothing


_RANK = (PutStatus.STORED, PutStatus.EXISTED, PutStatus.FULL, PutStatus.FAILED)


def _best(outcomes: Sequence[PutOutcome]) -> PutOutcome:
    return min(outcomes, key=lambda outcome: _RANK.index(outcome.status))
