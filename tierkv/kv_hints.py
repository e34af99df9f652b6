"""Hints of routers about the KV cache of a request: their form, and those that tierkv follows.

The form is that of vLLM 0.33 and SGLang 0.5.23: an envelope with a list of actions, each with a
type and a version. Actions of unknown types and versions are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Protocol

import msgspec

_PROTOCOL = "0.1"
_FETCH = ("kv.fetch", "1.0")

_Word = Annotated[str, msgspec.Meta(max_length=256)]


class KvHintAction(msgspec.Struct, frozen=True, kw_only=True):
    """One action that a request router asks the node to do.

    The only supported action is `kv.fetch` 1.0: fetch the blocks of the request's own prompt. The
    blocks that the router names in the action are ignored.

    Attributes:
        action_type: kind of the action, such as "kv.fetch".
        action_version: version of the action, such as "1.0".
        action_id: the router's id of the action; "" for none.
    """

    action_type: _Word
    action_version: _Word
    action_id: _Word = ""


class KvHints(msgspec.Struct, frozen=True, kw_only=True):
    """All hints of a request router about one request.

    Attributes:
        protocol_version: version of the hints' format.
        message_id: the router's id of these hints; "" without one.
        actions: the actions that the router asks for.
    """

    protocol_version: _Word
    message_id: _Word = ""
    actions: Annotated[list[KvHintAction], msgspec.Meta(max_length=256)] = []


class Action(Protocol):
    """The fields of one action in a router's hints (`kv_hints`) that tierkv reads.

    `KvHintAction` and the action types of vLLM and SGLang have these fields.
    """

    @property
    def action_type(self) -> str: ...

    @property
    def action_version(self) -> str: ...


class Envelope(Protocol):
    """The fields of a router's hints (`kv_hints`) that tierkv reads.

    `KvHints` and the hint types of vLLM and SGLang have these fields.
    """

    @property
    def protocol_version(self) -> str: ...

    @property
    def actions(self) -> Sequence[Action]: ...


def count_fetches(hints: Envelope) -> int:
    """Return the number of actions in `hints` that ask to fetch the request's prompt."""
    if hints.protocol_version != _PROTOCOL:
        return 0
    return sum((one.action_type, one.action_version) == _FETCH for one in hints.actions)


class HintCounts:
    """Counts of the actions in the hints that a node has received.

    Attributes:
        num_followed: number of actions that asked to fetch a prompt.
        num_ignored: number of actions of unknown types, versions or protocols.
    """

    def __init__(self) -> None:
        self.num_followed = 0
        self.num_ignored = 0

    def note(self, hints: Envelope) -> bool:
        """Count the actions of `hints`; return True if one of them asks to fetch the prompt."""
        num_fetches = count_fetches(hints)
        self.num_followed += num_fetches
        self.num_ignored += len(hints.actions) - num_fetches
        return num_fetches > 0
