"""The routes for the cached blocks of a prompt: lookup, explain, prefetches, pins, and tickets."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from http import HTTPStatus
from urllib.parse import quote

from aiohttp import web

from tierkv.api.idempotency import content_of
from tierkv.api.node import Routes, explained, principal_of
from tierkv.api.pins import Pin
from tierkv.api.prefetches import Prefetch
from tierkv.api.types import (
    LookupAnswer,
    LookupBody,
    PinAnswer,
    PinBody,
    PinsAnswer,
    PrefetchAnswer,
    PrefetchBody,
    TicketAnswer,
    TicketState,
)
from tierkv.errors import BadRequestError, StoreUnavailableError
from tierkv.http import bodies
from tierkv.http.callers import Access
from tierkv.http.problems import UnknownIdError
from tierkv.http.route import Route, in_path
from tierkv.pd.handoff import Handoff
from tierkv.pd.tickets import Standing
from tierkv.sched.explain import Explanation


class LookupRoutes(Routes):
    @Route("POST", "/v1/lookup", Access.READ, body=LookupBody, answer=LookupAnswer)
    async def lookup(self, request: web.BaseRequest) -> LookupAnswer:
        """Return the number of a prompt's leading tokens that are cached on each tier."""
        async with self._node.work():
            body = await self._read_prompt(request, LookupBody)
            request_id = self._request_id(request, body.request_id)
            found = await self._node.service.lookup(self._prompt(request, body))
        return LookupAnswer.of(request_id, found)

    @Route("POST", "/v1/explain", Access.READ, body=LookupBody, answer=Explanation)
    async def explain(self, request: web.BaseRequest) -> Explanation:
        """Return the tier of each cached block of a prompt, and the reason for the first miss."""
        async with self._node.work():
            body = await self._read_prompt(request, LookupBody)
            self._request_id(request, body.request_id)
            return await explained(self._node, principal_of(request), self._prompt(request, body))


_PREFETCH = "/v1/prefetches/{id}"


class PrefetchRoutes(Routes):
    @Route(
        "POST",
        "/v1/prefetches",
        Access.WRITE,
        body=PrefetchBody,
        answer=PrefetchAnswer,
        status=HTTPStatus.ACCEPTED,
    )
    async def begin(self, request: web.BaseRequest) -> web.Response:
        """Start to fetch a prompt's blocks from storage to the host, and answer at once."""
        async with self._node.work():
            body = await self._read_prompt(request, PrefetchBody)
            key = (principal_of(request).tenant, self._request_id(request, body.request_id))
            prompt = self._prompt(request, body)
            if not prompt.num_tokens:
                raise BadRequestError("the prompt is empty: give at least one token")
            prefetch = await self._node.prefetches.begin(
                key,
                content_of(body, prompt.tokens),
                prompt,
                deadline_s=body.deadline_s,
                is_asked=body.kv_hints is None or self._node.hints.note(body.kv_hints),
            )
        response = bodies.answer(request, _prefetched(prefetch), status=HTTPStatus.ACCEPTED)
        response.headers["Location"] = f"/v1/prefetches/{quote(prefetch.key[1], safe='')}"
        return response

    @Route("GET", _PREFETCH, Access.WRITE, answer=PrefetchAnswer)
    async def get(self, request: web.BaseRequest) -> PrefetchAnswer:
        """Return the state of a prefetch."""
        self._node.check_started()
        return _prefetched(self._node.prefetches.find(self._key(request)))

    @Route("DELETE", _PREFETCH, Access.WRITE, answer=PrefetchAnswer)
    async def cancel(self, request: web.BaseRequest) -> PrefetchAnswer:
        """Cancel a prefetch if it is running; copies that have begun are completed."""
        self._node.check_started()
        return _prefetched(self._node.prefetches.cancel(self._key(request)))


def _prefetched(one: Prefetch) -> PrefetchAnswer:
    return PrefetchAnswer(
        prefetch_id=one.key[1],
        state=one.state,
        prompt_tokens=one.prompt_tokens,
        first_token=one.tokens.start,
        fetched_tokens=len(one.tokens),
        problem=one.problem,
    )


_PIN = "/v1/pins/{id}"


