"""A gateway as a process: its routes, its address, and its shutdown on a signal."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from http import HTTPStatus
from typing import TypeVar

import msgspec
import uvloop
from aiohttp import web

import tierkv
from tierkv import tracing
from tierkv.api.settings import masked_url
from tierkv.api.types import PartHealth, ReadyAnswer, VersionAnswer
from tierkv.gateway.failures import (
    GatewayShuttingDownError,
    InvalidRequestError,
    NoNodesError,
    NoSuchModelError,
    failure_of,
)
from tierkv.gateway.gateway import Gateway
from tierkv.gateway.nodes import NodeState
from tierkv.gateway.openai import (
    AnswerPiece,
    CachedDetails,
    ChatBody,
    CompletionBody,
    Head,
    Model,
    ModelList,
    TokenUsage,
)
from tierkv.gateway.prompts import Prompt, packed_bytes
from tierkv.gateway.relay import PromptAnswer
from tierkv.gateway.settings import GatewaySettings
from tierkv.http import bodies, process
from tierkv.http.bodies import EVENT_STREAM, open_stream, write
from tierkv.http.callers import Access, Guard
from tierkv.http.live import PageRoutes
from tierkv.http.problems import fail, log_if_unexpected
from tierkv.http.process import LastResort, stop_signal
from tierkv.http.route import HttpRouter, Route, in_path, routes_of
from tierkv.http.server import answering, bind, make_room_for
from tierkv.tasks import task_group

_ID_CHARS = 200  # leaves room for the number of the call, which is appended for the nodes
_CLOSE_LIMIT_S = 5.0  # seconds for closing, after the drain
_MAX_PIECES = 64  # pieces of an answer that wait for a slow client

B = TypeVar("B", CompletionBody, ChatBody)
SendTo = Callable[[int, AnswerPiece], Awaitable[None]]


class CompletionRoutes:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    @Route("POST", "/v1/completions", Access.WRITE)
    async def completions(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self._counted(request, CompletionBody)

    @Route("POST", "/v1/chat/completions", Access.WRITE)
    async def chat(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self._counted(request, ChatBody)

    async def _counted(self, request: web.BaseRequest, kind: type[B]) -> web.StreamResponse:
        metrics = self._gateway.backend.metrics
        try:
            response = await self._answer(request, kind)
        except (asyncio.CancelledError, ConnectionError):
            metrics.requests.labels("client_gone").inc()
            raise
        except Exception as error:  # counted, and answered by the router
            is_ours = failure_of(request, error).status >= HTTPStatus.INTERNAL_SERVER_ERROR
            metrics.requests.labels("server_error" if is_ours else "client_error").inc()
            raise
        metrics.requests.labels("ok").inc()
        return response

    async def _answer(self, request: web.BaseRequest, kind: type[B]) -> web.StreamResponse:
        settings, backend = self._gateway.settings, self._gateway.backend
        prompts: list[Prompt] = []
        num_bytes = 0

        def accept(body: B) -> B:
            nonlocal num_bytes
            self._gateway.check_model(body.model)
            most = settings.gateway.max_prompt_tokens
            prompts.extend(body.prompts(max_prompts=settings.limits.max_batch, max_tokens=most))
            num_bytes = sum(map(packed_bytes, prompts))
            return body.without_prompts()

        async with self._gateway.work():
            body = await backend.bodies.read(request, kind, accept)
        stops = body.stops()
        session_id = bodies.session_of(request, body.session_id)
        num_answers = len(prompts) * body.num_choices
        if num_answers > (most := settings.limits.max_batch):
            raise InvalidRequestError(f"at most {most} answers at once", param="n")
        backend.admission.check(num_answers)
        backend.bodies.count(request, num_bytes)
        given = request[bodies.REQUEST_ID], request.headers.get("Authorization"), session_id
        answers = [
            PromptAnswer(job, backend, stops, min_tokens=body.min_tokens or 0)
            for job in body.jobs(prompts, *given)
        ]
        writer = _Writer(request, self._gateway.model, is_chat=kind is ChatBody)
        if body.stream:
            usage = body.num_choices if body.with_usage else None
            return await self._stream(writer, answers, usage_choices=usage)
        return await self._whole(writer, answers, body.num_choices)

    async def _whole(
        self, writer: _Writer, answers: Sequence[PromptAnswer], num_choices: int
    ) -> web.Response:
        pieces: list[list[AnswerPiece]] = [[] for _ in answers]

        async def send(index: int, piece: AnswerPiece) -> None:
            pieces[index].append(piece)

        await self._run(answers, send)
        finishes = [answer.finish_reason for answer in answers]
        completion = writer.head.whole(
            [AnswerPiece.joined(each) for each in pieces], finishes, usage_of(answers, num_choices)
        )
        return bodies.answer(writer.request, completion)

    async def _stream(
        self, writer: _Writer, answers: Sequence[PromptAnswer], *, usage_choices: int | None
    ) -> web.StreamResponse:
        pieces: asyncio.Queue[tuple[int, AnswerPiece] | None] = asyncio.Queue(_MAX_PIECES)

        async def send(index: int, piece: AnswerPiece) -> None:
            await pieces.put((index, piece))

        async def produce() -> Exception | None:
            try:
                await self._run(answers, send)
            except Exception as error:  # noqa: BLE001 - an unexpected error is logged
                return error
            return None

        async with task_group() as tasks:
            producer = tasks.create_task(produce(), name="tierkv-completion")
            producer.add_done_callback(lambda _: _wake(pieces))
            while not (producer.done() and pieces.empty()):
                found = await pieces.get()
                if found is not None:
                    await writer.write(writer.head.piece(*found))
        failure = producer.result()
        if failure is not None:
            if not writer.has_begun:
                raise failure
            log_if_unexpected(writer.request, failure)
            await writer.write_line(msgspec.json.encode(failure_of(writer.request, failure)))
            return await writer.end()
        for index, answer in enumerate(answers):
            await writer.write(writer.head.piece(index, AnswerPiece(), answer.finish_reason))
        if usage_choices is not None:
            await writer.write(writer.head.usage(usage_of(answers, usage_choices)))
        await writer.write_line(b"[DONE]")
        return await writer.end()

    async def _run(self, answers: Sequence[PromptAnswer], send: SendTo) -> None:
        async with task_group() as tasks:
            for index, answer in enumerate(answers):
                tasks.create_task(self._run_one(index, answer, send))

    async def _run_one(self, index: int, answer: PromptAnswer, send: SendTo) -> None:
        async with self._gateway.work():
            await answer.run(lambda piece: send(index, piece))


def _wake(pieces: asyncio.Queue[tuple[int, AnswerPiece] | None]) -> None:
    if pieces.empty():
        pieces.put_nowait(None)


def usage_of(answers: Sequence[PromptAnswer], num_choices: int) -> TokenUsage:
    """Return the token usage of a request. A prompt with several answers counts once.

    Args:
        answers: The answers, ordered by prompt.
        num_choices: Number of answers to each prompt.
    """
    prompts = answers[::num_choices]
    prompt = sum(answer.job.num_tokens for answer in prompts)
    generated = sum(answer.num_tokens for answer in answers)
    return TokenUsage(
        prompt_tokens=prompt,
        completion_tokens=generated,
        total_tokens=prompt + generated,
        prompt_tokens_details=CachedDetails(sum(answer.cached_tokens for answer in prompts)),
    )


class _Writer:
    """A writer of one streamed answer. The HTTP headers are sent with the first event."""

    def __init__(self, request: web.BaseRequest, model: str, *, is_chat: bool) -> None:
        self.request = request
        name = f"{'chatcmpl' if is_chat else 'cmpl'}-{request[bodies.REQUEST_ID]}"
        self.head = Head(name, int(time.time()), model, is_chat)
        self._response: web.StreamResponse | None = None

    @property
    def has_begun(self) -> bool:
        return self._response is not None

    async def write(self, piece: msgspec.Struct) -> None:
        await self.write_line(msgspec.json.encode(piece))

    async def write_line(self, line: bytes) -> None:
        if self._response is None:
            self._response = await open_stream(self.request)
        await write(self._response, b"data: %b\n\n" % line)

    async def end(self) -> web.StreamResponse:
        assert self._response is not None, "something was written"
        await self._response.write_eof()
        return self._response


def router_of(gateway: Gateway, guard: Guard) -> HttpRouter:
    """Return the HTTP router of a gateway.

    Args:
        gateway: A gateway; it must be running before the first request arrives.
        guard: Authenticator of callers; it must be running before the first request arrives.
    """
    kinds = [kind(gateway) for kind in (CompletionRoutes, ProbeRoutes, GatewayLiveRoutes)]
    table = [row for owner in (*kinds, PageRoutes()) for row in routes_of(owner)]
    return HttpRouter(table, guard, partial(fail, make_problem=failure_of), id_chars=_ID_CHARS)


class ProbeRoutes:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._started = int(time.time())

    @Route("GET", "/v1/models", Access.READ)
    async def models(self, _: web.BaseRequest) -> ModelList:
        return ModelList(data=(self._model(),) if self._gateway.model else ())

    @Route("GET", "/v1/models/{model:.+}", Access.READ)  # names of models may have slashes
    async def model(self, request: web.BaseRequest) -> Model:
        asked = in_path(request, "model")
        if asked != self._gateway.model:
            raise NoSuchModelError(asked, self._gateway.model)
        return self._model()

    def _model(self) -> Model:
        return Model(id=self._gateway.model, created=self._started)

    @Route("GET", "/livez", Access.PUBLIC)
    async def live(self, _: web.BaseRequest) -> ReadyAnswer:
        """Answer 200 while the gateway's event loop runs."""
        return ReadyAnswer("ok")

    @Route("GET", "/readyz", Access.PUBLIC)
    async def ready(self, request: web.BaseRequest) -> ReadyAnswer:
        """Answer 200 while at least one node accepts requests, else 503.

        While the gateway shuts down, the answer is 503, too. The status is "degraded" if a node is
        not ready or is degraded itself. With ?verbose, the answer names the state of each node.
        """
        gateway = self._gateway
        if gateway.is_draining:
            raise GatewayShuttingDownError("this gateway is shutting down")
        states = gateway.states()
        is_verbose = bodies.is_set(request, "verbose")
        if not any(state is NodeState.READY for state, _ in states.values()):
            each = "; ".join(
                f"{url} is {state.value}{f' ({detail})' if detail else ''}"
                for url, (state, detail) in states.items()
            )
            raise NoNodesError(f"no node is ready{f': {each}' if is_verbose else ''}")
        parts = {
            url: PartHealth(
                "degraded" if detail and state is NodeState.READY else state.value, detail
            )
            for url, (state, detail) in states.items()
        }
        is_whole = all(part.status == NodeState.READY.value for part in parts.values())
        status = "ok" if is_whole else "degraded"
        return ReadyAnswer(status, parts if is_verbose else None)

    @Route("GET", "/version", Access.PUBLIC)
    async def version(self, _: web.BaseRequest) -> VersionAnswer:
        """Return the version of the gateway, in the form of a node's answer.

        The fingerprint is empty, because a gateway has no blocks.
        """
        return VersionAnswer(tierkv.__version__, "gateway", "gateway", {}, "")

    @Route("GET", "/metrics", Access.READ)
    async def metrics(self, request: web.BaseRequest) -> web.Response:
        accept = request.headers.get("Accept", "")
        body, content_type = await self._gateway.backend.metrics.exposition.render(accept)
        return web.Response(body=body, headers=bodies.headers_of(request, content_type))


