"""Telling a store where a node's host slots lie, for one whose network card has to know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from tierkv.storage.protocol import Store


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
