"""The routes that compute: generate, prefill and decode, answered whole or as tokens come."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, cast

import msgspec
from aiohttp import web

from tierkv.api.routes import Routes, principal_of
from tierkv.api.sessions import content_of
from tierkv.api.settings import Role
from tierkv.api.types import (
    DecodeAnswer,
    DecodeBody,
    GenerateAnswer,
    GenerateBody,
    PrefillAnswer,
    PrefillBody,
    job_of,
)
from tierkv.http.bodies import open_stream, write
from tierkv.http.callers import Access
from tierkv.http.problems import WrongRoleError, log_if_unexpected, problem_of
from tierkv.http.route import Route
from tierkv.refmodel.engine import GenerateRequest, OnTokens
from tierkv.refmodel.model import decode
from tierkv.tasks import task_group

Work = Callable[[OnTokens], Awaitable[msgspec.Struct]]


class TokensEvent(msgspec.Struct, frozen=True):
    """Tokens that follow those of the events before."""

    tokens: Sequence[int]
    text: str


class _Feed:
    """What a generation has told so far, and what of it has been sent. It holds no more than
    the request's max_tokens, and a slow reader does not slow the model."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._changed = asyncio.Event()

    def tell(self, tokens: Sequence[int]) -> None:
        # A run that begins again tells the same tokens again: the same, so only new ones count.
        self._tokens += tokens[len(self._tokens) :]
        self._changed.set()

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def wake(self, _: object) -> None:
        self._changed.set()

    async def news(self, sent: int) -> list[int]:
        """Tokens from number `sent` on; none if something else has happened."""
        if len(self._tokens) == sent:
            self._changed.clear()
            await self._changed.wait()
        return self._tokens[sent:]


async def stream(request: web.BaseRequest, work: Work) -> web.StreamResponse:
    """Run `work` and answer with its tokens. Raises its TierKVError if it fails before the first.

    A cancel, which is what a client that goes away causes, cancels `work`.
    """
    feed = _Feed()
    response: web.StreamResponse | None = None
    sent = 0
    async with task_group() as tasks:
        task = tasks.create_task(_outcome(work, feed.tell), name="tierkv-stream")
        task.add_done_callback(feed.wake)
        while not task.done() or sent < feed.num_tokens:
            new = await feed.news(sent)
            if new:
                response = response or await open_stream(request)
                news = msgspec.json.encode(TokensEvent(new, decode(new)))
                await _tell(response, "tokens", news)
                sent += len(new)
    outcome = task.result()
    if isinstance(outcome, Exception):
        if response is None:
            raise outcome
        log_if_unexpected(request, outcome)
        await _tell(response, "error", msgspec.json.encode(problem_of(request, outcome)))
    else:
        response = response or await open_stream(request)
        await _tell(response, "done", msgspec.json.encode(outcome))
    await response.write_eof()
    return response


async def _outcome(work: Work, on_tokens: OnTokens) -> msgspec.Struct | Exception:
    """Failures are returned: they are for the client, whose stream has its own way to end."""
    try:
        return await work(on_tokens)
    except Exception as error:  # noqa: BLE001 - what nobody expected is logged
        return error


async def _tell(response: web.StreamResponse, event: str, data: bytes) -> None:
    await write(response, b"event: %b\ndata: %b\n\n" % (event.encode(), data))


A = TypeVar("A", bound=GenerateAnswer)


@dataclass(frozen=True, slots=True)
class _Work:
    """What one body asks for: under which id, of which tenant, and whether it is what another call
    of this id asked for (content). Whether the answer is streamed makes no difference to that."""

    operation: str
    request_id: str
    tenant: str
    content: bytes
    job: GenerateRequest


