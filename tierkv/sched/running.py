"""The requests that have blocks: those that run, and those that have ended with copies at work."""

from __future__ import annotations

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

    def __iter__(self) -> Iterator[Request]:
        yield from self.by_id.values()
        yield from self.ending

    def __contains__(self, request: object) -> bool:
        return request in self.ending or (
            isinstance(request, Request) and self.by_id.get(request.request_id) is request
        )

    def private_blocks(self, space: str) -> int:
        """Device blocks of a tenant's requests that the index does not count."""
        return sum(
            int(np.count_nonzero(one.is_private)) for one in self if one.spec.prompt.space == space
        )

    def of_tenant(self, space: str) -> tuple[int, int]:
        """How many requests of a tenant run, and how many blocks they have together."""
        requests, blocks = self._of_tenant.get(space, (0, 0))
        return requests, blocks

    def add(self, request: Request) -> None:
        self.by_id[request.request_id] = request
        self._count(request, +1, len(request.block_table))

    def grown(self, request: Request, num_blocks: int) -> None:
        """A running request has so many blocks more."""
        self._count(request, 0, num_blocks)

    def remove(self, request: Request) -> None:
        del self.by_id[request.request_id]
        self._count(request, -1, -len(request.block_table))

    def _count(self, request: Request, requests: int, blocks: int) -> None:
        space = request.spec.prompt.space
        had = self._of_tenant.get(space, (0, 0))
        self._of_tenant[space] = had[0] + requests, had[1] + blocks
        if not self._of_tenant[space][0]:
            del self._of_tenant[space]

    def findings(self) -> list[str]:
        """What is wrong with the counts, in words."""
        recounted: dict[str, tuple[int, int]] = {}
        for one in self.by_id.values():
            had = recounted.get(one.spec.prompt.space, (0, 0))
            recounted[one.spec.prompt.space] = had[0] + 1, had[1] + len(one.block_table)
        return [
            f"tenant {space!r} runs {recounted.get(space, (0, 0))} requests and blocks, but "
            f"{self._of_tenant.get(space, (0, 0))} are counted"
            for space in sorted(recounted.keys() | self._of_tenant.keys())
            if recounted.get(space) != self._of_tenant.get(space)
        ]
