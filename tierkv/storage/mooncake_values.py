"""The blocking half of the Mooncake store, run in its threads: values by its client's calls."""

from __future__ import annotations

import importlib
import math
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from tierkv.errors import ConfigError, StoreCorruptError, StoreUnavailableError
from tierkv.storage.buffers import copy_into, flat
from tierkv.storage.mooncake_client import Client, Config, Package
from tierkv.storage.mooncake_memory import KnownMemory, pointer
from tierkv.storage.protocol import (
    GetItem,
    GetOutcome,
    GetStatus,
    PutItem,
    PutOutcome,
    PutStatus,
)
from tierkv.storage.unreachable import why_unreachable

# Pieces of all calls together, and of them times the halt below in seconds. A call ends after 60 s,
# whatever its pieces may still do. Of a provider that was frozen, with halts of 2 s, 16 pieces kept
# it for 2 s, 64 for 11, 128 for 19; 192 for 60, and when the provider went on 47 of them landed in
# buffers that the caller had back (16 connections, loopback, package 0.3.13, 2026-11-22).
_MAX_PIECES = 128
_MAX_PIECES_AND_HALTS = 256
_LEAST_PIECES = 2  # of one call: a header and a payload
_MOST_READS = 10  # of a small value that is being replaced
# Without a byte, on a connection to a provider. A call ends after 60 s whatever may still come, and
# what a frozen provider sent later went into buffers that were somebody else's by then.
_LONGEST_HALT_S = 10.0
_NO_SPACE = -200
_NOT_FOUND = -704
# Of the master, for which the client has waited: 4 s if there is none, its deadline if it hangs.
_NO_ANSWER = frozenset({-900, -901})


