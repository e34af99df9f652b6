"""The form of routers' hints about the KV cache of a request, and the actions that are followed.

vLLM 0.33 and SGLang 0.5.23 define the form: an envelope of versioned actions. Receivers ignore
actions and versions that they do not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Protocol

import msgspec

_PROTOCOL = "0.1"
_FETCH = ("kv.fetch", "1.0")

_Word = Annotated[str, msgspec.Meta(max_length=256)]


class KvHintAction(msgspec.Struct, frozen=True, kw_only=True):
    """One action of an envelope.

    `kv.fetch` 1.0 asks for the blocks of the request's own prompt. Its payload, the same blocks by
    the router's hashes, is not read.
    """

    action_type: _Word
    action_version: _Word
    action_id: _Word = ""


class KvHints(msgspec.Struct, frozen=True, kw_only=True):
    """The envelope of a router's hints about one request."""

    protocol_version: _Word
    message_id: _Word = ""
    actions: Annotated[list[KvHintAction], msgspec.Meta(max_length=256)] = []


class Action(Protocol):
    """An action in the type of any engine."""

    @property
    def action_type(self) -> str: ...

    @property
    def action_version(self) -> str: ...


class Envelope(Protocol):
    """An envelope in the type of any engine."""

    @property
    def protocol_version(self) -> str: ...

    @property
    def actions(self) -> Sequence[Action]: ...


def count_fetches(hints: Envelope) -> int:
    """Return the number of actions to fetch the prompt; all other actions are unknown."""
    if hints.protocol_version != _PROTOCOL:
        return 0
    return sum((one.action_type, one.action_version) == _FETCH for one in hints.actions)


class HintCounts:
    """Counts of the actions in the hints that a node has received.

    Attributes:
        num_followed: Number of actions to fetch a prompt.
        num_ignored: Number of actions of unknown types, versions or protocols.
    """

    def __init__(self) -> None:
        self.num_followed = 0
        self.num_ignored = 0

    def note(self, hints: Envelope) -> bool:
        """Count the actions, and return whether one of them is to fetch the prompt."""
        num_fetches = count_fetches(hints)
        self.num_followed += num_fetches
        self.num_ignored += len(hints.actions) - num_fetches
        return num_fetches > 0
