"""Hints through Redis pub/sub, heard on a connection of their own that comes back when it is lost.

listen -> SUBSCRIBE topic -> confirmed: live, look once more -> messages
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager

from redis.exceptions import RedisError, ResponseError

from tierkv.errors import StoreUnavailableError
from tierkv.storage.notify import LOOK, Listener, Topics, check_message
from tierkv.storage.redis.control import Command, RedisConnection
from tierkv.tasks import background

_log = logging.getLogger(__name__)
_PING_EVERY_S = 5.0
_SILENT_S = 12.0
_CONNECT_S = 2.0
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
_WORDS = 3  # of a message: kind, topic, content


class RedisNotifier:
    """`Notifier` through channels that are called as their topics are.

    connect: makes a connection to a server that hears what any other is told, logged in.
    publish: PUBLISH topic, message. Raises StoreUnavailableError.
    A user who may not do that has to look; the log says so once.
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
        self._has_warned = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with background({"tierkv-redis-notify": self._serve()}):
            yield

    async def tell(self, topic: str, message: str = LOOK) -> None:
        try:
            await self._publish(topic, check_message(message))
        except StoreUnavailableError as error:
            if "Redis refused" in str(error):  # and not the kernel, since nobody listens there
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
                clock = _Heard()
                async with background({"tierkv-redis-subscribe": self._ask(connection, clock)}):
                    await self._hear(connection, clock)
            except ResponseError as error:
                self._warn(str(error))
                pause_s = _LONGEST_PAUSE_S
            except (RedisError, OSError, StoreUnavailableError, ExceptionGroup) as error:
                _log.debug("%s: hints are lost for now: %s", self._url, error)
                if self._live:
                    pause_s = _FIRST_PAUSE_S
            finally:
                self._asked.clear()
                self._live.clear()
                self._topics.turn_all(is_live=False)
                if connection is not None:
                    await connection.disconnect()
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                # It came with the error: before Python 3.13 a TaskGroup then forgets the cancel.
                raise asyncio.CancelledError
            await asyncio.sleep(pause_s * random.uniform(0.5, 1))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _ask(self, connection: RedisConnection, clock: _Heard) -> None:
        """Subscribe to what is wanted, and see to it that a dead connection is noticed."""
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
                await connection.send_packed_command(connection.pack_commands(commands))
            try:
                async with asyncio.timeout(_PING_EVERY_S):
                    await self._topics.changed.wait()
            except TimeoutError:
                if loop.time() - clock.at > _SILENT_S:
                    raise StoreUnavailableError(f"{self._url} is silent") from None
                if self._asked:
                    ping = connection.pack_commands([("PING",)])
                    await connection.send_packed_command(ping)
                else:
                    clock.at = loop.time()

    async def _hear(self, connection: RedisConnection, clock: _Heard) -> None:
        loop = asyncio.get_running_loop()
        while True:
            reply = await connection.read_response()
            clock.at = loop.time()
            if not isinstance(reply, list) or len(reply) != _WORDS:
                continue
            kind, topic_reply, content = reply
            if not isinstance(topic_reply, bytes):
                continue
            topic = topic_reply.decode("ascii", "replace")
            if kind == b"subscribe" and topic in self._asked:
                self._live.add(topic)
                self._topics.turn(topic, is_live=True)
            elif kind == b"message" and isinstance(content, bytes):
                self._topics.hear(topic, content.decode("ascii", "replace"))

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s does not let us tell or hear (%s): tickets are polled; allow this user "
                "+publish +subscribe +unsubscribe and the channels of the prefix",
                self._url,
                reason,
            )


class _Heard:
    """When the server was last heard of, on the loop's clock."""

    def __init__(self) -> None:
        self.at = asyncio.get_running_loop().time()
