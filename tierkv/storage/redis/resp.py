r"""The Redis protocol (RESP2) without I/O.

Values are not copied: they are sent from the caller's buffers, and the socket receives them
directly into the caller's buffers. All other bytes of replies are received into a scratch buffer:

    $2097240 \r\n | header | host slot ............ | \r\n +OK\r\n $...
    '- scratch -'  '------ the caller's buffers ----'  '--- scratch ---'

The length of a value is known only after the line before the value was received. The first bytes of
the value that are received together with this line are in the scratch buffer, too, and are copied.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from tierkv.storage.base import flat, room_for
from tierkv.storage.protocol import Buffer, Digest

# The scratch buffer contains the end of a value, the next reply's first line, and small replies.
_SCRATCH_BYTES = 8 << 10
_JUNK_BYTES = 256 << 10
_MAX_NUMBER_CHARS = 20
# Redis's own limit (proto-max-bulk-len); a larger number does not come from Redis.
_MAX_VALUE_BYTES = 512 << 20

_BITS = re.compile(rb"(?::[01]\r\n)+")
_BIT_BYTES = 4
_COLON, _ZERO = b":0"

Argument = bytes | str | int


class NotRedisError(Exception):
    """The received bytes are not RESP2, so the connection must be closed."""


@dataclass(frozen=True, slots=True)
class Refused:
    """An error reply, such as "OOM command not allowed ..."."""

    message: str

    @property
    def code(self) -> str:
        return self.message.partition(" ")[0]

    @property
    def turns_away(self) -> bool:
        """True if the server refuses the connection itself, not only a command.

        The server has too many clients (maxclients), or is in protected mode and refuses other
        hosts.
        """
        return self.message.startswith(("ERR max number of clients", "DENIED "))


@dataclass(frozen=True, slots=True)
class ValueLanded:
    """The reply to a read of a value that was received into the caller's buffers.

    Attributes:
        num_bytes: size of the value, which is at the start of the buffers.
        digest: the caller's digest object, which was given all bytes of the value; None if the
            caller passed none.
    """

    num_bytes: int
    digest: Digest | None = None


@dataclass(frozen=True, slots=True)
class TooLong:
    """The reply to a read of a value that is longer than the caller's buffers and is discarded.

    The parser returns this reply before it has received the value.

    Attributes:
        num_bytes: size of the value.
    """

    num_bytes: int


Reply = bytes | int | Refused | ValueLanded | TooLong | None


class _State(Enum):
    LINE = auto()
    BODY = auto()
    TRAILER = auto()


def pack(*arguments: Argument) -> bytes:
    """Return one command, encoded in the Redis protocol."""
    packed = [b"*%d\r\n" % len(arguments)]
    for argument in arguments:
        content = argument if isinstance(argument, bytes) else str(argument).encode()
        packed.append(b"$%d\r\n%b\r\n" % (len(content), content))
    return b"".join(packed)


def pack_all(verb: str, names: Sequence[str]) -> bytes:
    """Return one encoded command that has all names as arguments.

    Args:
        verb: for example EXISTS.
        names: the names, ASCII.
    """
    head = f"*{1 + len(names)}\r\n${len(verb)}\r\n{verb}\r\n"
    return (head + "".join([f"${len(name)}\r\n{name}\r\n" for name in names])).encode("ascii")


def pack_each(verb: str, names: Sequence[str], *more: int) -> bytes:
    """Return the encoded command `verb name more` for each name, one after the other.

    The call is faster than one call of `pack` for each name.

    Args:
        verb: for example EXISTS or PEXPIRE.
        names: the names, ASCII.
        more: numbers that follow each name as further arguments, such as a time to live.
    """
    head = f"*{2 + len(more)}\r\n${len(verb)}\r\n{verb}\r\n$"
    tail = "\r\n" + "".join([f"${len(str(number))}\r\n{number}\r\n" for number in more])
    return "".join([f"{head}{len(name)}\r\n{name}{tail}" for name in names]).encode("ascii")


def pack_set(name: str, parts: Sequence[Buffer], options: Sequence[Argument]) -> list[memoryview]:
    """Return an encoded SET as pieces to send in order; the value is not copied.

    Args:
        name: the key.
        parts: the bytes of the value, in order.
        options: further arguments of SET, such as "NX".
    """
    views = flat(parts)
    num_bytes = sum(map(len, views))
    key = name.encode()
    head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (
        3 + len(options),
        len(key),
        key,
        num_bytes,
    )
    tail = b"\r\n" + pack(*options).partition(b"\r\n")[2] if options else b"\r\n"
    return [memoryview(head), *views, memoryview(tail)]


class Replies:
    """A parser of the replies on one connection.

    Call `expect` for each reply, in the order of the commands. Receive bytes into the buffers that
    `targets` returns, and then call `received`.
    """

    def __init__(self) -> None:
        self._wanted: deque[tuple[tuple[memoryview, ...] | int, Digest | None]] = deque()
        self._scratch = bytearray(_SCRATCH_BYTES)
        self._start = self._end = 0  # received and not yet parsed bytes of the scratch
        self._state = _State.LINE
        self._body: deque[memoryview] = deque()  # buffers for the rest of a value
        self._drop_bytes = 0  # bytes of a too long value that are still to come
        self._reply: Reply = None
        self._own: bytearray | None = None
        self._digest: Digest | None = None  # of the value that is still to come

    def expect(
        self, into: tuple[memoryview, ...] | int = _MAX_VALUE_BYTES, digest: Digest | None = None
    ) -> None:
        """Register the next reply, after the replies that were registered before.

        Args:
            into: buffers for the value in the reply; or, to get the value as bytes, its largest
                accepted size in bytes.
            digest: receives the bytes that are written into `into`, in order; None for none.
        """
        self._wanted.append((into, digest))

    def targets(self, max_bytes: int) -> list[memoryview]:
        """Return buffers for the next received bytes, in order, together about `max_bytes` long."""
        if self._state is _State.BODY and self._drop_bytes:
            return [memoryview(bytearray(min(self._drop_bytes, _JUNK_BYTES, max_bytes)))]
        views: list[memoryview] = []
        for view in self._body:
            views.append(view[:max_bytes])
            max_bytes -= len(view)
            if max_bytes <= 0:
                return views
        views.append(memoryview(self._scratch)[self._end :])
        return views

    def received(self, num_bytes: int) -> list[Reply]:
        """Parse bytes that were received into `targets`; return the replies that are now complete.

        Args:
            num_bytes: number of bytes that were received.

        Raises:
            NotRedisError: the bytes are not RESP2; the connection must be closed.
        """
        if self._state is _State.BODY:
            num_bytes = self._fill(num_bytes)
        self._end += num_bytes
        replies: list[Reply] = []
        self._parse_bits(replies)
        while self._step(replies):
            pass
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == _SCRATCH_BYTES:
            if self._start == 0:
                raise NotRedisError("a line has no end")
            rest = self._end - self._start
            self._scratch[:rest] = self._scratch[self._start : self._end]
            self._start, self._end = 0, rest
        return replies

    def _fill(self, num_bytes: int) -> int:
        """Record the receipt of value bytes, and return how many bytes follow the value's end."""
        if self._drop_bytes:
            self._drop_bytes -= num_bytes
            num_bytes = 0
        while num_bytes and self._body:
            view = self._body[0]
            if self._digest is not None:
                self._digest.update(view[:num_bytes])
            if num_bytes < len(view):
                self._body[0] = view[num_bytes:]
                return 0
            num_bytes -= len(view)
            self._body.popleft()
        if not self._body and not self._drop_bytes:
            self._state = _State.TRAILER
        return num_bytes

    def _parse_bits(self, replies: list[Reply]) -> None:
        """Parse consecutive replies 0 and 1 at once, as answers to many EXISTS."""
        if self._state is not _State.LINE or self._scratch[self._start] != _COLON:
            return
        run = _BITS.match(self._scratch, self._start, self._end)
        if run is None:
            return
        count = min((run.end() - self._start) // _BIT_BYTES, len(self._wanted))
        stop = self._start + count * _BIT_BYTES
        # mypyc (2.4) fails on a comprehension over a bytearray, so this makes bytes.
        digits = bytes(self._scratch[self._start + 1 : stop : _BIT_BYTES])
        replies += [digit - _ZERO for digit in digits]
        self._start = stop
        for _ in range(count):
            self._wanted.popleft()

    def _step(self, replies: list[Reply]) -> bool:
        if self._state is _State.LINE:
            end = self._scratch.find(b"\r\n", self._start, self._end)
            if end < 0:
                return False
            line = bytes(self._scratch[self._start : end])
            self._start = end + 2
            self._parse_line(line, replies)
            return True
        if self._state is _State.TRAILER and self._end - self._start >= 2:  # noqa: PLR2004 - CRLF
            if self._scratch[self._start : self._start + 2] != b"\r\n":
                raise NotRedisError("a value is longer than its length says")
            self._start += 2
            self._state = _State.LINE
            if self._own is not None:
                replies.append(bytes(self._own))
            elif self._reply is not None:  # else TooLong was returned before
                replies.append(self._reply)
            self._own = None
            return True
        return False

    def _parse_line(self, line: bytes, replies: list[Reply]) -> None:
        if not self._wanted:
            raise NotRedisError(f"there is a reply without a request: {line[:40]!r}")
        into, digest = self._wanted.popleft()
        match line[:1]:
            case b"+":
                replies.append(line[1:])
            case b"-":
                replies.append(Refused(line[1:].decode("utf-8", "replace")))
            case b":":
                replies.append(_number(line))
            case b"$" if line == b"$-1":
                replies.append(None)
            case b"$":
                self._begin_value(_number(line), into, digest, replies)
            case _:
                raise NotRedisError(f"{line[:40]!r}")

    def _begin_value(
        self,
        num_bytes: int,
        into: tuple[memoryview, ...] | int,
        digest: Digest | None,
        replies: list[Reply],
    ) -> None:
        if not 0 <= num_bytes <= _MAX_VALUE_BYTES:
            raise NotRedisError(f"a value has {num_bytes} bytes, beyond Redis's limit")
        self._state = _State.BODY
        self._digest = None
        if isinstance(into, int):
            if fits := num_bytes <= into:
                self._own = bytearray(num_bytes)
                self._body.extend(flat([self._own]))
        elif fits := num_bytes <= sum(view.nbytes for view in into):
            self._reply = ValueLanded(num_bytes, digest)
            self._digest = digest
            self._body.extend(room_for(num_bytes, into))
        if not fits:
            self._reply = None
            replies.append(TooLong(num_bytes))
            self._drop_bytes = num_bytes
        self._move_from_scratch()

    def _move_from_scratch(self) -> None:
        at_hand = self._end - self._start
        if self._drop_bytes:
            taken = min(at_hand, self._drop_bytes)
        else:
            taken, source = 0, memoryview(self._scratch)[self._start : self._end]
            for view in self._body:
                piece = source[taken : taken + len(view)]
                view[: len(piece)] = piece
                taken += len(piece)
        self._start += taken
        self._fill(taken)


def _number(line: bytes) -> int:
    digits = line[1:].removeprefix(b"-")
    if not digits.isdigit() or len(digits) > _MAX_NUMBER_CHARS:
        raise NotRedisError(f"a number was expected, not {line[:40]!r}")
    return int(line[1:])
