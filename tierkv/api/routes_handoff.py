"""The routes of a hand-off for engines that compute by themselves: publish and claim."""

from __future__ import annotations

from aiohttp import web

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
    @Route(
        "POST",
        "/v1/requests/{id}/publish",
        Access.WRITE,
        body=PublishBody,
        answer=PublishAnswer,
        is_body_optional=True,
        on_disconnect=Disconnect.DETACH,
    )
    async def publish(self, request: web.Request) -> PublishAnswer:
        """Store a request's committed prompt, and a ticket for it."""
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
        return PublishAnswer(
            request_id=held.key[1],
            ticket_id=ticket_id,
            num_blocks=published.num_blocks,
            present_blocks=published.present_blocks,
            early_blocks=published.early_blocks,
            tail_tokens=ticket.num_tokens % ticket.block_size,
            flushed_bytes=published.flushed_bytes,
            expires_at=ticket.expires_at,
        )

    @Route(
        "POST",
        "/v1/requests/{id}/stream",
        Access.WRITE,
        body=StreamBody,
        answer=StreamAnswer,
        is_body_optional=True,
    )
    async def stream(self, request: web.Request) -> StreamAnswer:
        """Store what is committed of the prompt from now on; publish ends it."""
        node = self._node
        async with node.call():
            held = self._held(request)
            body = await self._read_optional(request, StreamBody)
            ticket_id = held.key[1] if body.ticket_id is None else body.ticket_id
            name = self._ticket(request, ticket_id)
            with self._metrics.handing("publish"):
                streams = await node.desk.outgoing.stream(held, name)
        return StreamAnswer(request_id=held.key[1], ticket_id=ticket_id, streams=streams)

    @Route("POST", "/v1/claims", Access.WRITE, body=ClaimBody, answer=ClaimAnswer)
    async def claim(self, request: web.Request) -> ClaimAnswer:
        """Wait for a published prompt, and admit a request for it."""
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
        return ClaimAnswer(
            **fields_of(request, held),
            ticket_id=body.ticket_id,
            producer=claimed.producer if claimed else None,
            first_tokens=list(claimed.first_tokens) if claimed else [],
            sampling=claimed.sampling if claimed else {},
        )
