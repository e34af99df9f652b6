"""What happens to a node's cached blocks, as its event stream tells it."""

from __future__ import annotations

from typing import Self

import msgspec

from tierkv.client.streams import Events

_END = "end"


class NodeEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something happened to blocks [start, stop) of a prompt.

    kind: what, or "lost": `events` of them could not be told, so ask for all blocks again.
    id: to go on after it on another connection. tier: device, host or storage. space: the
    fingerprint's short name, "" for the node's own. digests: of those blocks whose keys are known.
    """

    kind: str = ""
    id: str = ""
    tier: str = ""
    space: str = ""
    start: int = 0
    stop: int = 0
    digests: tuple[str, ...] = ()
    events: int = 0


class EventStream:
    """Iterate over it. It ends when the node drains, and raises BrokenOffError if the connection
    is lost."""

    def __init__(self, events: Events) -> None:
        self._events = events

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> NodeEvent:
        event = await self._events.next()
        if event is None or event.name == _END:
            raise StopAsyncIteration
        found = self._events.decoded(event, NodeEvent)
        return msgspec.structs.replace(found, kind=event.name, id=event.last_id)
