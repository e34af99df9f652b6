"""Runs a node as a process: binds its addresses, serves, and ends in order on a signal."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import uvloop
from msgspec.structs import replace

from tierkv.api.app import make_app
from tierkv.api.auth import Guard
from tierkv.api.connections import Limits, serving
from tierkv.api.garbage import rare_full_collections
from tierkv.api.listen import bind, is_loopback, make_room_for, open_listeners, url_of
from tierkv.api.node import Node
from tierkv.api.settings import NodeSettings
from tierkv.api.tls import server_tls

__all__ = ["bind", "listening", "run", "serve", "url_of"]

log = logging.getLogger("tierkv.server")


def run(settings: NodeSettings, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT, and return when all has ended in order.

    announce: called with the URL once the node answers there.
    Raises a TierKVError whose sentence says what to correct, with nothing left open.
    """
    make_room_for(settings.node.max_connections)
    with open_listeners(settings.node, asks_callers=bool(settings.auth.file)) as listeners:
        if settings.node.listens_tcp:
            port: int = listeners[0].getsockname()[1]
            settings = replace(settings, node=replace(settings.node, port=port))
            _warn_of_plain_tokens(settings, listeners[0])
        uvloop.run(serve(Node(settings), listeners, announce))


def _warn_of_plain_tokens(settings: NodeSettings, listener: socket.socket) -> None:
    if settings.auth.file and not settings.tls.cert and not is_loopback(listener.getsockname()[0]):
        log.warning("tokens come over the network unencrypted: set tls.cert, or put TLS in front")


async def serve(
    node: Node, listeners: list[socket.socket], announce: Callable[[str], None]
) -> None:
    """Run `node` behind `listeners` until a signal; then drain it.

    First it is unready and takes no more work; what runs may end within the grace time, and is
    cut off then; publishes under way end by themselves. A second signal cuts off all of it. The
    address answers from the first moment to the last, so a probe is told, not left to guess.
    """
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            log.warning("a second signal: not waiting for the work under way")
            node.hurry()
        stop.set()

    with ExitStack() as stack:
        stack.enter_context(_signals(on_signal))
        async with listening(node, *listeners) as url, node.running():
            stack.enter_context(rare_full_collections())
            log.info("%s is ready at %s", node.name, url)
            announce(url)
            await stop.wait()
            grace_s = node.settings.node.drain_grace_s
            log.info("%s drains, for up to %g s", node.name, grace_s)
            node.drain()
            await node.idle(grace_s=grace_s)
    log.info("%s has ended", node.name)


@asynccontextmanager
async def listening(node: Node, *listeners: socket.socket) -> AsyncIterator[str]:
    """Answers on `listeners`; yields the URL of the first.

    Raises ConfigError if the auth file or the certificate cannot be used.
    """
    settings = node.settings
    auth = settings.auth
    guard = Guard(Path(auth.file) if auth.file else None, reload_s=auth.reload_s)
    limits = Limits(
        max_connections=settings.node.max_connections,
        idle_timeout_s=settings.node.idle_timeout_s,
        send_timeout_s=settings.node.send_timeout_s,
    )
    async with (
        guard.running(),
        server_tls(settings.tls) as tls,
        serving(make_app(node, guard), listeners, limits=limits, tls=tls),
    ):
        yield url_of(listeners[0], has_tls=tls is not None)


# Signals


@contextmanager
def _signals(call: Callable[[], None]) -> Iterator[None]:
    """SIGTERM and SIGINT call `call`, on the loop."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, call)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
