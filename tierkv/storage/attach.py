"""Places for stores, one for all names and one for each tenant that has its own, filled, emptied
and refilled while requests run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from tierkv.errors import StoreUnavailableError
from tierkv.storage.protocol import Store
from tierkv.storage.routed import RoutedStore
from tierkv.storage.switch import Lifetimes, SwitchStore
from tierkv.tasks import task_group


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
