"""Copies on their way into a near store, of values that have come from a far one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from tierkv.errors import BadRequestError, ConfigError, StoreUnavailableError
from tierkv.storage.protocol import GetItem, PutItem, PutStatus, Store, check_ttl
from tierkv.storage.threads import WorkerThreads
from tierkv.tasks import background

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LayeredSettings:
    """near_ttl_s: how long copies live in the near store.
    max_fill_bytes: copies waiting for the near store; beyond that none is made.
    """

    near_ttl_s: float = 3600.0
    max_fill_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        try:
            check_ttl(self.near_ttl_s)
        except BadRequestError as error:
            raise ConfigError(f"near_ttl_s: {error}") from error


class NearCopies:
    """Puts copies into `near`, one after the other, in the background."""

    def __init__(self, near: Store, settings: LayeredSettings) -> None:
        self._near = near
        self._settings = settings
        self._waiting: dict[str, PutItem] = {}
        self._num_bytes = 0
        self._in_hand = ""  # the name of the copy that is being put
        self.num_forgets = 0
        self._came = asyncio.Event()
        self._copier = WorkerThreads(near.url, 1)
        self.num_dropped = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self._came = asyncio.Event()  # of this loop
        async with (
            self._copier.running(),
            background({"tierkv-near-fill": self._keep_filling()}),
        ):
            try:
                yield
            finally:
                self._waiting.clear()  # others can change what is there until it is opened again
                self._num_bytes = 0

    async def make(self, came: Sequence[GetItem], damaged: set[str], num_forgets: int) -> None:
        """Copy values that have come, whose buffers are soon another's. Beyond the limit, none.

        damaged: of these the near store has something else, which is replaced. num_forgets: when
        they were asked for; what was forgotten since may be one of them.
        """
        copied: list[GetItem] = []
        for item in came:
            if item.name in self._waiting:
                continue
            if self._num_bytes + item.num_bytes > self._settings.max_fill_bytes:
                self.num_dropped += 1
                continue
            self._num_bytes += item.num_bytes
            copied.append(item)
        if not copied:
            return
        try:  # not on the loop: 2 MiB take 0.5 ms, into memory that was never used 5
            contents = await self._copier.run(lambda: [b"".join(item.into) for item in copied])
        except BaseException as error:
            self._num_bytes -= sum(item.num_bytes for item in copied)
            if isinstance(error, StoreUnavailableError):
                return  # left meanwhile; what came is right all the same
            raise
        for item, content in zip(copied, contents, strict=True):
            if item.name in self._waiting or num_forgets != self.num_forgets:
                self._num_bytes -= item.num_bytes
                continue
            keeps = item.name not in damaged
            ttl_s = self._settings.near_ttl_s
            self._waiting[item.name] = PutItem(item.name, (content,), ttl_s, keep_existing=keeps)
        self._came.set()

    def forget(self, names: Sequence[str]) -> None:
        """Make no copies of these any more. One that is being put now is deleted then."""
        self.num_forgets += 1
        for name in names:
            item = self._waiting.pop(name, None)
            if item is not None:
                self._num_bytes -= item.num_bytes
            if name == self._in_hand:
                self._in_hand = ""

    async def _keep_filling(self) -> None:
        while True:
            while not self._waiting:
                self._came.clear()
                await self._came.wait()
            name = self._in_hand = next(iter(self._waiting))
            item = self._waiting.pop(name)
            self._num_bytes -= item.num_bytes
            [outcome] = await self._near.put([item])
            if outcome.status is PutStatus.FAILED:
                _log.debug("no near copy: %s", outcome.reason)
            if self._in_hand != name:  # forgotten while it was being put
                with suppress(StoreUnavailableError):
                    await self._near.delete([name])
            self._in_hand = ""
