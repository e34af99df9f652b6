"""The client for programs without an event loop. It runs an AsyncClient in a thread of its own."""

from __future__ import annotations

import asyncio
import functools
import ssl
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from tierkv.api.types import TokensEvent
from tierkv.client.asynchronous import AsyncClient
from tierkv.client.calls import Retries
from tierkv.client.errors import BrokenOffError, CallError
from tierkv.client.streams import TokenStream
from tierkv.loop_thread import LoopClosedError, LoopThread

A = TypeVar("A")
P = ParamSpec("P")

_OPEN_S = _CLOSE_S = 30.0  # enough, since only sockets are opened or closed
_AHEAD = 16  # items read ahead of the caller


@dataclass(frozen=True, slots=True)
class _Message:
    """A message from the task that reads a stream to the thread that iterates over it.

    Attributes:
        item: The next tokens; None for the first message (the stream is open) and the last one.
        is_end: True at the end of the stream.
        error: The error that ended the stream; None for no error.
    """

    item: TokensEvent | None = None
    is_end: bool = False
    error: Exception | None = None


class SyncStream(Generic[A]):
    """The `TokenStream` of a synchronous client, for one thread at a time.

        with client.stream_generate(body) as stream:
            for tokens in stream: ...

    The end of the `with` closes the connection, and the node ends the work.

    Args:
        client: The client that makes the call.
        opening: The context manager that opens the stream, to be entered on the client's loop.
    """

    def __init__(
        self, client: Client, opening: AbstractAsyncContextManager[TokenStream[A]]
    ) -> None:
        self._client = client
        self._opening = opening
        self._stream: TokenStream[A] | None = None
        self._over: _Message | None = None  # the last message of the stream

    @property
    def answer(self) -> A:
        """The whole answer, of the type that the call without a stream returns.

        Raises:
            BrokenOffError: The stream has not been read to its end.
        """
        if self._stream is None:
            raise BrokenOffError("the stream has not been read to its end")
        return self._stream.answer

    def __enter__(self) -> Self:
        # One task reads the whole stream: a deadline must end in the task where it began.
        self._messages: asyncio.Queue[_Message] = asyncio.Queue(_AHEAD)
        self._task = self._client.begin(self._read())
        try:
            self._next()  # waits until it is open
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
        left = BrokenOffError("this stream is closed")
        self._over = self._over or _Message(error=left)

    def __iter__(self) -> Iterator[TokensEvent]:
        """Yield the tokens as they arrive, and raise the stream's error if it fails."""
        while not (message := self._next()).is_end:
            assert message.item is not None, "only the first message has no item"
            yield message.item

    def _next(self) -> _Message:
        message = self._over or self._client.wait_for(self._messages.get())
        if message.is_end or message.error is not None:
            self._over = message
        if message.error is not None:
            raise message.error
        return message

    async def _read(self) -> None:
        try:
            async with self._opening as self._stream:
                await self._messages.put(_Message())
                async for item in self._stream:
                    await self._messages.put(_Message(item))
                await self._messages.put(_Message(is_end=True))
        except Exception as error:  # noqa: BLE001 - it is raised in the thread that reads
            await self._messages.put(_Message(error=error))


def _waiting(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, A]],
) -> Callable[Concatenate[Client, P], A]:

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
    """A client whose methods block, with the arguments and methods of `AsyncClient`.

    Several threads may use a client at a time. Use it in a `with` statement, or call `close` when
    it is no longer needed. Ctrl-C during a call cancels the call.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8100",
        *,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        timeout_s: float = 60.0,
        retries: Retries | None = None,
        max_connections: int = 100,
    ) -> None:
        self._client = AsyncClient(
            url,
            token=token,
            tls=tls,
            timeout_s=timeout_s,
            retries=retries,
            max_connections=max_connections,
        )
        self._thread = LoopThread(
            "client",
            lambda: self._client,
            name="tierkv-client",
            close_s=_CLOSE_S,
            grace_s=0.0,
        )
        if not self._thread.open(_OPEN_S):
            raise CallError(f"this client's thread did not start within {_OPEN_S:g} s")

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
        """Close the connections. Running calls of other threads raise CallError.

        Further calls do nothing.
        """
        self._thread.close()

    def wait_for(self, work: Coroutine[Any, Any, A]) -> A:
        """Run a coroutine on this client's loop, and block until it has a result.

        Args:
            work: The coroutine.

        Raises:
            CallError: The client was closed before the coroutine had a result.
        """
        future = self.begin(work)
        try:
            return future.result()
        except LoopClosedError as error:
            raise CallError(str(error)) from error
        except BaseException:  # Ctrl-C: the answer is not wanted any more
            future.cancel()
            raise

    def begin(self, work: Coroutine[Any, Any, A]) -> Future[A]:
        """Start a coroutine on this client's loop, and return the future of its result."""
        return self._thread.run(work)

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
    tokenize = _waiting(AsyncClient.tokenize)
    lookup = _waiting(AsyncClient.lookup)
    explain = _waiting(AsyncClient.explain)
    stream_generate = _streaming(AsyncClient.stream_generate)
    stream_prefill = _streaming(AsyncClient.stream_prefill)
    stream_decode = _streaming(AsyncClient.stream_decode)

    abort = _waiting(AsyncClient.abort)

    prefetch = _waiting(AsyncClient.prefetch)
    prefetch_state = _waiting(AsyncClient.prefetch_state)
    cancel_prefetch = _waiting(AsyncClient.cancel_prefetch)
    pins = _waiting(AsyncClient.pins)
    pin = _waiting(AsyncClient.pin)
    pin_state = _waiting(AsyncClient.pin_state)
    unpin = _waiting(AsyncClient.unpin)
    ticket = _waiting(AsyncClient.ticket)
    forget_ticket = _waiting(AsyncClient.forget_ticket)

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
