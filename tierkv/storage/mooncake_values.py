"""The blocking half of the Mooncake store, run in its threads: values by its client's calls."""

from __future__ import annotations

import importlib
import os
import socket
import time
from collections.abc import Mapping, Sequence
from threading import Semaphore
from typing import TypeAlias, TypeVar, cast

from tierkv.errors import StoreCorruptError, StoreUnavailableError, how_to_install
from tierkv.storage.buffers import copy_into, flat
from tierkv.storage.mooncake_client import Client, Config, Package
from tierkv.storage.mooncake_engine import EngineReads, Place, open_engine, place_of
from tierkv.storage.mooncake_memory import KnownMemory, pointer
from tierkv.storage.mooncake_puts import EXISTS, TOO_LATE, Puts
from tierkv.storage.mooncake_settings import MooncakeSettings, environment
from tierkv.storage.protocol import (
    GetItem,
    GetOutcome,
    GetStatus,
    PutItem,
    PutOutcome,
    PutStatus,
)
from tierkv.storage.unreachable import why_unreachable

_MOST_READS = 10  # of a small value that is being replaced
_NO_SPACE = -200
_NOT_FOUND = -704
# Of the master, for which the client has waited: 4 s if there is none, its deadline if it hangs.
_NO_ANSWER = frozenset({-900, -901})
_ABSENT = frozenset({0, _NOT_FOUND})
# Values in one call of the client: 8 of 2 MiB came at 1.25 GB/s, single ones at 0.73.
_GET_AT_ONCE = 8
# It sends a call's pieces one after the other, and waits for a frozen provider at each: 16 s with
# halts of 2 s. Two such calls at a time went as fast as two of 8 values, four of 2 values slower.
_PUT_AT_ONCE = 4
_PUT_PIECES = 8
_READ_AT_ONCE = 64  # by the engine, which has fewer on their way
# After a question where a value is, its memory is not given to another one for the master's
# `default_kv_lease_ttl`, 5 s if nobody has changed it.
_LEASE_S = 1.0

