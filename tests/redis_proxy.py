"""A TCP proxy in front of a server that delays, slows down or cuts what the server answers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

_PIECE_BYTES = 64 << 10


@dataclass
class Proxy:
    """delay_s: before each piece of an answer. latency_s: so much later each piece goes on, while
    more comes: of a network, where a delay is of a server. bytes_per_s: of answers, None for no
    limit.
    cut_after: bytes of answers after which a connection is closed, None for never. cuts_once: the
        first that is.
    """

    port: int = 0
    delay_s: float = 0.0
    latency_s: float = 0.0
    bytes_per_s: float | None = None
    cut_after: int | None = None
    cuts_once: bool = False
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    async def serve(
        self, server_port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            from_server, to_server = await asyncio.open_connection("127.0.0.1", server_port)
        except OSError:  # the server is down, and the caller finds that out as from the server
            writer.transport.abort()
            return
        try:
            async with asyncio.TaskGroup() as group:
                there = group.create_task(self._copy(reader, to_server))
                back = group.create_task(self._answer(from_server, writer))
                await asyncio.wait([there, back], return_when=asyncio.FIRST_COMPLETED)
                there.cancel()
                back.cancel()
        finally:
            writer.transport.abort()
            to_server.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(_PIECE_BYTES):
                writer.write(piece)
                await writer.drain()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        left, loop = self.cut_after, asyncio.get_running_loop()
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(_PIECE_BYTES):
                if self.latency_s:
                    loop.call_later(self.latency_s, writer.write, piece)
                    continue
                await asyncio.sleep(self.delay_s)
                if self.bytes_per_s is not None:
                    await asyncio.sleep(len(piece) / self.bytes_per_s)
                if self.cut_after is None:  # no more, of open connections too
                    left = None
                if left is not None:
                    piece, left = piece[:left], left - len(piece)
                writer.write(piece)
                await writer.drain()
                if left is not None and left <= 0:
                    if self.cuts_once:
                        self.cut_after = None
                    return


@asynccontextmanager
async def redis_proxy(server_port: int) -> AsyncIterator[Proxy]:
    proxy = Proxy()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "a handler runs in one"
        proxy._tasks.add(task)  # noqa: SLF001 - of this module
        try:
            await proxy.serve(server_port, reader, writer)
        except asyncio.CancelledError:
            return
        finally:
            proxy._tasks.discard(task)  # noqa: SLF001

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        for task in tuple(proxy._tasks):  # noqa: SLF001
            task.cancel()
        if proxy._tasks:  # noqa: SLF001
            await asyncio.wait(tuple(proxy._tasks))  # noqa: SLF001


@contextmanager
def proxy_on_a_thread(server_port: int) -> Iterator[Proxy]:
    """The same, for who has no loop."""
    loop, found = asyncio.new_event_loop(), Future[Proxy]()
    over = asyncio.Event()

    async def serve() -> None:
        async with redis_proxy(server_port) as proxy:
            found.set_result(proxy)
            await over.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        yield found.result(30)
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()
