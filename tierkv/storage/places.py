"""The choice of a store for each name: a tenant's own store, or the common one.

Stores are attached and detached while requests run.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Mapping,
    MutableSequence,
    Sequence,
)
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from typing import TypeVar

from tierkv.errors import BadRequestError, ConfigError, StoreUnavailableError, TierKVError
from tierkv.storage.base import StoreWrapper
from tierkv.storage.protocol import (
    EMPTY_MESSAGE,
    Capabilities,
    GetItem,
    GetOutcome,
    Listener,
    ListPage,
    Notifier,
    Polling,
    PutItem,
    PutOutcome,
    Store,
    StoredValue,
    StoreHealth,
    Usage,
    check_names,
)
from tierkv.tasks import expected, supervised, task_group

_log = logging.getLogger(__name__)
T = TypeVar("T")
Asked = TypeVar("Asked", str, GetItem, PutItem)
_CLOSED = "stores cannot be attached now: the service is not running"
# When all processes start at once, the first answer may be late. Refusals are quicker than _LATE_S.
_START_S = 5.0
_LATE_S = 0.2


async def patiently(attach: Callable[[], Awaitable[None]]) -> None:
    """Call `attach`, which connects to a store, until it succeeds, for up to 5 seconds.

    The call is repeated only if the store was slow, which is normal when many nodes start at once.
    An error that comes within 0.2 seconds is a refusal, and is raised.

    Raises:
        StoreUnavailableError: the store refuses, or has not answered in time.
    """
    time = asyncio.get_running_loop().time
    until = time() + _START_S
    while True:
        asked_at = time()
        try:
            return await attach()
        except StoreUnavailableError:
            if time() - asked_at < _LATE_S or time() >= until:
                raise


class _NoStore(StoreWrapper):
    """The store that is used while no store is attached: every operation fails."""

    url = "none"
    capabilities = Capabilities(is_shared=False, is_durable=False)
    health = StoreHealth()

    def __init__(self) -> None: ...

    def now(self) -> float:
        return time.time()

    def notifier(self) -> Notifier:
        return Polling()

    def use_memory(self, pools: Sequence[memoryview]) -> None: ...

    def on_recovery(self, call: Callable[[], None]) -> None: ...

    async def _ask(self, ask: Callable[[Store], Awaitable[T]]) -> T:  # noqa: ARG002
        raise StoreUnavailableError("no store is attached")


class _Attached:
    """A store that a task keeps open until the store is detached and no operation uses it.

    Attributes:
        error: the reason why the store could not be opened; None if it was.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.notifier = store.notifier()
        self.error: TierKVError | None = None
        self.is_opened, self.is_detached, self.is_left = (asyncio.Event() for _ in range(3))
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._num_under_way = 0
        self._is_open = False
        self._is_over = asyncio.Event()

    def __enter__(self) -> Store:
        self._num_under_way += 1
        self._is_idle.clear()
        return self.store

    def __exit__(self, *_: object) -> None:
        self._num_under_way -= 1
        if not self._num_under_way:
            self._is_idle.set()

    async def keep(self) -> None:
        """Open the store, and return when it is closed again.

        If the store cannot be opened, `error` is set and the call returns.
        """
        try:
            async with supervised({"tierkv-open-store": self._keep_open}):
                await self.is_detached.wait()
                await self._is_idle.wait()
                if self._is_open:
                    await self._is_over.wait()
        finally:
            if not self.is_opened.is_set() and self.error is None:  # such as when the service ends
                self.error = StoreUnavailableError(f"{self.store.url} is not open yet")
            self.is_opened.set()
            self.is_left.set()

    async def _keep_open(self) -> None:
        try:
            async with self.store.running(), self.notifier.running():
                self._is_open = True
                self.is_opened.set()
                await self.is_detached.wait()
                await self._is_idle.wait()
        except Exception as error:  # a store from another package may raise any error
            self._is_open = False
            if not self.is_opened.is_set():
                self.error = error if isinstance(error, TierKVError) else _failed(self.store, error)
                self.is_detached.set()
            elif not self.is_detached.is_set():
                raise
            else:
                _log.warning("%s failed while closing: %s", self.store.url, error)
        self._is_over.set()


