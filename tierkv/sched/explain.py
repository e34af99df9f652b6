"""Why a prompt matched what it matched: which block where, the first miss, and its reason."""

from __future__ import annotations

from enum import Enum

import msgspec

from tierkv.cache.history import Fate, History
from tierkv.cache.index import Index
from tierkv.cache.keys import Prompt
from tierkv.cache.match import segments
from tierkv.cache.node import Tier
from tierkv.cache.states import CopyState


class Miss(Enum):
    """Why the first block that is not cached is not."""

    NONE = "nothing is missing"
    NEVER_STORED = "never stored"
    EVICTED = "evicted"
    IN_FLIGHT = "in flight"
    DAMAGED = "checksum failed"
    LATE = "over deadline"
    NOT_WORTH_IT = "not worth it"
    FAILED = "the transfer failed"
    OTHER_FINGERPRINT = "fingerprint differs"


_OF_FATE = {
    Fate.EVICTED: Miss.EVICTED,
    Fate.DAMAGED: Miss.DAMAGED,
    Fate.LATE: Miss.LATE,
    Fate.NOT_WORTH_IT: Miss.NOT_WORTH_IT,
    Fate.FAILED: Miss.FAILED,
}


class Run(msgspec.Struct, frozen=True):
    """Blocks [start, stop) of the prompt, all in the same place."""

    start: int
    stop: int
    where: str  # "device", "loading", "host"


class Explanation(msgspec.Struct, frozen=True):
    """first_miss: the block, None if all are there. at: when, on the service's clock; tier: from
    where; detail: in words."""

    num_tokens: int
    num_blocks: int
    runs: tuple[Run, ...]
    partial_tokens: int
    first_miss: int | None
    reason: str
    tier: str | None = None
    at: float | None = None
    detail: str = ""


def explain(index: Index, prompt: Prompt, history: History) -> Explanation:
    """What a request for `prompt` would find right now. Changes nothing."""
    match = index.match(prompt)
    runs: list[Run] = []
    for node, i, j in segments(match.node, 0, match.num_blocks):
        device = node.copies[Tier.DEVICE].states[i:j].tolist()
        for at, state in enumerate(device, start=node.start + i):
            where = _PLACES[CopyState(state)]
            if runs and runs[-1].where == where:
                runs[-1] = Run(runs[-1].start, at + 1, where)
            else:
                runs.append(Run(at, at + 1, where))
    miss, tier, when, detail = _first_miss(index, prompt, history, match.num_blocks)
    partial = match.partial.num_tokens if match.partial else 0
    is_all = match.num_blocks * prompt.block_size + partial >= prompt.num_tokens
    return Explanation(
        num_tokens=prompt.num_tokens,
        num_blocks=match.num_blocks,
        runs=tuple(runs),
        partial_tokens=partial,
        first_miss=None if is_all else match.num_blocks,
        reason=(Miss.NONE if is_all else miss).value,
        tier=None if is_all else tier,
        at=None if is_all else when,
        detail="" if is_all else detail,
    )


_PLACES = {CopyState.READY: "device", CopyState.INCOMING: "loading", CopyState.ABSENT: "host"}


def _first_miss(
    index: Index, prompt: Prompt, history: History, block: int
) -> tuple[Miss, str | None, float | None, str]:
    event = history.find(prompt, block)
    if event is not None:
        return _OF_FATE[event.fate], event.tier, event.at, event.detail
    for space in index.spaces():
        if space.name == prompt.space:
            continue
        other = Prompt(prompt.tokens, prompt.block_size, prompt.extras, space.name)
        if index.match(other).num_blocks > block:
            # Not whose: one tenant must not learn what another one asks.
            return Miss.OTHER_FINGERPRINT, None, None, "cached under another fingerprint"
    return Miss.NEVER_STORED, None, None, ""
