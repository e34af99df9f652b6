"""What an engine hands over, looked at on the engine's own thread.

On the service's thread a value of the wrong kind is an error nobody expects, and stops the service;
here it is the caller's alone, and its traceback shows where it came from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from numbers import Integral, Real
from typing import Protocol, runtime_checkable

from tierkv.errors import BadRequestError
from tierkv.gpu.protocol import Event


@runtime_checkable
class _Waitable(Protocol):
    def block_until_done(self, timeout_s: float) -> None: ...


def check_text(**values: str) -> None:
    """Strings that can be written as UTF-8, since they become names in storage."""
    for name, value in values.items():
        if not isinstance(value, str):
            raise _wrong(name, "a string", value)
        try:
            value.encode()
        except UnicodeEncodeError:
            raise _wrong(name, "text that UTF-8 can write", value) from None


def check_count(**values: int) -> None:
    """0 or more."""
    check_integer(**values)
    for name, value in values.items():
        if value < 0:
            raise BadRequestError(f"{name} must not be negative: {value}")


def check_integer(**values: int) -> None:
    for name, value in values.items():
        if not isinstance(value, Integral):
            raise _wrong(name, "an integer", value)


def check_choice(kind: type[Enum], **values: Enum) -> None:
    for name, value in values.items():
        if not isinstance(value, kind):
            raise _wrong(name, f"a {kind.__name__}", value)


def check_deadline(deadline_s: float | None) -> None:
    """Seconds, or None for the one that is set."""
    if deadline_s is None:
        return
    if not isinstance(deadline_s, Real):
        raise _wrong("deadline_s", "a number of seconds", deadline_s)
    if not (math.isfinite(deadline_s) and deadline_s >= 0):
        raise BadRequestError(f"deadline_s must be a number not below 0, not {deadline_s}")


def events(after: Sequence[Event]) -> tuple[Event, ...]:
    """A copy that nobody changes."""
    if not isinstance(after, list | tuple):
        raise _wrong("after", "a sequence of events", after)
    for event in after:
        if not isinstance(event, _Waitable):
            raise _wrong("after", "a sequence of events", event)
    return tuple(after)


def token_ids(name: str, values: Sequence[int]) -> tuple[int, ...]:
    """A copy that nobody changes, of plain integers, whatever kind they came as."""
    try:
        copy = tuple(values)
    except TypeError:
        raise _wrong(name, "a sequence of token ids", values) from None
    for value in copy:
        if not (isinstance(value, Integral) and 0 <= value < 2**31):
            raise _wrong(name, "a sequence of token ids", value)
    return tuple(int(value) for value in copy)


def texts(name: str, values: Mapping[str, str] | None) -> dict[str, str]:
    """A copy that nobody changes; empty for None."""
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise _wrong(name, "a mapping of texts to texts", values)
    for key, value in values.items():
        check_text(**{f"a name in {name}": key, f"a value in {name}": value})
    return dict(values)


def _wrong(name: str, expected: str, found: object) -> BadRequestError:
    return BadRequestError(f"{name} must be {expected}, not {found!r:.80}")
