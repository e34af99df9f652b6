"""Runs a gateway as a process: binds its address, serves, and ends in order on a signal."""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import uvloop

from tierkv.gateway.app import make_app
from tierkv.gateway.gateway import Gateway
from tierkv.gateway.settings import GatewaySettings
from tierkv.http.auth import Guard
from tierkv.http.listen import bind, make_room_for, server_tls, url_of
from tierkv.http.process import told_to_end
from tierkv.http.server import Limits, serving

log = logging.getLogger("tierkv.gateway")


def run(settings: GatewaySettings, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT, and return when all has ended in order.

    announce: called with the URL once the gateway answers there.
    Raises a TierKVError whose sentence says what to correct, with nothing left open.
    """
    gateway = Gateway(settings)
    make_room_for(settings.gateway.max_connections)
    with listener_of(settings) as listener:
        uvloop.run(serve(gateway, listener, announce))


def listener_of(settings: GatewaySettings) -> socket.socket:
    """Bound to the settings' address. Raises ConfigError."""
    section = settings.gateway
    # The nodes ask callers who they are where the gateway hands that on.
    asks_callers = bool(settings.auth.file) or section.forward_authorization
    return bind(section, asks_callers=asks_callers)


async def serve(gateway: Gateway, listener: socket.socket, announce: Callable[[str], None]) -> None:
    """Run `gateway` behind `listener` until a signal; then drain it: it is unready and takes no
    more work, and streams may end within the grace time. A second signal cuts them off."""
    with told_to_end(gateway.hurry) as told:
        async with listening(gateway, listener) as url, gateway.running():
            log.info("the gateway is ready at %s", url)
            announce(url)
            await told.wait()
            grace_s = gateway.settings.gateway.drain_grace_s
            log.info("the gateway drains, for up to %g s", grace_s)
            gateway.drain()
            await gateway.idle(grace_s=grace_s)
    log.info("the gateway has ended")


@asynccontextmanager
async def listening(gateway: Gateway, listener: socket.socket) -> AsyncIterator[str]:
    """Answers on `listener`; yields the URL of it.

    Raises ConfigError if the auth file or the certificate cannot be used.
    """
    section, auth = gateway.settings.gateway, gateway.settings.auth
    guard = Guard(Path(auth.file) if auth.file else None, reload_s=auth.reload_s)
    limits = Limits.of(section)
    async with (
        guard.running(),
        server_tls(gateway.settings.tls) as tls,
        serving(make_app(gateway, guard), [listener], limits=limits, tls=tls),
    ):
        yield url_of(listener, has_tls=tls is not None)
