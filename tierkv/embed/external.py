"""A host tier in a process of its own, for several engines on one machine.

    an engine's scheduler                              the node, `tierkv serve --engine external`
    EngineCache(node=NodeHost(path))     -- hello ---> the first engine decides the kind of blocks
    its ranks map the same memory        <- memory --- one host tier, one store
    lookup, load, save: as without node  -- calls ---> found blocks, slots for saves, tickets
    connection ends                      -- EOF -----> the engine's blocks and slots are released

An engine calls the node's `HostSide` over a Unix socket. The engine's processes copy blocks between
their devices and the shared host memory themselves.

Copies can still run when the engine has disconnected, and would then write into slots of other
engines. To prevent this, all processes of the engine that copy keep a socket open, until they exit.
The node releases the engine's host slots only after the last of these processes has closed the
socket.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import selectors
import socket
import struct
import threading
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, TypeVarTuple, cast

import msgspec

from tierkv import errors
from tierkv.cache.groups import CacheGroup
from tierkv.cache.keys import Fingerprint, Prompt
from tierkv.embed.exchange import Call, Exchange
from tierkv.embed.host_names import HostNames
from tierkv.embed.host_side import (
    Copied,
    EngineCacheSettings,
    HeldRun,
    HostPromise,
    HostSide,
    HostSizes,
    Kept,
    whole_fingerprint,
)
from tierkv.errors import (
    BadRequestError,
    ConfigError,
    HandoffError,
    ShuttingDownError,
    StoreCorruptError,
    StoreUnavailableError,
    TierKVError,
)
from tierkv.gpu.protocol import HostSlots
from tierkv.observe import Stats
from tierkv.pd.direct.address import credentials
from tierkv.pd.handoff import Published
from tierkv.pd.tickets import Ticket
from tierkv.ranks.link import Link, LinkClosedError, close_all, connect, listen
from tierkv.ranks.memory import SharedSlots
from tierkv.sched.events import CacheEvent
from tierkv.service import Service
from tierkv.storage.codec import seal, unseal
from tierkv.tasks import task_group
from tierkv.threads import in_thread, start_thread

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

log = logging.getLogger(__name__)

MAGIC = b"TKEH"
VERSION = 2
_LENGTH = struct.Struct("<I")
_MAX_FRAME = 64 << 20
_ANSWER_S = 5.0  # between a connection and its hello
_ASK_AGAIN_S = 0.05
_ACCEPT_AGAIN_S = 1.0
_NEVER_S = 1e8  # promises expire in the engine's process, which plans the loads
_SETTLE_S = 1.0  # after the last process's end: a GPU's driver ends its copies a little later
_GRACE_S = 5.0  # for calls under way when an engine closes
_MAX_CALLS = 1 << 20
_NUMBER_BITS = 48  # bits of the numbers that an engine gives its publishes
_METHODS: dict[str, Callable[..., Awaitable[Any]]] = {
    one.__name__: one
    for one in (
        *(HostSide.promise, HostSide.free, HostSide.loaded, HostSide.reserve),
        *(HostSide.keep, HostSide.publish, HostSide.finish, HostSide.fail),
        *(
            HostSide.keep_session,
            HostSide.note_prefill,
            HostSide.verify,
            HostSide.forget,
            HostSide.stats,
        ),
    )
}


class EngineHello(msgspec.Struct, frozen=True, tag="engine"):
    """The first record that an engine sends to the node.

    Attributes:
        fingerprint: identity of the engine's blocks.
        groups: the engine's cache groups.
        name: name of the engine, for log lines.
        key: an admin's token, for a node with an auth file; "" without one.
    """

    fingerprint: Fingerprint
    groups: tuple[CacheGroup, ...]
    name: str = ""
    key: str = ""


class NodeMemory(msgspec.Struct, frozen=True, tag="node"):
    """The node's answer to an engine that it accepts: the numbers and sizes of the host slots.

    File descriptors are sent with the answer: one for the memory of each cache group, and one end
    of a socket pair. Each process of the engine that copies blocks keeps this end of the socket
    pair open. When all these processes have closed it, the node gives the engine's slots to other
    engines.

    Attributes:
        num_slots: number of host slots, by cache group.
        block_bytes: bytes of a slot, by cache group.
        max_reserved: largest number of slots that the engine may reserve for saves, by cache group;
            each answer to `reserve` updates it.
    """

    num_slots: tuple[int, ...]
    block_bytes: tuple[int, ...]
    max_reserved: tuple[int, ...] = msgspec.field(name="most_reserved")


class EngineRefused(msgspec.Struct, frozen=True, tag="refused"):
    """The node's answer to an engine that it does not accept.

    Attributes:
        reason: a sentence for the engine's error.
    """

    reason: str


_Answer = NodeMemory | EngineRefused

# Values on the wire: plain msgpack, and maps of one entry, which name a type of ours.

_TYPES: dict[str, Any] = {one.__name__: one for one in (Copied, HeldRun, Kept, Published)}


def _packed(value: Any, numbers: dict[object, int]) -> Any:  # noqa: ANN401, PLR0911 - any of them
    if isinstance(value, HostPromise):
        return {"number": numbers[value]}
    if isinstance(value, (array, range)):
        return {"ids": array("i", value).tobytes()}
    if isinstance(value, Prompt):
        extras = list(value.extras.items())
        return {"Prompt": [value.tokens, value.block_size, extras, value.space]}
    if isinstance(value, Ticket):
        return {"Ticket": value.encode()}
    if type(value).__name__ in _TYPES:
        fields = type(value).__dataclass_fields__
        return {type(value).__name__: [_packed(getattr(value, one), numbers) for one in fields]}
    if isinstance(value, (list, tuple)):
        return [_packed(one, numbers) for one in value]
    return value


def _unpacked(value: Any, known: dict[int, Any]) -> Any:  # noqa: ANN401, PLR0911 - as above
    if isinstance(value, list):
        return [_unpacked(one, known) for one in value]
    if not isinstance(value, dict):
        return value
    [(kind, inner)] = value.items()
    if kind == "number":
        return known[inner]
    if kind == "ids":
        return array("i", inner)
    if kind == "Prompt":
        tokens, block_size, extras, space = inner
        return Prompt(tokens, block_size, dict(extras), space)
    if kind == "Ticket":
        return Ticket.decode(inner)
    return _TYPES[kind](*_unpacked(inner, known))


def _packed_error(error: TierKVError) -> list[str]:
    reason = error.reason if isinstance(error, HandoffError) else ""
    return [type(error).__name__, reason, str(error)]


def _unpacked_error(name: str, reason: str, text: str) -> TierKVError:
    kind = getattr(errors, name, None)
    if kind is HandoffError:
        return HandoffError(reason, text)
    if isinstance(kind, type) and issubclass(kind, TierKVError):
        with suppress(TypeError):
            return kind(text)
    return TierKVError(text)


def _memory(record: bytes, num_descriptors: int) -> NodeMemory:
    found = unseal(MAGIC, VERSION, record, _Answer)  # type: ignore[arg-type,var-annotated]
    if isinstance(found, EngineRefused):
        raise ConfigError(found.reason)
    if isinstance(found, NodeMemory) and num_descriptors == len(found.num_slots) + 1:
        return found
    raise StoreCorruptError(
        "the node's answer does not carry one file descriptor per group: run the same "
        "version of tierkv in the node and the engine"
    )


class NodeHost:
    """An engine's connection to the node whose host tier it uses (`EngineCache(node=...)`).

    The node answers calls later. Loads and saves are planned in this process, without a call.

    Args:
        path: path of the node's socket, which is the node's setting `node.engine_socket`.
        name: name of this engine in the node's log lines; "" for the process id.
        key: an admin's token, if the node has an auth file; "" otherwise.
        deadline_s: seconds to wait for the node to listen.
    """

    def __init__(
        self, path: str, *, name: str = "", key: str = "", deadline_s: float = 60.0
    ) -> None:
        self.life: int | None = None
        self.max_reserved: Sequence[int] = ()
        self.slots: list[HostSlots] = []
        self.names: HostNames | None = None  # none: the node has blocks of other engines, too
        self._path = path
        self._name = name or f"process {os.getpid()}"
        self._key = key
        self._deadline_s = deadline_s
        self.calls = Exchange(_MAX_CALLS, self._wake)
        self._numbers: dict[object, int] = {}
        self._promised: dict[int, tuple[HostPromise, float]] = {}  # and when it expires
        self._asked: dict[int, tuple[Call[Any], float]] = {}  # and the expiry of its promise
        self.is_open = False
        self._thread: threading.Thread | None = None

    def open(self, fingerprint: Fingerprint, groups: Sequence[CacheGroup]) -> None:
        """Connect to the node, and map its host slots.

        Args:
            fingerprint: identity of the engine's blocks.
            groups: the engine's cache groups.

        Raises:
            ConfigError: no node listens, or the node refuses this engine.
        """
        with ExitStack() as opening:  # `close` is not called after a failed `open`
            self._link = link = self._reach()
            opening.callback(link.close)
            try:
                hello = EngineHello(fingerprint, tuple(groups), self._name, self._key)
                link.send(seal(MAGIC, VERSION, hello))
                record, descriptors = link.receive_descriptors()
                opening.callback(close_all, descriptors)  # descriptors that no SharedSlots owns
                answer = _memory(record, len(descriptors))
            except (LinkClosedError, StoreCorruptError) as error:
                raise ConfigError(
                    f"the node at {self._path} did not answer: {error}: check its log"
                ) from error
            self.life = descriptors[-1]  # `_open` closes it
            self.max_reserved = answer.max_reserved
            for count, size in zip(answer.num_slots, answer.block_bytes, strict=True):
                host = SharedSlots(descriptors.pop(0), count, size, slice(0, size))
                opening.callback(host.close)
                self.slots.append(host)
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            opening.callback(os.close, self._bell)
            self._open = opening.pop_all()
        self.is_open = True
        self._thread = start_thread(self._live, "tierkv-node")

    def _reach(self) -> Link:
        deadline = time.monotonic() + self._deadline_s
        while True:
            try:
                return connect(self._path, self._deadline_s)
            except ConfigError as error:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"no node listens at {self._path}: {error}: start the node first, "
                        "with node.engine_socket set to this path"
                    ) from error
                time.sleep(_ASK_AGAIN_S)  # there is no event for a socket that appears

    def call(
        self,
        method: Callable[[HostSide, *Ts], Awaitable[T]],
        *args: *Ts,
    ) -> Call[T]:
        """Make the node call a method of its `HostSide` for this engine. Never blocks.

        Args:
            method: an asynchronous method of `HostSide`.
            args: arguments of the method.

        Returns:
            The call. Its result comes later.
        """
        name, given = method.__name__, cast("tuple[Any, ...]", args)
        body = msgspec.msgpack.encode([name, _packed(given, self._numbers)])
        if name in {"free", "loaded"}:
            self._numbers.pop(given[0], None)
        expires = time.monotonic() + given[2] if name == "promise" else 0.0

        def frame(call: Call[Any]) -> bytes:
            self._asked[call.number] = (call, expires)
            return msgspec.msgpack.encode([call.number, msgspec.Raw(body)])

        return self.calls.submit(name, "", frame)

    def take_events(self) -> list[CacheEvent]:
        """Raise BadRequestError, because only the node reports the cache events of its engines."""
        raise BadRequestError(
            "this cache has no events, since they belong to the node: set "
            "events.endpoint of the node, and subscribe there"
        )

    def close(self) -> None:
        """Wait up to 5 s for running calls, and disconnect from the node.

        The node then releases the blocks of this process's engine. Before the call, the engine's
        ranks must have stopped copying.
        """
        if self._thread is None:
            return
        deadline = time.monotonic() + _GRACE_S
        for call in self.calls.pending():  # calls that keep copied blocks
            with suppress(TierKVError):
                call.wait(max(deadline - time.monotonic(), 0.0))
        self.calls.refuse(ShuttingDownError("this engine's cache is closed"))
        self.is_open = False
        self._wake()
        self._thread.join()
        self._thread = None
        self._open.close()

    # The thread

    def _wake(self) -> None:
        if self._thread is not None:
            with suppress(BlockingIOError):
                os.eventfd_write(self._bell, 1)

    def _live(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._link, selectors.EVENT_READ)
                selector.register(self._bell, selectors.EVENT_READ)
                while self.is_open:
                    self._step({key.fd for key, _ in selector.select(self._next_expiry())})
        except LinkClosedError as error:
            if self.is_open:
                log.error("the connection to the node at %s was lost: %s", self._path, error)
        gone = StoreUnavailableError(
            f"the connection to the node at {self._path} was lost: close this cache and "
            "open it again when the node runs"
        )
        self.calls.fail(gone)
        for promise, _ in list(self._promised.values()):
            promise.claim()

    def _step(self, ready: set[int]) -> None:
        if self._bell in ready:
            with suppress(BlockingIOError):
                os.eventfd_read(self._bell)
            self._send_all()
        if self._link.fileno() in ready:
            for record in self._link.receive():
                self._heard(record)
        now = time.monotonic()
        for number, (promise, expires) in list(self._promised.items()):
            if promise.is_over:
                del self._promised[number]
            elif expires <= now and promise.claim():
                del self._promised[number]
                self.call(HostSide.free, promise)

    def _next_expiry(self) -> float | None:
        if not self._promised:
            return None
        return max(min(at for _, at in self._promised.values()) - time.monotonic(), 0.01)

    def _send_all(self) -> None:
        while (found := self.calls.pop_work()) is not None:
            call, frame = found
            self._link.send(frame(call))
        while (number := self.calls.pop_cancel()) is not None:
            self._link.send(msgspec.msgpack.encode([number, ["cancel", []]]))

    def _heard(self, record: bytes) -> None:
        number, error, value = msgspec.msgpack.decode(record)
        call, expires = self._asked.pop(number)
        if error is not None:
            self.calls.finish(call, error=_unpacked_error(*error))
            return
        if call.kind == "promise":
            value = self._promise(value, expires)
        elif call.kind == "reserve":  # before the engine can ask again
            value, self.max_reserved = value
        elif call.kind == "stats":
            value = msgspec.convert(value, Stats)
        else:
            value = _unpacked(value, {})
        self.calls.finish(call, result=value)

    def _promise(self, value: list[Any], expires: float) -> HostPromise:
        number, num_tokens, parts, ticket, problem = value
        promise = HostPromise(num_tokens, problem=problem)
        promise.parts = _unpacked(parts, {})
        promise.ticket = None if ticket is None else _unpacked(ticket, {})
        self._numbers[promise] = number
        self._promised[number] = (promise, expires)
        return promise


class EngineListener:
    """The socket by which engines on this machine reach this node's host tier.

    Args:
        path: path of the socket; only processes of this user can connect.
        why_not: called with the access token that an engine has sent, "" for none; returns the
            reason to refuse the engine, or "" to accept it.
    """

    def __init__(self, path: str, why_not: Callable[[str], str] = lambda _: "") -> None:
        self._path = path
        self._why_not = why_not
        self._first: tuple[socket.socket, EngineHello] | None = None
        self._numbers = itertools.count(1)
        self._num_here = 0  # engines with slots that are not released yet

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Bind the socket; engines can connect until the `async with` block ends.

        Raises:
            ConfigError: the path cannot be bound.
        """
        self._listener = listen(self._path)
        self._listener.settimeout(0)
        try:
            yield
        finally:
            self._listener.close()
            with suppress(FileNotFoundError):
                os.unlink(self._path)

    async def first(self) -> EngineHello:
        """Wait until the first engine connects, and return the first record that it sends.

        The engine gets its answer later, in `serve`, when the node has a host tier for its
        blocks.
        """
        while self._first is None:
            self._first = await self._hello()
        return self._first[1]

    async def serve(self, side: HostSide, sizes: HostSizes) -> None:
        """Accept engines and carry out their calls on the host tier, until this is cancelled.

        Engines with a fingerprint other than that of `sizes` are refused.

        Args:
            side: the host tier that the engines use.
            sizes: fingerprint, cache groups and numbers of slots of the tier.
        """
        self._sizes = sizes
        async with task_group() as group:
            come, self._first = self._first, None
            while True:
                if come is not None:
                    group.create_task(self._serve(come, side), name="tierkv-engine")
                come = await self._hello()

    async def _hello(self) -> tuple[socket.socket, EngineHello] | None:
        try:
            end, _ = await asyncio.get_running_loop().sock_accept(self._listener)
        except OSError as error:  # such as too many open files
            log.warning("no engine can connect at %s at the moment: %s", self._path, error)
            await asyncio.sleep(_ACCEPT_AGAIN_S)
            return None
        end.settimeout(_ANSWER_S)
        try:
            return end, await in_thread(self._receive_hello, end)
        except (LinkClosedError, StoreCorruptError, ConfigError) as error:
            log.warning("a connection at %s was refused: %s", self._path, error)
            end.close()
            return None

    def _receive_hello(self, end: socket.socket) -> EngineHello:
        link, uid = Link(end), credentials(end)[1]
        if uid != os.geteuid():
            raise LinkClosedError(
                f"it comes from a process of user id {uid}, and this node's user id is "
                f"{os.geteuid()}"
            )
        deadline = time.monotonic() + _ANSWER_S
        while not (records := link.receive()):
            if time.monotonic() > deadline:
                raise LinkClosedError(f"it sent no greeting within {_ANSWER_S:g} s")
        hello = unseal(MAGIC, VERSION, records[0], EngineHello)
        reason = self._why_not(hello.key)
        if reason:
            link.send(seal(MAGIC, VERSION, EngineRefused(reason)))
            raise ConfigError(reason)
        return hello

    async def _serve(self, come: tuple[socket.socket, EngineHello], side: HostSide) -> None:
        """Answer the calls of an engine until it disconnects, then release its blocks and slots.

        The release waits until none of the engine's processes can copy any more. `come` is the
        engine's connection and its first message.
        """
        (end, hello), loop = come, asyncio.get_running_loop()
        try:
            mine, theirs = socket.socketpair()
        except OSError as error:  # such as too many open files
            log.warning(
                "engine %s cannot be served, since no socket pair could be made: %s",
                hello.name,
                error,
            )
            end.close()
            return
        with mine:
            with theirs:
                self._num_here += 1
                max_reserved = self._share()
                welcomed = await in_thread(self._welcome, come, side, theirs, max_reserved)
            if not welcomed:
                self._num_here -= 1
                end.close()
                return
            log.info("engine %s connected", hello.name)
            for one in (end, mine):
                one.settimeout(0)
            reader, writer = await asyncio.open_unix_connection(sock=end)
            engine = _Engine(next(self._numbers), hello.name, side, max_reserved, self._share)
            try:
                await engine.answer_all(reader, writer)
            finally:
                writer.close()
            log.info("engine %s disconnected; its ranks may still copy", hello.name)
            with suppress(ConnectionError):  # also means that the end is closed
                # Returns when the last process has closed its end.
                await loop.sock_recv(mine, 1)
            await asyncio.sleep(_SETTLE_S)
            await engine.release_all()
            self._num_here -= 1
            log.info("engine %s ended, and its slots and promises were released", hello.name)

    def _share(self) -> list[int]:
        """Return, by cache group, how many slots one engine may have reserved for saves now."""
        return self._sizes.max_reserved(EngineCacheSettings(), self._num_here)

    def _welcome(
        self,
        come: tuple[socket.socket, EngineHello],
        side: HostSide,
        theirs: socket.socket,
        max_reserved: Sequence[int],
    ) -> bool:
        """Send a new engine the host memory, or a refusal; return True if the memory was sent.

        `come` is the engine's connection and its first message. `theirs` is a socket that is sent
        with the memory, and that the engine's processes keep open for as long as they run.
        `max_reserved` is, for each cache group, the largest number of host slots that the engine
        may have reserved.
        """
        end, hello = come
        link, sizes = Link(end), self._sizes
        hosts = [host for host in side.slots if isinstance(host, SharedSlots)]
        refusal = _difference(sizes.fingerprint, whole_fingerprint(hello.fingerprint, hello.groups))
        try:
            if refusal:
                log.warning("engine %s was refused: %s", hello.name, refusal)
                link.send(seal(MAGIC, VERSION, EngineRefused(refusal)))
                return False
            memory = NodeMemory(
                tuple(host.num_slots for host in hosts),
                tuple(group.layout.block_bytes for group in sizes.groups),
                tuple(max_reserved),
            )
            descriptors = [*(host.descriptor for host in hosts), theirs.fileno()]
            link.send(seal(MAGIC, VERSION, memory), descriptors=descriptors)
        except LinkClosedError as error:
            log.warning(
                "engine %s disconnected before it received the shared memory: %s", hello.name, error
            )
            return False
        return True


