"""What became of blocks that are not there any more: a bounded memory, for explanations only."""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum
from typing import NamedTuple

from tierkv.cache.keys import Prompt
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
_Key = tuple[str, int, int]  # fingerprint, block, hash of its tokens: enough below a match


class History:
    """Keeps the newest `capacity` events. Recording costs one hash of one block a run: an evicted
    run is remembered by its first block, which is the first that a later match misses."""

    def __init__(self, capacity: int = 65_536) -> None:
        self._capacity = capacity
        self._events: OrderedDict[_Key, Event] = OrderedDict()

    def __len__(self) -> int:
        return len(self._events)

    def evicted(self, node: Node, first: int, tier: Tier, at: float) -> None:
        """Run blocks of `node` from `first` on went from `tier`; before they are dropped."""
        tokens, block = node.tokens_of(first, first + 1), node.start + first
        key = (node.space.name, block, hash((node.extra(block), tokens)))
        self._keep(key, Event(Fate.EVICTED, _NAMES[tier], at))

    def record(self, prompt: Prompt, block: int, event: Event) -> None:
        self._keep(self._key(prompt, block), event)

    def find(self, prompt: Prompt, block: int) -> Event | None:
        """What happened last to this block; None if nothing is remembered."""
        return self._events.get(self._key(prompt, block))

    def _key(self, prompt: Prompt, block: int) -> _Key:
        return prompt.space, block, hash((prompt.extra(block), prompt.block(block)))

    def _keep(self, key: _Key, event: Event) -> None:
        self._events[key] = event
        self._events.move_to_end(key)
        if len(self._events) > self._capacity:
            self._events.popitem(last=False)
