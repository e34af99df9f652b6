"""A bounded memory of what happened to blocks that are not cached any more.

Explanations read it, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import msgspec
from xxhash import xxh3_64_intdigest

from tierkv.cache.index import segments
from tierkv.cache.keys import TOKEN_BYTES, Prompt
from tierkv.cache.node import HOST, Tier, TreeNode


class MissCause(Enum):
    """Why a block that was asked for was not there."""

    EVICTED = "evicted"
    DAMAGED = "checksum failed"
    LATE = "over deadline"
    NOT_WORTH_IT = "computing was estimated to be faster"
    FAILED = "the transfer failed"

    def __init__(self, _: str) -> None:
        self.reason = self._name_.lower()  # of a missed token; made here, since `name` takes 0.1 us


class HistoryEvent(msgspec.Struct, frozen=True, gc=False):
    """at: seconds on the caller's clock. tier: its name, "storage" included."""

    fate: MissCause
    tier: str
    at: float
    detail: str = ""


# Hash of the fingerprint, the block, and a hash of its tokens and media, and of those of some
# blocks before it: what another prompt lost is not taken for this one's, nor is all of it hashed.
_Key = int
_BEFORE = 32  # blocks
_MOST_BACK = 8192  # blocks before one that are looked at
_MOST_RUNS = 3  # that begin with the same block
_RUN_BYTES, _EXTRA_BYTES = 400, 120  # of a run, and of one of its extras, beside tokens: measured
_NO_EXTRAS: Mapping[int, bytes] = {}


class _Run(msgspec.Struct, frozen=True, gc=False):
    """The blocks that an event is about, from the first one on.

    Attributes:
        packed: bytes whose part [start, stop) holds the tokens; shared with the run's node.
        longer: runs that begin with the same block and have later ones, the newest first.
    """

    event: HistoryEvent
    packed: bytes
    start: int
    stop: int
    extras: Mapping[int, bytes]
    longer: tuple[_Run, ...] = ()

    def covers(self, prompt: Prompt, first: int, block: int) -> bool:
        """Return whether this run begins with `prompt`'s block `first` and equals it to `block`."""
        width = prompt.block_token_bytes
        tokens = prompt.tokens[first * width : (block + 1) * width]
        return (
            len(tokens) == (block + 1 - first) * width
            and self.packed.startswith(tokens, self.start, self.stop)
            and all(
                self.extras.get(number, b"") == prompt.extra(number)
                for number in range(first, block + 1)
            )
        )


