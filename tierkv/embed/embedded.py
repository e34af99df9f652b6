"""The whole cache service in a thread of an engine's process, driven by calls that never block.

Arguments are checked in the caller's thread, so the caller gets the error. An unexpected error on
the service's thread would stop the service.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import Enum
from numbers import Integral, Real
from types import TracebackType
from typing import Any, Self, TypeVar

from tierkv.cache.keys import Prompt, Tokens, pack
from tierkv.embed.exchange import AbortedError, Call, Exchange
from tierkv.embed.requests import Admitted, Requests, Until
from tierkv.embed.thread import EmbedSettings, ServiceThread
from tierkv.errors import BadRequestError, TierKVError
from tierkv.gpu.protocol import Event
from tierkv.observe import Lookup, Stats
from tierkv.pd.claims import ClaimPolicy
from tierkv.pd.handoff import Published
from tierkv.sched.request import RequestSpec
from tierkv.service import Service
from tierkv.service.session import Session

T = TypeVar("T")

log = logging.getLogger(__name__)


class Embedded:
    """A service in a thread of its own, and the requests of an engine that embeds it.

    Every method except `open`, `close` and `wait` returns within some tens of microseconds, and any
    thread may call it. Most return a `Call`, which has its result later. Calls about one request
    run in the order in which they were made. Once per step, the engine reads the state of each
    call, or collects finished calls with `poll`. A method that gets an argument of the wrong kind
    raises BadRequestError in the caller's thread and changes nothing.

    Tokens are given as packed bytes (int32, little-endian), which is the fastest; as a list of
    ints, which the caller's thread packs in 8 ns a token; or as a `Prompt`, which also has images
    and other media, and the space (adapter, tenant) that its blocks belong to.

    Args:
        build: returns the service, with its device and its store; called on the service's own
            thread.
        settings: limits of calls and deadlines.
    """

    def __init__(self, build: Callable[[], Service], settings: EmbedSettings | None = None) -> None:
        settings = settings or EmbedSettings()
        self._load_timeout_s = settings.load_timeout_s
        self._requests = Requests()
        self._thread = ServiceThread(build, settings, at_close=self._end_requests)

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
        """Start the thread and the service, and wait until the service accepts calls.

        Raises:
            ConfigError: the configuration of the service is wrong.
            StoreUnavailableError: the store cannot be used.
            CloseTimeoutError: the service did not open within `EmbedSettings.open_deadline_s`.
        """
        self._thread.open()

    def close(self, deadline_s: float | None = None) -> None:
        """Refuse new calls, wait for running calls, end every request, and wait for copies.

        Any thread may call this. Further calls do nothing.

        Args:
            deadline_s: seconds to wait; None for `EmbedSettings.close_deadline_s`.

        Raises:
            CloseTimeoutError: the service was still closing after the deadline.
            TierKVError: the service had stopped with this error before.
        """
        self._thread.close(deadline_s)

    @property
    def is_open(self) -> bool:
        """True if the service accepts calls."""
        return self._thread.is_open

    @property
    def service(self) -> Service:
        """The service in the background thread that manages the blocks.

        Other threads may read its `planes`, `device` and `fingerprint`, and must not call its
        methods.
        """
        return self._thread.service

    # Finished calls

    def poll(self) -> list[Call[Any]]:
        """Return calls that have finished since the last poll.

        A call is left out if its result was already read.
        """
        return self._thread.exchange.poll()

    def wait(self, timeout_s: float) -> bool:
        """Block until `poll` can return a finished call, at most `timeout_s` seconds.

        Returns:
            True if a call has finished; False after the timeout.
        """
        return self._thread.exchange.wait(timeout_s)

    @property
    def calls(self) -> Exchange:
        """The engine's calls that run, or whose result `poll` has not returned yet."""
        return self._thread.exchange

    # Requests

    def lookup(self, tokens: Tokens | Prompt) -> Call[Lookup]:
        """Return a call that counts the prompt's cached tokens on each tier.

        The lookup changes nothing and protects no block from eviction: the result may be outdated
        at once.
        """
        prompt = _frozen(tokens)
        return self.run("lookup", lambda service: service.lookup(_prompt(service, prompt)))

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
        """Allocate device blocks for a request, and load the cached part of the prompt into them.

        While too few blocks are free, the request waits in the scheduler's queue. Cached blocks
        that cannot be loaded do not prevent the admission: `Admitted.failed_blocks` has their
        numbers, and the engine computes them. A refused or cancelled call leaves neither a request
        nor allocated blocks.

        Args:
            request_id: the engine's name of the request. The call is refused with
                DuplicateRequestError while another request has this name.
            tokens: the prompt.
            max_new_tokens: number of tokens beyond the prompt for which blocks are allocated, too.
            uses_cache: False to compute every token of the prompt, and to keep no blocks for later
                requests.
            priority: requests with a higher priority are admitted first.
            until: LOADED: the call is done when the cached tokens are loaded. ADMITTED: the call is
                done when the blocks are allocated.

        Returns:
            A call whose result has the request's blocks and its number of cached tokens.

        Raises:
            BadRequestError: an argument has a wrong type, or `max_new_tokens` is negative.
        """
        check_text(request_id=request_id)
        check_count(max_new_tokens=max_new_tokens)
        check_integer(priority=priority)
        check_choice(Until, until=until)
        frozen = _frozen(tokens)

        async def work(service: Service) -> Admitted:
            spec = RequestSpec(
                request_id,
                _prompt(service, frozen),
                max_new_tokens,
                uses_cache=bool(uses_cache),
                priority=priority,
            )
            async with self._requests.new(service, spec) as session:
                service.scheduler.check(spec)
                await session.admit()
                return await self._ready(session, until)

        return self._thread.run("admit", work, request_id=request_id)

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
        """Wait for a prompt that another node publishes, and load its tokens into device blocks.

        If the prompt cannot be claimed, the call is refused with HandoffError, which has the
        reason.

        Args:
            request_id: the engine's name of the request. The call is refused with
                DuplicateRequestError while another request has this name.
            ticket_id: id under which the other node publishes the prompt.
            tokens: the prompt.
            max_new_tokens: number of tokens beyond the prompt to reserve blocks for.
            policy: WHOLE: all tokens of the prompt must arrive. RECOMPUTE: the engine computes the
                tokens that do not arrive. RECOMPUTE_ALL: the engine computes the whole prompt,
                without a ticket.
            deadline_s: seconds to wait for the ticket; None for the service's setting.
            sampling: names and values of this engine's sampling settings. A ticket that was
                published with other settings is refused as incompatible, and the error names the
                difference.

        Returns:
            A call with the request's blocks and the ticket.

        Raises:
            BadRequestError: an argument is of the wrong kind.
        """
        check_text(request_id=request_id, ticket_id=ticket_id)
        check_count(max_new_tokens=max_new_tokens)
        check_choice(ClaimPolicy, policy=policy)
        check_deadline(deadline_s)
        frozen, ours = _frozen(tokens), texts("sampling", sampling)

        async def work(service: Service) -> Admitted:
            prompt = _prompt(service, frozen)
            spec = RequestSpec(request_id, prompt, max_new_tokens, needs_logits=False)
            async with self._requests.new(service, spec) as session:
                await session.claim(ticket_id, policy, deadline_s, ours)
                return await self._ready(session, Until.LOADED)

        return self._thread.run("claim", work, request_id=request_id)

    def commit(self, request_id: str, tokens: Tokens, *, after: Sequence[Event] = ()) -> Call[None]:
        """Record that kernels have written the KV of `tokens` into the request's blocks.

        The kernels may still be running; `after` then has their events. The call fails with
        TransferError if cached tokens of the request could not be loaded after its admission with
        `Until.ADMITTED`. In this case call `recover`.

        Args:
            request_id: id of the request.
            tokens: all tokens of the request so far, from the prompt's first on.
            after: events of the kernels that write the blocks; () if the kernels have ended.

        Raises:
            BadRequestError: an argument is of the wrong kind.
        """
        packed, done = _packed(tokens), events(after)
        return self._in_turn(
            "commit", request_id, lambda session: session.commit(pack(packed), after=done)
        )

    def extend(self, request_id: str, num_tokens: int) -> Call[Admitted]:
        """Allocate blocks for more tokens of a request; the result has the longer block table.

        While too few blocks are free, the request waits. If all running requests wait, and this one
        is chosen to release its blocks, the call fails with OutOfBlocksError.

        Args:
            request_id: id of a running request.
            num_tokens: number of tokens that the blocks must have room for, counted from the last
                committed token. Before the prompt is committed, counted from the end of the prompt.

        Raises:
            BadRequestError: `num_tokens` is not an integer of 0 or more.
        """
        check_count(num_tokens=num_tokens)

        async def work(session: Session) -> Admitted:
            await session.extend(num_tokens)
            return Admitted.of(session)

        return self._in_turn("extend", request_id, work)

    def recover(self, request_id: str, *, after: Sequence[Event] = ()) -> Call[Admitted]:
        """Replace a request's blocks after a failed load, and load tokens that are still cached.

        The engine computes from the result's `cached_tokens` on; tokens that were not committed are
        lost. Only requests that were admitted with `until=Until.ADMITTED` need this call; otherwise
        `admit` waits for the loads and replaces the blocks itself. If the call is refused, `abort`
        the request.

        Args:
            request_id: id of the request.
            after: events of the kernels that may still use the request's old blocks.

        Raises:
            BadRequestError: an argument is of the wrong kind.
        """
        done, timeout_s = events(after), self._load_timeout_s

        async def work(session: Session) -> Admitted:
            why = "the engine rejected the loaded blocks"
            await session.recover(why, timeout_s=timeout_s, after=done)
            return Admitted.of(session)

        return self._in_turn("recover", request_id, work)

    def preempt(self, request_id: str, *, after: Sequence[Event] = ()) -> Call[None]:
        """Release the request's device blocks, until `resume` allocates new ones.

        The blocks of committed tokens are copied to the host if the host has room.

        Args:
            request_id: id of a running request.
            after: events of kernels that may still use the blocks.

        Raises:
            BadRequestError: an argument is of the wrong kind.
        """
        done = events(after)
        return self._in_turn("preempt", request_id, lambda session: session.preempt(after=done))

    def resume(
        self, request_id: str, *, max_new_tokens: int, until: Until = Until.LOADED
    ) -> Call[Admitted]:
        """Allocate blocks for a preempted request, and load its tokens that are still cached.

        If the call is cancelled, the request stays preempted, and can be resumed again or aborted.

        Args:
            request_id: id of the preempted request.
            max_new_tokens: number of tokens beyond the committed ones to reserve blocks for.
            until: LOADED: the call is done when the cached tokens are loaded. ADMITTED: the call is
                done when the blocks are allocated.

        Raises:
            BadRequestError: an argument is of the wrong kind.
        """
        check_count(max_new_tokens=max_new_tokens)
        check_choice(Until, until=until)

        async def work(session: Session) -> Admitted:
            await session.resume(max_new_tokens=max_new_tokens)
            return await self._ready(session, until)

        return self._in_turn("resume", request_id, work)

    def publish(
        self,
        request_id: str,
        ticket_id: str,
        first_tokens: Sequence[int],
        *,
        after: Sequence[Event] = (),
        sampling: Mapping[str, str] | None = None,
    ) -> Call[Published]:
        """Store the committed prompt, and a ticket by which another node can claim it.

        `end` may be called at once: it waits for the publish. The call is refused with
        DuplicateRequestError if nodes can still claim a different prompt by this ticket id.

        Args:
            request_id: id of the request.
            ticket_id: id that the other node passes to `claim`.
            first_tokens: the tokens that follow the prompt.
            after: events of the kernels that wrote the blocks.
            sampling: names and values of the sampling settings that chose `first_tokens`. A claimer
                must pass the same ones.

        Raises:
            BadRequestError: an argument is of the wrong kind.
        """
        check_text(ticket_id=ticket_id)
        first, done = token_ids("first_tokens", first_tokens), events(after)
        how = texts("sampling", sampling)

        async def work(session: Session) -> Published:
            publishing = session.publish(ticket_id, first, after=done, sampling=how)
            try:
                return await session.published(publishing, first, how)
            except asyncio.CancelledError:  # the caller does not want the ticket any more
                publishing.give_up(
                    AbortedError(f"the publish of request {request_id!r} was cancelled")
                )
                raise

        return self._in_turn("publish", request_id, work)

    def end(self, request_id: str, *, after: Sequence[Event] = ()) -> Call[None]:
        """Release the request's blocks after all earlier calls about the request.

        Committed tokens stay cached.

        Args:
            request_id: id of the request.
            after: events of the kernels that may still use the blocks.

        Raises:
            BadRequestError: an argument is of the wrong kind.
        """
        check_text(request_id=request_id)
        done = events(after)
        return self._thread.run(
            "end", lambda _: self._requests.end(request_id, done), request_id=request_id
        )

    def abort(self, request_id: str, *, after: Sequence[Event] = ()) -> Call[bool]:
        """End the request in any state; its running calls are refused with AbortedError.

        Args:
            request_id: id of the request.
            after: events of kernels that may still use the blocks.

        Returns:
            The call. Its result is True if there was such a request.

        Raises:
            BadRequestError: an argument is of the wrong kind.
        """
        check_text(request_id=request_id)
        done = events(after)
        return self._thread.run(
            "abort", lambda _: self._requests.abort(request_id, done), request_id=request_id
        )

    # The rest

    def stats(self) -> Call[Stats]:
        """Return a call with statistics of the service, its tiers and its store."""

        async def work(service: Service) -> Stats:
            return service.stats()

        return self.run("stats", work)

    def verify(self) -> Call[list[str]]:
        """Check the service's invariants, such as its counts of slots, leases and tasks.

        The call's result has a sentence for each invariant that does not hold.
        """

        async def work(service: Service) -> list[str]:
            return service.verify()

        return self.run("verify", work)

    def run(self, name: str, work: Callable[[Service], Awaitable[T]]) -> Call[T]:
        """Run a function on the service's thread, for work that no other method does.

        Examples are pins, resizing and resets.

        Args:
            name: the call's name, for errors and traces.
            work: called with the service; must not block. An error of `work` that is not a
                TierKVError stops the service.
        """
        return self._thread.run(name, work)

    def _in_turn(
        self, kind: str, request_id: str, work: Callable[[Session], Awaitable[T]]
    ) -> Call[T]:
        """Run `work` on the request's session after all earlier calls for this request."""
        check_text(request_id=request_id)

        async def job(_: Service) -> T:
            async with self._requests.turn(request_id) as session:
                return await work(session)

        return self._thread.run(kind, job, request_id=request_id)

    async def _ready(self, session: Session, until: Until) -> Admitted:
        if until is Until.LOADED:
            await session.loaded_or_recovered(self._load_timeout_s)
        return Admitted.of(session)

    def _end_requests(self) -> None:
        for name in self._requests.end_all():
            log.warning(
                "request %r was still open when the service closed: finish or abort every "
                "request before close()",
                name,
            )


