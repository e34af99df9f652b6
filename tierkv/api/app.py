"""The aiohttp application of a node: its routes, and what goes around each of them."""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from tierkv.api.auth import Guard, auth_middleware
from tierkv.api.framing import add_headers
from tierkv.api.metrics import Metrics
from tierkv.api.node import Node
from tierkv.api.problems import problem_middleware
from tierkv.api.route import register
from tierkv.api.table import routes

_NO_ROUTE = "none"


def make_app(node: Node, guard: Guard) -> web.Application:
    """The application over a node, which must be running when the first request comes.

    guard: knows who may call; it must be running too.
    """
    metrics = Metrics(node)
    app = web.Application(
        middlewares=[_counting(metrics), problem_middleware, auth_middleware(guard)],
        client_max_size=node.settings.node.max_body_bytes,
    )
    register(routes(node, metrics), app)
    metrics.know_routes([_NO_ROUTE, *(one.canonical for one in app.router.resources())])
    app.on_response_prepare.append(add_headers)
    return app


def _counting(metrics: Metrics) -> Middleware:
    @web.middleware
    async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await handler(request)
        resource = request.match_info.route.resource
        metrics.count_answer(resource.canonical if resource else _NO_ROUTE, response.status)
        return response

    return count
