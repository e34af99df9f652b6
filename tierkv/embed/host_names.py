"""The engine's names of the blocks on the host, for an engine's thread to look at by itself."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from tierkv.sched.events import CacheEvent, CacheEventKind, ExternalId


class HostNames:
    """Names of the blocks of one group that lookups find on the host.

    The service's thread writes. Any thread may read: each read is one operation on a dict, which no
    other thread can cut in two. An answer is advice, since blocks come and go meanwhile.

    Args:
        group: number of the group, which must be the index's: its blocks are there without gaps.
    """

    wants_tokens = False

    def __init__(self, group: int) -> None:
        self._group = group
        self._names: dict[bytes, ExternalId] = {}  # by digest
        self._digests: dict[ExternalId, bytes] = {}  # by name

    def __contains__(self, name: ExternalId) -> bool:
        return name in self._digests

    def __len__(self) -> int:
        return len(self._digests)

    @property
    def digests(self) -> set[bytes]:
        """The keys of the host blocks that the engine has named (`external_ids`), for `verify`."""
        return set(self._names)

    def put(self, event: CacheEvent) -> None:
        """Follow an event about blocks on the host. See EventListener."""
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
        """Add blocks that are on the host; a block without a name is left out."""
        for digest, name in zip(digests, names, strict=False):
            if name is not None:
                self._names[digest] = name
                self._digests[name] = digest

    def clear(self) -> None:
        """Forget all blocks."""
        self._names.clear()
        self._digests.clear()


def num_leading(names: Sequence[ExternalId], is_there: Callable[[ExternalId], bool]) -> int:
    """Return how many of the `names`, from the first on, are there.

    The names are of a prompt's blocks: where one is there, so are all before it.
    """
    return bisect_left(range(len(names)), 1, key=lambda at: not is_there(names[at]))
