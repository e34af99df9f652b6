"""Forgetting a damaged copy of a value, and not the good ones that other stores have of it.

Who finds the damage knows nothing of the stores that a store is made of; these do not know what a
whole value is. So one tells the other, and reads again what is still to be had.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol, TypeVar, runtime_checkable

from tierkv.storage.protocol import Store

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
