"""Plans, batches and match results as they travel between a scheduler and its workers.

Each is a record of `tierkv.wire`: magic `TKPL`, version, checksum, msgpack body. Lists of slots are
little-endian int32 bytes. `docs/cache.md` lists every field; a change of any is a new version.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from tierkv.cache.match import Match
from tierkv.cache.pool import Ids
from tierkv.errors import OwnershipError, StoreCorruptError
from tierkv.wire import seal, unseal

MAGIC = b"TKPL"
VERSION = 1
_TIERS = {"load": ("host", "device"), "offload": ("device", "host"), "copy": ("device", "device")}
_Slot = tuple[str, int]  # tier, number
_MOST = 2**63 - 1  # of what is counted: an integer everywhere


class Moves(msgspec.Struct, frozen=True):
    """Copies of one kind. kind: "load" (host to device), "offload" (device to host), "copy"
    (within the device). source, target: slots, one of each for every block."""

    kind: str
    source: bytes
    target: bytes

    def __post_init__(self) -> None:
        if self.kind not in _TIERS:
            raise StoreCorruptError(
                f"a plan moves blocks by load, offload or copy, not {self.kind}"
            )
        if len(self.source) != len(self.target):
            raise StoreCorruptError("a plan needs one target for every source")
        _check_slots(self.source)
        _check_slots(self.target)

    @classmethod
    def of(cls, kind: str, source: Ids, target: Ids) -> Moves:
        return cls(kind, _packed(source), _packed(target))

    def slots(self) -> tuple[Ids, Ids]:
        return _slots(self.source), _slots(self.target)


class RequestPlan(msgspec.Struct, frozen=True):
    """One request's part of a step.

    block_table: its device slots, in order. cached_tokens: the first so many tokens have KV once
    the moves are done. num_computed: tokens that this step computes.
    """

    request_id: str
    block_table: bytes
    cached_tokens: int
    num_computed: int
    moves: tuple[Moves, ...] = ()

    def __post_init__(self) -> None:
        _check_slots(self.block_table)
        _check_counts(self.cached_tokens, self.num_computed)

    def table(self) -> Ids:
        return _slots(self.block_table)


class BatchPlan(msgspec.Struct, frozen=True):
    """One step of a batch. number: counts up; a worker reports completion by it."""

    number: int
    requests: tuple[RequestPlan, ...]
    moves: tuple[Moves, ...]

    def __post_init__(self) -> None:
        _check_counts(self.number)


class MatchResult(msgspec.Struct, frozen=True):
    """What `Index.match` found, without the tree. partial_*: the block and tokens, None if none."""

    num_blocks: int
    device_blocks: int
    loading_blocks: int
    host_blocks: int
    partial_block: int | None = None
    partial_tokens: int | None = None

    def __post_init__(self) -> None:
        _check_counts(self.num_blocks, self.device_blocks, self.loading_blocks, self.host_blocks)
        if (self.partial_block is None) != (self.partial_tokens is None):
            raise StoreCorruptError("a partial match is a block and how many of its tokens")
        _check_counts(self.partial_block or 0, self.partial_tokens or 0)
        if self.device_blocks + self.loading_blocks + self.host_blocks != self.num_blocks:
            raise StoreCorruptError("each matched block is on the device, coming, or on the host")

    @classmethod
    def of(cls, match: Match) -> MatchResult:
        partial = match.partial
        return cls(
            match.num_blocks,
            match.device_blocks,
            match.loading_blocks,
            match.host_blocks,
            partial.block if partial else None,
            partial.num_tokens if partial else None,
        )


def merge(number: int, plans: Sequence[RequestPlan]) -> BatchPlan:
    """All movements of a batch in one list per kind, in the order of the requests, the same copy
    wanted by several made once. Raises OwnershipError if two copies write one slot, or one reads
    what another writes: which comes first would be left to chance."""
    movements: dict[str, dict[int, int]] = {"copy": {}, "load": {}, "offload": {}}
    written: dict[_Slot, _Slot] = {}  # from where
    read: set[_Slot] = set()
    for plan in plans:
        for move in plan.moves:
            source_tier, target_tier = _TIERS[move.kind]
            sources, targets = move.slots()
            movements[move.kind] |= zip(targets.tolist(), sources.tolist(), strict=True)
            for come, go in zip(sources.tolist(), targets.tolist(), strict=True):
                source = source_tier, come
                read.add(source)
                if written.setdefault((target_tier, go), source) != source:
                    raise OwnershipError(f"two blocks of a batch go into {target_tier} slot {go}")
    if both := read & written.keys():
        tier, slot = min(both)
        raise OwnershipError(f"a batch reads and writes {tier} slot {slot}")
    moves = tuple(
        Moves.of(kind, np.fromiter(pairs.values(), np.int32), np.fromiter(pairs, np.int32))
        for kind, pairs in movements.items()
        if pairs
    )
    bare = tuple(msgspec.structs.replace(plan, moves=()) for plan in plans)
    return BatchPlan(number, bare, moves)


Record = RequestPlan | BatchPlan | MatchResult
_KINDS: dict[str, type[Record]] = {
    "request": RequestPlan,
    "batch": BatchPlan,
    "match": MatchResult,
}


def encode(record: Record) -> bytes:
    kind = next(name for name, one in _KINDS.items() if type(record) is one)
    return seal(
        MAGIC, VERSION, {"kind": kind, "body": msgspec.to_builtins(record, builtin_types=(bytes,))}
    )


def decode(value: bytes) -> Record:
    """Raises StoreCorruptError if it is damaged, of another version, or no plan."""
    found = unseal(MAGIC, VERSION, value, dict[str, object])
    kind = _KINDS.get(str(found.get("kind")))
    if kind is None:
        raise StoreCorruptError(f"a plan cannot be of kind {found.get('kind')!r}")
    try:
        # Without the builtin types text would be taken for bytes in base64.
        return msgspec.convert(found.get("body"), kind, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise StoreCorruptError(f"the plan cannot be read: {error}") from error


def _check_slots(packed: bytes) -> None:
    if len(packed) % 4:
        raise StoreCorruptError("slots are whole numbers, of 4 bytes each")
    if packed and _slots(packed).min() < 0:
        raise StoreCorruptError("a slot's number cannot be below 0")


def _check_counts(*counts: int) -> None:
    if min(counts) < 0:
        raise StoreCorruptError("a plan cannot count fewer than 0")
    if max(counts) > _MOST:
        raise StoreCorruptError(f"a plan cannot count more than {_MOST}")


def _packed(slots: Ids) -> bytes:
    given = np.asarray(slots)
    packed = given.astype("<i4")
    if not np.array_equal(packed, given):
        raise StoreCorruptError("a slot's number is whole, and below 2**31")
    return packed.tobytes()


def _slots(packed: bytes) -> Ids:
    return np.frombuffer(packed, "<i4").astype(np.int32)
