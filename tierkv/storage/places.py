"""Places for stores, one for all names and one for each tenant that has its own, which are filled,
emptied and refilled while requests run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    MutableMapping,
    MutableSequence,
    Sequence,
)
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from tierkv.errors import BadRequestError, ConfigError, StoreUnavailableError, TierKVError
from tierkv.storage.base import StoreAround, forget_damaged, present, use_memory
from tierkv.storage.notify import LOOK, Listener, Notifier, notifier_of
from tierkv.storage.protocol import (
    Capabilities,
    GetItem,
    GetOutcome,
    GetStatus,
    ListPage,
    PutItem,
    PutOutcome,
    PutStatus,
    Store,
    StoredValue,
    Usage,
    check_names,
)
from tierkv.tasks import background, task_group

_log = logging.getLogger(__name__)
T = TypeVar("T")
_NOTHING = "no store is attached"
# Where everything starts at once, the first answer may be late. Refusals are quicker than that.
_START_S = 5.0
_LATE_S = 0.2


_RETRY_S = 1.0


Item = TypeVar("Item", GetItem, PutItem)
Outcome = TypeVar("Outcome", GetOutcome, PutOutcome)


@dataclass(eq=False, slots=True)
class _Attached:
    """A store and the task that keeps it running. Left when detached and nothing is under way."""

    store: Store
    notifier: Notifier
    opened: asyncio.Future[None]
    is_detached: asyncio.Event = field(default_factory=asyncio.Event)
    is_idle: asyncio.Event = field(default_factory=asyncio.Event)
    is_left: asyncio.Event = field(default_factory=asyncio.Event)
    num_under_way: int = 0

    def refuse(self, error: TierKVError) -> None:
        self.opened.set_exception(error)
        self.opened.exception()  # seen: whoever attached it may have gone


Lifetimes = MutableMapping[Store, _Attached]


class AttachedStores:
    """`store` is what all others use; which store answers is decided when an operation begins.

    A route is what names of a tenant begin with, `prefix:fingerprint`; "" is all names that have no
    route of their own. Detaching a tenant's store sends its names to the common one again.
    """

    def __init__(self, store: Store | None = None) -> None:
        """store: the common one, attached when `running()` is entered."""
        self._lifetimes: Lifetimes = {}
        self._common = SwitchStore(store, self._lifetimes)
        self._own: dict[str, SwitchStore] = {}
        self._routes: dict[str, Store] = {}
        self._closing = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        self.store: Store = RoutedStore(self._routes, self._common)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Entering attaches the common store, and raises what its `running()` raises. Leaving lets
        what is under way end."""
        async with task_group() as tasks:
            try:
                async with self._common.running():
                    self._tasks = tasks
                    yield
            finally:
                self._tasks = None
                self._closing.set()

    @property
    def attached(self) -> Mapping[str, Store]:
        """By route, those that are attached now."""
        places = {"": self._common} | self._own
        return {route: place.store for route, place in places.items() if place.store is not None}

    async def attach(self, store: Store, route: str = "") -> None:
        """Use `store` from now on, once it can be used, instead of the one there, if any.

        What `store.running()` raises is raised here, and the one there stays; so is ConfigError for
        a store that is attached elsewhere.
        """
        if self._tasks is None:
            raise StoreUnavailableError("nothing can be attached now")
        if not route:
            await self._common.attach(store)
            return
        place = self._own.get(route)
        if place is None:
            opened = await self._open(self._tasks)
            place = self._own.setdefault(route, opened)  # another may have been faster
        await place.attach(store)
        self._routes[route] = place

    def detach(self, route: str = "") -> Store | None:
        """Use the store there no more; returns it. What was begun on it ends on it."""
        self._routes.pop(route, None)
        place = self._own.get(route) if route else self._common
        return place.detach() if place is not None else None

    async def _open(self, tasks: asyncio.TaskGroup) -> SwitchStore:
        place = SwitchStore(None, self._lifetimes)
        opened = asyncio.Event()

        async def keep() -> None:
            async with place.running():
                opened.set()
                await self._closing.wait()

        tasks.create_task(keep(), name="tierkv-tenant-store")
        await opened.wait()
        return place