def _difference(mine: Fingerprint, theirs: Fingerprint) -> str:
    if mine.root() == theirs.root():
        return ""
    had, asked = mine.readable(), theirs.readable()
    differ = [
        f"{name} is {had.get(name, '')!r} here and {asked.get(name, '')!r} there"
        for name in sorted(had | asked)
        if had.get(name) != asked.get(name)
    ]
    return (
        "this node caches blocks of another model or layout: start a separate node "
        f"for this engine ({'; '.join(differ)})"
    )


@dataclass(slots=True, eq=False)
class _Engine:
    """One connected engine: its running calls, and the blocks and slots that it uses.

    Attributes:
        number: number of the connection.
        name: the engine's name, for log lines.
        side: the host tier.
        allowed: by cache group, the number of slots that the engine may have reserved for saves, as
            last sent to the engine.
        share: returns the number of slots, by cache group, that the engine may have reserved now.
        known: the engine's promises, by number.
        lent: by cache group, the slots that the engine may write.
    """

    number: int
    name: str
    side: HostSide
    allowed: Sequence[int]
    share: Callable[[], Sequence[int]]
    known: dict[int, HostPromise] = field(default_factory=dict)
    numbers: dict[object, int] = field(default_factory=dict)
    lent: list[set[int]] = field(init=False)
    under_way: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    last_number: int = 0

    def __post_init__(self) -> None:
        self.lent = [set() for _ in self.side.slots]

    async def answer_all(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with task_group() as group:
            try:
                while True:
                    number, method, args = self._read(await _frame(reader))
                    if method == "cancel":
                        if number in self.under_way:
                            self.under_way[number].cancel()
                        continue
                    task = group.create_task(self._answer(writer, number, method, args))
                    self.under_way[number] = task
                    task.add_done_callback(partial(self._done, writer, number))
            except (asyncio.IncompleteReadError, OSError):
                pass
            except BadRequestError as error:
                log.error(
                    "engine %s was disconnected, since it sent a wrong call: %s", self.name, error
                )
            for task in list(self.under_way.values()):
                task.cancel()

    def _done(self, writer: asyncio.StreamWriter, number: int, task: asyncio.Task[None]) -> None:
        del self.under_way[number]
        if task.cancelled():
            error = _packed_error(
                ShuttingDownError(
                    "the node is shutting down: close this cache and open it again when the "
                    "node runs"
                )
            )
            _send(writer, [number, error, None])

    def _read(self, frame: bytes) -> tuple[int, str, list[Any]]:
        try:
            number, (method, packed) = msgspec.msgpack.decode(frame)
            args = _unpacked(packed, self.known)
        except (msgspec.DecodeError, ValueError, TypeError, KeyError, StoreCorruptError) as error:
            raise BadRequestError(f"the frame cannot be decoded as a call: {error!r}") from error
        if method not in _METHODS and method != "cancel":
            raise BadRequestError(
                f"there is no call {method!r}: run the same version of tierkv in the node "
                "and the engine"
            )
        if method == "keep":
            for some in _all_copied(args):
                if not self.lent[some.group].issuperset(some.slots):
                    raise BadRequestError(
                        f"the engine saved to host slots of group {some.group} that were "
                        "not lent to it"
                    )
        return number, method, args

    async def _answer(
        self, writer: asyncio.StreamWriter, number: int, method: str, args: list[Any]
    ) -> None:
        error, value = None, None
        try:
            value = await self._call(method, args)
        except TierKVError as failure:
            error = _packed_error(failure)
        except AssertionError:
            raise  # a bug of this node, not of the engine
        except Exception as failure:
            log.exception("a call of engine %s failed unexpectedly", self.name)
            error = _packed_error(BadRequestError(f"{method}: {failure!r}"))
        _send(writer, [number, error, value])

    async def _call(self, method: str, args: list[Any]) -> Any:  # noqa: ANN401 - the method's own
        if method == "promise":
            args[2] = _NEVER_S
        elif method in {"publish", "finish", "fail"}:
            args[0] += self.number << _NUMBER_BITS
        elif method == "reserve":
            return await self._reserve(*args)
        result = await _METHODS[method](self.side, *args)
        if method == "promise":
            return self._promised(result)
        if method == "keep":
            for some in _all_copied(args):
                self.lent[some.group].difference_update(some.slots)
            for lent, slots in zip(self.lent, result.unused, strict=True):
                lent.update(slots)
        elif method in {"free", "loaded"}:
            del self.known[self.numbers.pop(args[0])]
        return _packed(result, self.numbers)

    async def _reserve(self, counts: Sequence[int]) -> list[Any]:
        """Reserve `counts[i]` host slots of each cache group i, for blocks that this engine saves.

        Return two lists with one element per cache group: the slots, and the largest number of
        slots that this engine may have reserved at a time from now on.
        """
        before, self.allowed = self.allowed, self.share()
        parts = zip(counts, before, self.allowed, strict=True)
        found = await self.side.reserve([count + now - then for count, then, now in parts])
        for lent, slots in zip(self.lent, found, strict=True):
            lent.update(slots)
        return [found, self.allowed]

    def _promised(self, promise: HostPromise) -> list[Any]:
        promise.claim()  # only the engine may end it
        self.last_number = number = self.last_number + 1
        self.known[number] = promise
        self.numbers[promise] = number
        ticket = _packed(promise.ticket, {})
        return [number, promise.num_tokens, _packed(promise.parts, {}), ticket, promise.problem]

    async def release_all(self) -> None:
        """Release all blocks and slots of the engine after all of its copies have ended."""
        for held in list(self.known.values()):
            await self.side.free(held)
        await self.side.free_reserved(self.lent)


def _all_copied(args: list[Any]) -> list[Copied]:
    return [some for _, copied in args[0] for some in copied]


async def _frame(reader: asyncio.StreamReader) -> bytes:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > _MAX_FRAME:
        raise BadRequestError(f"a call of {length} bytes exceeds the limit of {_MAX_FRAME} bytes")
    return await reader.readexactly(length)


def _send(writer: asyncio.StreamWriter, answer: list[Any]) -> None:
    if not writer.is_closing():  # uvloop raises at a write to a closed connection
        data = msgspec.msgpack.encode(answer)
        writer.write(_LENGTH.pack(len(data)) + data)


class ExternalEngines:
    """The engines in other processes that use this node's host tier and store.

    The node runs no engine of its own. The first engine to connect has decided which blocks the
    host tier has; an engine with another fingerprint is refused.

    Args:
        listener: the socket at which engines connect.
        sizes: cache groups of the first engine, and the number of host slots of each.
    """

    def __init__(self, listener: EngineListener, sizes: HostSizes) -> None:
        self.sizes = sizes
        self._listener = listener

    @asynccontextmanager
    async def running(self, service: Service) -> AsyncIterator[None]:
        """Serve engines that connect to this node, until the `async with` block ends.

        `service` has the host tier and the store that the engines use.
        """
        self._side = HostSide(service, self.sizes, EngineCacheSettings())
        async with task_group() as group:
            serving = self._listener.serve(self._side, self.sizes)
            task = group.create_task(serving, name="tierkv-engines")
            yield
            task.cancel()
        await self._side.release_all()

    async def verify(self) -> list[str]:
        return await self._side.verify()
