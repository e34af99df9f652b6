"""Explains which blocks of a prompt are cached, and why the first missing block is not."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from itertools import groupby

import msgspec

from tierkv.cache.history import History
from tierkv.cache.index import Index, Match
from tierkv.cache.keys import Fingerprint, Prompt, differences
from tierkv.cache.node import CopyState, Tier


class Miss(Enum):
    """The reason why the first missing block is not cached."""

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


class Run(msgspec.Struct, frozen=True):
    """Consecutive blocks of a prompt, [start, stop), that are all on the same tier.

    A stored tail (partial last block) counts as a block.

    Attributes:
        start: position of the first block in the prompt.
        stop: position after the last block.
        where: "device", "host", "storage", or "loading" for blocks that are being copied from the
            host to the device.
    """

    start: int
    stop: int
    where: str  # "device", "loading", "host", "storage"


class Explanation(msgspec.Struct, frozen=True):
    """The cached part of a prompt, and the reason why its first missing block is not cached.

    Attributes:
        num_tokens: number of tokens of the prompt.
        num_blocks: number of the prompt's first full blocks that are on device or host.
        runs: the blocks that were found, by tier; blocks in storage come last.
        partial_tokens: number of further prompt tokens that are cached in a block of which only the
            first tokens match.
        first_miss: index of the first missing block; None if no block is missing.
        reason: the reason, such as "evicted" or "never stored".
        tier: the tier from which the missing block was lost; "storage" if the block is only in
            storage; None otherwise.
        at: time of the loss on the service's clock, in seconds; None if unknown.
        detail: more about the reason, in words.
        ago_s: seconds between the loss and this explanation; None if unknown.
    """

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


def explain(  # noqa: PLR0913 - what else is known at this moment
    index: Index,
    prompt: Prompt,
    match: Match,
    history: History,
    *,
    fetching: bool = False,
    computing: bool = False,
    fingerprints: Mapping[str, Fingerprint] | None = None,
    stored: range | None = None,
    now: float = 0.0,
) -> Explanation:
    """Explain which blocks of a prompt are cached, and why the first missing block is not.

    The call changes nothing.

    Args:
        index: the index of all blocks.
        prompt: the prompt to explain.
        match: the cached blocks of the prompt at this moment.
        history: the latest evictions and failures of blocks.
        fetching: True if the block after the match is being fetched from storage.
        computing: True if a request computes that block.
        fingerprints: the fingerprints that the recipient of the explanation is allowed to know, by
            name of their space; None for no fingerprints. If the prompt is cached under another
            fingerprint and this mapping has both, the explanation names the fields that differ.
        stored: indexes of the blocks after the match that storage has; None if storage was not
            asked or did not answer in time.
        now: time on the clock of the history, in seconds.
    """
    at_block, is_all = match.num_blocks, _covers(match, prompt)
    runs: list[Run] = []
    for state, group in groupby(index.states(Tier.DEVICE, match.node, 0, at_block)):
        at = runs[-1].stop if runs else 0
        runs.append(Run(at, at + len(list(group)), _PLACES[state]))
    is_stored = stored is not None and at_block in stored
    if stored is not None and is_stored and not is_all:
        runs.append(Run(at_block, stored.stop, "storage"))
    event = None if is_all or fetching else history.find(prompt, at_block)
    tier, detail = None, ""
    if is_all:
        miss = Miss.NONE
    elif fetching:
        miss, tier, detail = Miss.IN_FLIGHT, "storage", "being fetched"
    elif event is not None:
        miss, tier, detail = Miss[event.fate.name], event.tier, event.detail
    elif computing:
        miss, detail = Miss.IN_FLIGHT, "another request computes the block now"
    elif is_stored:
        miss, tier = Miss.STORED, "storage"
        detail = "a request fetches the block if that is estimated to be faster than computing"
    elif (other := _elsewhere(index, prompt, at_block)) is not None:
        miss, detail = Miss.OTHER_FINGERPRINT, _differs(prompt.space, other, fingerprints)
    else:
        miss = Miss.NEVER_STORED
    return Explanation(
        num_tokens=prompt.num_tokens,
        num_blocks=at_block,
        runs=tuple(runs),
        partial_tokens=match.partial.num_tokens if match.partial else 0,
        first_miss=None if is_all else at_block,
        reason=miss.value,
        tier=tier,
        at=event.at if event is not None else None,
        ago_s=max(now - event.at, 0.0) if event is not None else None,
        detail=detail,
    )


_PLACES = {CopyState.READY: "device", CopyState.INCOMING: "loading", CopyState.ABSENT: "host"}


def _elsewhere(index: Index, prompt: Prompt, block: int) -> str | None:
    """Return a space of another fingerprint that has block `block` of the prompt, or None.

    A space that has all tokens of the prompt counts too, since block `block` can be the
    partial last block.
    """
    for space in index.spaces.all():
        other = Prompt(prompt.tokens, prompt.block_size, prompt.extras, space.name)
        if space.name != prompt.space:
            found = index.match(other)
            if found.num_blocks > block or _covers(found, other):
                return space.name
    return None


def _covers(match: Match, prompt: Prompt) -> bool:
    partial = match.partial.num_tokens if match.partial else 0
    return match.num_blocks * prompt.block_size + partial >= prompt.num_tokens


def _differs(ours: str, theirs: str, known: Mapping[str, Fingerprint] | None) -> str:
    # A space that is not in `known` is not described: one tenant must not learn about another.
    if known is None or ours not in known or theirs not in known:
        return "cached under another fingerprint"
    return "; ".join(differences(known[ours].readable(), known[theirs].readable()))