def _prompt(service: Service, tokens: bytes | Prompt) -> Prompt:
    if isinstance(tokens, Prompt):
        return tokens
    return Prompt.of(tokens, service.settings.block_size)


def _packed(tokens: Tokens) -> bytes:
    return tokens if isinstance(tokens, bytes) else pack(tokens)


def _frozen(tokens: Tokens | Prompt) -> bytes | Prompt:
    return tokens if isinstance(tokens, Prompt) else _packed(tokens)


def check_text(**values: str) -> None:
    """Check that named arguments are texts that can be encoded as UTF-8.

    Raises:
        BadRequestError: an argument is not such a text; the error names it.
    """
    for name, value in values.items():
        if not isinstance(value, str):
            raise _wrong(name, "a string", value)
        try:
            value.encode()
        except UnicodeEncodeError:
            raise _wrong(name, "text without surrogates", value) from None


def check_count(**values: int) -> None:
    """Check that named arguments are integers of 0 or more.

    Raises:
        BadRequestError: an argument is not an integer of 0 or more; the error names it.
    """
    check_integer(**values)
    for name, value in values.items():
        if value < 0:
            raise BadRequestError(f"{name} must not be negative: {value}")


def check_integer(**values: int) -> None:
    """Check that named arguments are integers.

    Raises:
        BadRequestError: an argument is not an integer; the error names it.
    """
    for name, value in values.items():
        if not isinstance(value, Integral):
            raise _wrong(name, "an integer", value)


