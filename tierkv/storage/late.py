"""A store that is opened when it can be: one of several, of which the others are there already."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from tierkv.errors import ConfigError, StoreUnavailableError
from tierkv.storage.host_memory import use_memory
from tierkv.storage.protocol import Capabilities, Store
from tierkv.storage.switch import SwitchStore
from tierkv.tasks import background

_log = logging.getLogger(__name__)
_RETRY_S = 1.0


class LateStore(SwitchStore):
    """`Store`. One that cannot be opened at the start is out of order until it can: a node starts
    while one of its mirrors is down."""

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
