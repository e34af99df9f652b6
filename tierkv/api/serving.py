"""Lets an application answer on sockets, in HTTP/1.1 and 1.0 and nothing else."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from aiohttp import StreamReader, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import HttpVersion10, HttpVersion11, RawRequestMessage

from tierkv.api.connections import Connection, Counted, Limits
from tierkv.api.listen import BACKLOG
from tierkv.api.pace import Pace

_LAST_ANSWERS_S = 2.0  # for answers that are on their way when the work is done
_SPOKEN = (HttpVersion11, HttpVersion10)
_OF_OTHER_VERSION = web.RequestKey("of_other_version", bool)


@asynccontextmanager
async def serving(
    app: web.Application,
    listeners: Sequence[socket.socket],
    *,
    limits: Limits,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[None]:
    """`app` answers on `listeners` while the body runs; TCP ones speak TLS if there is some."""
    loop = asyncio.get_running_loop()
    runner = web.AppRunner(
        app,
        access_log=None,
        handler_cancellation=True,  # a client that has gone needs no tokens
        shutdown_timeout=_LAST_ANSWERS_S,
    )
    await runner.setup()
    handlers = runner.server
    assert handlers is not None, "it has been set up"
    _refuse_other_versions(handlers)
    counted = Counted(limits, Pace(loop))
    servers: list[asyncio.Server] = []
    try:
        for listener in listeners:
            is_unix = listener.family == socket.AF_UNIX
            context = None if is_unix else tls
            listen = loop.create_unix_server if is_unix else loop.create_server
            servers.append(
                await listen(
                    lambda: Connection(handlers, loop, counted),
                    sock=listener,
                    backlog=BACKLOG,
                    ssl=context,
                    ssl_handshake_timeout=limits.idle_timeout_s if context else None,
                )
            )
        yield
    finally:
        for server in servers:
            server.close()
        await runner.cleanup()


def _refuse_other_versions(handlers: web.Server) -> None:
    """HTTP/0.9 and what calls itself HTTP/2.0 in one line reach no route: aiohttp would answer
    them, in their own name. The answer is HTTP/1.0, which any client can tell from its own."""
    make, handle = handlers.request_factory, handlers.request_handler

    def make_request(
        message: RawRequestMessage,
        payload: StreamReader,
        connection: web.RequestHandler,
        writer: AbstractStreamWriter,
        task: asyncio.Task[None],
    ) -> web.BaseRequest:
        if message.version in _SPOKEN:
            return make(message, payload, connection, writer, task)
        message = message._replace(version=HttpVersion10, should_close=True)
        request = make(message, payload, connection, writer, task)
        request[_OF_OTHER_VERSION] = True
        return request

    async def refuse_or_handle(request: web.BaseRequest) -> web.StreamResponse:
        if _OF_OTHER_VERSION in request:
            raise web.HTTPVersionNotSupported
        return await handle(request)

    handlers.request_factory, handlers.request_handler = make_request, refuse_or_handle
