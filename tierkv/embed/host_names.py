"""A table of the host's blocks by the names that an engine gives them.

The engine's thread reads the table directly, without a call to the service's thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from tierkv.sched.events import CacheEvent, CacheEventKind, ExternalId


class HostNames:
    """The ids that the engine has given to blocks on the host, for one cache group.

    The engine can look up ids here without a call to the service. An answer may be outdated at
    once, because the service stores and evicts blocks at any time. Only the service's thread
    writes, and any thread may read.

    Args:
        group: number of the cache group that is in the index. Other cache groups cannot be used,
            because their blocks of a prompt may have gaps on the host.
    """

    wants_tokens = False

    def __init__(self, group: int) -> None:
        self._group = group
        self._names: dict[bytes, ExternalId] = {}  # by digest
        self._digests: dict[ExternalId, bytes] = {}  # by name

    def __contains__(self, name: ExternalId) -> bool:
        return name in self._digests

    @property
    def digests(self) -> set[bytes]:
        """The keys of all host blocks for which the engine has recorded its own block id."""
        return set(self._names)

    def put(self, event: CacheEvent) -> None:
        """Update the engine's ids of host blocks after an event of the cache.

        If blocks were stored on the host, their ids are added; if they were evicted, removed.
        Events of other tiers and cache groups are ignored.
        """
        if event.tier != "host" or event.group != self._group:
            return
        if event.kind is CacheEventKind.STORED:
            self.add(event.digests, event.external_ids)
        elif event.kind is CacheEventKind.EVICTED:
            for digest in event.digests:
                name = self._names.pop(digest, None)
                if name is not None and self._digests.get(name) == digest:
                    del self._digests[name]

    def add(self, digests: Iterable[bytes], names: Iterable[ExternalId | None]) -> None:
        """Add names of blocks that are on the host.

        Args:
            digests: key of each block.
            names: the engine's name of each block; None for a block without a name.
        """
        for digest, name in zip(digests, names, strict=False):
            if name is not None:
                self._names[digest] = name
                self._digests[name] = digest

    def clear(self) -> None:
        """Forget all of the engine's block ids, so that no lookup finds a block."""
        self._names.clear()
        self._digests.clear()


def num_leading(names: Sequence[ExternalId], is_there: Callable[[ExternalId], bool]) -> int:
    """Return the number of a prompt's leading blocks that are present, by binary search.

    Args:
        names: the engine's ids of the prompt's blocks, in the order of the prompt. All blocks after
            an absent block must be absent, too.
        is_there: returns True if the block with this id is present.
    """
    return bisect_left(range(len(names)), 1, key=lambda at: not is_there(names[at]))
