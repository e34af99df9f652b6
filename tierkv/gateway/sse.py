"""Reads server-sent events out of a stream of bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

_MOST_BYTES = 16 << 20  # of one event; a summary lists every token of its answer


@dataclass(frozen=True, slots=True)
class Event:
    """One event; data is empty if it had none."""

    name: str
    data: bytes


class EventReader:
    """Feed it bytes as they come, cut anywhere; it gives events as they are complete.

    Raises ValueError if an event is longer than anything a node says.
    """

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, chunk: bytes) -> Iterator[Event]:
        self._rest += chunk
        while (end := self._rest.find(b"\n\n")) >= 0:
            block = bytes(self._rest[:end])
            del self._rest[: end + 2]
            yield _event(block)
        if len(self._rest) > _MOST_BYTES:
            raise ValueError("an event without an end")


def _event(block: bytes) -> Event:
    name, data = "message", []
    for line in block.split(b"\n"):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ").rstrip(b"\r")
        if field == b"event":
            name = value.decode("ascii", "replace")
        elif field == b"data":
            data.append(value)
    return Event(name, b"\n".join(data))
