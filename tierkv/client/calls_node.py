"""Calls of those who run a node: tiers, quotas, blocks, life cycle, events."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from urllib.parse import urlencode

from tierkv.api.types import (
    BlocksAnswer,
    ConfigAnswer,
    LifeAnswer,
    QuotaAnswer,
    QuotaBody,
    ResetAnswer,
    ResizeBody,
    SleepBody,
    StorageBody,
    TiersAnswer,
    WakeBody,
)
from tierkv.client import routes
from tierkv.client.calls import Calls, Question
from tierkv.client.events import EventStream


class NodeCalls(Calls):
    async def drain(self) -> LifeAnswer:
        """Take no more work, until the end of the process."""
        return await self._call(routes.DRAIN)

    async def pause(self) -> LifeAnswer:
        """Admit nothing until `unpause`; what runs goes on, and what comes waits."""
        return await self._call(routes.PAUSE)

    async def unpause(self) -> LifeAnswer:
        return await self._call(routes.UNPAUSE)

    async def sleep(self, body: SleepBody | None = None) -> LifeAnswer:
        """Give the device's memory back until `wake`; requests wait."""
        return await self._call(routes.SLEEP, Question(body=body))

    async def wake(self, body: WakeBody | None = None) -> LifeAnswer:
        return await self._call(routes.WAKE, Question(body=body))

    async def resize(self, body: ResizeBody) -> TiersAnswer:
        return await self._call(routes.RESIZE, Question(body=body))

    async def reset(self) -> ResetAnswer:
        """Forget all cached blocks that nobody holds; storage keeps its own."""
        return await self._call(routes.RESET)

    async def forget_blocks(self, *, storage: bool = False) -> ResetAnswer:
        """The same as `reset`. storage: what is stored is removed as well."""
        query = "?storage=true" if storage else ""
        return await self._call(routes.FORGET_BLOCKS, Question(query=query))

    async def blocks(self, *, cursor: str | None = None, limit: int = 100) -> BlocksAnswer:
        """A page of the cached blocks of all tenants. cursor: of the page before."""
        query = {"limit": str(limit)} | ({"cursor": cursor} if cursor is not None else {})
        return await self._call(routes.BLOCKS, Question(query=f"?{urlencode(query)}"))

    async def config(self) -> ConfigAnswer:
        """The node's settings, secrets masked."""
        return await self._call(routes.CONFIG)

    async def tiers(self) -> TiersAnswer:
        return await self._call(routes.TIERS)

    async def attach_storage(self, body: StorageBody) -> TiersAnswer:
        return await self._call(routes.ATTACH_STORAGE, Question(body=body))

    async def detach_storage(self) -> TiersAnswer:
        return await self._call(routes.DETACH_STORAGE)

    async def set_quota(self, tenant: str, body: QuotaBody) -> QuotaAnswer:
        return await self._call(routes.SET_QUOTA, Question(tenant, body))

    async def quota(self, tenant: str) -> QuotaAnswer:
        return await self._call(routes.QUOTA, Question(tenant))

    async def drop_quota(self, tenant: str) -> QuotaAnswer:
        return await self._call(routes.DROP_QUOTA, Question(tenant))

    def events(self, *, after: str = "") -> AbstractAsyncContextManager[EventStream]:
        """What happens to cached blocks, as it happens. after: the id of the last event that was
        seen on an earlier connection."""
        return self._events(routes.EVENTS, {"Last-Event-ID": after} if after else {})
