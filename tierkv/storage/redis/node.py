"""Commands to one Redis server, over separate connections for reads, writes and questions.

A question is a command with a short reply, such as EXISTS.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator, Callable, Iterator, MutableSequence, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol, TypeVar

from redis.exceptions import AskError, ResponseError, TryAgainError

from tierkv.clock import Clock
from tierkv.errors import StoreCorruptError, StoreRefusedError, StoreUnavailableError
from tierkv.storage.protocol import (
    GetItem,
    GetOutcome,
    GetStatus,
    PutItem,
    PutOutcome,
    PutStatus,
    StoredValue,
    is_name,
    too_long,
)
from tierkv.storage.redis.control import (
    Command,
    Conversation,
    RedisConnection,
    connection_factory,
    conversation,
)
from tierkv.storage.redis.pool import (
    READING_BYTES,
    READING_REMOTE_BYTES,
    WRITING_BYTES,
    ConnectionPool,
    Locator,
    RedisAccess,
    finished,
)
from tierkv.storage.redis.resp import (
    Argument,
    Refused,
    Reply,
    TooLong,
    ValueLanded,
    pack,
    pack_all,
    pack_each,
    pack_set,
)
from tierkv.storage.redis.wire import (
    Address,
    InFlightLimit,
    SendBudget,
    Unanswered,
    WireRequest,
)
from tierkv.threads import in_thread

# Errors of servers that refuse writes and still serve reads: full, cannot save, too few replicas, a
# replica, a user without the permission, a value above proto-max-bulk-len.
WRITE_REFUSALS = re.compile(
    "OOM |MISCONF |NOREPLICAS |READONLY |NOPERM |ERR Protocol error: invalid bulk length"
)


_STORED: Final = PutOutcome(PutStatus.STORED)
_EXISTED: Final = PutOutcome(PutStatus.EXISTED)


def question(*command: Argument, num_bytes: int = 0) -> WireRequest:
    """Return a request that consists of one command with a short reply.

    Args:
        command: verb and arguments.
        num_bytes: largest length of the reply in bytes, which extends the time limit; 0 for a
            number or a line.
    """
    return WireRequest([memoryview(pack(*command))], None, num_bytes)


def pipeline(commands: bytes, num_replies: int) -> WireRequest:
    """Return one request that consists of several commands, each with a short reply.

    Args:
        commands: the encoded commands, one after the other.
        num_replies: number of commands.
    """
    return WireRequest([memoryview(commands)], None, 0, num_replies=num_replies)


def question_each(verb: str, names: Sequence[str], *more: int) -> WireRequest:
    """Return one request that consists of the command `verb name more` for each name.

    The reply to each command is a number.

    Args:
        verb: for example EXISTS or PEXPIRE.
        names: the names, ASCII.
        more: numbers that follow each name as further arguments, such as a time to live.
    """
    request = pipeline(pack_each(verb, names, *more), len(names))
    request.is_once = verb == "UNLINK"  # a repeated one would count no values
    return request


def get_request(item: GetItem) -> WireRequest:
    """Return the GET request that reads the value of `item` into the buffers of `item`."""
    command = [memoryview(pack("GET", item.name))]
    digest = None if item.digest is None else item.digest()
    return WireRequest(command, item.into, item.room_bytes, digest=digest)


def put_request(item: PutItem) -> WireRequest:
    """Return the SET request that writes the value of `item`."""
    options: list[Argument] = []
    if item.ttl_s is not None:
        options += ["PX", math.ceil(item.ttl_s * 1000)]
    if item.leaves_existing:
        options.append("NX")
    return WireRequest(
        pack_set(item.name, item.parts, options),
        None,
        item.num_bytes,
        # If the first attempt is carried out and its reply lost, a second one would get EXISTED.
        may_retry=not item.only_new,
        complete=item.complete,
    )


def get_outcome(  # noqa: PLR0911 - a table
    item: GetItem, reply: Reply | Unanswered
) -> GetOutcome:
    """Return the outcome of a read, given the reply to its GET.

    Args:
        item: the value that was requested.
        reply: the reply to GET, or the reason why there is none.
    """
    match reply:
        case ValueLanded(num_bytes, digest):
            return GetOutcome(GetStatus.HIT, num_bytes=num_bytes, digest=digest)
        case None:
            return GetOutcome(GetStatus.MISS)
        case TooLong(num_bytes):
            return too_long(item, num_bytes)
        case Refused(message) if reply.code == "WRONGTYPE":
            return GetOutcome(GetStatus.DAMAGED, f"{item.name} is not a string: {message}")
        case Refused(message):
            return GetOutcome(GetStatus.FAILED, f"{item.name}: {message}")
        case Unanswered(reason):
            return GetOutcome(GetStatus.FAILED, reason)
    return GetOutcome(
        GetStatus.FAILED, f"{item.name}: the server's answer to GET is unexpected: {reply!r:.80}"
    )


def put_outcome(item: PutItem, reply: Reply | Unanswered) -> PutOutcome:
    """Return the outcome of a write, given the reply to its SET.

    Args:
        item: the value that was sent.
        reply: the reply to SET, or the reason why there is none.
    """
    match reply:
        case None:
            return _EXISTED
        case b"OK":
            return _STORED
        case Refused(message):
            status = PutStatus.FULL if WRITE_REFUSALS.match(message) else PutStatus.FAILED
            return PutOutcome(status, f"{item.name}: {message}")
        case Unanswered(reason):
            return PutOutcome(PutStatus.FAILED, reason)
    return PutOutcome(
        PutStatus.FAILED, f"{item.name}: the server's answer to SET is unexpected: {reply!r:.80}"
    )


# Names in one command, during which the server does nothing else: 1,000 take 0.3 ms.
NAMES_PER_COMMAND = 1024
_SCAN_COUNT = 1000
_PTTL_NO_EXPIRY = -1  # a smaller number means "no such key"
_POSITION_CHARS = 20  # of a 64-bit number
_CHANGES = ("PEXPIRE", "UNLINK")

T = TypeVar("T")


class Purpose(Enum):
    """The kinds of requests to a Redis server, each with connections of its own.

    READ and WRITE transfer values. QUESTION is a command with a short reply, such as EXISTS.
    """

    READ = "read"
    WRITE = "write"
    QUESTION = "question"


# Number of parts of a list of names that one exchange counts: a gap among 1,000 names is found in
# three exchanges with 1,110 names together. Halving takes ten exchanges and 2,000 names.
_PARTS = 10
_FAR_S = 0.05  # an exchange with a far server takes more seconds


@dataclass(frozen=True, slots=True)
class KeyCommand:
    """A command about one value.

    Attributes:
        name: name of the value, which decides to which server of a cluster the command is sent.
        make: returns a new request for the command; called for each attempt to send it.
    """

    name: str
    make: Callable[[], WireRequest]


class Router(Protocol):
    """An object that sends each command to the right server: the only one, or one of a cluster."""

    def running(self) -> AbstractAsyncContextManager[None]: ...

    def nodes(self) -> Sequence[RedisNode]:
        """Return the servers that store values, in a fixed order."""

    async def ping(self) -> None:
        """Check that all servers answer.

        Raises:
            StoreUnavailableError: a server did not answer.
        """

    async def carry_out(
        self, calls: Sequence[KeyCommand], purpose: Purpose
    ) -> list[Reply | Unanswered]:
        """Send commands and return the reply to each, or the reason why there is none.

        If the call is cancelled, it ends only when the commands' buffers are no longer in use.

        Args:
            calls: the commands.
            purpose: READ or WRITE for commands that transfer values, QUESTION for commands with a
                short reply. Each has connections of its own.
        """

    async def count_leading(self, names: Sequence[str]) -> int:
        """Return the number of leading `names` that have a value, up to the first that has none.

        Raises:
            StoreUnavailableError: a server did not answer.
        """

    async def each(self, verb: str, names: Sequence[str], *more: int) -> list[int]:
        """Send the command `verb name more` for each name, and return the number in each reply.

        Args:
            verb: for example EXISTS or PEXPIRE.
            names: the names.
            more: numbers that follow each name as further arguments, such as a time to live.

        Raises:
            StoreUnavailableError: a server did not answer.
        """


class RedisNode:
    """One Redis server of a store.

    If the store has only this server, this object is also the store's `Router`, which chooses the
    server for each command. Connections are opened when a command is first sent.

    Args:
        locator: the source of the server's address.
        access: settings, login and counters, shared by all servers of the store.
        clock: this machine's clock, for the expiry times in listings.
        url: the server's URL without password, for error messages.

    Attributes:
        url: the server's URL without password.
        pools: the connections for each purpose: reads, writes and short questions.
    """

    def __init__(self, locator: Locator, access: RedisAccess, clock: Clock, *, url: str) -> None:
        settings = access.settings
        self.url = url
        self._locator = locator
        self._access = access
        self._clock = clock
        self._is_far = False  # the last count took long
        questions, long_values = SendBudget(), settings.write_connections * WRITING_BYTES

        def pool(
            count: int, send_budget: SendBudget, local_bytes: int, remote_bytes: int
        ) -> ConnectionPool:
            in_flight_limit = InFlightLimit(local_bytes=local_bytes, remote_bytes=remote_bytes)
            return ConnectionPool(
                locator,
                access,
                send_budget=send_budget,
                in_flight_limit=in_flight_limit,
                num_connections=count,
                url=url,
            )

        self.pools = {
            Purpose.READ: pool(
                settings.num_connections, questions, READING_BYTES, READING_REMOTE_BYTES
            ),
            # Writes have their own `SendBudget`, so they never delay questions. To another machine,
            # each connection may have a long value in flight.
            Purpose.WRITE: pool(
                settings.write_connections, access.send_budget, WRITING_BYTES, long_values
            ),
            Purpose.QUESTION: pool(1, questions, READING_BYTES, READING_REMOTE_BYTES),
        }

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with (
            self.pools[Purpose.QUESTION].running(),
            self.pools[Purpose.READ].running(),
            self.pools[Purpose.WRITE].running(),
        ):
            yield

    def nodes(self) -> Sequence[RedisNode]:
        return (self,)

    async def ping(self) -> None:
        await self.ask("PING")

    async def ask(self, *command: str | int, num_bytes: int = 0) -> Reply:
        """Send one command and return its reply.

        Args:
            command: verb and arguments.
            num_bytes: largest length of the reply in bytes, which extends the time limit; 0 if the
                reply is only an integer or a short line of text.

        Raises:
            StoreUnavailableError: the server refused the command or did not answer.
            StoreCorruptError: the command needs a string, but the stored value has another Redis
                type.
        """
        [outcome] = await self.pools[Purpose.QUESTION].ask(
            [question(*command, num_bytes=num_bytes)]
        )
        return check_reply(outcome if isinstance(outcome, Unanswered) else outcome[0], command)

    async def locate(self) -> Address:
        """Return the server's current address.

        Raises:
            StoreUnavailableError: the address is not known.
        """
        return await self._locator.locate()

    async def control_connection(self) -> RedisConnection:
        """Return a new redis-py connection to the server; the caller has to connect it.

        Raises:
            StoreUnavailableError: the server's address is not known.
        """
        # In a thread: for each connection redis-py reads its own package's version.
        return await in_thread(connection_factory(await self.locate(), self._access))

    async def carry_out(
        self, calls: Sequence[KeyCommand], purpose: Purpose
    ) -> list[Reply | Unanswered]:
        outcomes = await finished(self.pools[purpose].begin(call.make() for call in calls))
        return [outcome if isinstance(outcome, Unanswered) else outcome[-1] for outcome in outcomes]

    async def count_leading(self, names: Sequence[str]) -> int:
        found = 0
        for part in cut(names, NAMES_PER_COMMAND):
            leading = await self._count_leading(part)
            found += leading
            if leading < len(part):
                break
        return found

    async def each(self, verb: str, names: Sequence[str], *more: int) -> list[int]:
        return await self._numbers(verb, question_each(verb, names, *more)) if names else []

    async def _count_leading(self, names: Sequence[str]) -> int:
        # One exchange counts the values of all parts; the first incomplete part is divided again.
        # If the server is far, each name is a part, so one exchange is enough.
        present, time = 0, asyncio.get_running_loop().time
        num_parts = len(names) if self._is_far else _PARTS
        while True:
            parts, began = list(cut(names, -(-len(names) // num_parts))), time()
            wire = b"".join([pack_all("EXISTS", part) for part in parts])
            counts = await self._numbers("EXISTS", pipeline(wire, len(parts)))
            self._is_far = time() - began > _FAR_S
            num_parts = len(names) if self._is_far else _PARTS
            for part, count in zip(parts, counts, strict=True):
                if count < len(part):
                    break
                present += len(part)
            else:
                return present
            if len(part) == 1:
                return present
            names = part

    async def _numbers(self, verb: str, request: WireRequest) -> list[int]:
        """Send commands that begin with `verb`, and return the number in each reply."""
        [outcome] = await self.pools[Purpose.QUESTION].ask([request])
        if isinstance(outcome, Unanswered):
            raise StoreUnavailableError(outcome.reason)
        return [expect(int, check_reply(reply, (verb,))) for reply in outcome]

    async def list(
        self, address: Address, prefix: str, position: int, limit: int
    ) -> tuple[int, dict[str, StoredValue], Sequence[str]]:
        """Return values under `prefix`, found with SCAN over a new connection.

        Args:
            address: the address that `locate` returned.
            prefix: start of the names.
            position: SCAN's cursor to continue from; 0 at the start.
            limit: largest number of values, approximately.

        Returns:
            The cursor to continue from, 0 at the end; the values by name; and the names of values
                that are moving to another server of the cluster, so that this server cannot
                describe them.

        Raises:
            StoreUnavailableError: the server refused a command or did not answer.
        """
        new_connection = connection_factory(address, self._access)
        deadline_s = self._access.settings.deadline_s(0)
        values: dict[str, StoredValue] = {}
        moving: list[str] = []
        async with conversation(new_connection, url=self.url, deadline_s=deadline_s) as talk:
            while True:
                position, names = await self._scan(talk, prefix, position, limit)
                for value in await self._describe(talk, names, moving):
                    values[value.name] = value
                if position == 0 or len(values) + len(moving) >= limit:
                    return position, values, moving

    async def _scan(
        self, talk: Conversation, prefix: str, position: int, count: int
    ) -> tuple[int, Sequence[str]]:
        # check_prefix refuses glob characters, so nothing has to be escaped.
        command: Command = (
            "SCAN", position, "MATCH", f"{prefix}*", "COUNT", min(count, _SCAN_COUNT),
        )  # fmt: skip
        [reply] = await talk.ask([command])
        if isinstance(reply, ResponseError):
            raise StoreUnavailableError(f"{self.url} refused SCAN: {reply}") from reply
        match reply:
            case [bytes(after), list(found)] if after.isdigit() and len(after) <= _POSITION_CHARS:
                names = [expect(bytes, name).decode("ascii", "replace") for name in found]
                return int(after), [name for name in names if is_name(name)]
        raise StoreUnavailableError(f"{self.url} sent an unexpected answer to SCAN: {reply!r:.80}")

    async def _describe(
        self, talk: Conversation, names: Sequence[str], moving: MutableSequence[str]
    ) -> Sequence[StoredValue]:
        """Return size and expiry of each value that this server has.

        A name is appended to `moving` if its hash slot is moving to another server, which must be
        asked for the value.
        """
        values = []
        now = self._clock.wall()
        for part in cut(names, NAMES_PER_COMMAND):
            commands: list[Command] = [(verb, name) for name in part for verb in ("STRLEN", "PTTL")]
            replies = await talk.ask(commands)
            for name, *pair in zip(part, replies[::2], replies[1::2], strict=True):
                refusal = next((reply for reply in pair if isinstance(reply, ResponseError)), None)
                if refusal is None:
                    values += described(name, *pair, now=now)
                elif isinstance(refusal, (AskError, TryAgainError)):  # redis-py: MOVED is one, too
                    moving.append(name)
                elif not str(refusal).startswith("WRONGTYPE"):
                    raise StoreUnavailableError(f"{self.url} refused STRLEN or PTTL: {refusal}")
        return values


def described(name: str, num_bytes: object, ttl_ms: object, *, now: float) -> list[StoredValue]:
    """Return a description of a stored value, made from Redis' replies to STRLEN and PTTL.

    Args:
        name: name of the value.
        num_bytes: the reply to STRLEN, in bytes.
        ttl_ms: the reply to PTTL, in milliseconds; -1 for a value that never expires, -2 if there
            is no value.
        now: this machine's time, in Unix seconds.

    Returns:
        A list with the description; [] if there is no value.

    Raises:
        StoreUnavailableError: a reply is not a number.
    """
    milliseconds = expect(int, ttl_ms)
    if milliseconds < _PTTL_NO_EXPIRY:
        return []
    expires_at = None if milliseconds == _PTTL_NO_EXPIRY else now + milliseconds / 1000
    return [StoredValue(name, expect(int, num_bytes), expires_at)]


def check_reply(reply: Reply | Unanswered, command: Sequence[object]) -> Reply:
    """Return `reply`, or raise the error that it stands for.

    Args:
        reply: the reply to `command`, or the reason why there is none.
        command: verb and arguments, for error messages.

    Raises:
        StoreUnavailableError: there is no reply, or the server refused the command.
        StoreRefusedError: the server refused a change of values, for example because it is a
            replica.
        StoreCorruptError: the command needs a string, but the stored value has another Redis type.
    """
    if isinstance(reply, Unanswered):
        raise StoreUnavailableError(reply.reason)
    if isinstance(reply, Refused):
        if reply.code == "NOAUTH":
            raise StoreUnavailableError(
                f"Redis refused the login ({reply.message}): check user, password and database"
            )
        if reply.code in {"MOVED", "CROSSSLOT"}:
            raise StoreUnavailableError(
                f"this Redis is part of a cluster ({reply.message}): use a redis+cluster:// URL"
            )
        if reply.code == "WRONGTYPE":
            raise StoreCorruptError(f"{command[1]!s} is not a string: {reply.message}")
        is_change = command[0] in _CHANGES and WRITE_REFUSALS.match(reply.message)
        error = StoreRefusedError if is_change else StoreUnavailableError
        raise error(f"Redis refused {command[0]!s}: {reply.message}")
    return reply


def cut(names: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    """Return an iterator over consecutive parts of `names`.

    Args:
        names: the names in order.
        size: largest number of names in a part.
    """
    return (names[at : at + size] for at in range(0, len(names), size))


def expect(kind: type[T], reply: object) -> T:
    """Return `reply` if it is of type `kind`.

    Args:
        kind: the expected type.
        reply: a reply of the server.

    Raises:
        StoreUnavailableError: the reply has another type.
    """
    if not isinstance(reply, kind):
        raise StoreUnavailableError(f"the Redis server's answer {reply!r:.80} is unexpected")
    return reply
