"""The route of the event stream."""

from __future__ import annotations

import re
from contextlib import suppress

import msgspec
from aiohttp import hdrs, web

from tierkv.api.access import Access
from tierkv.api.route import Route
from tierkv.api.routes_base import Routes
from tierkv.api.sse import EVENT_STREAM, event_stream, open_stream, write
from tierkv.errors import ShuttingDownError
from tierkv.sched.events import CacheEvent

_ID = re.compile(r"(\d{1,18})-(\d{1,18})")
_QUIET_S = 15.0  # then a comment line tells that the connection is alive
_MOST = 256  # events in one write


class EventRoutes(Routes):
    @Route("GET", "/v1/events", Access.ADMIN, content_type=EVENT_STREAM)
    async def stream(self, request: web.Request) -> web.StreamResponse:
        """What happens to cached blocks, as server-sent events.

        Each event has an id; a client that comes back with it as Last-Event-ID goes on there.
        `lost` says how many could not be told: ask for /v1/blocks then."""
        node = self._node
        node.check_started()
        if node.is_draining:
            raise ShuttingDownError("this node is shutting down")
        known = _ID.fullmatch(request.headers.get("Last-Event-ID", ""))
        epoch = int(known[1]) if known else None
        number = int(known[2]) if known else 0
        if request.method == hdrs.METH_HEAD:  # a body would be taken for the next answer
            return event_stream()
        async with node.feed.reading(epoch, number) as reader:
            response = await open_stream(request)
            told = 0
            with suppress(ConnectionError):
                await write(response, b"retry: 1000\n\n")
                while True:
                    events = await node.feed.next(reader, most=_MOST, timeout_s=_QUIET_S)
                    if events is None:
                        await write(response, b"event: end\ndata: {}\n\n")
                        await response.write_eof()
                        break
                    first = reader.number - len(events) + 1
                    chunk = b"".join(
                        _encode(reader.epoch, number, event)
                        for number, event in enumerate(events, start=first)
                    )
                    if reader.num_lost > told:
                        lost = b'event: lost\ndata: {"events":%d}\n\n' % (reader.num_lost - told)
                        told, chunk = reader.num_lost, lost + chunk
                    await write(response, chunk or b":\n\n")
        return response


def _encode(epoch: int, number: int, event: CacheEvent) -> bytes:
    data = msgspec.json.encode(
        {
            "tier": event.tier,
            "space": event.space,
            "start": event.start,
            "stop": event.stop,
            "digests": [digest.hex() for digest in event.digests],
        }
    )
    kind = event.kind.value.encode()
    return b"id: %d-%d\nevent: %s\ndata: %s\n\n" % (epoch, number, kind, data)
