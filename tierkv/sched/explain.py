"""Why a prompt matched what it matched: which block where, the first miss, and its reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

import msgspec

from tierkv.cache.history import Fate, History
from tierkv.cache.index import Index, Match, segments
from tierkv.cache.keys import Fingerprint, Prompt, differences
from tierkv.cache.node import CopyState, Tier


class Miss(Enum):
    """Why the first block that is not cached is not."""

    NONE = "nothing is missing"
    STORED = "only in storage"
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
    """Blocks [start, stop) of the prompt, all in the same place; a stored tail counts as one."""

    start: int
    stop: int
    where: str  # "device", "loading", "host", "storage"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What an explanation may look at beside the index and its history.

    fetching: whether a block of this key is on its way from storage. computing: whether a request
    computes what follows a match. fingerprints: by space, for one who may know in which field
    another one differs; None for everybody else, who is told only that it does. stored: blocks of
    the prompt that storage has, from where the match ended when it was asked; None if it was not,
    or did not answer in time. now: on the clock of the history.
    """

    fetching: Callable[[Prompt, int], bool]
    computing: Callable[[Match, Prompt], bool]
    fingerprints: Mapping[str, Fingerprint] | None = None
    stored: range | None = None
    now: float = 0.0


class Explanation(msgspec.Struct, frozen=True):
    """first_miss: the block, None if all are there. at: when, on the service's clock, which was
    `ago_s` seconds before the explanation; tier: from where; detail: in words."""

    num_tokens: int
    num_blocks: int
    runs: tuple[Run, ...]
    partial_tokens: int
    first_miss: int | None
    reason: str
    tier: str | None = None
    at: float | None = None
    detail: str = ""
    ago_s: float | None = None


def explain(index: Index, prompt: Prompt, history: History, around: Surroundings) -> Explanation:
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
    partial = match.partial.num_tokens if match.partial else 0
    is_all = _covers(match, prompt)
    at_block = match.num_blocks
    if around.stored and at_block in around.stored and not is_all:
        runs.append(Run(at_block, around.stored.stop, "storage"))
    miss, tier, when, detail = _first_miss(index, prompt, history, match, around)
    return Explanation(
        num_tokens=prompt.num_tokens,
        num_blocks=match.num_blocks,
        runs=tuple(runs),
        partial_tokens=partial,
        first_miss=None if is_all else at_block,
        reason=(Miss.NONE if is_all else miss).value,
        tier=None if is_all else tier,
        at=None if is_all else when,
        ago_s=None if is_all or when is None else max(around.now - when, 0.0),
        detail="" if is_all else detail,
    )


_PLACES = {CopyState.READY: "device", CopyState.INCOMING: "loading", CopyState.ABSENT: "host"}


_Reason = tuple[Miss, str | None, float | None, str]


def _first_miss(
    index: Index, prompt: Prompt, history: History, match: Match, around: Surroundings
) -> _Reason:
    block = match.num_blocks
    if around.fetching(prompt, block):
        return Miss.IN_FLIGHT, "storage", None, "being fetched"
    event = history.find(prompt, block)
    if event is not None:
        return _OF_FATE[event.fate], event.tier, event.at, event.detail
    if around.computing(match, prompt):
        return Miss.IN_FLIGHT, None, None, "being computed by a request"
    if around.stored and block in around.stored:
        return Miss.STORED, "storage", None, "a request would fetch it, if that is worth its time"
    for space in index.spaces.all():
        if space.name == prompt.space:
            continue
        other = Prompt(prompt.tokens, prompt.block_size, prompt.extras, space.name)
        found = index.match(other)
        if found.num_blocks > block or _covers(found, other):
            return Miss.OTHER_FINGERPRINT, None, None, _differs(prompt.space, space.name, around)
    return Miss.NEVER_STORED, None, None, ""


def _covers(match: Match, prompt: Prompt) -> bool:
    """Whether all of the prompt is cached, its tail included."""
    partial = match.partial.num_tokens if match.partial else 0
    return match.num_blocks * prompt.block_size + partial >= prompt.num_tokens


def _differs(ours: str, theirs: str, around: Surroundings) -> str:
    """How two spaces differ; not whose the other is, unless the caller may know: one tenant must
    not learn what another one asks."""
    known = around.fingerprints
    if known is None or ours not in known or theirs not in known:
        return "cached under another fingerprint"
    return "; ".join(differences(known[ours].readable(), known[theirs].readable()))
