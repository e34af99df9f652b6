"""The routes that do work: generate, prefill, decode, lookup."""

from __future__ import annotations

from typing import TypeVar

from aiohttp import web

from tierkv.api import bodies
from tierkv.api.metrics import Metrics
from tierkv.api.node import Node
from tierkv.api.problems import WrongRoleError
from tierkv.api.settings import Role
from tierkv.api.types import (
    DecodeAnswer,
    DecodeBody,
    GenerateAnswer,
    GenerateBody,
    LookupAnswer,
    LookupBody,
    PrefillAnswer,
    PrefillBody,
)
from tierkv.cache.keys import Prompt
from tierkv.errors import HandoffError

T = TypeVar("T")


class WorkRoutes:
    def __init__(self, node: Node, metrics: Metrics) -> None:
        self._node = node
        self._metrics = metrics

    def add_to(self, router: web.UrlDispatcher) -> None:
        router.add_post("/v1/generate", self.generate)
        router.add_post("/v1/prefill", self.prefill)
        router.add_post("/v1/decode", self.decode)
        router.add_post("/v1/lookup", self.lookup)

    async def generate(self, request: web.Request) -> web.Response:
        async with self._node.work():
            body = await self._read(request, GenerateBody)
            request_id = bodies.name_request(request, body.request_id)
            generation = await self._node.engine.generate(body.job(request_id))
        self._metrics.observe("generate", generation)
        return bodies.answer(request, GenerateAnswer.of(request_id, generation))

    async def prefill(self, request: web.Request) -> web.Response:
        self._check_role(Role.PREFILL, has_it=self._node.settings.node.role.prefills)
        async with self._node.work():
            body = await self._read(request, PrefillBody)
            request_id = bodies.name_request(request, body.request_id)
            ticket_id = request_id
            if body.ticket_id is not None:
                ticket_id = bodies.check_id(body.ticket_id, "ticket_id")
            try:
                prefilled = await self._node.engine.prefill(body.job(request_id), ticket_id)
            except HandoffError as error:
                self._metrics.count_handoff_failure("publish", error.reason)
                raise
        self._metrics.observe("prefill", prefilled.generation)
        return bodies.answer(request, PrefillAnswer.of_prefill(request_id, prefilled))

    async def decode(self, request: web.Request) -> web.Response:
        self._check_role(Role.DECODE, has_it=self._node.settings.node.role.decodes)
        async with self._node.work():
            body = await self._read(request, DecodeBody)
            request_id = bodies.name_request(request, body.request_id)
            ticket_id = bodies.check_id(body.ticket_id, "ticket_id")
            try:
                generation, ticket = await self._node.engine.decode(
                    body.job(request_id),
                    ticket_id,
                    policy=body.policy,
                    deadline_s=body.deadline_s,
                )
            except HandoffError as error:
                self._metrics.count_handoff_failure("claim", error.reason)
                raise
        self._metrics.observe("decode", generation)
        return bodies.answer(request, DecodeAnswer.of_ticket(request_id, generation, ticket))

    async def lookup(self, request: web.Request) -> web.Response:
        async with self._node.work():
            body = await self._read(request, LookupBody)
            request_id = bodies.name_request(request, body.request_id)
            prompt = Prompt(body.packed(), self._node.settings.cache.block_size)
            found = await self._node.service.lookup(prompt)
        return bodies.answer(request, LookupAnswer.of(request_id, found))

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
