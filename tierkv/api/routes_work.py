"""The routes that do work: generate, prefill, decode."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from aiohttp import web

from tierkv.api import bodies
from tierkv.api.access import Access
from tierkv.api.metrics import Metrics
from tierkv.api.node import Node
from tierkv.api.problems import WrongRoleError
from tierkv.api.route import Route
from tierkv.api.settings import Role
from tierkv.api.streaming import stream
from tierkv.api.types import (
    DecodeAnswer,
    DecodeBody,
    GenerateAnswer,
    GenerateBody,
    PrefillAnswer,
    PrefillBody,
)
from tierkv.errors import HandoffError
from tierkv.pd.handoff import PublishWait
from tierkv.refmodel.generation import GenerateRequest, OnTokens

T = TypeVar("T")


class WorkRoutes:
    def __init__(self, node: Node, metrics: Metrics) -> None:
        self._node = node
        self._metrics = metrics

    def routes(self) -> list[Route]:
        return [
            Route(
                method="POST",
                path="/v1/generate",
                handler=self.generate,
                access=Access.WRITE,
                summary="Generate with the reference model, from the cache as far as it goes.",
                body=GenerateBody,
                answer=GenerateAnswer,
                is_stream=True,
            ),
            Route(
                method="POST",
                path="/v1/prefill",
                handler=self.prefill,
                access=Access.WRITE,
                summary="Compute a prompt's first token and publish the prompt's blocks.",
                body=PrefillBody,
                answer=PrefillAnswer,
                is_stream=True,
            ),
            Route(
                method="POST",
                path="/v1/decode",
                handler=self.decode,
                access=Access.WRITE,
                summary="Claim a published prompt and go on generating.",
                body=DecodeBody,
                answer=DecodeAnswer,
                is_stream=True,
            ),
        ]

    async def generate(self, request: web.Request) -> web.StreamResponse:
        async with self._node.work():
            body = await self._read(request, GenerateBody)
            job = body.job(bodies.name_request(request, body.request_id))
            if not body.stream:
                return bodies.answer(request, await self._generate(job))

        async def work(on_tokens: OnTokens) -> GenerateAnswer:
            async with self._node.work():
                return await self._generate(replace(job, on_tokens=on_tokens))

        return await stream(request, work)

    async def _generate(self, job: GenerateRequest) -> GenerateAnswer:
        generation = await self._node.engine.generate(job)
        self._metrics.observe("generate", generation)
        return GenerateAnswer.of(job.request_id, generation)

    async def prefill(self, request: web.Request) -> web.StreamResponse:
        self._check_role(Role.PREFILL, has_it=self._node.settings.node.role.prefills)
        async with self._node.work():
            body = await self._read(request, PrefillBody)
            job = body.job(bodies.name_request(request, body.request_id))
            ticket_id = job.request_id
            if body.ticket_id is not None:
                ticket_id = bodies.check_id(body.ticket_id, "ticket_id")
            if not body.stream:
                return bodies.answer(request, await self._prefill(job, ticket_id, body.wait))

        async def work(on_tokens: OnTokens) -> PrefillAnswer:
            async with self._node.work():
                told = replace(job, on_tokens=on_tokens)
                return await self._prefill(told, ticket_id, body.wait)

        return await stream(request, work)

    async def _prefill(
        self, job: GenerateRequest, ticket_id: str, wait: PublishWait
    ) -> PrefillAnswer:
        try:
            prefilled = await self._node.engine.prefill(job, ticket_id, waits_for=wait)
        except HandoffError as error:
            self._metrics.count_handoff_failure("publish", error.reason)
            raise
        self._metrics.observe("prefill", prefilled.generation)
        block_size = self._node.settings.cache.block_size
        return PrefillAnswer.of_prefill(job.request_id, prefilled, ticket_id, block_size)

    async def decode(self, request: web.Request) -> web.StreamResponse:
        self._check_role(Role.DECODE, has_it=self._node.settings.node.role.decodes)
        async with self._node.work():
            body = await self._read(request, DecodeBody)
            job = body.job(bodies.name_request(request, body.request_id))
            bodies.check_id(body.ticket_id, "ticket_id")
            if not body.stream:
                return bodies.answer(request, await self._decode(job, body))

        async def work(on_tokens: OnTokens) -> DecodeAnswer:
            async with self._node.work():
                return await self._decode(replace(job, on_tokens=on_tokens), body)

        return await stream(request, work)

    async def _decode(self, job: GenerateRequest, body: DecodeBody) -> DecodeAnswer:
        try:
            generation, ticket = await self._node.engine.decode(
                job, body.ticket_id, policy=body.policy, deadline_s=body.deadline_s
            )
        except HandoffError as error:
            self._metrics.count_handoff_failure("claim", error.reason)
            raise
        self._metrics.observe("decode", generation)
        return DecodeAnswer.of_ticket(job.request_id, generation, body.ticket_id, ticket)

    async def _read(self, request: web.Request, kind: type[T]) -> T:
        return await bodies.read_body(
            request, kind, timeout_s=self._node.settings.node.body_timeout_s
        )

    def _check_role(self, needed: Role, *, has_it: bool) -> None:
        if not has_it:
            mine = self._node.settings.node.role.value
            raise WrongRoleError(
                f"this is a {mine} node; ask one whose role is {needed.value} or {Role.BOTH.value}"
            )
