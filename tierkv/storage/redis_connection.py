"""redis-py's connections, set up so that none of its defaults can hold us up.

Measured with its defaults: 4.3 s to hear of a refused connection, more than 12 s of silence before
a server that never answers. Here nothing is retried, and every exchange has a deadline of its own.
"""

from __future__ import annotations

from asyncio import StreamWriter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypedDict, cast

from redis.asyncio.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from tierkv.storage.redis_lanes import RedisConnection
from tierkv.storage.redis_url import RedisUrl


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files. ca: who may sign the server's certificate (None: the system's list).

    certificate, key: ours, where the server wants to see one.
    """

    ca: str | None = None
    certificate: str | None = None
    key: str | None = None


class _ClosesAtOnce:
    """redis-py closes politely: what is not sent yet keeps the socket open, for ever if the peer
    is stopped."""

    _writer: StreamWriter | None

    async def disconnect(self, *_: object, **__: object) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
        await super().disconnect(nowait=True)  # type: ignore[misc]


class _Tcp(_ClosesAtOnce, Connection): ...


class _Tls(_ClosesAtOnce, SSLConnection): ...


class _Unix(_ClosesAtOnce, UnixDomainSocketConnection): ...


class _Options(TypedDict):
    db: int
    username: str | None
    password: str | None
    socket_connect_timeout: float
    socket_timeout: None
    retry: Retry
    decode_responses: bool
    protocol: int


def connection_factory(
    url: RedisUrl, tls: TlsFiles, *, connect_timeout_s: float
) -> Callable[[], RedisConnection]:
    """Makes connections that are not connected yet."""
    options = _Options(
        db=url.db,
        username=url.username,
        password=url.password,
        socket_connect_timeout=connect_timeout_s,
        socket_timeout=None,  # the exchange's deadline covers every read and write
        retry=Retry(NoBackoff(), 0),
        decode_responses=False,
        protocol=2,
    )
    socket_path = url.socket_path
    if socket_path is not None:
        return lambda: cast("RedisConnection", _Unix(path=socket_path, **options))
    if not url.is_tls:
        return lambda: cast("RedisConnection", _Tcp(host=url.host, port=url.port, **options))
    return lambda: cast(
        "RedisConnection",
        _Tls(
            host=url.host,
            port=url.port,
            ssl_ca_certs=tls.ca,
            ssl_certfile=tls.certificate,
            ssl_keyfile=tls.key,
            ssl_cert_reqs="required",
            ssl_check_hostname=True,
            **options,
        ),
    )
