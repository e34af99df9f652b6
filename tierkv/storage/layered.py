"""A near store in front of a far one, such as files in front of Redis.

get: near --miss--> far --hit--> caller, and a copy on its way to near
put: far, then near
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from tierkv.errors import StoreUnavailableError
from tierkv.storage.around import StoreAround
from tierkv.storage.host_memory import use_memory
from tierkv.storage.notify import Notifier, notifier_of
from tierkv.storage.presence import present
from tierkv.storage.protocol import (
    Capabilities,
    GetItem,
    GetOutcome,
    GetStatus,
    PutItem,
    PutOutcome,
    PutStatus,
    Store,
    check_names,
)
from tierkv.storage.threads import WorkerThreads
from tierkv.tasks import background

_log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LayeredSettings:
    """near_ttl_s: how long copies live in the near store.
    max_fill_bytes: copies waiting for the near store; beyond that none is made.
    """

    near_ttl_s: float = 3600.0
    max_fill_bytes: int = 256 << 20


class LayeredStore(StoreAround):
    """`Store`. The far store decides what there is: what counts as stored is stored there, and the
    near one holds copies of values that never change. Values that are replaced (tickets) and small
    ones asked for with `get` are far only. A near store that fails is a slower far store."""

    def __init__(self, near: Store, far: Store, settings: LayeredSettings) -> None:
        self._near = near
        self._far = far
        self._settings = settings
        self._fills: deque[PutItem] = deque()
        self._fill_bytes = 0
        self._came = asyncio.Event()
        self._copier = WorkerThreads(self.url, 1)
        self.num_near_hits = 0
        self.num_fills_dropped = 0

    def notifier(self) -> Notifier:
        return notifier_of(self._far)

    def use_memory(self, pools: Sequence[memoryview]) -> None:
        for store in (self._near, self._far):
            use_memory(store, pools)

    @property
    def url(self) -> str:
        return f"layered:{self._near.url}|{self._far.url}"

    @property
    def capabilities(self) -> Capabilities:
        return self._far.capabilities

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with (
            self._near.running(),
            self._far.running(),
            self._copier.running(),
            background({"tierkv-near-fill": self._keep_filling()}),
        ):
            yield

    async def _ask(self, ask: Callable[[Store], Awaitable[T]]) -> T:
        return await ask(self._far)

    async def exists(self, names: Sequence[str]) -> int:
        check_names(names)
        found = 0
        while found < len(names):
            near = await self._near_exists(names[found:])
            far = await self._far.exists(names[found + near :]) if found + near < len(names) else 0
            found += near + far
            if far == 0:
                break
        return found

    async def present(self, names: Sequence[str]) -> list[bool]:
        check_names(names)
        found = [False] * len(names)
        with suppress(StoreUnavailableError):
            found = await present(self._near, names)
        left = [at for at, is_near in enumerate(found) if not is_near]
        if left:
            answers = await present(self._far, [names[at] for at in left])
            for at, is_far in zip(left, answers, strict=True):
                found[at] = is_far
        return found

    async def _near_exists(self, names: Sequence[str]) -> int:
        try:
            return await self._near.exists(names)
        except StoreUnavailableError:
            return 0

    async def get_into(self, items: Sequence[GetItem]) -> list[GetOutcome]:
        outcomes = await self._near.get_into(items)
        left = [i for i, outcome in enumerate(outcomes) if outcome.status is not GetStatus.HIT]
        self.num_near_hits += len(items) - len(left)
        if left:
            far = await self._far.get_into([items[i] for i in left])
            came = [i for i, one in zip(left, far, strict=True) if one.status is GetStatus.HIT]
            damaged = {items[i].name for i in came if outcomes[i].status is GetStatus.DAMAGED}
            for i, outcome in zip(left, far, strict=True):
                outcomes[i] = outcome
            await self._fill([items[i] for i in came], damaged)
        return outcomes

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        outcomes = await self._far.put(items)
        near = [
            replace(item, ttl_s=min(self._settings.near_ttl_s, item.ttl_s or float("inf")))
            for item, outcome in zip(items, outcomes, strict=True)
            if item.keep_existing and outcome.status is PutStatus.STORED
        ]
        if near:
            await self._near.put(near)
        return outcomes

    async def delete(self, names: Sequence[str]) -> int:
        check_names(names)
        try:
            await self._near.delete(names)
        finally:
            deleted = await self._far.delete(names)
        return deleted

    async def _fill(self, came: Sequence[GetItem], damaged: set[str]) -> None:
        """Copy values that have come, for the near store: their buffers are soon another's.

        damaged: of these the near store has something else, which is replaced.
        """
        copied = []
        for item in came:
            if self._fill_bytes + item.num_bytes > self._settings.max_fill_bytes:
                self.num_fills_dropped += 1
                continue
            self._fill_bytes += item.num_bytes
            copied.append(item)
        if not copied:
            return
        try:  # not on the loop: 2 MiB take 0.5 ms, into memory that was never used 5
            contents = await self._copier.run(lambda: [b"".join(item.into) for item in copied])
        except BaseException:
            self._fill_bytes -= sum(item.num_bytes for item in copied)
            raise
        ttl_s = self._settings.near_ttl_s
        self._fills += [
            PutItem(item.name, (content,), ttl_s, keep_existing=item.name not in damaged)
            for item, content in zip(copied, contents, strict=True)
        ]
        self._came.set()

    async def _keep_filling(self) -> None:
        while True:
            while not self._fills:
                self._came.clear()
                await self._came.wait()
            item = self._fills.popleft()
            self._fill_bytes -= item.num_bytes
            [outcome] = await self._near.put([item])
            if outcome.status is PutStatus.FAILED:
                _log.debug("no near copy: %s", outcome.reason)