def check_choice(kind: type[Enum], **values: Enum) -> None:
    """Check that named arguments are members of an enum.

    Args:
        kind: the enum class.
        values: arguments by name.

    Raises:
        BadRequestError: an argument is not a member of the enum; the error names it.
    """
    for name, value in values.items():
        if not isinstance(value, kind):
            raise _wrong(name, f"a {kind.__name__}", value)


def check_deadline(deadline_s: float | None) -> None:
    """Check that a deadline is None (the default) or a finite number of seconds of at least 0.

    Raises:
        BadRequestError: the deadline is another value.
    """
    if deadline_s is None:
        return
    if not isinstance(deadline_s, Real):
        raise _wrong("deadline_s", "a number of seconds", deadline_s)
    if not (math.isfinite(deadline_s) and deadline_s >= 0):
        raise BadRequestError(f"deadline_s must be at least 0 s, not {deadline_s}")


def events(after: Sequence[Event]) -> tuple[Event, ...]:
    """Check that `after` is a list or tuple of events, and return the events as a tuple.

    Raises:
        BadRequestError: `after` is something else, or an item is not an event.
    """
    if not isinstance(after, list | tuple):
        raise _wrong("after", "a sequence of events", after)
    for event in after:
        if not hasattr(event, "block_until_done"):
            raise _wrong("after", "a sequence of events", event)
    return tuple(after)


def token_ids(name: str, values: Sequence[int]) -> tuple[int, ...]:
    """Return the token ids `values` as a tuple of plain integers.

    Args:
        name: name of the argument, for the error.
        values: integers of any type, 0 <= value < 2**31.

    Raises:
        BadRequestError: a value is not a token id.
    """
    try:
        copy = tuple(values)
    except TypeError:
        raise _wrong(name, "a sequence of token ids", values) from None
    for value in copy:
        if not (isinstance(value, Integral) and 0 <= value < 2**31):
            raise _wrong(name, "a sequence of token ids", value)
    return tuple(int(value) for value in copy)


def texts(name: str, values: Mapping[str, str] | None) -> dict[str, str]:
    """Return a copy of a mapping from text to text; empty for None.

    Args:
        name: name of the argument, for the error.
        values: the mapping.

    Raises:
        BadRequestError: a key or a value is not a text.
    """
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise _wrong(name, "a mapping of texts to texts", values)
    for key, value in values.items():
        check_text(**{f"a name in {name}": key, f"a value in {name}": value})
    return dict(values)


def _wrong(name: str, expected: str, found: object) -> BadRequestError:
    return BadRequestError(f"{name} must be {expected}, not {found!r:.80}")
