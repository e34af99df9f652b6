"""What the classes of routes share: the node, the reading of bodies, and whose things are whose."""

from __future__ import annotations

from typing import TypeVar

from aiohttp import web

from tierkv.api.metrics import Metrics
from tierkv.api.node import Node
from tierkv.api.sessions import Held, Key
from tierkv.api.types import PromptBody
from tierkv.cache.keys import Prompt
from tierkv.http import bodies
from tierkv.http.auth import PRINCIPAL
from tierkv.http.callers import Principal, ticket_name

T = TypeVar("T")

IDEMPOTENCY_HEADER = "Idempotency-Key"


def principal_of(request: web.Request) -> Principal:
    """Who calls."""
    return request[PRINCIPAL]


class Routes:
    def __init__(self, node: Node, metrics: Metrics) -> None:
        self._node = node
        self._metrics = metrics

    async def _read(self, request: web.Request, kind: type[T]) -> T:
        return await bodies.read_body(
            request, kind, timeout_s=self._node.settings.node.body_timeout_s
        )

    async def _read_optional(self, request: web.Request, kind: type[T]) -> T:
        return await bodies.read_optional(
            request, kind, timeout_s=self._node.settings.node.body_timeout_s
        )

    def _name(self, request: web.Request, given: str | None) -> str:
        """The request's id: of the body, of Idempotency-Key, of X-Request-Id, or a new one."""
        if given is None:
            given = request.headers.get(IDEMPOTENCY_HEADER)
        return bodies.name_request(request, given)

    def _key(self, request: web.Request) -> Key:
        """Of what the path names, which belongs to the caller's tenant."""
        return principal_of(request).tenant, bodies.check_id(request.match_info["id"], "the id")

    def _ticket(self, request: web.Request, ticket_id: str) -> str:
        """What a ticket that the caller calls so is called on all nodes. Raises FieldError or
        BadRequestError."""
        tenant = principal_of(request).tenant
        return ticket_name(bodies.check_id(ticket_id, "ticket_id"), tenant)

    def _held(self, request: web.Request) -> Held:
        """Raises UnknownIdError."""
        key = self._key(request)
        bodies.name_request(request, key[1])
        return self._node.desk.find(key)

    def _prompt(self, request: web.Request, body: PromptBody) -> Prompt:
        """In the space of the caller's tenant. Raises FieldError or BadRequestError."""
        return self._node.prompt(body.packed(), principal_of(request).tenant)
