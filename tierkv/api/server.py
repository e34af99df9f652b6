"""Runs a node as a process: binds its address, serves, and ends in order on a signal."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvloop
from aiohttp import web
from msgspec.structs import replace

from tierkv.api.app import make_app
from tierkv.api.node import Node
from tierkv.api.settings import NodeSection, NodeSettings
from tierkv.errors import ConfigError

log = logging.getLogger("tierkv.server")

_BACKLOG = 1024
_LINGER_S = 1.0  # a refused body is read on for so long, or its sender would not see the answer
_LAST_ANSWERS_S = 2.0  # for answers that are on their way when the work is done
_WHY_NOT = {
    errno.EADDRINUSE: "is taken by another process",
    errno.EACCES: "needs rights that this process does not have",
    errno.EADDRNOTAVAIL: "is not an address of this machine",
}


def run(settings: NodeSettings, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT, and return when all has ended in order.

    announce: called with the URL once the node answers there.
    Raises a TierKVError whose sentence says what to correct, with nothing left open.
    """
    with bind(settings.node) as listener:
        port: int = listener.getsockname()[1]
        settings = replace(settings, node=replace(settings.node, port=port))
        uvloop.run(serve(Node(settings), listener, announce))


async def serve(node: Node, listener: socket.socket, announce: Callable[[str], None]) -> None:
    """Run `node` behind `listener` until a signal; then drain it.

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

    with _signals(on_signal):
        async with listening(node, listener) as url, node.running():
            log.info("%s is ready at %s", node.name, url)
            announce(url)
            await stop.wait()
            grace_s = node.settings.node.drain_grace_s
            log.info("%s drains, for up to %g s", node.name, grace_s)
            node.drain()
            await node.idle(grace_s=grace_s)
    log.info("%s has ended", node.name)


@asynccontextmanager
async def listening(node: Node, listener: socket.socket) -> AsyncIterator[str]:
    """Answers on `listener`; yields the URL of it."""
    runner = web.AppRunner(
        make_app(node),
        access_log=None,
        handler_cancellation=True,  # a client that has gone needs no tokens
        lingering_time=_LINGER_S,
        keepalive_timeout=node.settings.node.idle_timeout_s,
        shutdown_timeout=_LAST_ANSWERS_S,
    )
    await runner.setup()
    try:
        await web.SockSite(runner, listener, backlog=_BACKLOG).start()
        yield url_of(listener)
    finally:
        await runner.cleanup()


# Addresses


def bind(settings: NodeSection) -> socket.socket:
    """A socket bound to the settings' address, not listening yet.

    Raises ConfigError if it cannot be had, or is not loopback and that is not allowed.
    """
    where = f"{settings.host}:{settings.port}"
    try:
        found = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"the host {settings.host!r} is not known: {error}") from error
    # Of a name with several addresses, such as localhost, the first IPv4 one.
    family, _, _, _, address = min(found, key=lambda one: one[0] is not socket.AF_INET)
    if not settings.allow_insecure_bind and not _is_loopback(str(address[0])):
        raise ConfigError(
            f"{settings.host} can be reached from other machines, and tierkv does not ask who "
            "calls: listen on 127.0.0.1, or, on a network that only you use, say --insecure"
        )
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        why = _WHY_NOT.get(error.errno or 0, f"cannot be had: {error.strerror}")
        raise ConfigError(f"the address {where} {why}: choose another with --port") from error
    return listener


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


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
