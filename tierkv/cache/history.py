"""What became of blocks that are not there any more: a bounded memory, for explanations only."""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum
from typing import NamedTuple

from tierkv.cache.keys import Prompt
from tierkv.cache.match import segments
from tierkv.cache.node import Node, Tier


class Fate(Enum):
    """Why a block that was asked for was not there."""

    EVICTED = "evicted"
    DAMAGED = "checksum failed"
    LATE = "over deadline"
    NOT_WORTH_IT = "computing was estimated to be faster"
    FAILED = "the transfer failed"


class Event(NamedTuple):
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


class History:
    """Keeps the newest `capacity` events. Recording costs one hash of a few blocks a run: an
    evicted run is remembered by its first block, which is the first that a later match misses."""

    def __init__(self, capacity: int = 65_536) -> None:
        self._capacity = capacity
        self._events: OrderedDict[_Key, Event] = OrderedDict()

    def __len__(self) -> int:
        return len(self._events)

    def evicted(self, node: Node, first: int, tier: Tier, at: float) -> None:
        """Run blocks of `node` from `first` on went from `tier`; before they are dropped."""
        block = node.start + first
        parts = segments(node, max(block - _BEFORE, 0), block + 1)
        tokens = b"".join([part.tokens_of(start, stop) for part, start, stop in parts])
        extras = [
            (number, extra)
            for part, start, stop in parts
            if part.extras
            for number in range(part.start + start, part.start + stop)
            if (extra := part.extra(number))
        ]
        key = (node.space.name, block, hash((tokens, *extras)))
        self._keep(key, Event(Fate.EVICTED, _NAMES[tier], at))

    def record(self, prompt: Prompt, block: int, event: Event) -> None:
        self._keep(self._key(prompt, block), event)

    def find(self, prompt: Prompt, block: int) -> Event | None:
        """What happened last to this block; None if nothing is remembered."""
        return self._events.get(self._key(prompt, block))

    def _key(self, prompt: Prompt, block: int) -> _Key:
        first, width = max(block - _BEFORE, 0), prompt.block_token_bytes
        tokens = prompt.tokens[first * width : (block + 1) * width]
        blocks = range(first, block + 1) if prompt.extras else ()
        extras = [(number, extra) for number in blocks if (extra := prompt.extra(number))]
        return prompt.space, block, hash((tokens, *extras))

    def _keep(self, key: _Key, event: Event) -> None:
        self._events[key] = event
        self._events.move_to_end(key)
        if len(self._events) > self._capacity:
            self._events.popitem(last=False)
