"""What the classes of routes share: the node, the reading of bodies, and whose things are whose."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from aiohttp import web

from tierkv.api.metrics import Metrics
from tierkv.api.node import Node
from tierkv.api.sessions import HeldSession, Key
from tierkv.api.types import PromptBody
from tierkv.cache.keys import Prompt
from tierkv.http import bodies
from tierkv.http.callers import PRINCIPAL, Access, Principal, ticket_name
from tierkv.http.route import in_path
from tierkv.sched.explain import Explanation, Miss

_LONG = 16_384  # tokens, bytes or characters, which take 0.1 ms to pack
T = TypeVar("T")
P = TypeVar("P", bound=PromptBody)

IDEMPOTENCY_HEADER = "Idempotency-Key"


def principal_of(request: web.BaseRequest) -> Principal:
    """Who calls."""
    return request[PRINCIPAL]


async def explained(node: Node, caller: Principal, prompt: Prompt) -> Explanation:
    """What of `prompt` is cached. What others have is told to those only who may see the blocks of
    all."""
    is_admin = caller.access >= Access.ADMIN
    deadline_s = node.settings.handoff.lookup_deadline_s
    found = await node.service.explain_with_storage(
        prompt, deadline_s=deadline_s, names_fields=is_admin
    )
    if is_admin or found.reason != Miss.OTHER_FINGERPRINT.value:
        return found
    return msgspec.structs.replace(found, reason=Miss.NEVER_STORED.value, detail="")


class Routes:
    def __init__(self, node: Node, metrics: Metrics) -> None:
        self._node = node
        self._metrics = metrics
        self._most_tokens = node.settings.node.max_prompt_tokens

    async def _read(self, request: web.BaseRequest, kind: type[T]) -> T:
        return await self._node.bodies.read(request, kind)

    async def _read_prompt(self, request: web.BaseRequest, kind: type[P]) -> P:
        """The tokens of a long body are packed off the event loop."""
        return await self._node.bodies.read(request, kind, self._pack)

    def _pack(self, body: P) -> P:
        given = body.tokens if body.prompt is None else body.prompt
        if given is None or len(given) <= _LONG:
            return body
        return msgspec.structs.replace(body, prompt=None, tokens=body.packed(self._most_tokens))

    async def _read_optional(self, request: web.BaseRequest, kind: type[T]) -> T:
        return await self._node.bodies.read_optional(request, kind)

    def _name(self, request: web.BaseRequest, given: str | None) -> str:
        """The request's id: of the body, of Idempotency-Key, of X-Request-Id, or a new one."""
        if given is None:
            given = request.headers.get(IDEMPOTENCY_HEADER)
        return bodies.name_request(request, given)

    def _key(self, request: web.BaseRequest) -> Key:
        """Of what the path names, which belongs to the caller's tenant."""
        return principal_of(request).tenant, bodies.check_id(in_path(request, "id"), "the id")

    def _ticket(self, request: web.BaseRequest, ticket_id: str) -> str:
        """What a ticket that the caller calls so is called on all nodes. Raises FieldError or
        BadRequestError."""
        tenant = principal_of(request).tenant
        return ticket_name(bodies.check_id(ticket_id, "ticket_id"), tenant)

    def _held(self, request: web.BaseRequest) -> HeldSession:
        """Raises UnknownIdError."""
        key = self._key(request)
        bodies.name_request(request, key[1])
        return self._node.desk.find(key)

    def _prompt(self, request: web.BaseRequest, body: PromptBody) -> Prompt:
        """In the space of the caller's tenant and adapter. Raises FieldError or BadRequestError."""
        tokens, tenant = body.packed(self._most_tokens), principal_of(request).tenant
        return self._node.prompt(tokens, tenant, body.media_items(), body.adapter)
