"""What became of blocks that are not there any more: a bounded memory, for explanations only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from enum import Enum

import msgspec

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


class HistoryEvent(msgspec.Struct, frozen=True):
    """at: seconds on the caller's clock. tier: its name, "storage" included."""

    fate: Fate
    tier: str
    at: float
    detail: str = ""


_NAMES = tuple(tier.name.lower() for tier in Tier)
# Fingerprint, block, and a hash of its tokens and media, and of those of some blocks before it:
# what another prompt lost is not taken for this one's, nor is a whole prompt hashed for each run.
_Key = tuple[str, int, int]
_BEFORE = 32  # blocks
_MOST_BACK = 8192  # blocks before one that are looked at
_MOST_RUNS = 3
_NO_EXTRAS: Mapping[int, bytes] = {}


class _Kept(msgspec.Struct, frozen=True):
    """tokens, extras: of the blocks that an event is about, from its own on; of one block none."""

    event: HistoryEvent
    tokens: bytes = b""
    extras: Mapping[int, bytes] = _NO_EXTRAS


class History:
    """Keeps the newest events, of `capacity` blocks and with `capacity_bytes` of tokens at most.
    Recording costs one hash of a few blocks a run: an evicted run is remembered by its first block,
    mostly the first that a later match misses, and by its tokens, for when it is not."""

    def __init__(self, capacity: int = 65_536, capacity_bytes: int = 32 << 20) -> None:
        self._capacity = capacity
        self._capacity_bytes = capacity_bytes
        self._num_bytes = 0
        self._events: OrderedDict[_Key, list[_Kept]] = OrderedDict()  # the newest of a block first

    def __len__(self) -> int:
        """Blocks about which something is remembered."""
        return len(self._events)

    def evicted(self, node: TreeNode, first: int, stop: int, tier: Tier, at_s: float) -> None:
        """Run blocks [first, stop) of `node` went from `tier`; before they are dropped."""
        block, width = node.start + first, node.token_bytes // node.num_blocks
        back = min(block, _BEFORE)
        if back <= first and not node.extras:  # all that is hashed lies in the run, as mostly
            at = node.packed_at + first * width
            mark = hash(node.packed[at - back * width : at + width])
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
            mark = hash((tokens, *extras) if extras else tokens)
        event = HistoryEvent(Fate.EVICTED, _NAMES[tier], at_s)
        run = node.tokens_of(first, stop) if stop - first > 1 else b""
        extras_of_run = dict(node.extras) if run and node.extras else _NO_EXTRAS
        self._keep((node.space.name, block, mark), _Kept(event, run, extras_of_run))

    def record(self, prompt: Prompt, block: int, event: HistoryEvent) -> None:
        self._keep(self._key(prompt, block), _Kept(event))

    def find(self, prompt: Prompt, block: int) -> HistoryEvent | None:
        """What happened last to this block; None if nothing is remembered. Looks at all runs that
        begin before it: where the first blocks of one that went are cached again, a match misses
        in the middle of it."""
        width = prompt.block_token_bytes
        newest: HistoryEvent | None = None
        for first in range(block, max(block - _MOST_BACK, -1), -1):
            for kept in self._events.get(self._key(prompt, first), ()):
                span = prompt.tokens[first * width : (block + 1) * width]
                covers = first == block or (
                    len(span) == (block + 1 - first) * width
                    and kept.tokens.startswith(span)
                    and all(
                        kept.extras.get(number, b"") == prompt.extra(number)
                        for number in range(first, block + 1)
                    )
                )
                if covers and (newest is None or kept.event.at > newest.at):
                    newest = kept.event
        return newest

    def newest(self, prompt: Prompt, block: int) -> HistoryEvent | None:
        """As `find`, of this block or a run that begins with it only: one hash."""
        kept = self._events.get(self._key(prompt, block)) if self._events else None
        return kept[0].event if kept else None

    def _key(self, prompt: Prompt, block: int) -> _Key:
        first, width = block - _BEFORE if block > _BEFORE else 0, prompt.block_size * TOKEN_BYTES
        tokens = prompt.tokens[first * width : (block + 1) * width]
        if not prompt.extras:
            return prompt.space, block, hash(tokens)
        numbers = range(first, block + 1)
        extras = [(number, extra) for number in numbers if (extra := prompt.extra(number))]
        return prompt.space, block, hash((tokens, *extras) if extras else tokens)

    def _keep(self, key: _Key, kept: _Kept) -> None:
        """Of a block the newest event, and those about longer runs, which tell of later blocks."""
        events, num_bytes = self._events, len(kept.tokens)
        known = events.pop(key, None)
        if known is None:
            events[key] = [kept]
        else:
            longer = [one for one in known if len(one.tokens) > num_bytes][:_MOST_RUNS]
            events[key] = [kept, *longer]
            num_bytes += _bytes_of(longer) - _bytes_of(known)
        self._num_bytes += num_bytes
        while len(events) > self._capacity or self._num_bytes > self._capacity_bytes:
            _, gone = events.popitem(last=False)
            self._num_bytes -= _bytes_of(gone)


def _bytes_of(kept: list[_Kept]) -> int:
    return sum(len(one.tokens) for one in kept)
