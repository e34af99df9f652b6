"""Shared parts of stores: base classes, threads for blocking work, and functions for buffers."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from tierkv.errors import StoreUnavailableError, TierKVError
from tierkv.storage.protocol import (
    Buffer,
    Capabilities,
    Digest,
    GetItem,
    GetOutcome,
    GetStatus,
    ListPage,
    Notifier,
    Polling,
    PutItem,
    PutOutcome,
    PutStatus,
    Store,
    StoreHealth,
    Usage,
    check_limit,
    check_name,
    check_names,
    check_prefix,
)
from tierkv.tasks import outlast
from tierkv.threads import Threads

T = TypeVar("T")
_PAGE = 1000
CLOCK_EVERY_S = 30.0  # between two questions for a store's time


def num_leading(are_there: Sequence[bool]) -> int:
    """Return the number of True values before the first False."""
    return next((at for at, is_there in enumerate(are_there) if not is_there), len(are_there))


class BaseStore(ABC):
    """A base class with defaults for a simple `Store`.

    By default a store has one copy of each value, uses this machine's clock, has no breaker and no
    listing, sends no hints, and ignores `use_memory`. Subclasses implement the other methods.
    """

    @property
    def health(self) -> StoreHealth:
        return StoreHealth()

    def now(self) -> float:
        return time.time()

    def notifier(self) -> Notifier:
        return Polling()

    def use_memory(self, pools: Sequence[memoryview]) -> None:  # noqa: B027 - a default
        """Do nothing: this store needs no registered memory."""

    def on_recovery(self, call: Callable[[], None]) -> None:  # noqa: B027 - a default
        """Ignore `call`, because a store without a breaker never reports that it has recovered."""

    @abstractmethod
    async def present(self, names: Sequence[str]) -> list[bool]: ...

    async def exists(self, names: Sequence[str]) -> int:
        return num_leading(await self.present(names))

    @abstractmethod
    async def delete(self, names: Sequence[str]) -> int: ...

    async def forget_damaged(self, names: Sequence[str]) -> list[bool]:
        await self.delete(names)
        return [False] * len(names)

    async def list(
        self,
        prefix: str,
        *,
        limit: int,
        cursor: str | None = None,  # noqa: ARG002 - the protocol's
    ) -> ListPage:
        """Raise an error, because this store has no listing. A store with a listing overrides this.

        Raises:
            StoreUnavailableError: always.
        """
        check_prefix(prefix)
        check_limit(limit)
        raise StoreUnavailableError("this store cannot list its values")

    async def usage(self, prefix: str) -> Usage:
        return await usage_of_pages(partial(self.list, prefix, limit=_PAGE))


async def usage_of_pages(page: Callable[..., Awaitable[ListPage]]) -> Usage:
    """Return number and total bytes of all values of a listing.

    Args:
        page: returns one page when called as `page(cursor=...)`, with the previous page's cursor,
            or None for the first page.
    """
    num_values, num_bytes, cursor = 0, 0, None
    while True:
        found = await page(cursor=cursor)
        num_values += len(found.values)
        num_bytes += sum(value.num_bytes for value in found.values)
        if (cursor := found.cursor) is None:
            return Usage(num_values, num_bytes)


class StoreWrapper:
    """A `Store` that checks names and then passes each operation to another store, `inner`.

    A subclass overrides one method to change one operation, or `_ask` to change all operations.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    @property
    def health(self) -> StoreHealth:
        return self.inner.health

    def now(self) -> float:
        return self.inner.now()

    def notifier(self) -> Notifier:
        return self.inner.notifier()

    def use_memory(self, pools: Sequence[memoryview]) -> None:
        self.inner.use_memory(pools)

    def on_recovery(self, call: Callable[[], None]) -> None:
        self.inner.on_recovery(call)

    def running(self) -> AbstractAsyncContextManager[None]:
        return self.inner.running()

    async def _ask(self, ask: Callable[[Store], Awaitable[T]]) -> T:
        """Call `ask` with the wrapped store, and return the result.

        Every operation of the store goes through this method, so that a subclass can override it.
        """
        return await ask(self.inner)

    async def ping(self) -> None:
        await self._ask(lambda store: store.ping())

    async def exists(self, names: Sequence[str]) -> int:
        checked = check_names(names)
        return await self._ask(lambda store: store.exists(checked))

    async def present(self, names: Sequence[str]) -> list[bool]:
        checked = check_names(names)
        return await self._ask(lambda store: store.present(checked))

    async def get_into(self, items: Sequence[GetItem]) -> list[GetOutcome]:
        try:
            return await self._ask(lambda store: store.get_into(items))
        except StoreUnavailableError as error:
            return [GetOutcome(GetStatus.FAILED, str(error))] * len(items)

    async def get(self, name: str, *, max_bytes: int) -> bytes | None:
        check_name(name)
        return await self._ask(lambda store: store.get(name, max_bytes=max_bytes))

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        try:
            return await self._ask(lambda store: store.put(items))
        except StoreUnavailableError as error:
            return [PutOutcome(PutStatus.FAILED, str(error))] * len(items)

    async def delete(self, names: Sequence[str]) -> int:
        checked = check_names(names)
        return await self._ask(lambda store: store.delete(checked))

    async def forget_damaged(self, names: Sequence[str]) -> list[bool]:
        checked = check_names(names)
        return await self._ask(lambda store: store.forget_damaged(checked))

    async def touch(self, names: Sequence[str], *, ttl_s: float) -> int:
        checked = check_names(names)
        return await self._ask(lambda store: store.touch(checked, ttl_s=ttl_s))

    async def list(self, prefix: str, *, limit: int, cursor: str | None = None) -> ListPage:
        check_prefix(prefix)
        check_limit(limit)
        return await self._ask(lambda store: store.list(prefix, limit=limit, cursor=cursor))

    async def usage(self, prefix: str) -> Usage:
        check_prefix(prefix)
        return await self._ask(lambda store: store.usage(prefix))


