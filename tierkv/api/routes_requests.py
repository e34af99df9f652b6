"""The routes for engines that compute by themselves: a request from admission or claim to end."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from tierkv.api.node import Routes, principal_of
from tierkv.api.sessions import HeldSession, content_of
from tierkv.api.types import (
    AdmitBody,
    ClaimAnswer,
    ClaimBody,
    CommitBody,
    EndAnswer,
    ExtendBody,
    MatchedTokens,
    PublishAnswer,
    PublishBody,
    RequestAnswer,
    ResumeBody,
    State,
    StreamAnswer,
    StreamBody,
)
from tierkv.http import bodies
from tierkv.http.callers import Access
from tierkv.http.problems import UnknownIdError
from tierkv.http.route import Disconnect, Route
from tierkv.sched.request import RequestSpec
from tierkv.service.session import Session

_PATH = "/v1/requests/{id}"


class RequestRoutes(Routes):
    @Route("POST", "/v1/requests", Access.WRITE, body=AdmitBody, answer=RequestAnswer)
    async def admit(self, request: web.BaseRequest) -> RequestAnswer:
        """Admit a request: its block table, and what of its prompt is cached."""
        self._node.check_engine()
        node = self._node
        async with node.work():
            body = await self._read_prompt(request, AdmitBody)
            request_id = self._request_id(request, body.request_id)
            prompt = self._prompt(request, body)
            tenant = principal_of(request).tenant

            spec = RequestSpec(
                node.request_name(request_id, principal_of(request).tenant),
                prompt,
                body.max_new_tokens,
                uses_cache=body.use_cache,
                priority=body.priority,
            )

            async def begin(session: Session) -> None:
                num_tokens = prompt.num_tokens + body.max_new_tokens
                async with node.sessions.room(num_tokens, deadline_s=body.deadline_s):
                    await session.admit()

            held = await node.sessions.begin(
                (tenant, request_id),
                content_of(body, prompt.tokens),
                spec,
                begin,
                ttl_s=body.ttl_s,
                wait=body.wait,
            )
        return _answer(request, held)

    @Route("GET", _PATH, Access.WRITE, answer=RequestAnswer)
    async def look(self, request: web.BaseRequest) -> RequestAnswer:
        """Tell how a request stands, and renew its lease."""
        self._node.check_started()
        return _answer(request, self._held(request))

    @Route("DELETE", _PATH, Access.WRITE, answer=EndAnswer, on_disconnect=Disconnect.DETACH)
    async def abort(self, request: web.BaseRequest) -> EndAnswer:
        """Give a request's blocks back, and what it publishes up; or its place in the line, or what
        this node generates for it."""
        node = self._node
        async with node.call():
            tenant, request_id = self._key(request)
            bodies.name_request(request, request_id)
            if not node.sessions.has((tenant, request_id)):
                # It waits for its blocks, or the engine of this node computes it; that is told.
                if not node.service.abort(node.request_name(request_id, tenant)):
                    raise UnknownIdError(f"there is no request {request_id!r}")
                return EndAnswer(request_id=request_id, state=State.ABORTED, computed_tokens=0)
            held = self._held(request)
            await node.sessions.end(held, State.ABORTED)
        return _end_answer(held)

    @Route(
        "POST",
        f"{_PATH}/commit",
        Access.WRITE,
        body=CommitBody,
        answer=RequestAnswer,
        is_body_optional=True,
    )
    async def commit(self, request: web.BaseRequest) -> RequestAnswer:
        """Tell which tokens' KV is computed."""
        self._node.check_engine()
        async with self._node.call():
            held = self._held(request)
            body = await self._read_optional(request, CommitBody)
            await self._node.sessions.commit(held, body.packed(held.running().spec.prompt.tokens))
        return _answer(request, held)

    @Route("POST", f"{_PATH}/extend", Access.WRITE, body=ExtendBody, answer=RequestAnswer)
    async def extend(self, request: web.BaseRequest) -> RequestAnswer:
        """Get room for more tokens."""
        self._node.check_engine()
        async with self._node.call():
            held = self._held(request)
            body = await self._read(request, ExtendBody)
            await self._node.sessions.extend(held, body.num_tokens, deadline_s=body.deadline_s)
        return _answer(request, held)

    @Route("POST", f"{_PATH}/preempt", Access.WRITE, answer=RequestAnswer)
    async def preempt(self, request: web.BaseRequest) -> RequestAnswer:
        """Give the blocks back for a while."""
        self._node.check_engine()
        async with self._node.call():
            held = self._held(request)
            await self._node.sessions.preempt(held)
        return _answer(request, held)

    @Route(
        "POST",
        f"{_PATH}/resume",
        Access.WRITE,
        body=ResumeBody,
        answer=RequestAnswer,
        is_body_optional=True,
    )
    async def resume(self, request: web.BaseRequest) -> RequestAnswer:
        """Get blocks again after a preemption."""
        self._node.check_engine()
        async with self._node.work():
            held = self._held(request)
            body = await self._read_optional(request, ResumeBody)
            await self._node.sessions.resume(
                held, max_new_tokens=body.max_new_tokens, deadline_s=body.deadline_s
            )
        return _answer(request, held)

    @Route(
        "POST",
        f"{_PATH}/finish",
        Access.WRITE,
        body=CommitBody,
        answer=EndAnswer,
        is_body_optional=True,
        on_disconnect=Disconnect.DETACH,
    )
    async def finish(self, request: web.BaseRequest) -> EndAnswer:
        """End a request, after a last commit if the body has one; what was committed stays
        cached."""
        self._node.check_engine()
        async with self._node.call():
            held = self._held(request)
            body = await self._read_optional(request, CommitBody)
            if not body.is_empty and held.state is not State.FINISHED:
                await self._node.sessions.commit(
                    held, body.packed(held.running().spec.prompt.tokens)
                )
            await self._node.sessions.end(held, State.FINISHED)
        return _end_answer(held)


