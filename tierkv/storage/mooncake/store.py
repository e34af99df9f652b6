"""The store on Mooncake: a master that knows where values are, and providers that lend memory.

Values go between the caller's buffers and the providers over TCP or RDMA, without a copy of ours.
What Mooncake has not: values of no bytes, times to live (it evicts what is used least), and a list
of what there is. Its calls block, so they are made in threads; a provider that is frozen holds such
a thread, and the caller's buffers, for some seconds.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from threading import Event
from urllib.parse import urlsplit

from tierkv.errors import ConfigError, StoreUnavailableError
from tierkv.storage.base import BaseStore, num_leading
from tierkv.storage.mooncake.client import MooncakeSettings
from tierkv.storage.mooncake.values import MooncakeValues
from tierkv.storage.protocol import (
    Capabilities,
    GetItem,
    GetOutcome,
    GetStatus,
    ListPage,
    PutItem,
    PutOutcome,
    PutStatus,
    Usage,
    check_limit,
    check_name,
    check_names,
    check_prefix,
    check_ttl,
)
from tierkv.storage.threads import WorkerThreads

ACCEPTED = "mooncake://master-host:port"


class MooncakeStore(BaseStore):
    """`Store` on a Mooncake cluster. Values that are replaced (tickets) are softly pinned.

    Of several who put one name at the same time one sends it; the others are told STORED or EXISTED
    at once, which is before it is there.
    """

    def __init__(self, url: str, settings: MooncakeSettings) -> None:
        """Raises ConfigError if `url` names no master."""
        self._address = _master(url)
        self._settings = settings
        # A frozen provider holds a thread for seconds: reads and writes have threads of their own,
        # and so have questions to the master, which wait for no provider.
        self._askers = WorkerThreads(self.url, settings.num_threads)
        self._readers = WorkerThreads(self.url, settings.num_threads)
        self._writers = WorkerThreads(self.url, settings.num_threads)
        self._values: MooncakeValues | None = None
        self._pools: Sequence[memoryview] = ()

    def use_memory(self, pools: Sequence[memoryview]) -> None:
        """Told to the network card when the store is opened; over RDMA values in other memory
        fail. Over TCP nobody is told."""
        self._pools = tuple(pools)

    @property
    def url(self) -> str:
        host, port = self._address
        return f"mooncake://{host}:{port}"

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(is_shared=True, is_durable=True, has_ttl=False, has_listing=False)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self._askers.running(), self._readers.running(), self._writers.running():
            values = await self._readers.run(
                lambda: MooncakeValues(self._address, self.url, self._settings, self._pools)
            )
            self._values = values
            try:
                yield
            finally:
                self._values, self._pools = None, ()
                try:
                    for threads in (self._askers, self._readers, self._writers):
                        await threads.idle()
                finally:
                    await self._readers.run(values.close)

    async def ping(self) -> None:
        await self._askers.run(self._opened().ping)

    async def exists(self, names: Sequence[str]) -> int:
        return num_leading(await self.present(names))

    async def present(self, names: Sequence[str]) -> list[bool]:
        check_names(names)
        values = self._opened()
        return await self._askers.run(lambda: values.present(names))

    async def get_into(self, items: Sequence[GetItem]) -> list[GetOutcome]:
        values = self._values
        if values is None:
            return [GetOutcome(GetStatus.FAILED, f"{self.url} is closed")] * len(items)
        given_up = Event()
        parts = await self._readers.run_each(
            lambda batch: values.get(batch, given_up), values.batches_to_get(items)
        )
        return [outcome for part in parts for outcome in part]

    async def get(self, name: str, *, max_bytes: int) -> bytes | None:
        check_name(name)
        values = self._opened()
        return await self._readers.run(lambda: values.get_small(name, max_bytes))

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        values = self._values
        if values is None:
            return [PutOutcome(PutStatus.FAILED, f"{self.url} is closed")] * len(items)
        given_up = Event()
        parts = await self._writers.run_each(
            lambda batch: values.put(batch, given_up), values.batches_to_put(items)
        )
        return [outcome for part in parts for outcome in part]

    async def delete(self, names: Sequence[str]) -> int:
        check_names(names)
        values = self._opened()
        return await self._writers.run(lambda: values.delete(names))

    async def touch(self, names: Sequence[str], *, ttl_s: float) -> int:
        """Values live for as long as they are used; returns how many there are."""
        check_ttl(ttl_s)
        return sum(await self.present(names))

    async def list(self, prefix: str, *, limit: int, cursor: str | None = None) -> ListPage:
        """Raises StoreUnavailableError: Mooncake does not tell."""
        check_prefix(prefix)
        check_limit(limit)
        raise StoreUnavailableError(f"{self.url} cannot list its values, {cursor=} or not")

    async def usage(self, prefix: str) -> Usage:
        """Raises StoreUnavailableError: Mooncake does not tell."""
        check_prefix(prefix)
        raise StoreUnavailableError(f"{self.url} cannot list its values")

    def _opened(self) -> MooncakeValues:
        if self._values is None:
            raise StoreUnavailableError(f"{self.url} is closed")
        return self._values


def _master(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port, parts = None, None, urlsplit("")
    if host is None or not port or parts.path.strip("/") or parts.query or parts.username:
        raise ConfigError(f"the storage URL names no Mooncake master; accepted: {ACCEPTED}")
    return host, port
