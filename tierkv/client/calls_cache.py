"""Calls about what is cached: prefetches, pins, tickets."""

from __future__ import annotations

from tierkv.api.types import (
    PinAnswer,
    PinBody,
    PinsAnswer,
    PrefetchAnswer,
    PrefetchBody,
    TicketAnswer,
)
from tierkv.client import routes
from tierkv.client.calls import Calls, Question, named


class CacheCalls(Calls):
    async def prefetch(self, body: PrefetchBody) -> PrefetchAnswer:
        """Begin to bring a prompt's blocks from storage to the host."""
        return await self._call(routes.PREFETCH, Question(body=named(body)))

    async def prefetch_state(self, name: str) -> PrefetchAnswer:
        return await self._call(routes.PREFETCH_STATE, Question(name))

    async def cancel_prefetch(self, name: str) -> PrefetchAnswer:
        return await self._call(routes.CANCEL_PREFETCH, Question(name))

    async def pins(self) -> PinsAnswer:
        """All of the caller's tenant."""
        return await self._call(routes.PINS)

    async def pin(self, name: str, body: PinBody) -> PinAnswer:
        """Keep what is cached of a prompt from being evicted, for a while; `name` is yours."""
        return await self._call(routes.PIN, Question(name, body))

    async def pin_state(self, name: str) -> PinAnswer:
        return await self._call(routes.PIN_STATE, Question(name))

    async def unpin(self, name: str) -> PinAnswer:
        return await self._call(routes.UNPIN, Question(name))

    async def ticket(self, name: str) -> TicketAnswer:
        """How a published prompt stands. It does not wait."""
        return await self._call(routes.TICKET, Question(name))

    async def forget_ticket(self, name: str) -> TicketAnswer:
        """Nobody will claim it; its blocks live on as long as any."""
        return await self._call(routes.FORGET_TICKET, Question(name))

    async def acknowledge(self, name: str) -> TicketAnswer:
        """It has been claimed: its producer need not keep anything for it."""
        return await self._call(routes.ACKNOWLEDGE, Question(name))