class WorkRoutes(Routes):
    @Route(
        "POST",
        "/v1/generate",
        Access.WRITE,
        body=GenerateBody,
        answer=GenerateAnswer,
        is_stream=True,
    )
    async def generate(self, request: web.BaseRequest) -> web.StreamResponse | GenerateAnswer:
        """Generate with the reference model, from the cache as far as it goes."""
        async with self._node.work():
            body = await self._read_prompt(request, GenerateBody)
            work = self._work(request, "generate", body, body.max_tokens, uses_cache=body.use_cache)

        async def compute(job: GenerateRequest) -> GenerateAnswer:
            generation = await self._node.engine.generate(job)
            self._metrics.observe("generate", generation)
            return GenerateAnswer.of(work.request_id, generation)

        return await self._answer(request, work, compute, streams=body.stream)

    @Route(
        "POST", "/v1/prefill", Access.WRITE, body=PrefillBody, answer=PrefillAnswer, is_stream=True
    )
    async def prefill(self, request: web.BaseRequest) -> web.StreamResponse | GenerateAnswer:
        """Compute a prompt's first token and publish the prompt's blocks."""
        self._check_role(Role.PREFILL, has_it=self._node.settings.node.role.prefills)
        async with self._node.work():
            body = await self._read_prompt(request, PrefillBody)
            work = self._work(request, "prefill", body)
            ticket_id = work.request_id if body.ticket_id is None else body.ticket_id
            name = self._ticket(request, ticket_id)

        async def compute(job: GenerateRequest) -> PrefillAnswer:
            with self._metrics.handing("publish"):
                prefilled = await self._node.engine.prefill(job, name, waits_for=body.wait)
            self._metrics.observe("prefill", prefilled.generation)
            block_size = self._node.settings.cache.block_size
            return PrefillAnswer.of_prefill(work.request_id, prefilled, ticket_id, block_size)

        return await self._answer(request, work, compute, streams=body.stream)

    @Route("POST", "/v1/decode", Access.WRITE, body=DecodeBody, answer=DecodeAnswer, is_stream=True)
    async def decode(self, request: web.BaseRequest) -> web.StreamResponse | GenerateAnswer:
        """Claim a published prompt and go on generating."""
        self._check_role(Role.DECODE, has_it=self._node.settings.node.role.decodes)
        async with self._node.work():
            body = await self._read_prompt(request, DecodeBody)
            work = self._work(request, "decode", body, body.max_tokens)
            name = self._ticket(request, body.ticket_id)

        async def compute(job: GenerateRequest) -> DecodeAnswer:
            with self._metrics.handing("claim"):
                generation, ticket = await self._node.engine.decode(
                    job, name, policy=body.policy, deadline_s=body.deadline_s
                )
            self._metrics.observe("decode", generation)
            return DecodeAnswer.of_ticket(work.request_id, generation, body.ticket_id, ticket)

        return await self._answer(request, work, compute, streams=body.stream)

    def _work(
        self,
        request: web.BaseRequest,
        operation: str,
        body: GenerateBody | PrefillBody | DecodeBody,
        max_tokens: int = 1,
        *,
        uses_cache: bool = True,
    ) -> _Work:
        request_id = self._name(request, body.request_id)
        prompt = self._prompt(request, body)
        name = self._node.request_name(request_id, principal_of(request).tenant)
        job = job_of(body, name, prompt, max_tokens, uses_cache=uses_cache)
        content = content_of(msgspec.structs.replace(body, stream=False), prompt.tokens)
        return _Work(operation, request_id, principal_of(request).tenant, content, job)

    def _answer(
        self,
        request: web.BaseRequest,
        work: _Work,
        compute: Callable[[GenerateRequest], Awaitable[A]],
        *,
        streams: bool,
    ) -> Awaitable[web.StreamResponse | A]:
        """Answer with what `compute` makes of the job, or made of it when this was asked before.
        A stream that repeats has its tokens all at once."""

        async def tell(on_tokens: OnTokens) -> A:
            job = replace(work.job, on_tokens=on_tokens)
            made = await self._once(replace(work, job=job), compute)
            on_tokens(made.tokens)
            return made

        return stream(request, tell) if streams else self._once(work, compute)

    async def _once(self, work: _Work, compute: Callable[[GenerateRequest], Awaitable[A]]) -> A:
        key = (work.operation, work.tenant, work.request_id)
        async with self._node.work():
            made = await self._node.answers.do(
                key, work.content, lambda: compute(work.job), stays_open=False
            )
        return cast("A", made)  # of the same operation

    def _check_role(self, needed: Role, *, has_it: bool) -> None:
        if not has_it:
            mine = self._node.settings.node.role.value
            raise WrongRoleError(
                f"this is a {mine} node; ask one whose role is {needed.value} or {Role.BOTH.value}"
            )
