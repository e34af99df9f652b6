"""The routes of pins: prompts whose blocks are to stay for a while."""

from __future__ import annotations

import asyncio

from aiohttp import web

from tierkv.api.access import Access
from tierkv.api.pace import in_turns
from tierkv.api.pins import Pin
from tierkv.api.route import Route
from tierkv.api.routes_base import Routes, principal_of
from tierkv.api.types_cache import PinAnswer, PinBody, PinsAnswer

_PATH = "/v1/pins/{id}"


class PinRoutes(Routes):
    @Route("GET", "/v1/pins", Access.WRITE, answer=PinsAnswer)
    async def list(self, request: web.Request) -> PinsAnswer:
        """List the tenant's pins."""
        self._node.check_started()
        pins = self._node.pins.all_of(principal_of(request).tenant)
        told = [self._answer(pin) async for pin in in_turns(pins)]
        return PinsAnswer(told)

    @Route("PUT", _PATH, Access.WRITE, body=PinBody, answer=PinAnswer)
    async def put(self, request: web.Request) -> PinAnswer:
        """Keep what is cached of a prompt, for a while."""
        async with self._node.work():
            key = self._key(request)
            body = await self._read(request, PinBody)
            prompt = self._prompt(request, body)
            pin = self._node.pins.put(key, prompt, body.ttl_s, is_soft=body.soft)
        return self._answer(pin)

    @Route("GET", _PATH, Access.WRITE, answer=PinAnswer)
    async def look(self, request: web.Request) -> PinAnswer:
        """Tell what a pin keeps, and for how long."""
        self._node.check_started()
        return self._answer(self._node.pins.get(self._key(request)))

    @Route("DELETE", _PATH, Access.WRITE, answer=PinAnswer)
    async def remove(self, request: web.Request) -> PinAnswer:
        """End a pin."""
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
