"""The store on Mooncake: a master that knows where values are, and providers that lend memory.

Values go between the caller's buffers and the providers over TCP or RDMA, without a copy of ours.
What Mooncake has not: values of no bytes, times to live (it evicts what is used least), and a list
of what there is. Its calls block, so they are made in threads; a provider that is frozen holds such
a thread, and the caller's buffers, for 30 s.
"""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar, cast
from urllib.parse import urlsplit

import numpy as np

from tierkv.errors import ConfigError, StoreCorruptError, StoreUnavailableError
from tierkv.storage.buffers import copy_into, flat
from tierkv.storage.mooncake_client import Client, Config, Package
from tierkv.storage.protocol import (
    Buffer,
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
# Values in one call: 8 of 2 MiB came at 1.25 GB/s and went at 2.40, single ones at 0.73 and 0.90.
_BATCH = 8
_MAX_PIECES = 64  # of one value; it refuses 2,500
_NO_SPACE = -200
_NOT_FOUND = -704

Item = TypeVar("Item", GetItem, PutItem)


@dataclass(frozen=True, slots=True)
class MooncakeSettings:
    """local_host: the address that providers reach this node at. num_threads: calls at a time.
    local_buffer_bytes: of Mooncake's own, for values that are asked for one by one.
    replicas: copies of each value. connect_timeout_s: for the master.
    protocol: tcp or rdma; rdma_devices: for the latter, by commas.
    """

    local_host: str = "127.0.0.1"
    num_threads: int = 2
    local_buffer_bytes: int = 64 << 20
    replicas: int = 1
    connect_timeout_s: float = 2.0
    protocol: str = "tcp"
    rdma_devices: str = ""

    def __post_init__(self) -> None:
        if not 1 <= self.num_threads <= 64:  # noqa: PLR2004
            raise ConfigError(f"a Mooncake store has 1 to 64 threads, not {self.num_threads}")
        if self.replicas < 1:
            raise ConfigError(f"a value has at least one replica, not {self.replicas}")
        if self.protocol not in {"tcp", "rdma"}:
            raise ConfigError(f"Mooncake's protocol is tcp or rdma, not {self.protocol!r}")


class MooncakeStore:
    """`Store` on a Mooncake cluster. Values that are replaced (tickets) are softly pinned.

    Of several who put one name at the same time more than one can be told STORED.
    """

    def __init__(self, url: str, settings: MooncakeSettings) -> None:
        """Raises ConfigError if `url` names no master."""
        self._address = _master(url)
        self._master = f"{self._address[0]}:{self._address[1]}"
        self._settings = settings
        self._threads = WorkerThreads(self.url, settings.num_threads)
        self._package: Package | None = None
        self._client: Client | None = None

    @property
    def url(self) -> str:
        return f"mooncake://{self._master}"

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(is_shared=True, is_durable=True, has_ttl=False, has_listing=False)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self._threads.running():
            client = await self._threads.run(self._connect)
            self._client = client
            try:
                yield
            finally:
                self._client = None
                await self._threads.idle()
                await self._threads.run(client.close)

    async def register(self, memory: memoryview) -> None:
        """Tell the network card of the host pool, once; values elsewhere work over TCP only."""
        client = self._opened()
        [pointer] = _pointers([memory])
        if status := await self._threads.run(
            lambda: client.register_buffer(pointer, memory.nbytes)
        ):
            raise StoreUnavailableError(f"{self.url} cannot register memory ({status})")

    async def ping(self) -> None:
        client = self._opened()
        if status := await self._threads.run(client.health_check):
            raise StoreUnavailableError(f"{self.url} is not well ({status})")

    async def exists(self, names: Sequence[str]) -> int:
        check_names(names)
        there = await self._look(names)
        return there.index(False) if False in there else len(names)

    async def present(self, names: Sequence[str]) -> list[bool]:
        check_names(names)
        return await self._look(names)

    async def _look(self, names: Sequence[str]) -> list[bool]:
        client = self._opened()
        if not names:
            return []
        statuses = await self._threads.run(lambda: client.batch_is_exist(list(names)))
        for status in statuses:
            if status < 0 and status != _NOT_FOUND:
                raise StoreUnavailableError(f"{self.url} does not answer ({status})")
        return [status == 1 for status in statuses]

    async def get_into(self, items: Sequence[GetItem]) -> list[GetOutcome]:
        client = self._client
        if client is None:
            return [GetOutcome(GetStatus.FAILED, f"{self.url} is closed")] * len(items)
        parts = await self._threads.run_each(lambda part: self._get(client, part), [*_cut(items)])
        return [outcome for part in parts for outcome in part]

    async def get(self, name: str, *, max_bytes: int) -> bytes | None:
        check_name(name)
        client = self._opened()
        return await self._threads.run(lambda: self._get_small(client, name, max_bytes))

    async def put(self, items: Sequence[PutItem]) -> list[PutOutcome]:
        client = self._client
        if client is None:
            return [PutOutcome(PutStatus.FAILED, f"{self.url} is closed")] * len(items)
        parts = await self._threads.run_each(lambda part: self._put(client, part), [*_cut(items)])
        return [outcome for part in parts for outcome in part]

    async def delete(self, names: Sequence[str]) -> int:
        check_names(names)
        client = self._opened()
        if not names:
            return 0
        # By force: a value that was just read has a lease, which protects memory, not meaning.
        statuses = await self._threads.run(lambda: client.batch_remove(list(names), True))  # noqa: FBT003
        for status in statuses:
            if status not in {0, _NOT_FOUND}:
                raise StoreUnavailableError(f"{self.url} did not remove a value ({status})")
        return statuses.count(0)

    async def touch(self, names: Sequence[str], *, ttl_s: float) -> int:
        """Values live for as long as they are used; returns how many there are."""
        check_names(names)
        check_ttl(ttl_s)
        return sum(await self._look(names))

    async def list(self, prefix: str, *, limit: int, cursor: str | None = None) -> ListPage:
        """Raises StoreUnavailableError: Mooncake does not tell."""
        check_prefix(prefix)
        check_limit(limit)
        raise StoreUnavailableError(f"{self.url} cannot list its values, {cursor=} or not")

    async def usage(self, prefix: str) -> Usage:
        """Raises StoreUnavailableError: Mooncake does not tell."""
        check_prefix(prefix)
        raise StoreUnavailableError(f"{self.url} cannot list its values")

    def _opened(self) -> Client:
        if self._client is None:
            raise StoreUnavailableError(f"{self.url} is closed")
        return self._client

    def _connect(self) -> Client:
        os.environ.setdefault("GLOG_minloglevel", "2")  # it logs each miss otherwise
        try:
            package = cast("Package", importlib.import_module("mooncake.store"))
        except ImportError as error:
            raise StoreUnavailableError(
                f"Mooncake's package cannot be loaded ({error}): install tierkv[mooncake] and, on "
                "Debian, libibverbs1"
            ) from error
        self._package = package
        try:  # their client goes on trying for minutes
            socket.create_connection(self._address, self._settings.connect_timeout_s).close()
        except OSError as error:
            raise StoreUnavailableError(f"{self.url} cannot be reached ({error})") from error
        client = package.MooncakeDistributedStore()
        status = client.setup(
            self._settings.local_host,
            "P2PHANDSHAKE",
            0,  # memory is lent by providers, not by this node
            self._settings.local_buffer_bytes,
            self._settings.protocol,
            self._settings.rdma_devices,
            self._master,
        )
        if status:
            raise StoreUnavailableError(f"{self.url} cannot be reached ({status})")
        return client

    def _get(self, client: Client, items: Sequence[GetItem]) -> Sequence[GetOutcome]:
        landings = [_few(flat(item.into), item.num_bytes) for item in items]
        statuses = client.batch_get_into_multi_buffers(
            [item.name for item in items],
            [_pointers(views) for views in landings],
            [[len(view) for view in views] for views in landings],
        )
        for item, views, status in zip(items, landings, statuses, strict=True):
            if len(item.into) > _MAX_PIECES and status == item.num_bytes:
                copy_into(views[0], item.into)
        return [
            self._get_outcome(client, item, status)
            for item, status in zip(items, statuses, strict=True)
        ]

    def _get_outcome(self, client: Client, item: GetItem, status: int) -> GetOutcome:
        if status == _NOT_FOUND:
            return GetOutcome(GetStatus.MISS)
        if status == item.num_bytes and status > 0:
            return GetOutcome(GetStatus.HIT)
        # Buffers that are too long or too short are errors of many kinds; the size tells.
        num_bytes = client.get_size(item.name) if status < 0 else status
        if num_bytes == _NOT_FOUND:
            return GetOutcome(GetStatus.MISS)
        if num_bytes >= 0 and num_bytes != item.num_bytes:
            return GetOutcome(
                GetStatus.DAMAGED, f"{item.name} has {num_bytes} bytes, not {item.num_bytes}"
            )
        return GetOutcome(GetStatus.FAILED, f"{item.name}: Mooncake answers {status}")

    def _get_small(self, client: Client, name: str, max_bytes: int) -> bytes | None:
        num_bytes = client.get_size(name)
        if num_bytes == _NOT_FOUND:
            return None
        if num_bytes < 0:
            raise StoreUnavailableError(f"{self.url} does not answer ({num_bytes})")
        if num_bytes > max_bytes:
            raise StoreCorruptError(
                f"{name} has {num_bytes} bytes, more than the {max_bytes} it may have"
            )
        content = client.get(name)
        if not content:
            raise StoreUnavailableError(f"{self.url} has lost {name} while it was being read")
        return content

    def _put(self, client: Client, items: Sequence[PutItem]) -> Sequence[PutOutcome]:
        outcomes: list[PutOutcome | None] = [None] * len(items)
        there = client.batch_is_exist([item.name for item in items])
        fresh: list[int] = []
        for index, item in enumerate(items):
            if not item.num_bytes:
                reason = f"{item.name}: Mooncake keeps no values of no bytes"
                outcomes[index] = PutOutcome(PutStatus.FAILED, reason)
            elif not item.keep_existing:
                content = b"".join(item.parts)
                outcomes[index] = _put_outcome(
                    item, client.upsert(item.name, content, self._config(is_pinned=True))
                )
            elif there[index] == 1:
                outcomes[index] = PutOutcome(PutStatus.EXISTED)
            else:
                fresh.append(index)
        if fresh:
            views = [
                parts
                if len(parts := flat(items[index].parts)) <= _MAX_PIECES
                else [memoryview(b"".join(parts))]
                for index in fresh
            ]
            statuses = client.batch_put_from_multi_buffers(
                [items[index].name for index in fresh],
                [_pointers(some) for some in views],
                [[len(view) for view in some] for some in views],
                self._config(is_pinned=False),
            )
            for index, status in zip(fresh, statuses, strict=True):
                outcomes[index] = _put_outcome(items[index], status)
        return [outcome for outcome in outcomes if outcome is not None]

    def _config(self, *, is_pinned: bool) -> Config:
        assert self._package is not None, "set before the client"
        config = self._package.ReplicateConfig()
        config.replica_num = self._settings.replicas
        if is_pinned:
            config.soft_pin_action = self._package.SoftPinAction.ENABLE
        return config


def _master(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port, parts = None, None, urlsplit("")
    if host is None or not port or parts.path.strip("/") or parts.query or parts.username:
        raise ConfigError(f"the storage URL names no Mooncake master; accepted: {ACCEPTED}")
    return host, port


def _put_outcome(item: PutItem, status: int) -> PutOutcome:
    if status == 0:
        return PutOutcome(PutStatus.STORED)
    kind = PutStatus.FULL if status == _NO_SPACE else PutStatus.FAILED
    return PutOutcome(kind, f"{item.name}: Mooncake answers {status}")


def _few(views: Sequence[memoryview], num_bytes: int) -> Sequence[memoryview]:
    """The views, or one as large as they are where Mooncake refuses as many."""
    return views if len(views) <= _MAX_PIECES else [memoryview(bytearray(num_bytes))]


def _pointers(views: Sequence[Buffer]) -> list[int]:
    return [int(np.frombuffer(view, np.uint8).ctypes.data) for view in views]


def _cut(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    return (items[at : at + _BATCH] for at in range(0, len(items), _BATCH))