class RoutedStore:
    """`Store`. A name goes to the store of its first two fields (`prefix:fingerprint`), to
    `default` where there is none. Names of one store are asked for in one batch, stores at the same
    time."""

    def __init__(self, routes: Mapping[str, Store], default: Store) -> None:
        """routes: looked at anew by every operation; whoever changes it inside `running()` keeps
        the stores in it running."""
        self._routes = routes
        self._default = default

    @property
    def _stores(self) -> tuple[Store, ...]:
        return tuple(dict.fromkeys((self._default, *self._routes.values())))

    @property
    def url(self) -> str:
        return self._default.url

    @property
    def capabilities(self) -> Capabilities:
        every = [store.capabilities for store in self._stores]
        return Capabilities(
            is_shared=all(one.is_shared for one in every),
            is_durable=all(one.is_durable for one in every),
            has_ttl=all(one.has_ttl for one in every),
            has_listing=all(one.has_listing for one in every),
        )

    def notifier(self) -> Notifier:
        """The common store's: tickets lie there."""
        return notifier_of(self._default)

    def store_of(self, name: str) -> Store:
        return self._routes.get(":".join(name.split(":", 2)[:2]), self._default)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for store in self._stores:
                await stack.enter_async_context(store.running())
            yield

    async def ping(self) -> None:
        for store in self._stores:
            await store.ping()

    async def exists(self, names: Sequence[str]) -> int:
        if not self._routes:
            return await self._default.exists(names)  # which checks the names: 0.3 ms of 1,000
        check_names(names)
        groups = self._groups(names)
        found = len(names)
        for store, indexes in groups.items():
            present = await store.exists([names[i] for i in indexes])
            if present < len(indexes):
                found = min(found, indexes[present])
        return found

    async def present(self, names: Sequence[str]) -> list[bool]:
        return await self._each(names, present)

    async def forget_damaged(self, names: Sequence[str]) -> list[bool]:
        return await self._each(names, forget_damaged)

    async def _each(
        self,
        names: Sequence[str],
        ask: Callable[[Store, Sequence[str]], Awaitable[Sequence[bool]]],
    ) -> list[bool]:
        check_names(names)
        answers = [False] * len(names)
        for store, indexes in self._groups(names).items():
            some = await ask(store, [names[i] for i in indexes])
            for index, answer in zip(indexes, some, strict=True):
                answers[index] = answer
        return answers

    async def get_into(self, items: Sequence[GetItem]) -> list[GetOutcome]:
        return await self._spread(items, lambda store, part: store.get_into(part))

    async def get(self, name: str, *, max_bytes: int) -> bytes | None:
        return await self.store_of(name).get(name, max_bytes=max_bytes)

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        return await self._spread(items, lambda store, part: store.put(part))

    async def delete(self, names: Sequence[str]) -> int:
        return await self._sum(names, lambda store, part: store.delete(part))

    async def touch(self, names: Sequence[str], *, ttl_s: float) -> int:
        return await self._sum(names, lambda store, part: store.touch(part, ttl_s=ttl_s))

    async def _sum(
        self, names: Sequence[str], ask: Callable[[Store, Sequence[str]], Awaitable[int]]
    ) -> int:
        """Raises the first store's error after all have been asked."""
        check_names(names)
        total = 0
        failures = []
        for store, indexes in self._groups(names).items():
            try:
                total += await ask(store, [names[i] for i in indexes])
            except StoreUnavailableError as error:
                failures.append(error)
        if failures:
            raise failures[0]
        return total

    async def list(self, prefix: str, *, limit: int, cursor: str | None = None) -> ListPage:
        """One store after the other."""
        index, _, inner = ("0", "", "") if cursor is None else cursor.partition("/")
        stores = self._stores
        if not (index.isascii() and index.isdecimal() and int(index) < len(stores)):
            raise BadRequestError(f"{(cursor or '')[:80]!r} is not a cursor of this store")
        values: MutableSequence[StoredValue] = []
        for at in range(int(index), len(stores)):
            page = await stores[at].list(prefix, limit=limit, cursor=inner or None)
            values += page.values
            inner = ""
            if page.cursor is not None:
                return ListPage(tuple(values), f"{at}/{page.cursor}")
            if len(values) >= limit and at + 1 < len(stores):
                return ListPage(tuple(values), f"{at + 1}/")
        return ListPage(tuple(values), None)

    async def usage(self, prefix: str) -> Usage:
        usages = [await store.usage(prefix) for store in self._stores]
        return Usage(sum(u.num_values for u in usages), sum(u.num_bytes for u in usages))

    def _groups(self, names: Sequence[str]) -> dict[Store, Sequence[int]]:
        groups: dict[Store, list[int]] = {}
        for index, name in enumerate(names):
            groups.setdefault(self.store_of(name), []).append(index)
        return dict(groups)

    async def _spread(
        self,
        items: Sequence[Item],
        ask: Callable[[Store, Sequence[Item]], Awaitable[Sequence[Outcome]]],
    ) -> list[Outcome]:  # type: ignore[valid-type]
        if not self._routes:
            return [*await ask(self._default, items)]
        groups = self._groups([item.name for item in items])
        results: dict[int, Outcome] = {}

        async def carry_out(store: Store, indexes: Sequence[int]) -> None:
            outcomes = await ask(store, [items[i] for i in indexes])
            results.update(zip(indexes, outcomes, strict=True))

        async with task_group() as group:
            for store, indexes in groups.items():
                group.create_task(carry_out(store, indexes))
        return [results[index] for index in range(len(items))]