def _failed(store: Store, error: Exception) -> StoreUnavailableError:
    failure = StoreUnavailableError(f"{store.url} failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


class Places:
    """A `Store` that passes each name to one of several attached stores, which work in parallel.

    The first two fields of a name, `prefix:fingerprint`, are its route. A name goes to the store
    that is attached for its route (a tenant's store). If there is none, the name goes to the common
    store, which has the route "". Without a common store such an operation fails. An operation ends
    on the store on which it began, even if that store is detached in the meantime.
    """

    def __init__(self, store: Store | None = None) -> None:
        """Create the set of stores; no store is attached yet.

        Args:
            store: the common store, which `running()` attaches; None if there is no common store.
        """
        self._first = store
        self._nothing = self._common = _Attached(_NoStore())
        self._own: dict[str, _Attached] = {}  # by route
        self._known: dict[Store, _Attached] = {}  # also stores that are being opened or closed
        self._tasks: asyncio.TaskGroup | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Attach the common store until the `async with` block ends.

        At the end, all stores are detached, and operations that have begun are awaited. An error of
        the common store's `running()` is raised before the block begins.
        """
        async with task_group() as tasks:
            self._tasks = tasks
            try:
                if (first := self._first) is not None:
                    await patiently(lambda: self.attach(first))
                yield
            finally:
                self._tasks = None
                for route in self.attached:
                    self.detach(route)

    @property
    def attached(self) -> Mapping[str, Store]:
        """The attached stores, by the route (`prefix:fingerprint`) of the names that they keep.

        The key of the common store is "".
        """
        every = {"": self._common} | self._own
        return {route: one.store for route, one in every.items() if one is not self._nothing}

    async def attach(self, store: Store, route: str = "") -> None:
        """Open `store`, and use it from now on for all names that begin with `route`.

        The store that had these names before is detached. If the call raises, for example an error
        of `store.running()`, that store stays attached. If `store` itself was detached and is still
        closing, the call first waits until it is closed.

        Args:
            store: the store to open.
            route: the first two fields of the names, `prefix:fingerprint`, for a tenant's own
                store; "" for the common store, which has all names of no other store.

        Raises:
            ConfigError: `store` is attached for another route.
            StoreUnavailableError: the call is outside `running()`.
        """
        while (known := self._known.get(store)) is not None:
            if known is (self._own.get(route) if route else self._common):
                return
            if not known.is_detached.is_set():
                raise ConfigError(
                    f"{store.url} is already attached for another tenant: attach a "
                    "separate store object here"
                )
            await known.is_left.wait()
        if self._tasks is None:
            raise StoreUnavailableError(_CLOSED)
        attached = self._known[store] = _Attached(store)
        self._tasks.create_task(self._keep(attached), name="tierkv-attached-store")
        try:
            await attached.is_opened.wait()
        except asyncio.CancelledError:
            attached.is_detached.set()
            raise
        if attached.error is not None:
            raise attached.error
        if self._tasks is None:
            attached.is_detached.set()
            raise StoreUnavailableError(_CLOSED)
        self.detach(route)
        if route:
            self._own[route] = attached
        else:
            self._common = attached

    def detach(self, route: str = "") -> Store | None:
        """Stop using a tenant's store or the common store, and return this store.

        Operations under way end on the detached store. After a tenant's store is detached,
        operations on the tenant's names use the common store. After the common store is detached,
        operations on names without a store of their own fail.

        Args:
            route: `prefix:fingerprint`, the first two fields of the tenant's names; "" for the
                common store.

        Returns:
            The store; None if no store is attached for `route`.
        """
        attached = self._own.pop(route, self._nothing) if route else self._common
        if not route:
            self._common = self._nothing
        if attached is self._nothing:
            return None
        attached.is_detached.set()
        return attached.store

    async def _keep(self, attached: _Attached) -> None:
        try:
            await attached.keep()
        finally:
            del self._known[attached.store]

    # Properties

    @property
    def url(self) -> str:
        return self._common.store.url

    @property
    def capabilities(self) -> Capabilities:
        places = self._places
        if len(places) == 1:  # the usual case, asked for by every fetch
            return places[0].store.capabilities
        return Capabilities.common_to([one.store.capabilities for one in places])

    @property
    def health(self) -> StoreHealth:
        return self._common.store.health

    def now(self) -> float:
        """Return the time of the common store, in Unix seconds. Tickets are in that store."""
        return self._common.store.now()

    def notifier(self) -> Notifier:
        """Return the notifier of the common store, which also has the tickets.

        Once this store is detached from the service, its listeners receive no more messages and
        have to poll.
        """
        return _NotifierOfCommon(lambda: self._common.notifier)

    def use_memory(self, pools: Sequence[memoryview]) -> None:
        """Let all stores register the node's buffers with the network card, for RDMA."""
        for one in self._places:
            one.store.use_memory(pools)

    def on_recovery(self, call: Callable[[], None]) -> None:
        """Register `call` with all attached stores, which call it when they answer again."""
        for one in self._places:
            one.store.on_recovery(call)

    @property
    def _places(self) -> Sequence[_Attached]:
        return (self._common, *self._own.values())

    # Operations. Without tenants' stores, all names go to the common one.

    async def _joined(
        self,
        asked: Sequence[Asked],
        ask: Callable[[Store, Sequence[Asked]], Awaitable[list[T]]],
    ) -> list[T]:
        """Like `_answers`, for a call with one result per item; return them in the items' order."""
        if not self._own:
            with self._common as store:
                return await ask(store, asked)
        answers = await self._answers(asked, ask)
        by_index = {i: one for at, some in answers for i, one in zip(at, some, strict=True)}
        return [by_index[i] for i in range(len(by_index))]

    async def ping(self) -> None:
        for one in self._places:
            with one as store:
                await store.ping()

    async def exists(self, names: Sequence[str]) -> int:
        if not self._own:
            with self._common as store:
                return await store.exists(names)
        answers = await self._answers(check_names(names), lambda store, some: store.exists(some))
        return min((at[n] for at, n in answers if n < len(at)), default=len(names))

    async def present(self, names: Sequence[str]) -> list[bool]:
        return await self._joined(check_names(names), lambda store, some: store.present(some))

    async def get_into(self, items: Sequence[GetItem]) -> list[GetOutcome]:
        return await self._joined(items, lambda store, some: store.get_into(some))

    async def get(self, name: str, *, max_bytes: int) -> bytes | None:
        with self._place_of(name) as store:
            return await store.get(name, max_bytes=max_bytes)

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        return await self._joined(items, lambda store, some: store.put(some))

    async def delete(self, names: Sequence[str]) -> int:
        answers = await self._answers(check_names(names), lambda store, some: store.delete(some))
        return sum(count for _, count in answers)

    async def forget_damaged(self, names: Sequence[str]) -> list[bool]:
        return await self._joined(
            check_names(names), lambda store, some: store.forget_damaged(some)
        )

    async def touch(self, names: Sequence[str], *, ttl_s: float) -> int:
        answers = await self._answers(
            check_names(names), lambda store, some: store.touch(some, ttl_s=ttl_s)
        )
        return sum(count for _, count in answers)

    async def list(self, prefix: str, *, limit: int, cursor: str | None = None) -> ListPage:
        """Return one page of a listing of all attached stores, one store after the other."""
        index, _, inner = ("0", "", "") if cursor is None else cursor.partition("/")
        places = self._places
        if not (index.isascii() and index.isdecimal() and int(index) < len(places)):
            raise BadRequestError(f"{(cursor or '')[:80]!r} is not a cursor of this store")
        values: MutableSequence[StoredValue] = []
        for at in range(int(index), len(places)):
            with places[at] as store:
                page = await store.list(prefix, limit=limit, cursor=inner or None)
            values += page.values
            inner = ""
            if page.cursor is not None:
                return ListPage(tuple(values), f"{at}/{page.cursor}")
            if len(values) >= limit and at + 1 < len(places):
                return ListPage(tuple(values), f"{at + 1}/")
        return ListPage(tuple(values), None)

    async def usage(self, prefix: str) -> Usage:
        usages = []
        for one in self._places:
            with one as store:
                usages.append(await store.usage(prefix))
        return Usage(sum(u.num_values for u in usages), sum(u.num_bytes for u in usages))

    def _place_of(self, name: str) -> _Attached:
        return self._own.get(":".join(name.split(":", 2)[:2]), self._common)

    async def _answers(
        self,
        asked: Sequence[Asked],
        ask: Callable[[Store, Sequence[Asked]], Awaitable[T]],
    ) -> Sequence[tuple[Sequence[int], T]]:
        """Divide `asked` by store, and await `ask(store, its items)` for all stores at once.

        Return, for each store, the indexes of its items in `asked`, and the result of `ask`.
        """
        groups: dict[_Attached, list[int]] = {}
        for index, one in enumerate(asked):
            name = one if isinstance(one, str) else one.name
            groups.setdefault(self._place_of(name), []).append(index)

        async def of_store(store: Store, at: Sequence[int]) -> T | TierKVError:
            return await expected(ask(store, [asked[i] for i in at]))

        with ExitStack() as stack:
            stores = [stack.enter_context(place) for place in groups]
            async with task_group() as group:
                tasks = [
                    group.create_task(of_store(store, at))
                    for store, at in zip(stores, groups.values(), strict=True)
                ]
        answers = []
        for at, task in zip(groups.values(), tasks, strict=True):
            answer = task.result()
            if isinstance(answer, TierKVError):
                raise answer
            answers.append((at, answer))
        return answers


class _NotifierOfCommon:
    """The `Notifier` of `Places`: it passes calls to the present common store's notifier."""

    def __init__(self, current: Callable[[], Notifier]) -> None:
        self._current = current

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        yield

    def notify(self, topic: str, message: str = EMPTY_MESSAGE) -> Coroutine[None, None, None]:
        return self._current().notify(topic, message)

    def listen(self, topic: str) -> AbstractContextManager[Listener]:
        return self._current().listen(topic)