class PinRoutes(Routes):
    @Route("GET", "/v1/pins", Access.WRITE, answer=PinsAnswer)
    async def list(self, request: web.BaseRequest) -> PinsAnswer:
        """List the pins of the caller's tenant."""
        self._node.check_started()
        pins = self._node.pins.all_of(principal_of(request).tenant)
        return PinsAnswer([self._answer(pin) for pin in pins])

    @Route("PUT", _PIN, Access.WRITE, body=PinBody, answer=PinAnswer)
    async def put(self, request: web.BaseRequest) -> PinAnswer:
        """Pin a prompt's cached blocks: protect them from eviction for a time."""
        async with self._node.work():
            key = self._key(request)
            body = await self._read_prompt(request, PinBody)
            prompt = self._prompt(request, body)
            pin = self._node.pins.put(key, prompt, body.ttl_s, is_soft=body.soft)
        return self._answer(pin)

    @Route("GET", _PIN, Access.WRITE, answer=PinAnswer)
    async def get(self, request: web.BaseRequest) -> PinAnswer:
        """Return the number of tokens that a pin protects, and the seconds until the pin ends."""
        self._node.check_started()
        return self._answer(self._node.pins.get(self._key(request)))

    @Route("DELETE", _PIN, Access.WRITE, answer=PinAnswer)
    async def remove(self, request: web.BaseRequest) -> PinAnswer:
        """Remove a pin."""
        self._node.check_started()
        return self._answer(self._node.pins.remove(self._key(request)))

    def _answer(self, pin: Pin) -> PinAnswer:
        size = self._node.settings.cache.block_size
        return PinAnswer(
            pin_id=pin.pin_id,
            num_tokens=pin.num_blocks * size,
            prompt_tokens=pin.prompt_tokens,
            soft=pin.is_soft,
            expires_in_s=max(pin.ends_at - asyncio.get_running_loop().time(), 0.0),
        )


_TICKET = "/v1/tickets/{id}"
_STATES = {
    Standing.OPEN: TicketState.OPEN,
    Standing.PRODUCER_FAILED: TicketState.FAILED,
    Standing.PRODUCER_LOST: TicketState.LOST,
    Standing.WHOLE: TicketState.WHOLE,
    Standing.ACKNOWLEDGED: TicketState.CLAIMED,
    Standing.EXPIRED: TicketState.EXPIRED,
    Standing.INCOMPATIBLE: TicketState.INCOMPATIBLE,
    Standing.DAMAGED: TicketState.DAMAGED,
}


class TicketRoutes(Routes):
    @Route("GET", _TICKET, Access.WRITE, answer=TicketAnswer)
    async def get(self, request: web.BaseRequest) -> TicketAnswer:
        """Return the state of a hand-off ticket, by which a decode node claims a prompt."""
        async with self._node.call():
            return await self._state(request)

    @Route("DELETE", _TICKET, Access.WRITE, answer=TicketAnswer)
    async def forget(self, request: web.BaseRequest) -> TicketAnswer:
        """Delete a hand-off ticket, so that no decode node can claim its prompt.

        The prompt's blocks stay in storage until they expire.
        """
        async with self._node.call():
            answer = await self._state(request)
            await self._node.service.forget_ticket(self._ticket_in_path(request))
        return answer

    def _ticket_in_path(self, request: web.BaseRequest) -> str:
        return self._ticket_name(request, in_path(request, "id"))

    async def _state(self, request: web.BaseRequest) -> TicketAnswer:
        handoff = self._node.service.handoff
        if handoff is None:
            raise StoreUnavailableError(
                "this node has no storage tier and therefore no tickets: set storage.url"
            )
        name = self._ticket_in_path(request)
        found = await self._node.service.ticket_state(name)
        if found.state is Standing.NOT_YET:
            raise UnknownIdError(f"there is no ticket {in_path(request, 'id')!r}")
        if found.state is Standing.UNAVAILABLE:
            raise StoreUnavailableError(found.detail)
        state, present = _STATES[found.state], None
        if state is TicketState.WHOLE:
            present = await self._count_present(request, handoff, name)
            state = TicketState.WHOLE if present == found.num_blocks else TicketState.INCOMPLETE
        return TicketAnswer(
            ticket_id=in_path(request, "id"),
            state=state,
            detail=found.detail,
            num_tokens=found.num_tokens,
            num_blocks=found.num_blocks,
            present_blocks=present,
            producer=found.producer,
            claimer=found.claimer,
            expires_at=found.expires_at,
        )

    async def _count_present(self, request: web.BaseRequest, handoff: Handoff, name: str) -> int:
        ticket = await handoff.tickets.read(name)
        adapter = ticket.fingerprint.get("adapter", "") if ticket else ""
        space = self._node.space(principal_of(request).tenant, adapter)
        keys = ticket.keys() if ticket else []
        return await handoff.count_present([replace(key, space=space) for key in keys])
