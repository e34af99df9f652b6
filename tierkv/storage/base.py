"""What a store need not do by itself: `BaseStore` for those that keep values, `StoreWrapper` for
those that pass on what they are asked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

from tierkv.errors import StoreUnavailableError
from tierkv.storage.notify import Notifier, Polling
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
    StoreHealth,
    Usage,
    check_limit,
    check_name,
    check_names,
    check_prefix,
)

T = TypeVar("T")


def num_leading(are_there: Sequence[bool]) -> int:
    """How many, from the first on and without a gap."""
    return next((at for at, is_there in enumerate(are_there) if not is_there), len(are_there))


class BaseStore(ABC):
    """A `Store` that has one copy of each value, no breaker, no way to tell its users, and no use
    for what lies where. Its other operations are its own."""

    @property
    def health(self) -> StoreHealth:
        return StoreHealth()

    def notifier(self) -> Notifier:
        return Polling()

    def use_memory(self, pools: Sequence[memoryview]) -> None:  # noqa: B027 - a default
        """Has no use for them."""

    def expect_latency(  # noqa: B027 - a default
        self, latency_s: float, *, of_questions_s: float = 0.0
    ) -> None:
        """Has no deadlines of its own."""

    def when_back(self, call: Callable[[], None]) -> None:  # noqa: B027 - a default
        """Does not know."""

    @abstractmethod
    async def delete(self, names: Sequence[str]) -> int: ...

    async def forget_damaged(self, names: Sequence[str]) -> list[bool]:
        await self.delete(names)
        return [False] * len(names)


class StoreWrapper:
    """A `Store` that passes each operation to `inner` after checking its names. To change one
    operation, override it; to change all, override `_ask`."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    @property
    def health(self) -> StoreHealth:
        return self.inner.health

    def notifier(self) -> Notifier:
        return self.inner.notifier()

    def use_memory(self, pools: Sequence[memoryview]) -> None:
        self.inner.use_memory(pools)

    def expect_latency(self, latency_s: float, *, of_questions_s: float = 0.0) -> None:
        self.inner.expect_latency(latency_s, of_questions_s=of_questions_s)

    def when_back(self, call: Callable[[], None]) -> None:
        self.inner.when_back(call)

    def running(self) -> AbstractAsyncContextManager[None]:
        return self.inner.running()

    async def _ask(self, ask: Callable[[Store], Awaitable[T]]) -> T:
        """What `ask` returns of the store that is to answer this. Raises StoreUnavailableError."""
        return await ask(self.inner)

    async def ping(self) -> None:
        await self._ask(lambda store: store.ping())

    async def exists(self, names: Sequence[str]) -> int:
        checked = check_names(names)
        return await self._ask(lambda store: store.exists(checked))

    async def present(self, names: Sequence[str]) -> list[bool]:
        checked = check_names(names)
        return await self._ask(lambda store: store.present(checked))

    async def get_into(self, items: Sequence[GetItem]) -> list[GetOutcome]:
        try:
            return await self._ask(lambda store: store.get_into(items))
        except StoreUnavailableError as error:
            return [GetOutcome(GetStatus.FAILED, str(error))] * len(items)

    async def get(self, name: str, *, max_bytes: int) -> bytes | None:
        check_name(name)
        return await self._ask(lambda store: store.get(name, max_bytes=max_bytes))

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        try:
            return await self._ask(lambda store: store.put(items))
        except StoreUnavailableError as error:
            return [PutOutcome(PutStatus.FAILED, str(error))] * len(items)

    async def delete(self, names: Sequence[str]) -> int:
        checked = check_names(names)
        return await self._ask(lambda store: store.delete(checked))

    async def forget_damaged(self, names: Sequence[str]) -> list[bool]:
        checked = check_names(names)
        return await self._ask(lambda store: store.forget_damaged(checked))

    async def touch(self, names: Sequence[str], *, ttl_s: float) -> int:
        checked = check_names(names)
        return await self._ask(lambda store: store.touch(checked, ttl_s=ttl_s))

    async def list(self, prefix: str, *, limit: int, cursor: str | None = None) -> ListPage:
        check_prefix(prefix)
        check_limit(limit)
        return await self._ask(lambda store: store.list(prefix, limit=limit, cursor=cursor))

    async def usage(self, prefix: str) -> Usage:
        check_prefix(prefix)
        return await self._ask(lambda store: store.usage(prefix))
