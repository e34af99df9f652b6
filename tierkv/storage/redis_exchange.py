"""What goes over a connection for values: a request and its outcome, how long it may take, how much
of it in one turn of the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tierkv.storage.protocol import Digest
from tierkv.storage.resp import Reply

# After so many bytes nothing more is sent in this turn of the loop, over all connections of a
# store: a MiB takes 0.3 ms. SET of 512 KiB over 8 connections kept the loop for 5.2 ms at times
# (p99) without.
_TURN_BYTES = 1 << 20
# So much of values may be on its way when one more is begun, over all connections of one kind to a
# server: what is behind costs it memory that is in no cache by the time it is sent or received. GET
# of 2 MiB took it 0.5 ms with one at a time, 0.6 with two and 1.5 with two on each of 8 connections
# (loopback, Redis 7.0, 2 cores, 2026-11-22). But the next must be there when one ends: with 1 MiB,
# a value of 2 MiB at a time, GET went at 0.8 of the rate.
MOST_BYTES = 3 << 20
# Of longer values, which make up most of the bytes, so many are written at a time to a server on
# this machine, and on one connection while it has room: with one the server has nothing to do from
# its answer until the next value comes, with a third what it has yet to read is in no cache any
# more, and values of several connections it reads by turns. To one each on two connections SET of
# 512 KiB went at 1.07 of the rate into an empty server and 1.4 where values are replaced, of 2 MiB
# at 1.01 and 1.08 (loopback, Redis 7.0, 2 cores, 2026-11-23; on 16 cores 1.06 and 1.02).
LONG_BYTES = 256 << 10
LONG_AT_HOME = 2
_LEAST_VALUES = 2  # on their way: the next is there when one ends


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request has no reply. is_over: the peer ended the connection, or turned it away:
    another one may carry the request. is_new: of a connection on which nothing was ever heard."""

    reason: str
    is_over: bool = False
    is_new: bool = False


Outcome = list[Reply] | Failure


class Batch:
    """Requests that one caller waits for, who is woken when all have ended: a future for each would
    take as long as all the rest that is done for it."""

    __slots__ = ("_num_open", "ended")

    def __init__(self, num_open: int) -> None:
        self._num_open = num_open
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def one_ended(self) -> None:
        self._num_open -= 1
        if not (self._num_open or self.ended.done()):
            self.ended.set_result(None)


@dataclass(eq=False, slots=True)
class Request:
    """A command in pieces, and where its value lands.

    num_bytes: of the value it carries or asks for. num_replies: of several commands in `pieces`;
    only the last one's value lands in `into`, and is given to `digest`. outcome: all replies, set
    once, when the buffers are the caller's again. batch: of whoever waits for that. is_login: of
    use on its own connection only. is_once: not sent again where it may have been carried out.
    may_retry: sent again at all.
    """

    pieces: Sequence[memoryview]
    into: tuple[memoryview, ...] | None
    num_bytes: int
    outcome: Outcome | None = None
    batch: Batch | None = None
    num_replies: int = 1
    digest: Digest | None = None
    was_sent: bool = False
    may_retry: bool = True
    num_retries: int = 0
    is_login: bool = False
    is_once: bool = False
    complete: Callable[[], None] | None = None

    @property
    def bulk_bytes(self) -> int:
        """Of a value that it moves. How long the answer to a question may be tells nothing."""
        is_question = self.into is None and len(self.pieces) == 1
        return 0 if is_question else self.num_bytes

    @property
    def is_long_write(self) -> bool:
        return self.into is None and self.bulk_bytes > LONG_BYTES

    def make_ready(self) -> None:
        """What is sent is complete now, see PutItem."""
        if self.complete is not None:
            self.complete()
            self.complete = None

    def settle(self, outcome: Outcome) -> None:
        if self.outcome is None:
            self.outcome = outcome
            if self.batch is not None:
                self.batch.one_ended()

    def abandon(self) -> None:
        """Nobody waits any more: do not begin it. What has begun goes on to its end, once."""
        self.may_retry = False
        if not self.was_sent:
            self.settle(Failure("nobody waits for it"))


@dataclass(frozen=True, slots=True)
class Pace:
    """How long an exchange may take: timeout_s, and its bytes at slowest_bytes_per_s."""

    timeout_s: float
    slowest_bytes_per_s: float

    def deadline_s(self, num_bytes: int) -> float:
        return self.timeout_s + num_bytes / self.slowest_bytes_per_s


class Traffic:
    """Values on their way between us and one server, over all connections of one kind.

    max_on_one: of their bytes so many may be on a connection when one more request is begun there.
    least_on_one: requests that may be there however long they are.
    num_connections: open ones. is_at_home: they end on this machine. most_at_home: of their bytes
    so many, over all connections, if they do, and two values however long they are.
    """

    def __init__(self, max_on_one: int, least_on_one: int, most_at_home: int = MOST_BYTES) -> None:
        self.max_on_one = max_on_one
        self.least_on_one = least_on_one
        self._most_at_home = most_at_home
        self.num_connections = 0
        self.is_at_home = False
        self._num_bytes = 0
        self._num_values = 0
        self._num_long_writes = 0

    @property
    def has_room(self) -> bool:
        if self.is_at_home and self._num_long_writes >= LONG_AT_HOME:
            return False
        may_be_full = self.is_at_home and self._num_values >= _LEAST_VALUES
        return self._num_bytes <= (self._most_at_home if may_be_full else MOST_BYTES)

    def began(self, request: Request) -> None:
        self._num_bytes += request.bulk_bytes
        self._num_values += request.bulk_bytes > 0
        self._num_long_writes += request.is_long_write

    def shrank(self, num_bytes: int) -> None:
        """So many bytes less count as on their way."""
        self._num_bytes -= num_bytes

    def ended(self, request: Request, num_bytes: int) -> None:
        """num_bytes: that counted to the end."""
        self._num_bytes -= num_bytes
        self._num_values -= request.bulk_bytes > 0
        self._num_long_writes -= request.is_long_write


@dataclass(slots=True)
class WireStats:
    """Counts over all connections that share this object."""

    connections: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


class Turn:
    """What may still be sent in this turn of the loop, over all connections that share this."""

    def __init__(self) -> None:
        self.left = _TURN_BYTES
        self._waiting: list[Callable[[], None]] = []

    def spend(self, num_bytes: int) -> None:
        if self.left == _TURN_BYTES:
            asyncio.get_running_loop().call_soon(self._begin)
        self.left -= num_bytes

    def when_next(self, go_on: Callable[[], None]) -> None:
        """Nothing is left: call `go_on` as the next one begins. What else has to be done by then
        may take the loop as long as it takes the server to run out of work."""
        self._waiting.append(go_on)

    def _begin(self) -> None:
        self.left = _TURN_BYTES
        waiting, self._waiting = self._waiting, []
        for go_on in waiting:
            go_on()
