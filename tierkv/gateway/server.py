"""Runs a gateway as a process: binds its address, serves, and ends in order on a signal."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import uvloop
from aiohttp import web

from tierkv.api.server import bind, url_of
from tierkv.api.settings import NodeSection
from tierkv.gateway.app import make_app
from tierkv.gateway.gateway import Gateway
from tierkv.gateway.settings import GatewaySettings

log = logging.getLogger("tierkv.gateway")

_BACKLOG = 1024
_LINGER_S = 1.0  # a refused body is read on for so long, or its sender would not see the answer
_LAST_ANSWERS_S = 2.0  # for answers that are on their way when the work is done


def run(settings: GatewaySettings, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT, and return when all has ended in order.

    announce: called with the URL once the gateway answers there.
    Raises a TierKVError whose sentence says what to correct, with nothing left open.
    """
    gateway = Gateway(settings)
    with listener_of(settings) as listener:
        uvloop.run(serve(gateway, listener, announce))


def listener_of(settings: GatewaySettings) -> socket.socket:
    """Bound to the settings' address. Raises ConfigError."""
    section = settings.gateway
    return bind(
        NodeSection(
            host=section.host,
            port=section.port,
            # The nodes ask callers who they are where the gateway hands that on.
            allow_insecure_bind=section.allow_insecure_bind or section.forward_authorization,
        )
    )


async def serve(gateway: Gateway, listener: socket.socket, announce: Callable[[str], None]) -> None:
    """Run `gateway` behind `listener` until a signal; then drain it: it is unready and takes no
    more work, and streams may end within the grace time. A second signal cuts them off."""
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            log.warning("a second signal: not waiting for the work under way")
            gateway.hurry()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    async with listening(gateway, listener) as url, gateway.running():
        log.info("the gateway is ready at %s", url)
        announce(url)
        await stop.wait()
        grace_s = gateway.settings.gateway.drain_grace_s
        log.info("the gateway drains, for up to %g s", grace_s)
        gateway.drain()
        await gateway.idle(grace_s=grace_s)
    log.info("the gateway has ended")


@asynccontextmanager
async def listening(gateway: Gateway, listener: socket.socket) -> AsyncIterator[str]:
    """Answers on `listener`; yields the URL of it."""
    runner = web.AppRunner(
        make_app(gateway),
        access_log=None,
        handler_cancellation=True,  # a client that has gone needs no tokens
        lingering_time=_LINGER_S,
        keepalive_timeout=gateway.settings.gateway.idle_timeout_s,
        shutdown_timeout=_LAST_ANSWERS_S,
    )
    await runner.setup()
    try:
        await web.SockSite(runner, listener, backlog=_BACKLOG).start()
        yield url_of(listener)
    finally:
        await runner.cleanup()
