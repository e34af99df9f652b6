"""The whole cache service in a thread of an engine's process, driven by calls that never block.

What an engine hands over is looked at on its own thread: on the service's a value of the wrong kind
is an error nobody expects, and stops the service; here its traceback shows where it came from.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import Enum
from numbers import Integral, Real
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

from tierkv import tracing
from tierkv.cache.keys import Prompt, Tokens, pack
from tierkv.embed.exchange import Call, Exchange
from tierkv.embed.requests import Admitted, Requests, Until
from tierkv.embed.thread import EmbedSettings, ServiceThread
from tierkv.errors import BadRequestError, TierKVError
from tierkv.gpu.protocol import Event
from tierkv.observe import Lookup, Stats
from tierkv.pd.claims import ClaimPolicy
from tierkv.pd.handoff import Published
from tierkv.sched.request import RequestSpec
from tierkv.service import Service

T = TypeVar("T")


class Embedded:
    """A service and the thread it lives in.

    Every method but `open`, `close` and `wait` returns within some tens of microseconds, from any
    thread: a `Call`, which is READY, REFUSED or to be asked again. Calls about one request run in
    the order in which they were made. Look at a call, or collect those that have finished with
    `poll`, once per step. An argument of the wrong kind raises BadRequestError in the caller's
    thread, and nothing has happened.

    tokens: packed bytes (int32 little-endian) cost nothing here; a list of ints is packed by the
        caller's thread, 8 ns a token; a Prompt brings its media and its space.
    build: makes the service, with its device and its store, on the service's own thread.
    """

    def __init__(self, build: Callable[[], Service], settings: EmbedSettings | None = None) -> None:
        self._thread = ServiceThread(build, settings or EmbedSettings())
        self._submit = self._thread.exchange.submit

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            self.close()
        except TierKVError:
            if error is None:
                raise

    def open(self) -> None:
        """Start the thread and the service; return when it takes calls. Raises what keeps it from
        that: ConfigError, StoreUnavailableError, CloseTimeoutError."""
        tracing.join()
        self._thread.open()

    def close(self, deadline_s: float | None = None) -> None:
        """End in order: refuse new calls, let those under way end, end every request, wait for
        copies, close. Any thread, any number of times. Raises CloseTimeoutError after `deadline_s`,
        or the error with which the service ended."""
        self._thread.close(deadline_s)

    @property
    def is_open(self) -> bool:
        return self._thread.is_open

    @property
    def service(self) -> Service:
        """For what an engine reads: `planes`, `device`, `fingerprint`. Its methods belong to the
        service's thread."""
        return self._requests.service

    # What has finished

    def poll(self) -> list[Call[Any]]:
        """The calls that have finished and whose result nobody has taken, each once."""
        return self._thread.exchange.poll()

    def wait(self, timeout_s: float) -> bool:
        """Block until `poll` has something to return, or for `timeout_s`; whether it has."""
        return self._thread.exchange.wait(timeout_s)

    @property
    def calls(self) -> Exchange:
        """All that are open."""
        return self._thread.exchange

    @property
    def num_open_calls(self) -> int:
        return self._thread.exchange.num_open

    # Requests

    def lookup(self, tokens: Tokens | Prompt) -> Call[Lookup]:
        """Where the prompt's tokens are right now. Changes nothing, and promises nothing."""
        prompt = _frozen(tokens)
        return self._submit("lookup", "", lambda: self.service.lookup(self._prompt(prompt)))

    def admit(
        self,
        request_id: str,
        tokens: Tokens | Prompt,
        *,
        max_new_tokens: int,
        uses_cache: bool = True,
        priority: int = 0,
        until: Until = Until.LOADED,
    ) -> Call[Admitted]:
        """Get blocks for a request, and what is cached of it into them. While there is no room it
        waits, in fair order. Blocks that do not load are named in the result, which has all the
        others: nothing need be asked again for them. A call that is refused or cancelled leaves
        nothing behind."""
        check_text(request_id=request_id)
        check_count(max_new_tokens=max_new_tokens)
        check_integer(priority=priority)
        check_choice(Until, until=until)
        prompt = _frozen(tokens)

        async def work() -> Admitted:
            spec = RequestSpec(
                request_id,
                self._prompt(prompt),
                max_new_tokens,
                uses_cache=bool(uses_cache),
                priority=priority,
            )
            return await self._requests.admit(spec, until)

        return self._submit("admit", request_id, work)

    def claim(  # noqa: PLR0913 - what an admission says, the ticket, and how to go on
        self,
        request_id: str,
        ticket_id: str,
        tokens: Tokens | Prompt,
        *,
        max_new_tokens: int,
        policy: ClaimPolicy = ClaimPolicy.WHOLE,
        deadline_s: float | None = None,
        sampling: Mapping[str, str] | None = None,
    ) -> Call[Admitted]:
        """Wait for a published prompt and get all its tokens; see Service.claim. With
        ClaimPolicy.RECOMPUTE `cached_tokens` may be fewer. sampling: how this engine would go on,
        see `publish`; a ticket that says otherwise is refused as incompatible, naming what differs.
        What the ticket says is in the result's `ticket`."""
        check_text(request_id=request_id, ticket_id=ticket_id)
        check_count(max_new_tokens=max_new_tokens)
        check_choice(ClaimPolicy, policy=policy)
        check_deadline(deadline_s)
        prompt, ours = _frozen(tokens), texts("sampling", sampling)

        async def work() -> Admitted:
            spec = RequestSpec(request_id, self._prompt(prompt), max_new_tokens, needs_logits=False)
            return await self._requests.claim(spec, ticket_id, policy, deadline_s, ours)

        return self._submit("claim", request_id, work)

    def commit(self, request_id: str, tokens: Tokens, *, after: Sequence[Event] = ()) -> Call[None]:
        """KV of `tokens`, from the prompt's first on, is in the block table, or will be when
        `after` is done. Refused with TransferError if a load that it builds on failed (with
        Until.ADMITTED): `recover` the request then."""
        check_text(request_id=request_id)
        packed, done = _packed(tokens), events(after)
        return self._submit(
            "commit", request_id, lambda: self._requests.commit(request_id, packed, done)
        )

    def extend(self, request_id: str, num_tokens: int) -> Call[Admitted]:
        """Room for `num_tokens` more than are committed; the result has the longer block table.
        Refused with OutOfBlocksError if this request is the one to be preempted."""
        check_text(request_id=request_id)
        check_count(num_tokens=num_tokens)
        return self._submit(
            "extend", request_id, lambda: self._requests.extend(request_id, num_tokens)
        )

    def recover(self, request_id: str, *, after: Sequence[Event] = ()) -> Call[Admitted]:
        """After a layer's gate failed: the request with other blocks, of which those that are
        intact on the device are filled; what must be computed is named. For Until.ADMITTED; with
        Until.LOADED this has been done when the admission is READY. What was not committed is lost.
        after: events of the kernels that may still use the blocks it had. If it is refused, `abort`
        the request."""
        check_text(request_id=request_id)
        done = events(after)
        return self._submit("recover", request_id, lambda: self._requests.recover(request_id, done))

    def preempt(self, request_id: str, *, after: Sequence[Event] = ()) -> Call[None]:
        """Give the blocks back for a while; what was committed stays cached if it can."""
        check_text(request_id=request_id)
        done = events(after)
        return self._submit("preempt", request_id, lambda: self._requests.preempt(request_id, done))

    def resume(
        self, request_id: str, *, max_new_tokens: int, until: Until = Until.LOADED
    ) -> Call[Admitted]:
        """Wait for blocks again, with all that is still cached of the committed tokens."""
        check_text(request_id=request_id)
        check_count(max_new_tokens=max_new_tokens)
        check_choice(Until, until=until)
        return self._submit(
            "resume", request_id, lambda: self._requests.resume(request_id, max_new_tokens, until)
        )

    def publish(
        self,
        request_id: str,
        ticket_id: str,
        first_tokens: Sequence[int],
        *,
        after: Sequence[Event] = (),
        sampling: Mapping[str, str] | None = None,
    ) -> Call[Published]:
        """Store the committed prompt and a ticket for it. An `end` may follow at once: it waits.

        sampling: how `first_tokens` were chosen, in the engine's own words, as equal texts where
        equal tokens would be chosen. Refused with DuplicateRequestError if another prompt's ticket
        of this id can still be claimed.
        """
        check_text(request_id=request_id, ticket_id=ticket_id)
        first, done = token_ids("first_tokens", first_tokens), events(after)
        how = texts("sampling", sampling)
        return self._submit(
            "publish",
            request_id,
            lambda: self._requests.publish(request_id, ticket_id, first, done, how),
        )

    def end(self, request_id: str, *, after: Sequence[Event] = ()) -> Call[None]:
        """Give the blocks back, after what was asked before. What was committed stays cached."""
        check_text(request_id=request_id)
        done = events(after)
        return self._submit("end", request_id, lambda: self._requests.end(request_id, done))

    def abort(self, request_id: str, *, after: Sequence[Event] = ()) -> Call[bool]:
        """End the request whatever it is doing: its calls under way are refused with AbortedError.
        The result says whether there was such a request."""
        check_text(request_id=request_id)
        done = events(after)
        return self._submit("abort", request_id, lambda: self._requests.abort(request_id, done))

    # The rest

    def stats(self) -> Call[Stats]:
        async def work() -> Stats:
            return self.service.stats()

        return self._submit("stats", "", work)

    def verify(self) -> Call[list[str]]:
        """Recount everything; what is wrong, in words."""

        async def work() -> list[str]:
            return self.service.verify()

        return self._submit("verify", "", work)

    def run(self, name: str, work: Callable[[Service], Awaitable[T]]) -> Call[T]:
        """Anything else, such as pins, resizing or a reset: `work(service)` on the service's
        thread, which it must not block. An error that is no TierKVError stops the service."""

        async def job() -> T:
            return await work(self.service)

        return self._submit(name, "", job)

    @property
    def _requests(self) -> Requests:
        requests = self._thread.requests
        assert requests is not None, "the service is open"
        return requests

    def _prompt(self, tokens: bytes | Prompt) -> Prompt:
        if isinstance(tokens, Prompt):
            return tokens
        return Prompt.of(tokens, self.service.settings.block_size)


def _packed(tokens: Tokens) -> bytes:
    """Bytes as they are: whether they are tokens is checked on the service's thread."""
    return tokens if isinstance(tokens, bytes) else pack(tokens)


def _frozen(tokens: Tokens | Prompt) -> bytes | Prompt:
    return tokens if isinstance(tokens, Prompt) else _packed(tokens)


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
