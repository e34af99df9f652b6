"""What stores around others have in common: an operation is passed on, unless they say more."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from tierkv.storage.copies import forget_damaged
from tierkv.storage.presence import present
from tierkv.storage.protocol import (
    GetItem,
    GetOutcome,
    ListPage,
    PutItem,
    PutOutcome,
    Store,
    Usage,
    check_limit,
    check_name,
    check_names,
    check_prefix,
)

T = TypeVar("T")


class StoreAround(ABC):
    """The operations of a `Store`, each asked of another store, once its names are checked."""

    @abstractmethod
    async def _ask(self, ask: Callable[[Store], Awaitable[T]]) -> T:
        """What `ask` returns of the store that is to answer this. Raises StoreUnavailableError."""

    async def ping(self) -> None:
        await self._ask(lambda store: store.ping())

    async def exists(self, names: Sequence[str]) -> int:
        checked = check_names(names)
        return await self._ask(lambda store: store.exists(checked))

    async def present(self, names: Sequence[str]) -> list[bool]:
        checked = check_names(names)
        return await self._ask(lambda store: present(store, checked))

    async def get_into(self, items: Sequence[GetItem]) -> list[GetOutcome]:
        return await self._ask(lambda store: store.get_into(items))

    async def get(self, name: str, *, max_bytes: int) -> bytes | None:
        check_name(name)
        return await self._ask(lambda store: store.get(name, max_bytes=max_bytes))

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        return await self._ask(lambda store: store.put(items))

    async def delete(self, names: Sequence[str]) -> int:
        checked = check_names(names)
        return await self._ask(lambda store: store.delete(checked))

    async def forget_damaged(self, names: Sequence[str]) -> list[bool]:
        checked = check_names(names)
        return await self._ask(lambda store: forget_damaged(store, checked))

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
