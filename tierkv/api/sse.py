"""Server-sent events on their way to a client: the head of the answer, then pieces of it."""

from __future__ import annotations

import asyncio

from aiohttp import web

EVENT_STREAM = "text/event-stream"
_WRITE_TIMEOUT_S = 30.0  # a client that takes nothing for so long has gone


def event_stream() -> web.StreamResponse:
    """An answer that is an event stream."""
    return web.StreamResponse(
        headers={
            "Content-Type": EVENT_STREAM,
            "Cache-Control": "no-store",
            "X-Accel-Buffering": "no",  # a proxy in between is not to collect events
        }
    )


async def open_stream(request: web.Request) -> web.StreamResponse:
    """The head of an event stream, on its way."""
    response = event_stream()
    await response.prepare(request)
    return response


async def write(response: web.StreamResponse, chunk: bytes) -> None:
    """Raises ConnectionError if the client has gone or takes nothing."""
    try:
        async with asyncio.timeout(_WRITE_TIMEOUT_S):
            await response.write(chunk)
    except TimeoutError as error:
        raise ConnectionResetError(f"nothing was read for {_WRITE_TIMEOUT_S:g} s") from error
