"""Requests of a service for tests that look at the service, and not at a session's life."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tierkv.cache.keys import Prompt
from tierkv.gpu.protocol import Event
from tierkv.pd.claims import ClaimPolicy
from tierkv.pd.handoff import Published, PublishStream
from tierkv.pd.tickets import Ticket
from tierkv.sched.request import Request, RequestSpec
from tierkv.service import Service
from tierkv.service.session import Session


async def begin_request(
    service: Service,
    request_id: str,
    prompt: Prompt,
    *,
    max_new_tokens: int,
    uses_cache: bool = True,
    priority: int = 0,
    session_id: str = "",
) -> Request:
    """Admit a request with everything that is cached of `prompt`; see Session.admit."""
    spec = RequestSpec(
        request_id,
        prompt,
        max_new_tokens,
        uses_cache=uses_cache,
        priority=priority,
        session_id=session_id,
    )
    return await Session(service, spec).admit()


async def resume_request(service: Service, request: Request, *, max_new_tokens: int) -> Request:
    """Admit a preempted request again; see Session.resume."""
    fetch = service.fetched if service.fetches(request.spec) else None
    return await service.scheduler.resume(request, max_new_tokens=max_new_tokens, fetch=fetch)


async def claim_request(
    service: Service,
    request_id: str,
    ticket_id: str,
    prompt: Prompt,
    *,
    max_new_tokens: int,
    policy: ClaimPolicy = ClaimPolicy.WHOLE,
    deadline_s: float | None = None,
    sampling: Mapping[str, str] | None = None,
) -> tuple[Request, Ticket | None]:
    """Claim a ticket; errors of loads are raised as they are, which Session.claim does not do."""
    service.require_handoff()
    return await service.claims.claim(
        RequestSpec(request_id, prompt, max_new_tokens, needs_logits=False),
        ticket_id,
        policy=policy,
        deadline_s=service.handoff_settings.claim_deadline_s if deadline_s is None else deadline_s,
        sampling=sampling or {},
    )


async def publish_request(
    service: Service,
    request: Request,
    ticket_id: str,
    first_tokens: Sequence[int],
    *,
    after: Sequence[Event] = (),
    sampling: Mapping[str, str] | None = None,
) -> Published:
    """Publish the request's computed prompt at once; see Session.publish."""
    handoff = service.require_handoff()
    return await handoff.publish(
        handoff.blocks_of(request),
        ticket_id,
        first_tokens,
        after=after,
        sampling=sampling,
        deadline_s=service.handoff_settings.publish_deadline_s,
    )


def open_stream(service: Service, request: Request, ticket_id: str) -> PublishStream:
    """Return a stream that publishes the request's prompt while it is computed."""
    handoff = service.require_handoff()
    deadline_s = service.handoff_settings.publish_deadline_s
    return PublishStream(handoff, handoff.blocks_of(request), ticket_id, deadline_s=deadline_s)
