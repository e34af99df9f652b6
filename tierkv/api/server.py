"""The process of a node: its route table, and its life from the start to the last signal."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path

import uvloop
from msgspec.structs import replace

from tierkv import tracing
from tierkv.api.metrics import Metrics
from tierkv.api.node import Node
from tierkv.api.routes_cache import (
    LookupRoutes,
    PinRoutes,
    PrefetchRoutes,
    TicketRoutes,
)
from tierkv.api.routes_node import NodeRoutes, QuotaRoutes
from tierkv.api.routes_status import (
    LifeRoutes,
    NodeLiveRoutes,
    OpenApiRoutes,
    StatusRoutes,
)
from tierkv.api.routes_work import WorkRoutes
from tierkv.api.settings import NodeSection, NodeSettings
from tierkv.errors import ServiceFailedError
from tierkv.http import process
from tierkv.http.callers import Access, Guard, UnauthenticatedError
from tierkv.http.live import PageRoutes
from tierkv.http.problems import fail
from tierkv.http.process import LastResort, stop_signal
from tierkv.http.route import NO_ROUTE, HttpRouter, Route, routes_of
from tierkv.http.server import answering, bind, is_loopback, make_room_for, unix_listener

_KINDS = (
    *(StatusRoutes, PrefetchRoutes),
    *(PinRoutes, TicketRoutes),
    *(LookupRoutes, NodeRoutes, LifeRoutes, QuotaRoutes, WorkRoutes),
)


def routes(node: Node, metrics: Metrics) -> list[Route]:
    """Return the route table of a node.

    Args:
        node: The node that answers.
        metrics: The node's metrics, in which answers and times are recorded.
    """
    table = [row for kind in _KINDS for row in routes_of(kind(node, metrics))]
    return [*table, *routes_of(OpenApiRoutes(table))]


def router_of(node: Node, guard: Guard) -> HttpRouter:
    """Return the HTTP router of a node.

    Args:
        node: The node; it must be running before the first request arrives.
        guard: Authenticator of callers; it must be running before the first request arrives.
    """
    metrics = Metrics(node)
    page = (NodeLiveRoutes(node, metrics), PageRoutes())  # for browsers, no part of the API
    table = [*routes(node, metrics), *(row for kind in page for row in routes_of(kind))]
    metrics.know_routes([NO_ROUTE, *(row.path for row in table)])
    return HttpRouter(table, guard, fail, metrics.count_answer)


log = logging.getLogger(__name__)


def run(settings: NodeSettings, announce: Callable[[str], None]) -> None:
    """Run a node until SIGTERM or SIGINT, and return once all parts of the node are closed.

    Args:
        settings: The node's settings.
        announce: Called with the node's URL once the node answers requests.

    Raises:
        TierKVError: The node could not start, or failed. All parts are closed.
    """
    make_room_for(settings.node.max_connections)
    with open_listeners(settings.node, asks_callers=bool(settings.auth.file)) as listeners:
        if settings.node.listens_tcp:
            port: int = listeners[0].getsockname()[1]
            settings = replace(settings, node=replace(settings.node, port=port))
            _warn_of_plain_tokens(settings, listeners[0])
        last_resort = LastResort(settings.node.close_limit_s)
        try:
            if settings.node.engine_socket:
                uvloop.run(_serve_engines(settings, listeners, announce, last_resort))
                return
            node = Node(settings)
            with tracing.exporting(node.name):
                uvloop.run(serve(node, listeners, announce, last_resort))
        finally:
            last_resort.cancel()


async def _serve_engines(
    settings: NodeSettings,
    listeners: list[socket.socket],
    announce: Callable[[str], None],
    last_resort: LastResort,
) -> None:
    """Wait until the first engine connects, and run a node with the layout of that engine."""
    # This import takes 30 ms: only a node with an engine socket needs it.
    from tierkv.embed.external import EngineListener, ExternalEngines  # noqa: PLC0415
    from tierkv.embed.host_side import HostSizes  # noqa: PLC0415

    path, auth = settings.node.engine_socket, settings.auth
    guard = Guard(Path(auth.file) if auth.file else None, reload_s=auth.reload_s)

    def why_not(token: str) -> str:
        """Return the reason to reject an engine with this token, or "" to accept the engine.

        Only admins are accepted, because an engine can read the host blocks of all tenants.
        """
        try:
            caller = guard.principal_of_token(token)
        except UnauthenticatedError as error:
            return str(error)
        may = caller.access is Access.ADMIN
        return "" if may else f"{caller.name} does not have the role admin, which engines need"

    at_socket = EngineListener(path, why_not)
    async with guard.running(), at_socket.listening():
        with stop_signal(lambda: None) as stop:
            log.info("waiting for the first engine to connect at %s", path)
            # This function awaits one of the two tasks, and cancels the other, below.
            first = asyncio.ensure_future(at_socket.first())
            ending = asyncio.ensure_future(stop.wait())
            await asyncio.wait({first, ending}, return_when=asyncio.FIRST_COMPLETED)
            ending.cancel()
            if not first.done():
                first.cancel()
                return
        hello = first.result()
        sizes = HostSizes.for_blocks(hello.fingerprint, hello.groups, settings.cache.host_blocks)
        settings = replace(settings, cache=sizes.settings(settings.cache))
        node = Node(settings, external=ExternalEngines(at_socket, sizes))
        with tracing.exporting(node.name):
            await serve(node, listeners, announce, last_resort)


@contextmanager
def open_listeners(settings: NodeSection, *, asks_callers: bool) -> Iterator[list[socket.socket]]:
    """Open the listening sockets of `settings`, and close them at the end of the `with` block.

    Args:
        settings: The addresses.
        asks_callers: True if every caller is authenticated. If False, and `allow_insecure_bind` is
            not set, the TCP address must be one that other machines cannot reach.

    Yields:
        The sockets, TCP before the Unix socket.

    Raises:
        ConfigError: A socket cannot be opened.
    """
    with ExitStack() as stack:
        listeners = []
        if settings.listens_tcp:
            listeners.append(stack.enter_context(bind(settings, asks_callers=asks_callers)))
        if settings.unix_socket:
            listeners.append(stack.enter_context(unix_listener(Path(settings.unix_socket))))
        yield listeners


def _why_left(node: Node) -> str:
    failure, limit_s = node.service.failure, node.settings.node.close_limit_s
    why = "" if failure is None else f", which closes after a failure ({failure})"
    return (
        f"closing took longer than node.close_limit_s = {limit_s:g} s, since a store "
        f"or a device still uses memory of this node{why}"
    )


def _warn_of_plain_tokens(settings: NodeSettings, listener: socket.socket) -> None:
    if settings.auth.file and not settings.tls.cert and not is_loopback(listener.getsockname()[0]):
        log.warning(
            "callers' tokens cross the network unencrypted: set tls.cert, or put a TLS "
            "proxy in front"
        )


async def serve(
    node: Node,
    listeners: list[socket.socket],
    announce: Callable[[str], None],
    last_resort: LastResort,
) -> None:
    """Run `node` and answer requests on `listeners` until SIGTERM or SIGINT, then shut down.

    The shutdown waits until running requests have ended and their prompts are published.

    Args:
        node: The node.
        listeners: Listening sockets.
        announce: Called with the node's URL once the node answers requests.
        last_resort: Kills the process if closing takes too long.

    Raises:
        ServiceFailedError: The node's cache service failed and rejects all further requests: the
            caller must end the process.
    """
    last_resort.why = partial(_why_left, node)
    grace_s = node.settings.node.drain_grace_s
    at = listening(node, *listeners)
    with stop_signal(node.end_grace) as stop:

        def failed() -> None:
            last_resort.start()
            node.end_grace()
            stop.set()

        node.service.on_failure = failed
        await process.serve(
            node,
            node.name,
            at,
            announce,
            grace_s=grace_s,
            on_closing=last_resort.start,
            stop=stop,
        )
    if node.service.failure is not None:
        raise ServiceFailedError(f"the node ended after a failure: {node.service.failure}")


def listening(node: Node, *listeners: socket.socket) -> AbstractAsyncContextManager[str]:
    """Return a context manager that answers HTTP requests for `node` while it is entered.

    Args:
        node: The node; it must be running before the first request arrives.
        listeners: Listening sockets.

    Returns:
        The context manager. Its `as` value is the URL of the first of `listeners`.
    """
    own = node.settings
    return answering(own.node, own.auth, own.tls, listeners, partial(router_of, node))