class History:
    """The newest events, at most `capacity`, and the tokens of the newest runs.

    An event takes some 240 bytes, the tokens at most `capacity_bytes`: at most 12 MB by default.

    Recording costs one hash of a few blocks per run. An evicted run is found by its first block,
    which
    is mostly the first block that a later match misses, or by its tokens. A full history drops its
    older half at once, since one drop per event would cost 5 us each.
    """

    def __init__(self, capacity: int = 32_768, capacity_bytes: int = 4 << 20) -> None:
        self._most_events = max(capacity // 2, 1)
        self._most_bytes = capacity_bytes // 2
        self._num_bytes = 0
        self._events: dict[_Key, HistoryEvent] = {}  # the newest of each block
        self._older_events: dict[_Key, HistoryEvent] = {}
        self._runs: dict[_Key, _Run] = {}  # the newest of each first block
        self._older_runs: dict[_Key, _Run] = {}
        self._packed = b""  # of the newest run

    def __len__(self) -> int:
        """Return the number of blocks with a recorded eviction or loss."""
        return len(self._events.keys() | self._older_events.keys())

    def evicted(self, node: TreeNode, first: int, stop: int, tier: Tier, at_s: float) -> None:
        """Record that blocks [first, stop) of a run leave `tier`. Call this before that."""
        width = node.token_bytes // node.num_blocks
        name = "host" if tier is HOST else "device"
        event = HistoryEvent(MissCause.EVICTED, name, at_s)
        key = hash((node.space.name, node.start + first, _mark_before(node, first, width)))
        self._keep(key, event)
        if stop - first > 1 and len(node.packed) < self._most_bytes:
            extras = dict(node.extras) if node.extras else _NO_EXTRAS
            at = node.packed_at
            run = _Run(event, node.packed, at + first * width, at + stop * width, extras)
            self._keep_run(key, run)

    def record(self, prompt: Prompt, block: int, event: HistoryEvent) -> None:
        self._keep(self._key(prompt, block), event)

    def find(self, prompt: Prompt, block: int) -> HistoryEvent | None:
        """Return what happened last to a block of `prompt`; None if nothing is remembered.

        Looks at all runs that begin before the block: where the first blocks of an evicted run are
        cached again, a match misses in the middle of that run.
        """
        newest = self.newest(prompt, block)
        is_any = self._runs or self._older_runs
        for first in range(block, max(block - _MOST_BACK, -1), -1) if is_any else ():
            known = self._run_at(self._key(prompt, first))
            for run in (known, *known.longer) if known is not None else ():
                is_newer = newest is None or run.event.at > newest.at
                if is_newer and run.covers(prompt, first, block):
                    newest = run.event
        return newest

    def newest(self, prompt: Prompt, block: int) -> HistoryEvent | None:
        """Return what happened last to this block or to a run that begins with it: one hash."""
        if not self._events:
            return None
        key = self._key(prompt, block)
        event = self._events.get(key)
        return event if event is not None else self._older_events.get(key)

    def _run_at(self, key: _Key) -> _Run | None:
        run = self._runs.get(key)
        return run if run is not None else self._older_runs.get(key)

    def _key(self, prompt: Prompt, block: int) -> _Key:
        first, width = block - _BEFORE if block > _BEFORE else 0, prompt.block_size * TOKEN_BYTES
        tokens = prompt.tokens[first * width : (block + 1) * width]
        if not prompt.extras:
            return hash((prompt.space, block, xxh3_64_intdigest(tokens)))
        numbers = range(first, block + 1)
        extras = [(number, extra) for number in numbers if (extra := prompt.extra(number))]
        return hash((prompt.space, block, _mark(tokens, extras)))

    def _keep(self, key: _Key, event: HistoryEvent) -> None:
        if len(self._events) >= self._most_events:
            self._older_events, self._events = self._events, {}
        self._events[key] = event

    def _keep_run(self, key: _Key, run: _Run) -> None:
        """Remember `run` beside longer runs that begin with the same block."""
        if (known := self._run_at(key)) is not None:
            most = run.stop - run.start
            others = (msgspec.structs.replace(known, longer=()), *known.longer)
            longer = [one for one in others if one.stop - one.start > most][:_MOST_RUNS]
            run = msgspec.structs.replace(run, longer=tuple(longer))
            self._num_bytes += sum(_RUN_BYTES + len(one.packed) for one in longer)
        if run.packed is not self._packed:  # parts of one run mostly go one after the other
            self._packed = run.packed
            self._num_bytes += len(run.packed)
        self._num_bytes += _RUN_BYTES + _EXTRA_BYTES * len(run.extras)
        if self._num_bytes > self._most_bytes:
            self._older_runs, self._runs = self._runs, {}
            self._num_bytes = _RUN_BYTES + len(run.packed)
        self._runs[key] = run


def _mark_before(node: TreeNode, first: int, width: int) -> int:
    """Return a hash of run block `first` and the _BEFORE blocks of the path before it."""
    block, at = node.start + first, node.packed_at + first * width
    back = min(_BEFORE, block)
    if back <= first and not node.extras:  # all that is hashed lies in the run
        return xxh3_64_intdigest(node.packed[at - back * width : at + width])
    pieces, left, part = [node.packed[node.packed_at : at + width]], back - first, node.parent
    has_extras = bool(node.extras)
    while left > 0 and not has_extras:
        assert part is not None, "blocks before one are on its path"
        stop, count = part.packed_at + part.token_bytes, min(left, part.num_blocks)
        pieces.append(part.packed[stop - count * width : stop])
        left, has_extras, part = left - count, bool(part.extras), part.parent
    if not has_extras:
        return xxh3_64_intdigest(b"".join(reversed(pieces)))
    parts = segments(node, block - back, block + 1)
    tokens = b"".join([part.tokens_of(start, stop) for part, start, stop in parts])
    extras = [
        (number, extra)
        for part, start, stop in parts
        if part.extras
        for number in range(part.start + start, part.start + stop)
        if (extra := part.extra(number))
    ]
    return _mark(tokens, extras)


def _mark(tokens: bytes, extras: list[tuple[int, bytes]]) -> int:
    mark = xxh3_64_intdigest(tokens)  # of 2 KiB in a quarter of the time that hash() takes
    return hash((mark, *extras)) if extras else mark
