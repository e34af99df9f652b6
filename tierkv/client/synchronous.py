"""The client for programs without an event loop: it has one of its own, in a thread of its own.

Of a stream a task of that loop reads, and the caller's thread waits."""

from __future__ import annotations

import asyncio
import functools
import ssl
import threading
from collections.abc import AsyncIterable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from tierkv.api.routes_work import TokensEvent
from tierkv.client.asynchronous import AsyncClient
from tierkv.client.calls import Retries
from tierkv.client.errors import BrokenOffError, CallError
from tierkv.client.streams import EventStream, NodeEvent, TokenStream

A = TypeVar("A")
P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound=AsyncIterable[object])

_AHEAD = 16  # so many items are read before they are asked for


@dataclass(frozen=True, slots=True)
class _News(Generic[T]):
    """An item, or else that the stream is open, or at its end, or why it failed."""

    item: T | None = None
    is_end: bool = False
    error: Exception | None = None


class _Reading(Generic[T, S]):
    """Use it with `with`, in one thread at a time; leaving it closes the connection."""

    def __init__(self, client: Client, opening: AbstractAsyncContextManager[S]) -> None:
        self._client = client
        self._opening = opening
        self._stream: S | None = None
        self._over: _News[T] | None = None  # the last of the news: there will be no others

    def __enter__(self) -> Self:
        # One task reads it all: a deadline must end in the task where it began.
        self._news: asyncio.Queue[_News[T]] = asyncio.Queue(_AHEAD)
        self._task = self._client.begin(self._read())
        try:
            self._next()  # that it is open
        except BaseException:  # Ctrl-C too: `__exit__` is not called
            self._task.cancel()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._task.cancel()
        left = BrokenOffError("this stream was left, and is closed")
        self._over = self._over or _News(error=left)

    def __iter__(self) -> Iterator[T]:
        """Raises what the stream of AsyncClient raises."""
        while not (news := self._next()).is_end:
            assert news.item is not None, "there are no other news after the first"
            yield news.item

    def _next(self) -> _News[T]:
        news = self._over or self._client.wait_for(self._news.get())
        if news.is_end or news.error is not None:
            self._over = news
        if news.error is not None:
            raise news.error
        return news

    async def _read(self) -> None:
        try:
            async with self._opening as self._stream:
                await self._news.put(_News())
                async for item in self._stream:
                    await self._news.put(_News(item))  # type: ignore[arg-type]
                await self._news.put(_News(is_end=True))
        except Exception as error:  # noqa: BLE001 - it is raised in the thread that reads
            await self._news.put(_News(error=error))


class SyncStream(_Reading[TokensEvent, TokenStream[A]]):
    """As TokenStream: `with client.stream_generate(body) as stream: for tokens in stream: ...`"""

    @property
    def answer(self) -> A:
        """What the call answers without a stream. Raises BrokenOffError before the end."""
        if self._stream is None:
            raise BrokenOffError("the stream has not been read to its end")
        return self._stream.answer


class SyncEvents(_Reading[NodeEvent, EventStream]):
    """As EventStream: `with client.events() as events: for event in events: ...`"""


