"""The routes of a hand-off for engines that compute by themselves: publish and claim."""

from __future__ import annotations

from aiohttp import web

from tierkv.api import bodies
from tierkv.api.access import Access
from tierkv.api.route import Disconnect, Route
from tierkv.api.routes_base import Routes, principal_of
from tierkv.api.routes_requests import content_of, fields_of
from tierkv.api.types_requests import (
    ClaimAnswer,
    ClaimBody,
    PublishAnswer,
    PublishBody,
    StreamAnswer,
    StreamBody,
)
from tierkv.pd.ticket import Ticket
from tierkv.sched.request import Request


class HandoffRoutes(Routes):
    def routes(self) -> list[Route]:
        return [
            Route(
                method="POST",
                path="/v1/requests/{id}/publish",
                handler=self.publish,
                access=Access.WRITE,
                summary="Store a request's committed prompt, and a ticket for it.",
                body=PublishBody,
                answer=PublishAnswer,
                is_body_optional=True,
                on_disconnect=Disconnect.DETACH,
            ),
            Route(
                method="POST",
                path="/v1/requests/{id}/stream",
                handler=self.stream,
                access=Access.WRITE,
                summary="Store what is committed of the prompt from now on; publish ends it.",
                body=StreamBody,
                answer=StreamAnswer,
                is_body_optional=True,
            ),
            Route(
                method="POST",
                path="/v1/claims",
                handler=self.claim,
                access=Access.WRITE,
                summary="Wait for a published prompt, and admit a request for it.",
                body=ClaimBody,
                answer=ClaimAnswer,
            ),
        ]

    async def stream(self, request: web.Request) -> web.Response:
        node = self._node
        async with node.call():
            held = self._held(request)
            body = await self._read_optional(request, StreamBody)
            ticket_id = held.key[1] if body.ticket_id is None else body.ticket_id
            name = self._ticket(request, ticket_id)
            with self._metrics.handing("publish"):
                streams = await node.desk.outgoing.stream(held, name)
        return bodies.answer(
            request, StreamAnswer(request_id=held.key[1], ticket_id=ticket_id, streams=streams)
        )

    async def publish(self, request: web.Request) -> web.Response:
        node = self._node
        async with node.call():
            held = self._held(request)
            body = await self._read_optional(request, PublishBody)
            ticket_id = held.key[1] if body.ticket_id is None else body.ticket_id
            name = self._ticket(request, ticket_id)
            with self._metrics.handing("publish"):
                published = await node.desk.outgoing.publish(
                    held, name, body.first_tokens, body.sampling
                )
        ticket = published.ticket
        return bodies.answer(
            request,
            PublishAnswer(
                request_id=held.key[1],
                ticket_id=ticket_id,
                num_blocks=published.num_blocks,
                present_blocks=published.present_blocks,
                early_blocks=published.early_blocks,
                tail_tokens=ticket.num_tokens % ticket.block_size,
                flushed_bytes=published.flushed_bytes,
                expires_at=ticket.expires_at,
            ),
        )

    async def claim(self, request: web.Request) -> web.Response:
        node = self._node
        async with node.work():
            body = await self._read(request, ClaimBody)
            request_id = self._name(request, body.request_id)
            prompt = self._prompt(request, body)
            ticket = self._ticket(request, body.ticket_id)

            async def begin() -> tuple[Request, Ticket | None]:
                return await node.service.claim(
                    node.request_name(request_id, prompt),
                    ticket,
                    prompt,
                    max_new_tokens=body.max_new_tokens,
                    policy=body.policy,
                    deadline_s=body.deadline_s,
                    sampling=body.sampling,
                )

            with self._metrics.handing("claim"):
                held = await node.desk.begin(
                    (principal_of(request).tenant, request_id),
                    content_of(body, prompt.tokens),
                    begin,
                    ttl_s=body.ttl_s,
                    wait=body.wait,
                )
        claimed = held.ticket
        return bodies.answer(
            request,
            ClaimAnswer(
                **fields_of(request, held),
                ticket_id=body.ticket_id,
                producer=claimed.producer if claimed else None,
                first_tokens=list(claimed.first_tokens) if claimed else [],
                sampling=claimed.sampling if claimed else {},
            ),
        )
