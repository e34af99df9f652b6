"""Questions through redis-py: sentinels, topology, listings and hints. Values go by `wire`.

Its connections are set up so that none of its defaults can hold us up.

Measured with its defaults: 4.3 s to hear of a refused connection, more than 12 s of silence before
a server that never answers. Here nothing is retried, and every exchange has a deadline of its own.
"""

from __future__ import annotations

import asyncio
from asyncio import StreamWriter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol, TypedDict, cast

from redis.asyncio.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    InvalidResponse,
    RedisError,
    ResponseError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError

from tierkv.errors import StoreUnavailableError
from tierkv.storage.redis.pool import Login
from tierkv.storage.redis.socket import Address
from tierkv.storage.redis.url import TlsFiles
from tierkv.storage.unreachable import why_unreachable

Argument = bytes | str | int
Command = tuple[Argument, ...]
ControlReply = bytes | int | list["ControlReply"] | ResponseError | None


class RedisConnection(Protocol):
    """What is used of redis-py's connections."""

    @property
    def is_connected(self) -> bool: ...

    async def connect(self) -> None:
        """Connect and log in."""

    async def disconnect(self) -> None:
        """Close at once, dropping what is not sent yet."""

    def pack_commands(self, commands: Sequence[Command]) -> list[bytes]: ...

    async def send_packed_command(self, command: list[bytes]) -> None: ...

    async def read_response(self) -> bytes | int | list[ControlReply] | None:
        """The next reply; raises it if it is an error."""


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


class Conversation:
    """Questions over a connection that nobody else has, made with the first one."""

    def __init__(self, connection: RedisConnection, *, url: str, deadline_s: float) -> None:
        self._connection = connection
        self._url = url
        self._deadline_s = deadline_s

    async def ask(self, commands: Sequence[Command]) -> list[ControlReply]:
        """The reply to each command; one that the server refuses is a ResponseError in its place.

        Takes deadline_s at most, connecting included. Raises StoreUnavailableError.
        """
        connection = self._connection
        try:
            async with asyncio.timeout(self._deadline_s):
                if not connection.is_connected:
                    await connection.connect()
                await connection.send_packed_command(connection.pack_commands(commands))
                return [await _reply(connection) for _ in commands]
        except (RedisError, OSError) as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise asyncio.CancelledError from error  # which redis-py has replaced
            raise StoreUnavailableError(self._sentence(error)) from error

    def _sentence(self, error: RedisError | OSError) -> str:
        match error:
            case AuthenticationError() | AuthorizationError():
                return f"{self._url} refused to log us in ({error}): check user and password"
            case BusyLoadingError():
                return f"{self._url} is still loading its values"
            case TimeoutError() | RedisTimeoutError():
                return f"{self._url} did not answer within {self._deadline_s * 1000:.0f} ms"
            case InvalidResponse():
                return f"{self._url} does not speak Redis ({error})"
            case _:
                return f"{self._url} cannot be reached {why_unreachable(error)}"


async def _reply(connection: RedisConnection) -> ControlReply:
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error


@asynccontextmanager
async def conversation(
    new_connection: Callable[[], RedisConnection], *, url: str, deadline_s: float
) -> AsyncIterator[Conversation]:
    # In a thread: for each connection redis-py reads its own package's version from the disk.
    connection = await asyncio.to_thread(new_connection)
    try:
        yield Conversation(connection, url=url, deadline_s=deadline_s)
    finally:
        await connection.disconnect()


async def ask_once(
    new_connection: Callable[[], RedisConnection], command: Command, *, url: str, deadline_s: float
) -> ControlReply:
    """One answer over a connection of its own. Raises StoreUnavailableError."""
    async with conversation(new_connection, url=url, deadline_s=deadline_s) as talk:
        [reply] = await talk.ask([command])
    if isinstance(reply, ResponseError):
        is_alone = "cluster support disabled" in str(reply)
        what_to_do = "; it is no cluster, so use redis://" if is_alone else ""
        raise StoreUnavailableError(f"{url} refused {command[0]!s}: {reply}{what_to_do}") from reply
    return reply
