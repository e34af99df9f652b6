"""The routes of pins: prompts whose blocks are to stay for a while."""

from __future__ import annotations

import asyncio

from aiohttp import web

from tierkv.api import bodies
from tierkv.api.access import Access
from tierkv.api.pace import in_turns
from tierkv.api.pins import Pin
from tierkv.api.route import Route
from tierkv.api.routes_base import Routes, principal_of
from tierkv.api.types_cache import PinAnswer, PinBody, PinsAnswer

_PATH = "/v1/pins/{id}"


class PinRoutes(Routes):
    def routes(self) -> list[Route]:
        return [
            Route(
                method="GET",
                path="/v1/pins",
                handler=self.list,
                access=Access.WRITE,
                summary="List the tenant's pins.",
                answer=PinsAnswer,
            ),
            Route(
                method="PUT",
                path=_PATH,
                handler=self.put,
                access=Access.WRITE,
                summary="Keep what is cached of a prompt, for a while.",
                body=PinBody,
                answer=PinAnswer,
            ),
            Route(
                method="GET",
                path=_PATH,
                handler=self.look,
                access=Access.WRITE,
                summary="Tell what a pin keeps, and for how long.",
                answer=PinAnswer,
            ),
            Route(
                method="DELETE",
                path=_PATH,
                handler=self.remove,
                access=Access.WRITE,
                summary="End a pin.",
                answer=PinAnswer,
            ),
        ]

    async def list(self, request: web.Request) -> web.Response:
        self._node.check_started()
        pins = self._node.pins.all_of(principal_of(request).tenant)
        told = [self._answer(pin) async for pin in in_turns(pins)]
        return bodies.answer(request, PinsAnswer(told))

    async def put(self, request: web.Request) -> web.Response:
        async with self._node.work():
            key = self._key(request)
            body = await self._read(request, PinBody)
            prompt = self._prompt(request, body)
            pin = self._node.pins.put(key, prompt, body.ttl_s, is_soft=body.soft)
        return bodies.answer(request, self._answer(pin))

    async def look(self, request: web.Request) -> web.Response:
        self._node.check_started()
        return bodies.answer(request, self._answer(self._node.pins.get(self._key(request))))

    async def remove(self, request: web.Request) -> web.Response:
        self._node.check_started()
        return bodies.answer(request, self._answer(self._node.pins.remove(self._key(request))))

    def _answer(self, pin: Pin) -> PinAnswer:
        size = self._node.settings.cache.block_size
        return PinAnswer(
            pin_id=pin.pin_id,
            num_tokens=pin.num_blocks * size,
            prompt_tokens=pin.prompt_tokens,
            soft=pin.is_soft,
            expires_in_s=max(pin.ends_at - asyncio.get_running_loop().time(), 0.0),
        )
