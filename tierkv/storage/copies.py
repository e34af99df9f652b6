"""Forgetting a damaged copy of a value, and not the good ones that other stores have of it.

Who finds the damage knows nothing of the stores that a store is made of; these do not know what a
whole value is. So one tells the other, and reads again what is still to be had.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from tierkv.storage.protocol import Store


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
