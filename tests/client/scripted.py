"""A server that answers what a test tells it to, and counts what it is asked."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from tierkv.http.problems import PROBLEM_JSON

Answering = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Scripted:
    """Each request takes the next answer; the last one is for all that come after."""

    url: str = ""
    answers: list[Answering] = field(default_factory=list)
    asked: list[tuple[str, str, bytes]] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((request.method, request.path_qs, await request.read()))
        chosen = self.answers[0] if len(self.answers) == 1 else self.answers.pop(0)
        return await chosen(request)


@asynccontextmanager
async def scripted(*answers: Answering) -> AsyncIterator[Scripted]:
    script = Scripted(answers=list(answers))
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", script.answer)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        script.url = f"http://127.0.0.1:{site.port}"
        yield script
    finally:
        await runner.cleanup()


def says(body: bytes, content_type: str, status: int = 200, **headers: str) -> Answering:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=body, content_type=content_type, status=status, headers=headers)

    return answer


def value(content: object) -> Answering:
    return says(msgspec.msgpack.encode(content), "application/msgpack")


def problem(status: int, code: str, *, retry_after: str | None = None, **more: Any) -> Answering:
    body = {"title": "T", "status": status, "detail": "why", "code": code, "request_id": "r1"}
    headers = {"Retry-After": retry_after} if retry_after is not None else {}
    return says(msgspec.json.encode(body | more), PROBLEM_JSON, status, **headers)


async def breaks_off(request: web.Request) -> web.StreamResponse:
    """Closes the connection without a word."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def events(*pieces: bytes, is_cut: bool = False) -> Answering:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        if is_cut:
            assert request.transport is not None
            request.transport.abort()
        return response

    return answer
