"""Planes that processes of one machine show each other: this node's own, and those of others."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from uuid import uuid4

from tierkv.gpu.protocol import Ids, PeerPlanes, Planes, SharedPlanes, Sharing


class ShownPlanes:
    """This node's planes as others may open them, described once for as long as they are there."""

    def __init__(self, sharing: Sharing, planes: Callable[[], Planes]) -> None:
        """planes: those of now."""
        self._sharing = sharing
        self._planes = planes
        self._owner = uuid4().hex
        self._described: tuple[Planes, SharedPlanes] | None = None

    def describe(self) -> SharedPlanes:
        """Raises ConfigError if no other process can open them."""
        planes = self._planes()
        if self._described is None or self._described[0] is not planes:
            shared = SharedPlanes(
                owner=self._owner,
                name=uuid4().hex,
                place=self._sharing.place,
                num_blocks=planes.num_blocks,
                planes=self._sharing.share(planes),
            )
            self._described = (planes, shared)
        return self._described[1]


@dataclass(slots=True)
class _Open:
    name: str
    own: Planes
    peer: PeerPlanes
    used_at: float


class OpenPlanes:
    """Others' planes that are open here, one set of each owner. For one thread.

    What is open keeps the owner's memory from being freed, also when it is dead or asleep.
    """

    def __init__(self, sharing: Sharing, planes: Callable[[], Planes]) -> None:
        """planes: this node's, of now."""
        self._sharing = sharing
        self._planes = planes
        self._of: dict[str, _Open] = {}

    def copy(self, shared: SharedPlanes, source_ids: Ids, target_ids: Ids) -> None:
        """See PeerPlanes.copy. Raises what it and Sharing.open raise."""
        self._opened(shared).copy(source_ids, target_ids)

    def _opened(self, shared: SharedPlanes) -> PeerPlanes:
        own = self._planes()
        found = self._of.get(shared.owner)
        if found is not None and (found.name != shared.name or found.own is not own):
            self.close(shared.owner)  # first: the new ones may have the handles of the old
            found = None
        if found is None:
            found = _Open(shared.name, own, self._sharing.open(own, shared), 0.0)
            self._of[shared.owner] = found
        found.used_at = time.monotonic()
        return found.peer

    @property
    def num_open(self) -> int:
        return len(self._of)

    def close(self, owner: str) -> None:
        found = self._of.pop(owner, None)
        if found is not None:
            found.peer.close()

    def close_unused(self, unused_s: float) -> None:
        """Close those that were not read from for so long."""
        before = time.monotonic() - unused_s
        for owner in [owner for owner, one in self._of.items() if one.used_at <= before]:
            self.close(owner)
