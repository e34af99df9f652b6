"""The requests that have blocks: those that run, and those that have ended with copies at work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from tierkv.sched.loads import Load
from tierkv.sched.request import Request


@dataclass(slots=True)
class Running:
    """by_id: in the order of admission. ending: kernels or copies may still touch their blocks.
    loads_of: loads that write blocks of a request's table."""

    by_id: dict[str, Request] = field(default_factory=dict)
    ending: set[Request] = field(default_factory=set)
    loads_of: dict[Request, list[Load]] = field(default_factory=dict)
    _of_tenant: dict[str, tuple[int, int]] = field(default_factory=dict)
    _private: Counter[str] = field(default_factory=Counter)
    _num_with_blocks: Counter[str] = field(default_factory=Counter)

    def __iter__(self) -> Iterator[Request]:
        yield from self.by_id.values()
        yield from self.ending

    def __contains__(self, request: object) -> bool:
        return request in self.ending or (
            isinstance(request, Request) and self.by_id.get(request.request_id) is request
        )

    def private_blocks(self, space: str) -> int:
        """Device blocks of a tenant's requests that the index does not count."""
        return self._private[space]

    def has_tenant(self, space: str) -> bool:
        """Whether requests of a tenant run, or have ended with copies at work."""
        return space in self._num_with_blocks

    def of_tenant(self, space: str) -> tuple[int, int]:
        """How many requests of a tenant run, and how many blocks they have together."""
        return self._of_tenant.get(space, (0, 0))

    def add(self, request: Request, num_private: int) -> None:
        self.by_id[request.request_id] = request
        self._count(request, +1, len(request.block_table))
        self._private[request.space] += num_private
        self._num_with_blocks[request.space] += 1

    def grown(self, request: Request, num_blocks: int) -> None:
        """A running request has so many blocks more, all private."""
        self._count(request, 0, num_blocks)
        self._private[request.space] += num_blocks

    def cached(self, request: Request, num_blocks: int) -> None:
        """So many of its private blocks are the index's now."""
        self._private[request.space] -= num_blocks

    def remove(self, request: Request) -> None:
        """It does not run any more; it has its blocks still."""
        del self.by_id[request.request_id]
        self._count(request, -1, -len(request.block_table))

    def freed(self, request: Request, num_private: int) -> None:
        """It has given back all of its blocks, of which so many were private."""
        space = request.space
        self._private[space] -= num_private
        self._num_with_blocks[space] -= 1
        if not self._num_with_blocks[space]:
            del self._num_with_blocks[space], self._private[space]

    def _count(self, request: Request, requests: int, blocks: int) -> None:
        space = request.space
        had = self._of_tenant.get(space, (0, 0))
        self._of_tenant[space] = had[0] + requests, had[1] + blocks
        if not self._of_tenant[space][0]:
            del self._of_tenant[space]

    def findings(self) -> list[str]:
        """What is wrong with the counts, in words."""
        running: dict[str, tuple[int, int]] = {}
        private: Counter[str] = Counter()
        for one in self:
            space = one.space
            private[space] += int(np.count_nonzero(one.is_private))
            if one not in self.ending:
                had = running.get(space, (0, 0))
                running[space] = had[0] + 1, had[1] + len(one.block_table)
        wrong = [
            f"tenant {space!r} runs {running.get(space, (0, 0))} requests and blocks, but "
            f"{self._of_tenant.get(space, (0, 0))} are counted"
            for space in sorted(running.keys() | self._of_tenant.keys())
            if running.get(space) != self._of_tenant.get(space)
        ]
        if private != self._private:
            wrong.append("the blocks that are only their requests' own are miscounted by tenant")
        if Counter(one.space for one in self) != self._num_with_blocks:
            wrong.append("the requests that have blocks are miscounted by tenant")
        return wrong