def fields_of(request: web.BaseRequest, held: HeldSession) -> dict[str, Any]:
    """How a request stands. One that has ended has no block table: others may have its blocks."""
    matched, state = held.matched, held.state
    table: list[int] | bytes = []
    if held.session is not None and state is State.RUNNING:
        ids = held.session.request.block_table
        table = ids.tobytes() if bodies.wants_msgpack(request) else ids.tolist()
    return {
        "request_id": held.key[1],
        "state": state,
        "loads": held.loads,
        "prompt_tokens": held.prompt_tokens,
        "cached_tokens": matched.total_tokens,
        "computed_tokens": held.computed_tokens,
        "matched": MatchedTokens.of(matched),
        "block_size": held.block_size,
        "block_table": table,
        "expires_in_s": None if held.session is None else held.ttl_s,
    }


def _answer(request: web.BaseRequest, held: HeldSession) -> RequestAnswer:
    return RequestAnswer(**fields_of(request, held))


def _end_answer(held: HeldSession) -> EndAnswer:
    return EndAnswer(request_id=held.key[1], state=held.state, computed_tokens=held.computed_tokens)


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
    async def publish(self, request: web.BaseRequest) -> PublishAnswer:
        """Store a request's committed prompt, and a ticket for it."""
        self._node.check_engine()
        node = self._node
        async with node.call():
            held = self._held(request)
            body = await self._read_optional(request, PublishBody)
            ticket_id = held.key[1] if body.ticket_id is None else body.ticket_id
            name = self._ticket_name(request, ticket_id)
            with self._metrics.handing("publish"):
                published = await node.sessions.publish(
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
    async def stream(self, request: web.BaseRequest) -> StreamAnswer:
        """Store what is committed of the prompt from now on; publish ends it."""
        self._node.check_engine()
        node = self._node
        async with node.call():
            held = self._held(request)
            body = await self._read_optional(request, StreamBody)
            ticket_id = held.key[1] if body.ticket_id is None else body.ticket_id
            name = self._ticket_name(request, ticket_id)
            with self._metrics.handing("publish"):
                streams = await node.sessions.stream(held, name)
        return StreamAnswer(request_id=held.key[1], ticket_id=ticket_id, streams=streams)

    @Route("POST", "/v1/claims", Access.WRITE, body=ClaimBody, answer=ClaimAnswer)
    async def claim(self, request: web.BaseRequest) -> ClaimAnswer:
        """Wait for a published prompt, and admit a request for it."""
        self._node.check_engine()
        node = self._node
        async with node.work():
            body = await self._read_prompt(request, ClaimBody)
            request_id = self._request_id(request, body.request_id)
            prompt = self._prompt(request, body)
            ticket = self._ticket_name(request, body.ticket_id)

            spec = RequestSpec(
                node.request_name(request_id, principal_of(request).tenant),
                prompt,
                body.max_new_tokens,
                needs_logits=False,
            )

            async def begin(session: Session) -> None:
                await session.claim(ticket, body.policy, body.deadline_s, body.sampling)

            with self._metrics.handing("claim"):
                held = await node.sessions.begin(
                    (principal_of(request).tenant, request_id),
                    content_of(body, prompt.tokens),
                    spec,
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
