"""Redis commands other than reads and writes of values, sent through redis-py.

These are commands to Sentinels, the hash slot table of a cluster, listings, and pub/sub messages
that serve as hints. The module `wire` reads and writes values. No command is sent again after a
failure, and every exchange has a deadline. With redis-py's defaults a refused connection is
reported after 4.3 s, and a silent server after more than 12 s.
"""

from __future__ import annotations

import asyncio
import logging
import random
from asyncio import StreamWriter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Protocol, cast

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
from tierkv.storage.base import why_unreachable
from tierkv.storage.protocol import EMPTY_MESSAGE, Listener, Topics, check_message
from tierkv.storage.redis.pool import Login, RedisAccess
from tierkv.storage.redis.wire import Address
from tierkv.tasks import background, supervised
from tierkv.threads import in_thread

_log = logging.getLogger(__name__)
_PING_EVERY_S = 5.0
_SILENT_S = 12.0
_CONNECT_S = 2.0
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
_WORDS = 3  # a message consists of kind, topic and content


class RedisNotifier:
    """A `Notifier` that uses Redis channels; the name of a topic is the name of its channel.

    If the Redis user may not use channels, no message arrives and listeners have to poll. A warning
    in the log says so once.

    Args:
        connect: returns a logged-in redis-py connection to a server that receives every message.
        publish: sends PUBLISH with a topic and a message; raises StoreUnavailableError if that
            fails.
        url: the store's URL without password, for logs.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[RedisConnection]],
        publish: Callable[[str, str], Awaitable[None]],
        *,
        url: str,
    ) -> None:
        self._connect = connect
        self._publish = publish
        self._url = url
        self._topics = Topics()
        self._asked: set[str] = set()
        self._live: set[str] = set()
        self._heard_at = 0.0  # the server's last reply, on the loop's clock
        self._has_warned = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with supervised({"tierkv-redis-notify": self._serve}):
            yield

    async def notify(self, topic: str, message: str = EMPTY_MESSAGE) -> None:
        """Send `message` to the listeners of `topic`; failures are not raised."""
        try:
            await self._publish(topic, check_message(message))
        except StoreUnavailableError as error:
            if "Redis refused" in str(error):  # the server, not the kernel with a closed port
                self._warn(str(error))

    def listen(self, topic: str) -> AbstractContextManager[Listener]:
        return self._topics.listening(topic, is_live=topic in self._live)

    async def _serve(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            while not self._topics:
                self._topics.changed.clear()
                await self._topics.changed.wait()
            connection: RedisConnection | None = None
            try:
                async with asyncio.timeout(_CONNECT_S):
                    connection = await self._connect()
                self._heard_at = asyncio.get_running_loop().time()
                async with background({"tierkv-redis-subscribe": self._ask(connection)}):
                    await self._receive(connection)
            except ResponseError as error:
                self._warn(str(error))
                pause_s = _LONGEST_PAUSE_S
            except (RedisError, OSError, StoreUnavailableError, ExceptionGroup) as error:
                _log.debug("%s: hints are lost until the next connection: %s", self._url, error)
                if self._live:
                    pause_s = _FIRST_PAUSE_S
            finally:
                self._asked.clear()
                self._live.clear()
                self._topics.set_all_live(is_live=False)
                if connection is not None:
                    await connection.disconnect()
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                # The cancel came with the error: TaskGroup drops the cancel before Python 3.13.
                raise asyncio.CancelledError
            await asyncio.sleep(pause_s * random.uniform(0.5, 1))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _ask(self, connection: RedisConnection) -> None:
        """Keep the connection subscribed to all topics that have listeners, until it fails.

        If the server sends nothing for _SILENT_S seconds, raise StoreUnavailableError.
        """
        loop = asyncio.get_running_loop()
        while True:
            self._topics.changed.clear()
            wanted = self._topics.wanted
            commands: list[Command] = []
            if new := wanted - self._asked:
                commands.append(("SUBSCRIBE", *sorted(new)))
            if old := self._asked - wanted:
                commands.append(("UNSUBSCRIBE", *sorted(old)))
            self._asked = wanted
            self._live -= old
            if commands:
                await _send(connection, commands)
            try:
                async with asyncio.timeout(_PING_EVERY_S):
                    await self._topics.changed.wait()
            except TimeoutError:
                if loop.time() - self._heard_at > _SILENT_S:
                    raise StoreUnavailableError(
                        f"{self._url} does not answer on the connection for notifications"
                    ) from None
                if self._asked:
                    await _send(connection, [("PING",)])
                else:
                    self._heard_at = loop.time()

    async def _receive(self, connection: RedisConnection) -> None:
        loop = asyncio.get_running_loop()
        while True:
            reply = await connection.read_response()
            self._heard_at = loop.time()
            if not isinstance(reply, list) or len(reply) != _WORDS:
                continue
            kind, topic_reply, content = reply
            if not isinstance(topic_reply, bytes):
                continue
            topic = topic_reply.decode("ascii", "replace")
            if kind == b"subscribe" and topic in self._asked:
                self._live.add(topic)
                self._topics.set_live(topic, is_live=True)
            elif kind == b"message" and isinstance(content, bytes):
                self._topics.deliver(topic, content.decode("ascii", "replace"))

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s refuses notifications between nodes (%s), so tickets are polled: "
                "allow this user +publish +subscribe +unsubscribe and the channels of "
                "the prefix",
                self._url,
                reason,
            )


async def _send(connection: RedisConnection, commands: Sequence[Command]) -> None:
    async with asyncio.timeout(_SILENT_S):
        await connection.send_packed_command(connection.pack_commands(commands))


Argument = bytes | str | int
Command = tuple[Argument, ...]
ControlReply = bytes | int | list["ControlReply"] | ResponseError | None


class RedisConnection(Protocol):
    """The methods of redis-py's connections that tierkv uses."""

    @property
    def is_connected(self) -> bool: ...

    async def connect(self) -> None:
        """Connect and log in."""

    async def disconnect(self) -> None:
        """Close the connection at once, and discard unsent bytes."""

    def pack_commands(self, commands: Sequence[Command]) -> list[bytes]: ...

    async def send_packed_command(self, command: list[bytes]) -> None: ...

    async def read_response(self) -> bytes | int | list[ControlReply] | None:
        """Return the next reply; raise ResponseError for an error reply."""


