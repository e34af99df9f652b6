"""A place for a store that can be attached, detached and exchanged while requests run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    MutableMapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from tierkv.errors import ConfigError, StoreUnavailableError, TierKVError
from tierkv.storage.around import StoreAround
from tierkv.storage.notify import LOOK, Listener, Notifier, notifier_of
from tierkv.storage.protocol import (
    Capabilities,
    GetItem,
    GetOutcome,
    GetStatus,
    PutItem,
    PutOutcome,
    PutStatus,
    Store,
)
from tierkv.tasks import task_group

_log = logging.getLogger(__name__)
T = TypeVar("T")
_NOTHING = "no store is attached"
# Where everything starts at once, the first answer may be late. Refusals are quicker than that.
_START_S = 5.0
_LATE_S = 0.2


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
