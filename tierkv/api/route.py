"""One row of the route table: from it come the router, the OpenAPI document and the auth matrix."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from http import HTTPStatus

from aiohttp.typedefs import Handler

from tierkv.api.access import Access


class Disconnect(Enum):
    """What happens to the work of a client that has gone."""

    CANCEL = "cancel"  # it is stopped, and what it held is given back
    DETACH = "detach"  # it goes on to its end: others may wait for the result


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """path: with aiohttp's {names}. body, answer: msgspec types, None where there is none.

    query: names of query parameters with their types. summary: one sentence for the document.
    is_stream: the answer may also be text/event-stream. is_body_optional: none is as good as {}.
    content_type: of the answer, where it is not JSON or msgpack.
    """

    method: str
    path: str
    handler: Handler
    access: Access
    summary: str
    body: type | None = None
    answer: type | None = None
    status: int = HTTPStatus.OK
    on_disconnect: Disconnect = Disconnect.CANCEL
    query: tuple[tuple[str, type], ...] = ()
    is_stream: bool = False
    is_body_optional: bool = False
    content_type: str | None = None