class _RedisPyFixes:
    """A mixin that corrects two faults of redis-py's connections.

    redis-py's `disconnect` waits until unsent bytes are sent, which never ends if the server is
    stopped. On replies that no Redis sends, such as a MOVED without an address, redis-py raises
    TypeError or ValueError instead of InvalidResponse.
    """

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


class _Tcp(_RedisPyFixes, Connection): ...


class _Tls(_RedisPyFixes, SSLConnection): ...


class _Unix(_RedisPyFixes, UnixDomainSocketConnection): ...


def connection_factory(
    address: Address, access: RedisAccess, login: Login | None = None
) -> Callable[[], RedisConnection]:
    """Return a function that returns a new redis-py connection, which its caller has to connect.

    Args:
        address: the server's address.
        access: settings and login of the store.
        login: user, password and database; None for those in `access`.
    """
    login, tls = login or access.login, access.tls_files
    options: dict[str, object] = {
        "db": login.db,
        "username": login.username,
        "password": login.password,
        "socket_connect_timeout": access.settings.connect_timeout_s,
        "socket_timeout": None,  # the exchange's deadline covers every read and write
        "retry": Retry(NoBackoff(), 0),
        "decode_responses": False,
        "protocol": 2,
    }
    kind: Callable[..., object] = _Tcp if tls is None else _Tls
    if address.socket_path is not None:
        kind = _Unix
        options["path"] = address.socket_path
    else:
        options |= {"host": address.host, "port": address.port}
    if tls is not None:
        options |= {"ssl_ca_certs": tls.ca, "ssl_certfile": tls.certificate, "ssl_keyfile": tls.key}
        options |= {"ssl_cert_reqs": "required", "ssl_check_hostname": True}
    return lambda: cast("RedisConnection", kind(**options))


class Conversation:
    """A connection to one server for commands; the first command opens it.

    Args:
        connection: a connection that is not connected yet.
        url: the server, for error messages.
        deadline_s: largest number of seconds for each call of `ask`, connecting included.
    """

    def __init__(self, connection: RedisConnection, *, url: str, deadline_s: float) -> None:
        self._connection = connection
        self._url = url
        self._deadline_s = deadline_s

    async def ask(self, commands: Sequence[Command]) -> list[ControlReply]:
        """Send commands and return the reply to each; a ResponseError for a refused command.

        The call takes at most `deadline_s` seconds, connecting included.

        Raises:
            StoreUnavailableError: the server did not answer, or cannot be used.
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
                raise asyncio.CancelledError from error  # redis-py has replaced the cancel
            raise StoreUnavailableError(self._sentence(error)) from error

    def _sentence(self, error: RedisError | OSError) -> str:
        match error:
            case AuthenticationError() | AuthorizationError():
                return f"{self._url} refused the login ({error}): check user and password"
            case BusyLoadingError():
                return f"{self._url} is still loading its values"
            case TimeoutError() | RedisTimeoutError():
                return f"{self._url} did not answer within {self._deadline_s * 1000:.0f} ms"
            case InvalidResponse():
                return f"{self._url} does not use the Redis protocol ({error}): check host and port"
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
    """Yield an object that sends commands to one server, and close its connection at the end.

    Args:
        new_connection: returns a connection that is not connected yet.
        url: the server, for error messages.
        deadline_s: largest number of seconds for each call of `Conversation.ask`, connecting
            included.
    """
    # In a thread: for each connection redis-py reads its own package's version from the disk.
    connection = await in_thread(new_connection)
    try:
        yield Conversation(connection, url=url, deadline_s=deadline_s)
    finally:
        await connection.disconnect()


async def ask_once(
    new_connection: Callable[[], RedisConnection], command: Command, *, url: str, deadline_s: float
) -> ControlReply:
    """Send one command over a new connection, and return the reply.

    Args:
        new_connection: returns a connection that is not connected yet.
        command: verb and arguments.
        url: the server, for error messages.
        deadline_s: largest number of seconds for the exchange, connecting included.

    Raises:
        StoreUnavailableError: the server refused the command or did not answer.
    """
    async with conversation(new_connection, url=url, deadline_s=deadline_s) as talk:
        [reply] = await talk.ask([command])
    if isinstance(reply, ResponseError):
        is_alone = "cluster support disabled" in str(reply)
        what_to_do = "; it is no cluster, so use redis://" if is_alone else ""
        raise StoreUnavailableError(f"{url} refused {command[0]!s}: {reply}{what_to_do}") from reply
    return reply
