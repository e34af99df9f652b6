"""What became of blocks that are not there any more: a bounded memory, for explanations only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from enum import Enum

import msgspec
from xxhash import xxh3_64_intdigest

from tierkv.cache.index import segments
from tierkv.cache.keys import TOKEN_BYTES, Prompt
from tierkv.cache.node import Tier, TreeNode


class Fate(Enum):
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

    fate: Fate
    tier: str
    at: float
    detail: str = ""


_NAMES = tuple(tier.name.lower() for tier in Tier)
# Hash of the fingerprint, the block, and a hash of its tokens and media, and of those of some
# blocks before it: what another prompt lost is not taken for this one's, nor is all of it hashed.
_Key = int
_BEFORE = 32  # blocks
_MOST_BACK = 8192  # blocks before one that are looked at
_MOST_RUNS = 3  # that begin with the same block
_RUN_BYTES, _EXTRA_BYTES = 400, 120  # of a run, and of one of its extras, beside tokens: measured
_NO_EXTRAS: Mapping[int, bytes] = {}


class _Run(msgspec.Struct, frozen=True):
    """tokens, extras: of the blocks that an event is about, from its first one on."""

    event: HistoryEvent
    tokens: bytes
    extras: Mapping[int, bytes]


class History:
    """Keeps the newest events, `capacity` of them (some 240 bytes each), and the tokens of the
    newest runs in `capacity_bytes`: at most 12 MB as it is.

    Recording costs one hash of a few blocks a run: an evicted run is remembered by its first block,
    mostly the first that a later match misses, and by its tokens, for when it is not."""

    def __init__(self, capacity: int = 32_768, capacity_bytes: int = 4 << 20) -> None:
        self._capacity = capacity
        self._capacity_bytes = capacity_bytes
        self._num_bytes = 0
        self._events: OrderedDict[_Key, HistoryEvent] = OrderedDict()  # the newest of each block
        self._runs: OrderedDict[_Key, tuple[_Run, ...]] = OrderedDict()  # newest first

    def __len__(self) -> int:
        """Blocks about which something is remembered."""
        return len(self._events)

    def evicted(self, node: TreeNode, first: int, stop: int, tier: Tier, at_s: float) -> None:
        """Run blocks [first, stop) of `node` went from `tier`; before they are dropped."""
        block, width = node.start + first, node.token_bytes // node.num_blocks
        back = min(block, _BEFORE)
        if back <= first and not node.extras:  # all that is hashed lies in the run, as mostly
            at = node.packed_at + first * width
            mark = xxh3_64_intdigest(node.packed[at - back * width : at + width])
        else:
            parts = segments(node, block - back, block + 1)
            tokens = b"".join([part.tokens_of(start, stop) for part, start, stop in parts])
            extras = [
                (number, extra)
                for part, start, stop in parts
                if part.extras
                for number in range(part.start + start, part.start + stop)
                if (extra := part.extra(number))
            ]
            mark = _mark(tokens, extras)
        event = HistoryEvent(Fate.EVICTED, _NAMES[tier], at_s)
        key = hash((node.space.name, block, mark))
        self._keep(key, event)
        if stop - first > 1:
            extras_of_run = dict(node.extras) if node.extras else _NO_EXTRAS
            self._keep_run(key, _Run(event, node.tokens_of(first, stop), extras_of_run))

    def record(self, prompt: Prompt, block: int, event: HistoryEvent) -> None:
        self._keep(self._key(prompt, block), event)

    def find(self, prompt: Prompt, block: int) -> HistoryEvent | None:
        """What happened last to this block; None if nothing is remembered. Looks at all runs that
        begin before it: where the first blocks of one that went are cached again, a match misses
        in the middle of it."""
        width = prompt.block_token_bytes
        newest = self.newest(prompt, block)
        for first in range(block, max(block - _MOST_BACK, -1), -1) if self._runs else ():
            for run in self._runs.get(self._key(prompt, first), ()):
                span = prompt.tokens[first * width : (block + 1) * width]
                covers = (
                    len(span) == (block + 1 - first) * width
                    and run.tokens.startswith(span)
                    and all(
                        run.extras.get(number, b"") == prompt.extra(number)
                        for number in range(first, block + 1)
                    )
                )
                if covers and (newest is None or run.event.at > newest.at):
                    newest = run.event
        return newest

    def newest(self, prompt: Prompt, block: int) -> HistoryEvent | None:
        """As `find`, of this block or a run that begins with it only: one hash."""
        events = self._events
        return events.get(self._key(prompt, block)) if events else None

    def _key(self, prompt: Prompt, block: int) -> _Key:
        first, width = block - _BEFORE if block > _BEFORE else 0, prompt.block_size * TOKEN_BYTES
        tokens = prompt.tokens[first * width : (block + 1) * width]
        if not prompt.extras:
            return hash((prompt.space, block, xxh3_64_intdigest(tokens)))
        numbers = range(first, block + 1)
        extras = [(number, extra) for number in numbers if (extra := prompt.extra(number))]
        return hash((prompt.space, block, _mark(tokens, extras)))

    def _keep(self, key: _Key, event: HistoryEvent) -> None:
        events = self._events
        events.pop(key, None)
        events[key] = event
        if len(events) > self._capacity:
            events.popitem(last=False)

    def _keep_run(self, key: _Key, run: _Run) -> None:
        """With the longer ones that begin with the same block, which tell of later blocks."""
        runs = self._runs
        now: tuple[_Run, ...] = (run,)
        if known := runs.pop(key, None):
            length = len(run.tokens)
            now = (run, *[one for one in known if len(one.tokens) > length][:_MOST_RUNS])
            self._num_bytes -= _bytes_of(known)
        runs[key] = now
        self._num_bytes += _bytes_of(now)
        while self._num_bytes > self._capacity_bytes:
            _, gone = runs.popitem(last=False)
            self._num_bytes -= _bytes_of(gone)


def _mark(tokens: bytes, extras: list[tuple[int, bytes]]) -> int:
    mark = xxh3_64_intdigest(tokens)  # of 2 KiB in a quarter of the time that hash() takes
    return hash((mark, *extras)) if extras else mark


def _bytes_of(runs: tuple[_Run, ...]) -> int:
    return sum([_RUN_BYTES + len(one.tokens) + _EXTRA_BYTES * len(one.extras) for one in runs])