class SwitchStore(StoreAround):
    """`Store`. Operations under way end on the store they were begun on; later ones go to the one
    attached then. With none attached it is out of order: FAILED, or StoreUnavailableError."""

    def __init__(self, store: Store | None = None, lifetimes: Lifetimes | None = None) -> None:
        """store: attached when `running()` is entered. lifetimes: shared by the places that one
        store could come to be attached to; a store has one lifetime at a time."""
        self._first = store
        self._lifetimes = {} if lifetimes is None else lifetimes
        self._current: _Attached | None = None
        self._without = _NOTHING  # said to who asks while none is attached
        self._tasks: asyncio.TaskGroup | None = None

    @property
    def store(self) -> Store | None:
        """The one attached."""
        return None if self._current is None else self._current.store

    def notifier(self) -> Notifier:
        """Tells and hears through the store attached at that moment. Who listens when it is
        detached hears nothing more, and has to look."""
        return _Notifier(self)

    @property
    def current_notifier(self) -> Notifier | None:
        return None if self._current is None else self._current.notifier

    @property
    def url(self) -> str:
        return "none" if self._current is None else self._current.store.url

    @property
    def capabilities(self) -> Capabilities:
        if self._current is None:
            return Capabilities(is_shared=False, is_durable=False)
        return self._current.store.capabilities

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with task_group() as tasks:
            self._tasks = tasks
            try:
                if (first := self._first) is not None:
                    await patiently(lambda: self.attach(first))
                yield
            finally:
                self._tasks = None
                self.detach()

    async def attach(self, store: Store) -> None:
        """Put `store` in the place of the one attached, if any, once it can be used.

        What `store.running()` raises is raised here, and the old one stays. One that is still being
        left is waited for; one that is attached here stays so; ConfigError for one that is attached
        elsewhere.
        """
        while (known := self._lifetimes.get(store)) is not None:
            if known is self._current:
                return
            if not known.is_detached.is_set():
                raise ConfigError(f"{store.url} is attached already: open one more for this place")
            await known.is_left.wait()
        if self._tasks is None:
            raise StoreUnavailableError("nothing can be attached now")
        attached = self._lifetimes[store] = _Attached(
            store, notifier_of(store), asyncio.get_running_loop().create_future()
        )
        self._tasks.create_task(self._keep(attached), name="tierkv-attached-store")
        try:
            await asyncio.shield(attached.opened)
        except asyncio.CancelledError:
            attached.is_idle.set()
            attached.is_detached.set()
            raise
        self.detach()
        if self._tasks is None:
            attached.is_idle.set()
            attached.is_detached.set()
            raise StoreUnavailableError("nothing can be attached now")
        attached.is_idle.set()
        self._current = attached

    def detach(self) -> Store | None:
        """Use the store no more; it is left when what is under way has ended. Returns it."""
        attached, self._current = self._current, None
        if attached is None:
            return None
        attached.is_detached.set()
        return attached.store

    async def get_into(self, items: Sequence[GetItem]) -> list[GetOutcome]:
        if self._current is None:
            return [GetOutcome(GetStatus.FAILED, self._without)] * len(items)
        return await super().get_into(items)

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        if self._current is None:
            return [PutOutcome(PutStatus.FAILED, self._without)] * len(items)
        return await super().put(items)

    async def _keep(self, attached: _Attached) -> None:
        try:
            await _keep(attached)
        finally:
            del self._lifetimes[attached.store]
            attached.is_left.set()
            if not attached.opened.done():  # such as at the end of all
                attached.refuse(StoreUnavailableError(f"{attached.store.url} was not opened"))

    async def _ask(self, ask: Callable[[Store], Awaitable[T]]) -> T:
        if self._current is None:
            raise StoreUnavailableError(self._without)
        with _under_way(self._current) as store:
            return await ask(store)