class GatewayLiveRoutes:
    """The routes of the live page's data.

    These routes are not part of the API, and any version of tierkv may change them.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    @Route("GET", "/live/stream", Access.READ, content_type=EVENT_STREAM)
    async def stream(self, request: web.BaseRequest) -> web.StreamResponse:
        """Stream the gateway's metrics and the state of each node.

        The stream begins with the metrics of the last minutes.
        """
        return await self._gateway.live.stream(request, lambda: [("state", self._state())])

    def _state(self) -> bytes:
        gateway, states = self._gateway, self._gateway.states()
        return msgspec.json.encode(
            {
                "kind": "gateway",
                "name": gateway.model,
                "version": tierkv.__version__,
                "started_at": gateway.started_at,
                "is_draining": gateway.is_draining,
                "nodes": [
                    {
                        "url": masked_url(node.url),
                        "role": node.role.value,
                        "state": states[node.url][0].value,
                        "reason": states[node.url][1],
                        "running": node.running,
                        "outstanding_tokens": node.outstanding_tokens,
                        "failures": node.num_failures,
                        "recoveries": node.num_recoveries,
                    }
                    for node in gateway.backend.nodes.all
                ],
            }
        )


def run(settings: GatewaySettings, announce: Callable[[str], None]) -> None:
    """Run a gateway until SIGTERM or SIGINT, and return once all its parts are closed.

    Args:
        settings: The gateway's settings.
        announce: Called with the gateway's URL once it answers requests.

    Raises:
        TierKVError: The gateway could not start; nothing is left open.
    """
    gateway, section = Gateway(settings), settings.gateway
    make_room_for(section.max_connections)
    last_resort = LastResort(_CLOSE_LIMIT_S)
    last_resort.why = lambda: f"closing took longer than {_CLOSE_LIMIT_S:g} s"
    # With forward_authorization, the nodes authenticate the callers.
    asks_callers = bool(settings.auth.file) or section.forward_authorization
    with tracing.exporting("gateway"), bind(section, asks_callers=asks_callers) as listener:

        async def serve() -> None:
            with stop_signal(gateway.end_grace) as stop:
                await process.serve(
                    gateway,
                    "the gateway",
                    listening(gateway, listener),
                    announce,
                    grace_s=section.drain_grace_s,
                    on_closing=last_resort.start,
                    stop=stop,
                )

        try:
            uvloop.run(serve())
        finally:
            last_resort.cancel()


def listening(gateway: Gateway, listener: socket.socket) -> AbstractAsyncContextManager[str]:
    """Return a context manager that answers requests for `gateway` and yields the gateway's URL.

    Args:
        gateway: The gateway; it must be running before the first request arrives.
        listener: The listening socket.
    """
    own = gateway.settings
    return answering(own.gateway, own.auth, own.tls, [listener], partial(router_of, gateway))
