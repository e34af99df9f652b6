"""POST /v1/completions: one or several prompts, answered whole or as server-sent events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus

import msgspec
from aiohttp import web

from tierkv.gateway.answers import failure_of
from tierkv.gateway.completion import PromptAnswer
from tierkv.gateway.failures import NoSuchModelError
from tierkv.gateway.gateway import Gateway
from tierkv.gateway.openai import CachedDetails, Choice, Completion, CompletionBody, Usage
from tierkv.http import bodies
from tierkv.http.bodies import open_stream, write
from tierkv.http.callers import Access
from tierkv.http.loop import in_turns
from tierkv.http.problems import log_if_unexpected
from tierkv.http.route import Route
from tierkv.tasks import task_group

_MOST_PIECES = 64  # that wait for the client; a slow one then slows its own answer only

SayTo = Callable[[int, str], Awaitable[None]]


class CompletionRoutes:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    @Route("POST", "/v1/completions", Access.WRITE)
    async def completions(self, request: web.Request) -> web.StreamResponse:
        metrics = self._gateway.backend.metrics
        try:
            response = await self._answer(request)
        except (asyncio.CancelledError, ConnectionError):
            metrics.count_request("client_gone")
            raise
        except Exception as error:  # counted, and answered by the middleware
            is_ours = failure_of(request, error).status >= HTTPStatus.INTERNAL_SERVER_ERROR
            metrics.count_request("server_error" if is_ours else "client_error")
            raise
        metrics.count_request("ok")
        return response

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        settings = self._gateway.settings
        async with self._gateway.work():
            body = await bodies.read_body(
                request, CompletionBody, timeout_s=settings.gateway.body_timeout_s
            )
        if body.model not in (None, settings.gateway.model):
            raise NoSuchModelError(body.model, settings.gateway.model)
        jobs = body.jobs(
            request[bodies.REQUEST_ID],
            request.headers.get("Authorization"),
            most=settings.limits.max_batch,
        )
        backend, stops = self._gateway.backend, body.stops()
        answers = [PromptAnswer(job, backend, stops) async for job in in_turns(jobs)]
        backend.admission.check(len(answers))
        writer = _Writer(request, settings.gateway.model)
        if body.stream:
            with_usage = body.stream_options is not None and body.stream_options.include_usage
            return await self._stream(writer, answers, with_usage=with_usage)
        return await self._whole(writer, answers)

    async def _whole(self, writer: _Writer, answers: Sequence[PromptAnswer]) -> web.Response:
        texts: list[list[str]] = [[] for _ in answers]

        async def say(index: int, text: str) -> None:
            texts[index].append(text)

        await self._run(answers, say)
        choices = [
            Choice(text="".join(texts[index]), index=index, finish_reason=answer.finish_reason)
            async for index, answer in in_turns(enumerate(answers))
        ]
        return bodies.answer(writer.request, writer.completion(tuple(choices), usage_of(answers)))

    async def _stream(
        self, writer: _Writer, answers: Sequence[PromptAnswer], *, with_usage: bool
    ) -> web.StreamResponse:
        pieces: asyncio.Queue[tuple[int, str] | None] = asyncio.Queue(_MOST_PIECES)

        async def say(index: int, text: str) -> None:
            await pieces.put((index, text))

        async def produce() -> Exception | None:
            try:
                await self._run(answers, say)
            except Exception as error:  # noqa: BLE001 - what nobody expected is logged
                return error
            return None

        async with task_group() as tasks:
            producer = tasks.create_task(produce(), name="tierkv-completion")
            producer.add_done_callback(lambda _: _wake(pieces))
            while not (producer.done() and pieces.empty()):
                piece = await pieces.get()
                if piece is not None:
                    index, text = piece
                    await writer.write((Choice(text=text, index=index),))
        failure = producer.result()
        if failure is not None:
            if not writer.has_begun:
                raise failure
            log_if_unexpected(writer.request, failure)
            await writer.write_line(msgspec.json.encode(failure_of(writer.request, failure)))
            return await writer.end()
        async for index, answer in in_turns(enumerate(answers)):
            await writer.write((Choice(text="", index=index, finish_reason=answer.finish_reason),))
        if with_usage:
            await writer.write((), usage_of(answers))
        await writer.write_line(b"[DONE]")
        return await writer.end()

    async def _run(self, answers: Sequence[PromptAnswer], say: SayTo) -> None:
        """Run all prompts; the first that fails ends the others. Raises GatewayError."""
        async with task_group() as tasks:
            async for index, answer in in_turns(enumerate(answers)):
                tasks.create_task(self._run_one(index, answer, say))

    async def _run_one(self, index: int, answer: PromptAnswer, say: SayTo) -> None:
        async with self._gateway.work():
            await answer.run(lambda text: say(index, text))


def _wake(pieces: asyncio.Queue[tuple[int, str] | None]) -> None:
    if pieces.empty():
        pieces.put_nowait(None)


def usage_of(answers: Sequence[PromptAnswer]) -> Usage:
    prompt = sum(answer.job.num_tokens for answer in answers)
    generated = sum(answer.num_tokens for answer in answers)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=generated,
        total_tokens=prompt + generated,
        prompt_tokens_details=CachedDetails(sum(answer.cached_tokens for answer in answers)),
    )


class _Writer:
    """Writes the pieces of one answer; the head goes out with the first."""

    def __init__(self, request: web.Request, model: str) -> None:
        self.request = request
        self._id = f"cmpl-{request[bodies.REQUEST_ID]}"
        self._model = model
        self._created = int(time.time())
        self._response: web.StreamResponse | None = None

    @property
    def has_begun(self) -> bool:
        return self._response is not None

    def completion(self, choices: tuple[Choice, ...], usage: Usage | None) -> Completion:
        return Completion(
            id=self._id, created=self._created, model=self._model, choices=choices, usage=usage
        )

    async def write(self, choices: tuple[Choice, ...], usage: Usage | None = None) -> None:
        await self.write_line(msgspec.json.encode(self.completion(choices, usage)))

    async def write_line(self, line: bytes) -> None:
        """Raises ConnectionError if the client has gone or takes nothing."""
        if self._response is None:
            self._response = await open_stream(self.request)
        await write(self._response, b"data: %b\n\n" % line)

    async def end(self) -> web.StreamResponse:
        assert self._response is not None, "something was written"
        await self._response.write_eof()
        return self._response
