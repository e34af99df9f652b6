"""redis-py's connections, set up so that none of its defaults can hold us up.

Measured with its defaults: 4.3 s to hear of a refused connection, more than 12 s of silence before
a server that never answers. Here nothing is retried, and every exchange has a deadline of its own.
"""

from __future__ import annotations

import asyncio
from asyncio import StreamWriter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
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
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from tierkv.errors import StoreUnavailableError
from tierkv.storage.redis.pool import Login, serving
from tierkv.storage.redis.socket import Address
from tierkv.storage.redis.url import TlsFiles
from tierkv.storage.unreachable import why_unreachable


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


Argument = bytes | str | int
Command = tuple[Argument, ...]
Reply = bytes | int | list["Reply"] | ResponseError | None

# Callers wait for their outcomes, so this bounds callers, not bytes.
_MAX_WAITING = 1024


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

    async def read_response(self) -> bytes | int | list[Reply] | None:
        """The next reply; raises it if it is an error."""


@dataclass(frozen=True, slots=True)
class _Exchange:
    """outcome: the replies, or a sentence that says why there are none. Cancelled by its caller."""

    commands: Sequence[Command]
    deadline_s: float
    outcome: asyncio.Future[list[Reply] | str]

    def settle(self, outcome: list[Reply] | str) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)


class RedisLanes:
    """`num_connections` connections, opened when first needed and again after a failure."""

    def __init__(
        self, connection: Callable[[], RedisConnection], *, num_connections: int, url: str
    ) -> None:
        self._new_connection = connection
        self.num_connections = num_connections
        self.url = url
        self._waiting: asyncio.Queue[_Exchange] = asyncio.Queue(_MAX_WAITING)
        self.is_open = False

    def running(self) -> AbstractAsyncContextManager[None]:
        """Leaving closes the connections; whoever still waits gets StoreUnavailableError."""
        return serving(self)

    async def ask(self, commands: Sequence[Command], *, deadline_s: float) -> list[Reply]:
        """The reply to each command; one the server refuses is a ResponseError in its place.

        deadline_s: for the exchange itself, connecting included. Waiting for a lane is not counted,
        but ends when an exchange before it fails: the server that is silent for one is silent for
        all. Raises StoreUnavailableError. May be cancelled at any time; the commands are carried
        out all the same if they were begun.
        """
        if not self.is_open:
            raise StoreUnavailableError(f"{self.url} is closed")
        exchange = _Exchange(commands, deadline_s, asyncio.get_running_loop().create_future())
        try:
            self._waiting.put_nowait(exchange)
        except asyncio.QueueFull:
            raise StoreUnavailableError(
                f"{self.url} has {_MAX_WAITING} exchanges waiting for it"
            ) from None
        outcome = await exchange.outcome
        if isinstance(outcome, str):
            raise StoreUnavailableError(outcome)
        return outcome

    async def serve(self) -> None:
        # In a thread: for each connection redis-py reads its own package's version from the disk.
        connection = await asyncio.to_thread(self._new_connection)
        try:
            while True:
                exchange = await self._waiting.get()
                if not exchange.outcome.done():
                    await self._carry_out(connection, exchange)
        finally:
            await connection.disconnect()

    async def _carry_out(self, connection: RedisConnection, exchange: _Exchange) -> None:
        try:
            async with asyncio.timeout(exchange.deadline_s):
                exchange.settle(await _talk(connection, exchange.commands))
        except (RedisError, OSError) as error:
            await connection.disconnect()
            reason = self._sentence(error, exchange.deadline_s)
            exchange.settle(reason)
            self.fail_waiting(reason)
        finally:
            exchange.settle(f"{self.url} is closed")

    def fail_waiting(self, reason: str) -> None:
        while not self._waiting.empty():
            self._waiting.get_nowait().settle(reason)

    def _sentence(self, error: RedisError | OSError, deadline_s: float) -> str:
        match error:
            case AuthenticationError() | AuthorizationError():
                return f"{self.url} refused to log us in ({error}): check user and password"
            case BusyLoadingError():
                return f"{self.url} is still loading its values"
            case TimeoutError() | RedisTimeoutError():
                return f"{self.url} did not answer within {deadline_s * 1000:.0f} ms"
            case InvalidResponse():
                return f"{self.url} does not speak Redis ({error})"
            case _:
                return f"{self.url} cannot be reached {why_unreachable(error)}"


async def _talk(connection: RedisConnection, commands: Sequence[Command]) -> list[Reply]:
    """The replies. A connection that the server closed while it was idle is replaced, once."""
    if connection.is_connected:
        try:
            return await _talk_once(connection, commands)
        except (AuthenticationError, AuthorizationError, BusyLoadingError):
            raise
        except (RedisConnectionError, ConnectionError):
            await connection.disconnect()
    await connection.connect()
    return await _talk_once(connection, commands)


async def _talk_once(connection: RedisConnection, commands: Sequence[Command]) -> list[Reply]:
    await connection.send_packed_command(connection.pack_commands(commands))
    replies: list[Reply] = []
    for _ in commands:
        try:
            replies.append(await connection.read_response())
        except ResponseError as error:
            replies.append(error)
    return replies