def _waiting(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, A]],
) -> Callable[Concatenate[Client, P], A]:
    """The same method, which returns when the answer is there."""

    @functools.wraps(method)
    def call(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> A:
        return self.wait_for(method(self._client, *args, **kwargs))

    return call


def _streaming(
    method: Callable[Concatenate[AsyncClient, P], AbstractAsyncContextManager[TokenStream[A]]],
) -> Callable[Concatenate[Client, P], SyncStream[A]]:
    @functools.wraps(method)
    def call(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> SyncStream[A]:
        return SyncStream(self, method(self._client, *args, **kwargs))

    return call


class Client:
    """As AsyncClient, with methods that wait. Any thread may use it, several at a time.

    Use it with `with`, or call `close` at the end. Ctrl-C during a call cancels it.
    """

    def __init__(  # noqa: PLR0913 - those of AsyncClient
        self,
        url: str = "http://127.0.0.1:8100",
        *,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        uds: str | Path | None = None,
        timeout_s: float = 60.0,
        retries: Retries | None = None,
        max_connections: int = 100,
    ) -> None:
        self._client = AsyncClient(
            url,
            token=token,
            tls=tls,
            uds=uds,
            timeout_s=timeout_s,
            retries=retries,
            max_connections=max_connections,
        )
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="tierkv-client", daemon=True
        )
        self._thread.start()
        self.wait_for(self._client.__aenter__())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Calls of other threads that still wait raise CallError. Closing twice is nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        me = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not me]
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others)
        await self._client.__aexit__(None, None, None)
        await self._loop.shutdown_asyncgens()

    def wait_for(self, work: Coroutine[Any, Any, A]) -> A:
        """The result of `work`, which runs on this client's loop. Raises CallError if the client
        is closed meanwhile."""
        future = self.begin(work)
        try:
            return future.result()
        except BaseException as error:  # Ctrl-C too, see below
            if future.cancelled() and self._is_closed:
                raise CallError("this client was closed before the answer came") from error
            future.cancel()  # Ctrl-C: nobody waits for it any more
            raise

    def begin(self, work: Coroutine[Any, Any, A]) -> Future[A]:
        """Let `work` run on this client's loop."""
        with self._lock:  # a loop that is being closed would never run it
            if self._is_closed:
                work.close()
                raise CallError("this client is closed")
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    livez = _waiting(AsyncClient.livez)
    readyz = _waiting(AsyncClient.readyz)
    healthz = _waiting(AsyncClient.healthz)
    version = _waiting(AsyncClient.version)
    metrics = _waiting(AsyncClient.metrics)
    stats = _waiting(AsyncClient.stats)
    verify = _waiting(AsyncClient.verify)
    openapi = _waiting(AsyncClient.openapi)

    generate = _waiting(AsyncClient.generate)
    prefill = _waiting(AsyncClient.prefill)
    decode = _waiting(AsyncClient.decode)
    lookup = _waiting(AsyncClient.lookup)
    explain = _waiting(AsyncClient.explain)
    stream_generate = _streaming(AsyncClient.stream_generate)
    stream_prefill = _streaming(AsyncClient.stream_prefill)
    stream_decode = _streaming(AsyncClient.stream_decode)

    admit = _waiting(AsyncClient.admit)
    claim = _waiting(AsyncClient.claim)
    request = _waiting(AsyncClient.request)
    explain_request = _waiting(AsyncClient.explain_request)
    commit = _waiting(AsyncClient.commit)
    extend = _waiting(AsyncClient.extend)
    preempt = _waiting(AsyncClient.preempt)
    resume = _waiting(AsyncClient.resume)
    stream = _waiting(AsyncClient.stream)
    publish = _waiting(AsyncClient.publish)
    finish = _waiting(AsyncClient.finish)
    abort = _waiting(AsyncClient.abort)

    prefetch = _waiting(AsyncClient.prefetch)
    prefetch_state = _waiting(AsyncClient.prefetch_state)
    cancel_prefetch = _waiting(AsyncClient.cancel_prefetch)
    backup = _waiting(AsyncClient.backup)
    backup_state = _waiting(AsyncClient.backup_state)
    cancel_backup = _waiting(AsyncClient.cancel_backup)
    pins = _waiting(AsyncClient.pins)
    pin = _waiting(AsyncClient.pin)
    pin_state = _waiting(AsyncClient.pin_state)
    unpin = _waiting(AsyncClient.unpin)
    ticket = _waiting(AsyncClient.ticket)
    forget_ticket = _waiting(AsyncClient.forget_ticket)
    acknowledge = _waiting(AsyncClient.acknowledge)

    def events(self, *, after: str = "") -> SyncEvents:
        """As AsyncClient.events."""
        return SyncEvents(self, self._client.events(after=after))

    drain = _waiting(AsyncClient.drain)
    pause = _waiting(AsyncClient.pause)
    unpause = _waiting(AsyncClient.unpause)
    sleep = _waiting(AsyncClient.sleep)
    wake = _waiting(AsyncClient.wake)
    resize = _waiting(AsyncClient.resize)
    reset = _waiting(AsyncClient.reset)
    forget_blocks = _waiting(AsyncClient.forget_blocks)
    blocks = _waiting(AsyncClient.blocks)
    config = _waiting(AsyncClient.config)
    tiers = _waiting(AsyncClient.tiers)
    attach_storage = _waiting(AsyncClient.attach_storage)
    detach_storage = _waiting(AsyncClient.detach_storage)
    set_quota = _waiting(AsyncClient.set_quota)
    quota = _waiting(AsyncClient.quota)
    drop_quota = _waiting(AsyncClient.drop_quota)
