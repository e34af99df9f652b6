"""The state of one tier's copy of a block, and the one table of its transitions."""

from __future__ import annotations

from enum import IntEnum

from tierkv.errors import OwnershipError


class CopyState(IntEnum):
    """Independent per tier: a block's device copy knows nothing of its host copy.

    ABSENT    no slot is assigned.
    INCOMING  a slot is assigned and bytes are on their way; invisible to every match.
    READY     all bytes are there.
    """

    ABSENT = 0
    INCOMING = 1
    READY = 2


class Change(IntEnum):
    RESERVE = 0  # a movement towards this tier is submitted
    ARRIVE = 1  # its completion event is done, or its acknowledged read verified
    FAIL = 2  # the movement failed; the slot goes back
    PLACE = 3  # whole bytes were in a slot before the index learnt of it: computed, or fetched
    EVICT = 4  # the copy is forgotten


_TABLE = {
    (CopyState.ABSENT, Change.RESERVE): CopyState.INCOMING,
    (CopyState.ABSENT, Change.PLACE): CopyState.READY,
    (CopyState.INCOMING, Change.ARRIVE): CopyState.READY,
    (CopyState.INCOMING, Change.FAIL): CopyState.ABSENT,
    (CopyState.READY, Change.EVICT): CopyState.ABSENT,
}


def is_allowed(current: CopyState, change: Change) -> bool:
    return (current, change) in _TABLE


def advance(current: CopyState, change: Change) -> CopyState:
    """The state after `change`. Raises OwnershipError for a transition that cannot happen."""
    try:
        return _TABLE[current, change]
    except KeyError:
        message = f"a copy that is {current.name} cannot {change.name}"
        raise OwnershipError(message) from None
