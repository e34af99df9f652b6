"""Server-sent events out of a stream of bytes that may be cut anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

_MAX_EVENT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """name: "message" if it had none. last_id: "" if it had none."""

    name: str
    data: bytes
    last_id: str = ""


class EventReader:
    """Feed it bytes; it gives each event once it is complete. Comments are left out."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._name = ""
        self._data: list[bytes] = []
        self._last_id = ""
        self._size = 0

    def feed(self, chunk: bytes) -> Iterator[ServerEvent]:
        """Raises ValueError at an event that is too long to be one."""
        for line in self._lines(chunk):
            if line:
                self._take(line)
            elif self._data:
                yield ServerEvent(self._name or "message", b"\n".join(self._data), self._last_id)
                self._name, self._data, self._size = "", [], 0
            else:
                self._name = ""

    def _lines(self, chunk: bytes) -> Iterator[bytes]:
        """Whole lines; a line ends with LF or CR LF."""
        self._line += chunk
        if len(self._line) + self._size > _MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {_MAX_EVENT_BYTES >> 20} MiB")
        if b"\n" not in chunk:
            return  # a long line is searched once, not again with each piece of it
        *lines, rest = bytes(self._line).replace(b"\r\n", b"\n").split(b"\n")
        self._line = bytearray(rest)
        yield from lines

    def _take(self, line: bytes) -> None:
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
            self._size += len(value)
        elif field == b"event":
            self._name = value.decode("utf-8", "replace")
        elif field == b"id":
            self._last_id = value.decode("utf-8", "replace")
