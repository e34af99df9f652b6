"""The route of the OpenAPI document."""

from __future__ import annotations

import msgspec
from aiohttp import web

from tierkv.api.access import Access
from tierkv.api.bodies import JSON
from tierkv.api.openapi import document
from tierkv.api.route import Route


class OpenApiRoutes:
    """table: all other routes; its own is told of too."""

    def __init__(self, table: list[Route]) -> None:
        self._document = msgspec.json.encode(document([*table, *self.routes()]))

    def routes(self) -> list[Route]:
        return [
            Route(
                method="GET",
                path="/openapi.json",
                handler=self.tell,
                access=Access.READ,
                summary="This document.",
                content_type=JSON,
            )
        ]

    async def tell(self, _: web.Request) -> web.Response:
        return web.Response(body=self._document, content_type=JSON)
