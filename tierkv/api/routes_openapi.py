"""The route of the OpenAPI document."""

from __future__ import annotations

import msgspec
from aiohttp import web

from tierkv.api.access import Access
from tierkv.api.bodies import JSON
from tierkv.api.openapi import document
from tierkv.api.route import Route, routes_of


class OpenApiRoutes:
    """table: all other routes; its own is told of too."""

    def __init__(self, table: list[Route]) -> None:
        self._document = msgspec.json.encode(document([*table, *routes_of(self)]))

    @Route("GET", "/openapi.json", Access.READ, content_type=JSON)
    async def tell(self, _: web.Request) -> web.Response:
        """This document."""
        return web.Response(body=self._document, content_type=JSON)
