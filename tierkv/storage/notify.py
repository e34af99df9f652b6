"""Telling those who wait that something is there: hints, never the thing itself.

A message may be lost, come twice, or come late. So whoever listens looks into the store first,
looks again whenever it hears something, and now and then when it hears nothing.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
)
from typing import Protocol

LOOK = ""  # nothing is known but that it is worth looking
_MESSAGE = re.compile(r"[A-Za-z0-9]{0,32}")
_MAX_WAITING = 64


def check_message(message: str) -> str:
    """A message is so short and plain that any way of telling can carry it."""
    assert _MESSAGE.fullmatch(message), "a message has up to 32 letters and digits"
    return message


class Listener:
    """What one waiter hears of one topic.

    is_live: messages arrive as they are sent. If False, the waiter must read the store again.
    """

    def __init__(self) -> None:
        self.is_live = False
        self._heard: deque[str] = deque(maxlen=_MAX_WAITING)
        self._came = asyncio.Event()

    def hear(self, message: str) -> None:
        self._heard.append(message)
        self._came.set()

    async def next(self, timeout_s: float) -> str | None:
        """The next message, None if none came in `timeout_s` seconds."""
        if not self._heard:
            self._came.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._came.wait()
            except TimeoutError:
                return None
        return self._heard.popleft()


class Notifier(Protocol):
    """Hints about topics (names, as a store takes them) between the users of one store."""

    def running(self) -> AbstractAsyncContextManager[None]:
        """Its lifetime, within that of its store. What goes wrong in it is never raised."""

    async def tell(self, topic: str, message: str = LOOK) -> None:
        """Let listeners of `topic` hear `message`: up to 32 letters and digits. Never fails; it may
        take as long as one question to the store."""

    def listen(self, topic: str) -> AbstractContextManager[Listener]:
        """Hear of `topic` from now on. Between the start and the moment `is_live` turns true, at
        which LOOK is heard, messages can be missed."""


class Topics:
    """Who listens to what, in this process."""

    def __init__(self) -> None:
        self._listeners: dict[str, set[Listener]] = {}
        self.changed = asyncio.Event()

    def __bool__(self) -> bool:
        return bool(self._listeners)

    @property
    def wanted(self) -> set[str]:
        return set(self._listeners)

    @contextmanager
    def listening(self, topic: str, *, is_live: bool) -> Iterator[Listener]:
        listener = Listener()
        listener.is_live = is_live
        self._listeners.setdefault(topic, set()).add(listener)
        self.changed.set()
        try:
            yield listener
        finally:
            others = self._listeners[topic]
            others.discard(listener)
            if not others:
                del self._listeners[topic]
                self.changed.set()

    def hear(self, topic: str, message: str) -> None:
        """Anybody may have written it: what is no message is a reason to look."""
        if not _MESSAGE.fullmatch(message):
            message = LOOK
        for listener in self._listeners.get(topic, ()):
            listener.hear(message)

    def turn(self, topic: str, *, is_live: bool) -> None:
        """Note whether `topic` is heard of, and let its listeners look: something may have been
        missed."""
        for listener in self._listeners.get(topic, ()):
            listener.is_live = is_live
            listener.hear(LOOK)

    def turn_all(self, *, is_live: bool) -> None:
        for topic in self.wanted:
            self.turn(topic, is_live=is_live)


class Polling:
    """`Notifier` of a store that cannot tell: nobody hears anything."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        yield

    async def tell(self, topic: str, message: str = LOOK) -> None:
        """Does nothing."""

    @contextmanager
    def listen(self, topic: str) -> Iterator[Listener]:  # noqa: ARG002 - the protocol's
        yield Listener()


class Hub:
    """`Notifier` within one process and one event loop."""

    def __init__(self) -> None:
        self.topics = Topics()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        yield

    async def tell(self, topic: str, message: str = LOOK) -> None:
        self.topics.hear(topic, check_message(message))

    def listen(self, topic: str) -> AbstractContextManager[Listener]:
        return self.topics.listening(topic, is_live=True)
