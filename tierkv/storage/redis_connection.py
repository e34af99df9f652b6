"""redis-py's connections, set up so that none of its defaults can hold us up.

Measured with its defaults: 4.3 s to hear of a refused connection, more than 12 s of silence before
a server that never answers. Here nothing is retried, and every exchange has a deadline of its own.
"""

from __future__ import annotations

from asyncio import StreamWriter
from collections.abc import Callable
from typing import TypedDict, cast

from redis.asyncio.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import InvalidResponse, ResponseError

from tierkv.errors import StoreUnavailableError
from tierkv.storage.redis_bulk import Login
from tierkv.storage.redis_lanes import Command, RedisConnection, RedisLanes, Reply
from tierkv.storage.redis_socket import Address
from tierkv.storage.redis_tls import TlsFiles


class _BehavesWell:
    """redis-py closes politely: what is not sent yet keeps the socket open, for ever if the peer
    is stopped. And it stumbles over what no Redis says, such as a MOVED to nowhere."""

    _writer: StreamWriter | None

    async def disconnect(self, *_: object, **__: object) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
        await super().disconnect(nowait=True)  # type: ignore[misc]

    async def read_response(self, *args: object, **options: object) -> object:
        try:
            return await super().read_response(*args, **options)  # type: ignore[misc]
        except (TypeError, ValueError) as error:
            raise InvalidResponse(str(error)) from error


class _Tcp(_BehavesWell, Connection): ...


class _Tls(_BehavesWell, SSLConnection): ...


class _Unix(_BehavesWell, UnixDomainSocketConnection): ...


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
    address: Address,
    login: Login,
    tls: TlsFiles | None,
    *,
    connect_timeout_s: float,
) -> Callable[[], RedisConnection]:
    """Makes connections that are not connected yet."""
    options = _Options(
        db=login.db,
        username=login.username,
        password=login.password,
        socket_connect_timeout=connect_timeout_s,
        socket_timeout=None,  # the exchange's deadline covers every read and write
        retry=Retry(NoBackoff(), 0),
        decode_responses=False,
        protocol=2,
    )
    socket_path = address.socket_path
    if socket_path is not None:
        return lambda: cast("RedisConnection", _Unix(path=socket_path, **options))
    host, port = address.host, address.port
    if tls is None:
        return lambda: cast("RedisConnection", _Tcp(host=host, port=port, **options))
    return lambda: cast(
        "RedisConnection",
        _Tls(
            host=host,
            port=port,
            ssl_ca_certs=tls.ca,
            ssl_certfile=tls.certificate,
            ssl_keyfile=tls.key,
            ssl_cert_reqs="required",
            ssl_check_hostname=True,
            **options,
        ),
    )


async def ask_once(
    connection: Callable[[], RedisConnection], command: Command, *, url: str, deadline_s: float
) -> Reply:
    """One answer over a connection of its own. Raises StoreUnavailableError."""
    lanes = RedisLanes(connection, num_connections=1, url=url)
    reply: Reply | StoreUnavailableError
    async with lanes.running():
        try:
            [reply] = await lanes.ask([command], deadline_s=deadline_s)
        except StoreUnavailableError as error:
            reply = error  # outside a TaskGroup, where no cancel is forgotten for it
    if isinstance(reply, StoreUnavailableError):
        raise reply
    if isinstance(reply, ResponseError):
        is_alone = "cluster support disabled" in str(reply)
        what_to_do = "; it is no cluster, so use redis://" if is_alone else ""
        raise StoreUnavailableError(f"{url} refused {command[0]!s}: {reply}{what_to_do}") from reply
    return reply
