"""The requests that have blocks: those that run, and those that have ended with copies at work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tierkv.sched.loads import Load
from tierkv.sched.request import Request


@dataclass(slots=True)
class Running:
    """by_id: in the order of admission. ending: kernels or copies may still touch their blocks.
    loads_of: loads that write blocks of a request's table."""

    by_id: dict[str, Request] = field(default_factory=dict)
    ending: set[Request] = field(default_factory=set)
    loads_of: dict[Request, list[Load]] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Request]:
        yield from self.by_id.values()
        yield from self.ending

    def __contains__(self, request: object) -> bool:
        return request in self.ending or any(request is one for one in self.by_id.values())

    def private_blocks(self, space: str) -> int:
        """Device blocks of a tenant's requests that the index does not count."""
        return sum(sum(one.is_private) for one in self if one.spec.prompt.space == space)

    def of_tenant(self, space: str) -> list[int]:
        """The number of blocks of each running request of a tenant."""
        return [
            len(one.block_table) for one in self.by_id.values() if one.spec.prompt.space == space
        ]
