"""What stores have in common: what a store need not do by itself is done here, or passed on.

A damaged copy of a value is forgotten, and not the good ones that other stores have of it: who
finds the damage knows nothing of the stores that a store is made of, and these do not know what a
whole value is. So one tells the other, and reads again what is still to be had.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar, runtime_checkable

from tierkv.errors import StoreUnavailableError
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
from tierkv.tasks import task_group

_MAX_NOTED = 10_000

T = TypeVar("T")


class Noted(OrderedDict[str, T]):
    """Something about each of so many names; of more those noted longest ago are forgotten."""

    def note(self, name: str, what: T) -> None:
        self[name] = what
        self.move_to_end(name)
        if len(self) > _MAX_NOTED:
            self.popitem(last=False)


@runtime_checkable
class HasCopies(Protocol):
    """A store that can have several copies of a value."""

    async def forget_damaged(self, names: Sequence[str]) -> list[bool]:
        """As `forget_damaged` below."""


async def forget_damaged(store: Store, names: Sequence[str]) -> list[bool]:
    """Forget the copy that the last read of each of `names` came from, which was damaged.

    Returns of each whether there may be another copy, for which to read again. Raises
    StoreUnavailableError; then some of them may be left.
    """
    if isinstance(store, HasCopies):
        return await store.forget_damaged(names)
    await store.delete(names)
    return [False] * len(names)


@runtime_checkable
class UsesHostMemory(Protocol):
    """A store that reads and writes memory faster, or at all, where it was told of it."""

    def use_memory(self, pools: Sequence[memoryview]) -> None:
        """As `use_memory` below."""


def use_memory(store: Store, pools: Sequence[memoryview]) -> None:
    """Before `store.running()` is entered: most buffers of reads and writes will lie in `pools`,
    which are plain memory and stay until it is left. A store that has no use for that is not told.
    """
    if isinstance(store, UsesHostMemory):
        store.use_memory(pools)


@runtime_checkable
class TellsEach(Protocol):
    """A store that tells of many names at once."""

    async def present(self, names: Sequence[str]) -> list[bool]:
        """As `present` below."""


async def present(store: Store, names: Sequence[str]) -> list[bool]:
    """Whether each of `names` has a value. Raises StoreUnavailableError."""
    if isinstance(store, TellsEach):
        return await store.present(names)
    answers: list[bool | StoreUnavailableError] = [False] * len(names)

    async def ask(at: int) -> None:
        try:
            answers[at] = await store.exists([names[at]]) == 1
        except StoreUnavailableError as error:
            answers[at] = error

    async with task_group() as group:
        for at in range(len(names)):
            group.create_task(ask(at))
    found = []
    for answer in answers:
        if isinstance(answer, StoreUnavailableError):
            raise answer
        found.append(answer)
    return found


def num_leading(are_there: Sequence[bool]) -> int:
    """How many, from the first on and without a gap."""
    return next((at for at, is_there in enumerate(are_there) if not is_there), len(are_there))


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