@dataclass(frozen=True, slots=True)
class MooncakeSettings:
    """local_host: the address that providers reach this node at.
    num_threads: reads at a time, and as many writes. Each waits by looking again and again: on a
        machine of two cores one thread was 1.2 times as fast as two. 1 to 32, to 6 with long
        timeouts: see max_pieces.
    local_buffer_bytes: of Mooncake's own, for values that are asked for one by one.
    replicas: copies of each value. connect_timeout_s: for the master, to be reached and to answer,
        and for a provider to move a byte (whole seconds, 10 at most); the package takes it from
        the environment, once (MC_RPC_TIMEOUT_MS, 30 s without; MC_TCP_PROGRESS_TIMEOUT_SEC).
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
        if self.num_threads < 1:
            raise ConfigError(f"a Mooncake store has at least one thread, not {self.num_threads}")
        if not (math.isfinite(self.connect_timeout_s) and self.connect_timeout_s > 0):
            raise ConfigError(f"connect_timeout_s must be above 0, not {self.connect_timeout_s}")
        if self.replicas < 1:
            raise ConfigError(f"a value has at least one replica, not {self.replicas}")
        if self.protocol not in {"tcp", "rdma"}:
            raise ConfigError(f"Mooncake's protocol is tcp or rdma, not {self.protocol!r}")
        if self.max_pieces < _LEAST_PIECES:
            raise ConfigError(
                f"{self.num_threads} threads that each wait {self.halt_s} s for a frozen provider "
                "outlast Mooncake's calls: set fewer num_threads, or a shorter connect_timeout_s"
            )

    @property
    def halt_s(self) -> int:
        """How long a provider may move no byte."""
        return math.ceil(min(self.connect_timeout_s, _LONGEST_HALT_S))

    @property
    def max_pieces(self) -> int:
        """Of the values of one call: see _MAX_PIECES. Reads and writes have as many threads."""
        in_flight = min(_MAX_PIECES, _MAX_PIECES_AND_HALTS // self.halt_s)
        return in_flight // (2 * self.num_threads)


class MooncakeValues:
    """Blocking, safe from several threads. Connected when made, until `close`."""

    def __init__(
        self,
        address: tuple[str, int],
        url: str,
        settings: MooncakeSettings,
        pools: Sequence[memoryview] = (),
    ) -> None:
        """address: of the master. pools: where most values lie. Raises StoreUnavailableError."""
        for variable, value in _environment(settings).items():
            os.environ.setdefault(variable, value)
        self._url = url
        self._settings = settings
        self._max_pieces = settings.max_pieces
        self._package = _load_package()
        try:  # their client goes on trying for minutes
            socket.create_connection(address, settings.connect_timeout_s).close()
        except OSError as error:
            why = why_unreachable(error)
            raise StoreUnavailableError(f"{url} cannot be reached {why}") from error
        self._client: Client = self._package.MooncakeDistributedStore()
        status = self._client.setup(
            settings.local_host,
            "P2PHANDSHAKE",
            0,  # memory is lent by providers, not by this node
            settings.local_buffer_bytes,
            settings.protocol,
            settings.rdma_devices,
            f"{address[0]}:{address[1]}",
        )
        if status:
            raise StoreUnavailableError(f"{url} cannot be reached ({status})")
        self._memory = KnownMemory(self._client, pools, num_users=2 * settings.num_threads)
        try:
            self._memory.register()
        except StoreUnavailableError:
            self.close()
            raise

    def close(self) -> None:
        self._memory.unregister()
        self._client.close()

    def ping(self) -> None:
        """Raises StoreUnavailableError."""
        self.present(["ping"])  # its `health_check` does not ask the master

    def present(self, names: Sequence[str]) -> list[bool]:
        """Raises StoreUnavailableError."""
        if not names:
            return []
        statuses = self._client.batch_is_exist(list(names))
        for status in statuses:
            if status < 0 and status != _NOT_FOUND:
                raise StoreUnavailableError(f"{self._url} does not answer ({status})")
        return [status == 1 for status in statuses]

    def delete(self, names: Sequence[str]) -> int:
        """How many there were. Raises StoreUnavailableError."""
        if not names:
            return 0
        # By force: a value that was just read has a lease, which protects memory, not meaning.
        statuses = self._client.batch_remove(list(names), True)  # noqa: FBT003
        for status in statuses:
            if status not in {0, _NOT_FOUND}:
                raise StoreUnavailableError(f"{self._url} did not remove a value ({status})")
        return statuses.count(0)

    def get(self, items: Sequence[GetItem]) -> Sequence[GetOutcome]:
        wanted = [flat(item.into) for item in items]
        landings = [
            # One as large as they are, where they are too many.
            views if len(views) <= self._max_pieces else [memoryview(bytearray(item.num_bytes))]
            for item, views in zip(items, wanted, strict=True)
        ]
        with self._memory.known(landings) as (known, scattered):
            statuses = self._client.batch_get_into_multi_buffers(
                [item.name for item in items],
                [[pointer(view) for view in views] for views in known],
                [[len(view) for view in views] for views in known],
            )
            for view, copy in scattered:
                view[:] = copy
        for item, views, landed, status in zip(items, wanted, landings, statuses, strict=True):
            if landed is not views and status == item.num_bytes:
                copy_into(landed[0], views)
        return [
            self._get_outcome(item, status) for item, status in zip(items, statuses, strict=True)
        ]

    def _get_outcome(self, item: GetItem, status: int) -> GetOutcome:
        if status == _NOT_FOUND:
            return GetOutcome(GetStatus.MISS)
        if status == item.num_bytes and status > 0:
            return GetOutcome(GetStatus.HIT)
        if status not in _NO_ANSWER:
            # Buffers that are too long or too short are errors of many kinds; the size tells.
            num_bytes = self._client.get_size(item.name) if status < 0 else status
            if num_bytes == _NOT_FOUND:
                return GetOutcome(GetStatus.MISS)
            if num_bytes >= 0 and num_bytes != item.num_bytes:
                return GetOutcome(
                    GetStatus.DAMAGED, f"{item.name} has {num_bytes} bytes, not {item.num_bytes}"
                )
        return GetOutcome(GetStatus.FAILED, f"{item.name}: Mooncake answers {status}")

    def get_small(self, name: str, max_bytes: int) -> bytes | None:
        """Raises StoreCorruptError, StoreUnavailableError."""
        num_bytes = self._client.get_size(name)
        if num_bytes == _NOT_FOUND:
            return None
        if num_bytes < 0:
            raise StoreUnavailableError(f"{self._url} does not answer ({num_bytes})")
        if num_bytes > max_bytes:
            raise StoreCorruptError(
                f"{name} has {num_bytes} bytes, more than the {max_bytes} it may have"
            )
        # Mooncake replaces a value where it lies: who reads meanwhile gets parts of both.
        content, before = self._client.get(name), b""
        for _ in range(_MOST_READS):
            if not content:
                raise StoreUnavailableError(f"{self._url} has lost {name} while it was being read")
            if content == before:
                return content
            content, before = self._client.get(name), content
        raise StoreUnavailableError(f"{self._url} has another {name} each time it is asked")

    def put(self, items: Sequence[PutItem]) -> Sequence[PutOutcome]:
        outcomes: list[PutOutcome | None] = [None] * len(items)
        there = self._client.batch_is_exist([item.name for item in items])
        fresh: list[int] = []
        for index, item in enumerate(items):
            if not item.num_bytes:
                reason = f"{item.name}: Mooncake keeps no values of no bytes"
                outcomes[index] = PutOutcome(PutStatus.FAILED, reason)
            elif there[index] in _NO_ANSWER:
                outcomes[index] = _put_outcome(item, there[index])
            elif item.leaves_existing and there[index] == 1:
                outcomes[index] = PutOutcome(PutStatus.EXISTED)
            elif item.only_new:
                outcomes[index] = self._put_new(item)
            elif not item.keep_existing:
                content = b"".join(item.parts)
                outcomes[index] = _put_outcome(
                    item, self._client.upsert(item.name, content, self._config(is_pinned=True))
                )
            else:
                fresh.append(index)
        if fresh:
            views = [
                parts
                if len(parts := flat(items[index].parts)) <= self._max_pieces
                else [memoryview(b"".join(parts))]
                for index in fresh
            ]
            with self._memory.known(views) as (known, scattered):
                for view, copy in scattered:
                    copy[:] = view
                statuses = self._client.batch_put_from_multi_buffers(
                    [items[index].name for index in fresh],
                    [[pointer(view) for view in some] for some in known],
                    [[len(view) for view in some] for some in known],
                    self._config(is_pinned=False),
                )
            for index, status in zip(fresh, statuses, strict=True):
                outcomes[index] = _put_outcome(items[index], status)
        return [outcome for outcome in outcomes if outcome is not None]

    def _put_new(self, item: PutItem) -> PutOutcome:
        content = b"".join(item.parts)
        status = self._client.put(item.name, content, self._config(is_pinned=True))
        # It is the first one's that stays, and the others are told 0 too.
        if status == 0 and self._client.get(item.name) != content:
            return PutOutcome(PutStatus.EXISTED)
        return _put_outcome(item, status)

    def _config(self, *, is_pinned: bool) -> Config:
        config = self._package.ReplicateConfig()
        config.replica_num = self._settings.replicas
        if is_pinned:
            config.soft_pin_action = self._package.SoftPinAction.ENABLE
        return config


def _environment(settings: MooncakeSettings) -> dict[str, str]:
    """What the package reads there when a client is made. What the user has set stays."""
    limit_s = settings.connect_timeout_s
    halt_s = str(settings.halt_s)
    return {
        "GLOG_minloglevel": "2",  # it logs each miss otherwise
        "MC_RPC_TIMEOUT_MS": str(math.ceil(limit_s * 1000)),
        "MC_RPC_CONNECT_TIMEOUT_MS": str(math.ceil(limit_s * 1000)),
        # Each waits for the master once more: 42 s for a frozen one, with the package's own 20.
        "MC_STORE_CLIENT_SETUP_RETRIES": "2",
        "MC_TCP_STATUS_TIMEOUT_SEC": halt_s,
        "MC_TCP_PROGRESS_TIMEOUT_SEC": halt_s,
        # Connections to a provider, of which each has one piece on its way: a header keeps one from
        # payloads for a round trip. Of the client with its own 4, put and get came at 0.78 and 0.80
        # with 4, 0.80 and 0.90 with 8, 0.90 to 0.98 and 0.89 to 0.90 with 16, the most it takes
        # (8 values of 2 MiB, loopback, 2 cores, package 0.3.13, 2026-11-22).
        "MC_TCP_LANES_PER_PEER": "16",
    }


def _load_package() -> Package:
    """Raises StoreUnavailableError."""
    try:
        return cast("Package", importlib.import_module("mooncake.store"))
    except ImportError as error:
        raise StoreUnavailableError(
            f"Mooncake's package cannot be loaded ({error}): install tierkv[mooncake] and, on "
            "Debian, libibverbs1"
        ) from error


def _put_outcome(item: PutItem, status: int) -> PutOutcome:
    if status == 0:
        return PutOutcome(PutStatus.STORED)
    kind = PutStatus.FULL if status == _NO_SPACE else PutStatus.FAILED
    return PutOutcome(kind, f"{item.name}: Mooncake answers {status}")