Item = TypeVar("Item")


class WorkerThreads:
    """A pool of threads for a store's blocking work; the threads exist inside `running()`.

    The work uses the caller's buffers. A cancelled call therefore ends only after its work has
    ended.

    Args:
        owner: URL of the store, for errors.
        num_threads: largest number of threads.
    """

    def __init__(self, owner: str, num_threads: int) -> None:
        self._owner = owner
        self._num_threads = num_threads
        self._pool: Threads | None = None
        self._in_flight: set[asyncio.Future[Any]] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start the threads. At the end, refuse new work and wait for the work under way.

        Raises:
            ConfigError: the system cannot start another thread.
        """
        pool = Threads(self._num_threads, "tierkv-store")
        self._pool = pool
        try:
            yield
        finally:
            self._pool = None
            try:
                await self.idle()
            finally:
                pool.shutdown(wait=False)  # only idle threads are left

    async def idle(self) -> None:
        """Wait until all work that is under way now has ended."""
        await outlast(set(self._in_flight), on_cancel=lambda: None)

    def _opened(self) -> Threads:
        if self._pool is None:
            raise StoreUnavailableError(f"{self._owner} is closed")
        return self._pool

    async def run(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, run in a thread.

        A cancelled call ends only after `work` has ended.

        Raises:
            StoreUnavailableError: the threads are not running.
        """
        call = self._opened().submit(work)
        future = asyncio.wrap_future(call)
        await self._ended([call], {future})
        return future.result()

    @asynccontextmanager
    async def holding(
        self, acquire: Callable[[], T], release: Callable[[T], object]
    ) -> AsyncIterator[T]:
        """Let a thread acquire a resource before the `async with` block, and release it after.

        The release waits until all work of these threads has ended. If the call is cancelled during
        `acquire`, the resource is released, too.

        Args:
            acquire: acquires and returns the resource.
            release: releases the resource.
        """
        acquired: list[T] = []
        try:
            await self.run(lambda: acquired.append(acquire()))
            yield acquired[0]
        finally:
            try:
                await self.idle()
            finally:
                if acquired:
                    await self.run(lambda: release(acquired.pop()))

    async def run_each(self, work: Callable[[Item], T], items: Sequence[Item]) -> list[T]:
        """Return `work(item)` for each item, in the order of the items, using all threads.

        After a TierKVError, the remaining items are still done before the error is raised. Any
        other error stops the thread in which it happened; the other threads do the remaining items
        before the error is raised. If the call is cancelled, no further item is begun, and the call
        ends when the begun items are done.

        Args:
            work: blocking function, called in a thread.
            items: the arguments of the calls.

        Raises:
            StoreUnavailableError: the threads are not running.
        """
        pool = self._opened()
        results: dict[int, T] = {}
        failures: list[TierKVError] = []
        waiting = deque(enumerate(items))

        def drain() -> None:
            while True:
                try:
                    index, item = waiting.popleft()
                except IndexError:
                    return
                try:
                    results[index] = work(item)
                except TierKVError as error:
                    failures.append(error)

        calls = [pool.submit(drain) for _ in range(min(self._num_threads, len(items)))]
        futures = {asyncio.wrap_future(call) for call in calls}
        await self._ended(calls, futures, on_cancel=waiting.clear)
        for error in [future.exception() for future in futures]:
            if error is not None:
                raise error
        if failures:
            raise failures[0]
        return [results[index] for index in range(len(items))]

    async def _ended(
        self,
        calls: Sequence[Future[T]],
        futures: set[asyncio.Future[T]],
        on_cancel: Callable[[], None] = lambda: None,
    ) -> None:
        """Wait until all calls have ended in their threads; `futures` are their asyncio futures.

        If this wait is cancelled, call `on_cancel` and withdraw the calls that have not begun, but
        continue to wait for the running ones.
        """

        def withdraw() -> None:
            on_cancel()
            for call in calls:
                call.cancel()

        self._in_flight |= futures
        try:
            await outlast(futures, on_cancel=withdraw)
        finally:
            self._in_flight -= futures


