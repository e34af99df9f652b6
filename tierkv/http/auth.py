"""Asks who calls, before any route is reached, and whether that caller may."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import hdrs, web

from tierkv.http.callers import (
    ANYONE,
    NOBODY,
    Access,
    ForbiddenError,
    Keyring,
    Principal,
    UnauthenticatedError,
    read,
)
from tierkv.http.process import watching
from tierkv.pd.direct.address import credentials

log = logging.getLogger("tierkv.auth")

PRINCIPAL = web.RequestKey("principal", Principal)

_BEARER = re.compile(rb"bearer +([!-~]+) *", re.IGNORECASE)
_COMMON_NAME = "commonName"


class Guard:
    """Knows callers. Use it inside `running()`; outside of it, it knows nobody.

    file: the auth file; None asks nobody who they are.
    """

    def __init__(self, file: Path | None, *, reload_s: float = 1.0) -> None:
        self._file = file
        self._reload_s = reload_s
        self._keyring: Keyring | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Reads the file, and again whenever it has changed. Raises ConfigError if it is wrong at
        the start; a wrong one later is logged, and the last good one stays in force."""
        if self._file is None:
            yield
            return
        file = self._file

        async def reload() -> None:
            self._keyring = Keyring(await asyncio.to_thread(read, file))
            log.info("the callers of %s are in force", file)

        async with watching([file], reload, every_s=self._reload_s):
            yield

    def principal_of(self, request: web.BaseRequest) -> Principal:
        """Raises UnauthenticatedError. A token decides where there is one; else the certificate of
        the connection; else the user at the other end of a Unix socket."""
        if self._file is None:
            return ANYONE
        keyring = self._keyring
        if keyring is None:
            raise UnauthenticatedError("this node does not know its callers yet")
        given = request.headers.getall(hdrs.AUTHORIZATION, [])
        if given:
            return keyring.by_token(_token_of(given), now=time.time())
        return _by_connection(request, keyring)

    def admit(self, request: web.BaseRequest, needed: Access) -> None:
        """Set `request[PRINCIPAL]`. Raises UnauthenticatedError or ForbiddenError."""
        if needed is Access.PUBLIC:
            request[PRINCIPAL] = ANYONE if self._file is None else NOBODY
            return
        caller = self.principal_of(request)
        if caller.access < needed:
            has = caller.access.name.lower()
            log.info("%s (%s) may not %s %s", caller.name, has, request.method, request.path[:200])
            raise ForbiddenError(f"{caller.name} may {has}; this needs {needed.name.lower()}")
        request[PRINCIPAL] = caller


def _token_of(given: list[str]) -> bytes:
    """The token of the one Authorization header. Compared as bytes, so any character may come."""
    if len(given) > 1:
        raise UnauthenticatedError("there are several Authorization headers", was_given=True)
    found = _BEARER.fullmatch(given[0].encode("utf-8", "surrogateescape"))
    if found is None:
        raise UnauthenticatedError("the Authorization header is no bearer token", was_given=True)
    return found[1]


def _by_connection(request: web.BaseRequest, keyring: Keyring) -> Principal:
    transport = request.transport
    if transport is None:
        raise UnauthenticatedError("the caller has gone")
    certificate: Mapping[str, Any] | None = transport.get_extra_info("peercert")
    if certificate:
        names = list(_names(certificate))
        if found := keyring.by_certificate(names):
            return found
        raise UnauthenticatedError(
            f"the certificate of {', '.join(names)[:200]} is not known here", was_given=True
        )
    peer: socket.socket | None = transport.get_extra_info("socket")
    if peer is not None and peer.family == socket.AF_UNIX:
        return _by_user(peer, keyring)
    raise UnauthenticatedError("send a token: Authorization: Bearer tkv_...")


def _names(certificate: Mapping[str, Any]) -> Iterator[str]:
    """The names of a certificate as ssl gives it; alternative names before the common name."""
    for kind, name in certificate.get("subjectAltName", ()):
        yield f"{kind}:{name}"
    for parts in certificate.get("subject", ()):
        for key, value in parts:
            if key == _COMMON_NAME:
                yield f"CN:{value}"


def _by_user(peer: socket.socket, keyring: Keyring) -> Principal:
    """Who can open the socket may call it: by its row, or as an admin if it is the node's user."""
    _, uid, _ = credentials(peer)
    if found := keyring.by_uid(uid):
        return found
    if uid == os.geteuid():
        return Principal(f"uid:{uid}", "", Access.ADMIN)
    raise UnauthenticatedError(f"the user of uid {uid} is not known here", was_given=True)