class LateStore(SwitchStore):
    """`Store`. One that cannot be opened at the start is out of order until it can: a node starts
    while its near store is down."""

    def __init__(self, inner: Store) -> None:
        super().__init__()
        self._inner = inner

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    def use_memory(self, pools: Sequence[memoryview]) -> None:
        use_memory(self._inner, pools)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Entering raises ConfigError only."""
        async with super().running():
            late = {}
            try:
                await self.attach(self._inner)
            except StoreUnavailableError as error:
                _log.warning("%s is done without for now: %s", self.url, error)
                self._without = str(error)
                late = {"tierkv-late-store": self._keep_trying()}
            async with background(late):
                yield

    async def _keep_trying(self) -> None:
        """On its own, since opening can take longer than a ping may."""
        while self.store is None:
            await asyncio.sleep(_RETRY_S)
            try:
                await self.attach(self._inner)
            except (StoreUnavailableError, ConfigError) as error:  # such as TLS files that are gone
                self._without = str(error)


async def patiently(attach: Callable[[], Awaitable[None]]) -> None:
    """Attach a store of a node that starts: one that is late is asked again, one that refuses is
    not."""
    time = asyncio.get_running_loop().time
    until = time() + _START_S
    while True:
        asked_at = time()
        try:
            return await attach()
        except StoreUnavailableError:
            if time() - asked_at < _LATE_S or time() >= until:
                raise


class _Notifier:
    """`Notifier` of a place; those of the stores live as long as they are attached."""

    def __init__(self, place: SwitchStore) -> None:
        self._place = place

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        yield

    async def tell(self, topic: str, message: str = LOOK) -> None:
        notifier = self._place.current_notifier
        if notifier is not None:
            await notifier.tell(topic, message)

    @contextmanager
    def listen(self, topic: str) -> Iterator[Listener]:
        notifier = self._place.current_notifier
        if notifier is None:
            yield Listener()
            return
        with notifier.listen(topic) as listener:
            yield listener


@contextmanager
def _under_way(attached: _Attached) -> Iterator[Store]:
    attached.num_under_way += 1
    attached.is_idle.clear()
    try:
        yield attached.store
    finally:
        attached.num_under_way -= 1
        if not attached.num_under_way:
            attached.is_idle.set()


async def _keep(attached: _Attached) -> None:
    try:
        async with attached.store.running(), attached.notifier.running():
            attached.opened.set_result(None)
            await attached.is_detached.wait()
            await attached.is_idle.wait()
    except TierKVError as error:
        if not attached.opened.done():
            attached.refuse(error)
        elif attached.is_detached.is_set():
            _log.warning("%s was detached and did not close well: %s", attached.store.url, error)
        else:
            raise