# Linux reads this much ahead by default. Values of 2 MiB that are not in memory are read at
# 1.4 GB/s in such pieces with their checksums, and at 0.9 GB/s in one piece.
_READ_BYTES = 128 << 10
# Linux refuses more pieces than this in one call (UIO_MAXIOV).
_MAX_PIECES = 1024


def copy_into(content: Buffer, views: Sequence[memoryview]) -> None:
    """Copy a value into buffers, which are filled in order.

    Args:
        content: the value, at most as long as all buffers together.
        views: the buffers, writable.
    """
    source, at = memoryview(content), 0
    for view in flat(views):
        piece = source[at : at + len(view)]
        view[: len(piece)] = piece
        at += len(piece)
    assert at == len(source), "the caller compares the lengths first"


def room_for(num_bytes: int, views: Sequence[memoryview]) -> tuple[memoryview, ...]:
    """Return views of the first `num_bytes` bytes of buffers, as if the buffers were joined.

    Args:
        num_bytes: number of bytes, at most the sum of the buffers' sizes.
        views: the buffers in order.
    """
    return cut_buffers(views, [num_bytes])[0]


def flat(buffers: Iterable[Buffer]) -> list[memoryview]:
    """Return each buffer as a view of single bytes, without empty buffers."""
    views = (memoryview(buffer) for buffer in buffers)
    return [view.cast("B") for view in views if view.nbytes]