Item = TypeVar("Item")
Value = TypeVar("Value")
Asked: TypeAlias = Sequence[tuple[Item, int]]  # what the master has said of each one's name


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
        for variable, value in environment(settings).items():
            os.environ.setdefault(variable, value)
        self._url = url
        self._settings = settings
        self._max_pieces = settings.max_pieces
        self._put_pieces = min(_PUT_PIECES, self._max_pieces)
        self._client_reads = Semaphore(settings.num_threads)  # which max_pieces counts on
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
        self._engine = _open_reads(settings)
        self._memory = KnownMemory(
            self._client,
            pools if settings.is_rdma else (),
            num_users=settings.num_threads + settings.num_writers,
        )
        self._puts = Puts(self._client, self._memory, num_sending=settings.num_threads)
        try:
            self._memory.register()
        except StoreUnavailableError:
            self.close()
            raise

    def close(self) -> None:
        self._engine = None
        self._memory.unregister()
        self._client.close()

    def ping(self) -> None:
        """Raises StoreUnavailableError."""
        self.present(["ping"])  # its `health_check` does not ask the master

    def present(self, names: Sequence[str]) -> list[bool]:
        """Raises StoreUnavailableError."""
        statuses = self.states(names)
        for status in statuses:
            if status < 0 and status != _NOT_FOUND:
                raise StoreUnavailableError(f"{self._url} does not answer ({status})")
        return [status == 1 for status in statuses]

    def states(self, names: Sequence[str]) -> Sequence[int]:
        """What the master says of each: 1 if it is there, 0 if not, or why it does not say."""
        return self._client.batch_is_exist(list(names)) if names else []

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

    def batches_to_get(self, asked: Asked[GetItem]) -> list[Asked[GetItem]]:
        """For one `get` each."""
        if self._engine is not None:
            return [asked[at : at + _READ_AT_ONCE] for at in range(0, len(asked), _READ_AT_ONCE)]
        num_pieces = [len(item.into) for item, _ in asked]
        return _batches(asked, num_pieces, _GET_AT_ONCE, self._max_pieces)

    def batches_to_put(self, asked: Asked[PutItem]) -> list[Asked[PutItem]]:
        """For one `put` each."""
        num_pieces = [len(item.parts) for item, _ in asked]
        return _batches(asked, num_pieces, _PUT_AT_ONCE, self._put_pieces)

    def get(self, asked: Asked[GetItem]) -> Sequence[GetOutcome]:
        """asked: each value, and what the master has said of its name."""
        outcomes = {
            at: GetOutcome(GetStatus.MISS)
            if state in _ABSENT
            else GetOutcome(GetStatus.FAILED, f"{item.name}: Mooncake answers {state}")
            for at, (item, state) in enumerate(asked)
            if state != 1
        }
        started = time.monotonic()
        if self._engine is not None:
            wanted = {at: item for at, (item, _) in enumerate(asked) if at not in outcomes}
            outcomes |= self._get_by_engine(self._engine, wanted)
        left = [at for at in range(len(asked)) if at not in outcomes]
        items = [(at, asked[at][0]) for at in left]
        num_pieces = [len(item.into) for _, item in items]
        for batch in _batches(items, num_pieces, _GET_AT_ONCE, self._max_pieces):
            if time.monotonic() - started < self._settings.halt_s:
                with self._client_reads:
                    got = self._get_by_client([item for _, item in batch])
            else:
                why = "its provider does not answer"
                got = [GetOutcome(GetStatus.FAILED, f"{item.name}: {why}") for _, item in batch]
            outcomes |= {at: outcome for (at, _), outcome in zip(batch, got, strict=True)}
        return [outcomes[at] for at in range(len(asked))]

    def _get_by_engine(
        self, engine: EngineReads, wanted: Mapping[int, GetItem]
    ) -> dict[int, GetOutcome]:
        """What became of those that it could read, or of which is known why not."""
        started = time.monotonic()
        places = self._places([item.name for item in wanted.values()])
        outcomes = {
            at: _wrong_size(item, place.num_bytes)
            for at, item in wanted.items()
            if (place := places.get(item.name)) and place.num_bytes != item.num_bytes
        }
        readable = {
            at: item for at, item in wanted.items() if item.name in places and at not in outcomes
        }
        got = engine.read([(places[item.name], item) for item in readable.values()])
        if time.monotonic() - started > _LEASE_S:
            # The master may have given the memory to another value.
            now = self._places([item.name for item in readable.values()])
            places = {name: place for name, place in places.items() if now.get(name) == place}
        for (at, item), outcome in zip(readable.items(), got, strict=True):
            if outcome is not None:
                outcomes[at] = outcome if item.name in places else GetOutcome(GetStatus.MISS)
        return outcomes

    def _places(self, names: Sequence[str]) -> dict[str, Place]:
        """Of those that are in the memory of a provider, which is theirs for the next seconds."""
        found = self._client.batch_get_replica_desc(list(names)) if names else {}
        places = {name: place_of(replicas) for name, replicas in found.items()}
        return {name: place for name, place in places.items() if place is not None}

    def _get_by_client(self, items: Sequence[GetItem]) -> Sequence[GetOutcome]:
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
                return _wrong_size(item, num_bytes)
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

    def put(self, asked: Asked[PutItem]) -> Sequence[PutOutcome]:
        """asked: each value, and what the master has said of its name."""
        items = [item for item, _ in asked]
        outcomes: list[PutOutcome | None] = [None] * len(items)
        fresh: list[int] = []
        for index, (item, state) in enumerate(asked):
            if not item.num_bytes:
                reason = f"{item.name}: Mooncake keeps no values of no bytes"
                outcomes[index] = PutOutcome(PutStatus.FAILED, reason)
            elif state in _NO_ANSWER:
                outcomes[index] = _put_outcome(item, state)
            elif item.leaves_existing and state == 1:
                outcomes[index] = PutOutcome(PutStatus.EXISTED)
            elif item.only_new:
                outcomes[index] = self._put_new(item)
            elif not item.keep_existing:
                content = b"".join(item.completed())
                outcomes[index] = _put_outcome(
                    item, self._client.upsert(item.name, content, self._config(is_pinned=True))
                )
            else:
                fresh.append(index)
        if fresh:
            views = [
                parts
                if len(parts := flat(items[index].completed())) <= self._put_pieces
                else [memoryview(b"".join(parts))]
                for index in fresh
            ]
            statuses = self._puts.put(
                [items[index].name for index in fresh], views, self._config(is_pinned=False)
            )
            for index, status in zip(fresh, statuses, strict=True):
                outcomes[index] = _put_outcome(items[index], status)
        return [outcome for outcome in outcomes if outcome is not None]

    def _put_new(self, item: PutItem) -> PutOutcome:
        content = b"".join(item.completed())
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


def _batches(
    values: Sequence[Value], num_pieces: Sequence[int], at_once: int, max_pieces: int
) -> list[Sequence[Value]]:
    """For one call of the client each; a value of more pieces than that may have goes as one
    piece."""
    batches: list[Sequence[Value]] = []
    first = count = 0
    for at, pieces in enumerate(num_pieces):
        more = pieces if pieces <= max_pieces else 1
        if at > first and (at - first == at_once or count + more > max_pieces):
            batches.append(values[first:at])
            first, count = at, 0
        count += more
    return [*batches, values[first:]] if values else []


def _open_reads(settings: MooncakeSettings) -> EngineReads | None:
    """None: over RDMA the client reads, into memory that it was told of."""
    engine = None if settings.is_rdma else open_engine(settings.local_host)
    return EngineReads(engine, halt_s=settings.halt_s) if engine is not None else None


def _load_package() -> Package:
    """Raises StoreUnavailableError."""
    try:
        return cast("Package", importlib.import_module("mooncake.store"))
    except ImportError as error:
        raise StoreUnavailableError(
            f"Mooncake's package cannot be loaded ({error}): {how_to_install('mooncake')} and, on "
            "Debian, libibverbs1"
        ) from error


def _wrong_size(item: GetItem, num_bytes: int) -> GetOutcome:
    return GetOutcome(GetStatus.DAMAGED, f"{item.name} has {num_bytes} bytes, not {item.num_bytes}")


def _put_outcome(item: PutItem, status: int) -> PutOutcome:
    if status == 0:
        return PutOutcome(PutStatus.STORED)
    if status == EXISTS:
        return PutOutcome(PutStatus.EXISTED)
    if status == TOO_LATE:
        return PutOutcome(PutStatus.FAILED, f"{item.name}: others took too long to be sent")
    kind = PutStatus.FULL if status == _NO_SPACE else PutStatus.FAILED
    return PutOutcome(kind, f"{item.name}: Mooncake answers {status}")