def read_fully(fd: int, views: Sequence[memoryview], digest: Digest | None = None) -> bool:
    """Fill buffers in order with the start of a file; return False if the file is shorter.

    Args:
        fd: descriptor of the file.
        views: the buffers to fill.
        digest: checksum to update with each piece right after it is read, while it is in the
            processor's cache; None to compute no checksum.

    Raises:
        OSError: the file cannot be read.
    """
    total, offset = sum(view.nbytes for view in views), 0
    sizes = [min(_READ_BYTES, total - at) for at in range(0, total, _READ_BYTES)]
    for piece in cut_buffers(views, sizes):
        rest = [*piece]
        while rest:
            num_bytes = os.preadv(fd, list(islice(rest, _MAX_PIECES)), offset)
            if num_bytes == 0:
                return False
            offset += num_bytes
            rest = _after(rest, num_bytes)
        if digest is not None:
            for view in piece:
                digest.update(view)
    return True


def write_fully(fd: int, parts: Sequence[Buffer]) -> None:
    """Write all bytes to a file, starting at its current position.

    Args:
        fd: descriptor of the file, open for writing.
        parts: the bytes in order.

    Raises:
        OSError: the file cannot be written; some of the bytes may be in it.
    """
    pieces = flat(parts)
    while pieces:
        pieces = _after(pieces, os.writev(fd, list(islice(pieces, _MAX_PIECES))))


def _after(pieces: list[memoryview], num_bytes: int) -> list[memoryview]:
    done = 0
    while done < len(pieces) and len(pieces[done]) <= num_bytes:
        num_bytes -= len(pieces[done])
        done += 1
    rest = pieces[done:]
    if num_bytes:
        rest[0] = rest[0][num_bytes:]
    return rest


def cut_buffers(buffers: Sequence[Buffer], sizes: Sequence[int]) -> list[tuple[memoryview, ...]]:
    """Cut buffers, as if they were joined, into consecutive pieces, without a copy.

    Args:
        buffers: the buffers in order.
        sizes: bytes of each piece; their sum is at most the sum of the buffers' sizes.

    Returns:
        For each piece, the views that make it up.
    """
    rest = deque(flat(buffers))
    pieces = []
    for size in sizes:
        piece: list[memoryview] = []
        missing = size
        while missing:
            view = rest.popleft()
            if len(view) > missing:
                rest.appendleft(view[missing:])
                view = view[:missing]
            piece.append(view)
            missing -= len(view)
        pieces.append(tuple(piece))
    return pieces


_UNREACHABLE = (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT)


def why_unreachable(error: BaseException) -> str:
    """Return a phrase with the reason of a connection error and a remedy.

    The phrase follows the words "URL cannot be reached", for example "(permission denied): let user
    1000 connect to it".

    Args:
        error: an OSError, or an error that was raised from one.
    """
    while not isinstance(error, OSError) and (cause := error.__cause__ or error.__context__):
        error = cause
    why, what_to_do = str(error), ""
    match error:
        case ssl.SSLCertVerificationError():
            why = f"its certificate is refused: {error.verify_message}"
            what_to_do = (
                "name its authority with storage.redis.tls.ca or --tls-ca, and use the host in "
                "the certificate"
            )
        case ssl.SSLError():
            why = "TLS: " + (error.reason or why).replace("_", " ").lower()
            what_to_do = (
                "if it requires a client certificate, set "
                "storage.redis.tls.certificate or --tls-certificate; if it does not "
                "use TLS on this port, use redis://"
            )
        case socket.gaierror():
            why, what_to_do = error.strerror or why, "correct the host name"
        case FileNotFoundError():
            why, what_to_do = "the socket does not exist", "start the server, or correct the path"
        case PermissionError():
            why, what_to_do = "permission denied", f"let user {os.geteuid()} connect to it"
        case OSError() if error.errno in _UNREACHABLE:
            why, what_to_do = os.strerror(error.errno), "start the server, or correct the address"
        case OSError() if error.errno:
            why = os.strerror(error.errno)
    return f"({why}): {what_to_do}" if what_to_do else f"({why})"
