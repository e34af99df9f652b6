"""The decode node's side of a hand-off: wait for a ticket, fetch its blocks, report problems.

A ticket is the record in storage by which a prefill node says that all blocks of a prompt are
stored. If the host has little room, blocks are fetched in portions, a few at a time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from functools import partial

import msgspec

from tierkv import tracing
from tierkv.cache.keys import KeyRun, Prompt, StoredKey, differences
from tierkv.cache.node import Tier
from tierkv.errors import (
    HandoffError,
    StoreDownError,
    StoreUnavailableError,
    TierKVError,
    TransferError,
)
from tierkv.pd.portions import Portions
from tierkv.pd.source import PeerSource, Supply
from tierkv.pd.tickets import (
    PROGRESS,
    HandoffProblem,
    HandoffStats,
    OpenTicket,
    Ticket,
    Tickets,
    check_id,
)
from tierkv.sched.budget import Budget
from tierkv.sched.copies import HASHED_BLOCKS
from tierkv.sched.fetch import NO_ROOM, Fetched, Fetcher
from tierkv.sched.request import Arrivals, Request, RequestSpec
from tierkv.sched.scheduler import Scheduler
from tierkv.sched.worth import SILENT_S, Estimator
from tierkv.storage.protocol import GetOutcome, GetStatus
from tierkv.tasks import both, deadline, expected, supervised
from tierkv.transfer.mover import Movement

_FIRST_READ_S = 0.005
_LONGEST_READ_S = 0.1
_LIVE_READ_S = 1.0  # pause between reads while the store sends hints, which can be lost
_ASK_EVERY_S = 1.0
# Seconds in which another node that has begun the same hand-off again can write its open ticket.
_GRACE_S = 0.5


class Watch:
    """The wait of a decode node for the ticket of a prompt that a prefill node computes.

    Args:
        tickets: reads tickets from the store.
        ticket_id: id of the ticket.
        prompt: the prompt that the ticket must be for.
        estimator: measures how long the store takes to answer.
        on_progress: called when storage has probably received more blocks of the prompt. The
            argument is the number of stored blocks from the prompt's start; None if unknown.
        near: reads blocks from the prefill node's memory. It gets the node's address from the open
            ticket.

    Attributes:
        keys: keys of all blocks of the prompt, complete once `ticket` has returned.
    """

    def __init__(
        self,
        tickets: Tickets,
        ticket_id: str,
        prompt: Prompt,
        *,
        estimator: Estimator,
        on_progress: Callable[[int | None], None],
        near: Supply,
    ) -> None:
        self._tickets = tickets
        self._estimator = estimator
        self._lease = tickets.lease
        self._ticket_id = ticket_id
        self._prompt = prompt
        self._on_progress = on_progress
        self._near = near
        self.keys: KeyRun | tuple[StoredKey, ...] = ()
        self._hashing: asyncio.Handle | None = None
        self._open: OpenTicket | None = None
        self._failed: OpenTicket | None = None  # given up by its producer; reason in `_failure`
        self._failure = ""
        self._has_read = False
        self._ready_blocks = 0
        self._over: HandoffError | None = None  # the reason why no ticket will come
        self._over_since = 0.0  # loop time at which `_over` was first set
        self._patience_s = 0.0  # seconds from then on until the claim fails
        self._problem: StoreUnavailableError | None = None
        self._has_answered = self._is_useless = False
        self._heard_at = 0.0  # time of the store's last answer, or of the first question
        # A store that was flushed or restarted has no liveness lease until its next renewal.
        self._lost_after_s = self._lease.interval_s + _GRACE_S

    async def ticket(self, budget: Budget, deadline_s: float) -> Ticket:
        """Wait until the ticket is in the store, and return it.

        The call raises earlier if it is certain that no ticket will come, or if the store fails.

        Args:
            budget: the time that the claim may still wait for the store's answers; if a request
                that may compute its prompt has used it up, the call raises. The time in which the
                prefill node computes does not count.
            deadline_s: largest duration of the call, in seconds.

        Returns:
            The ticket, which is for this prompt and this model.

        Raises:
            HandoffError: no ticket came in time, or the ticket cannot be used; the reason is a
                HandoffProblem.
        """
        loop = asyncio.get_running_loop()
        began, pause = loop.time(), _FIRST_READ_S
        give_up_at, self._heard_at = began + deadline_s, began
        verdict = budget.restrict(self._prompt.num_tokens)
        if not verdict.is_asked:
            raise HandoffError(HandoffProblem.UNAVAILABLE.value, verdict.reason)
        hints = self._tickets.notifier.listen(self._tickets.names.ticket(self._ticket_id))
        with hints as listener, self._hash_while_waiting():
            while True:
                found = await self._read_within(budget, give_up_at)
                if found is not None:
                    return found
                if self._problem is None:
                    self._forget_keys()  # as large as the prompt: too much memory for many waits
                if self._over is not None and loop.time() - self._over_since >= self._patience_s:
                    raise self._over
                left = give_up_at - loop.time()
                if left <= 0 or self._is_useless:
                    break
                is_quiet = listener.is_live and self._over is None
                await self._wait_for_hint(
                    listener.next, min(_LIVE_READ_S if is_quiet else pause, left)
                )
                pause = min(pause * 2, _LONGEST_READ_S)
        if self._over is not None:
            raise self._over
        if self._problem is not None:
            reason = HandoffProblem.UNAVAILABLE.value
            raise HandoffError(reason, str(self._problem)) from self._problem
        raise await self._missing_ticket(loop.time() - began)

    async def ask_producer(self) -> None:
        """Until cancelled, ask the prefill node every second whether it has given up the publish.

        If so, `ticket` raises an error with the node's reason. The question is needed if the store
        is full, because the node cannot write the reason there.
        """
        while True:
            await asyncio.sleep(_ASK_EVERY_S)
            opened = self._open
            if opened is not None and (failure := await self._near.failure()):
                self._failed, self._failure = opened, failure

    async def _read_within(self, budget: Budget, give_up_at: float) -> Ticket | None:
        """Read the ticket once; return None if it may still come or the store fails.

        `give_up_at` is the time of the loop's clock at which the claim ends.
        """
        loop, tier = asyncio.get_running_loop(), self._estimator.tier
        began = loop.time()
        try:
            async with (
                asyncio.timeout_at(max(give_up_at, began + _LONGEST_READ_S)),
                budget.limit(),
            ):
                found = await self._read_ticket()
        except StoreUnavailableError as error:
            self._problem = error
            is_down = isinstance(error, StoreDownError) and not self._has_answered
            is_silent = budget.may_compute and loop.time() - self._heard_at >= SILENT_S
            self._is_useless = is_down or is_silent
            # Leases may have expired; live producers need time to renew them.
            self._lost_after_s = max(self._lost_after_s, self._lease.lease_s)
            return None
        except TimeoutError:
            tier.note_silence(loop.time() - began)
            self._is_useless = budget.may_compute
            if not self._has_answered:
                silent_s = loop.time() - self._heard_at
                self._problem = self._problem or StoreUnavailableError(
                    f"the store did not answer within {silent_s:.3g} s, so the ticket could not be "
                    "looked up"
                )
            return None
        self._problem, self._has_answered, self._heard_at = None, True, loop.time()
        budget.restart()
        return found

    @contextmanager
    def _hash_while_waiting(self) -> Iterator[None]:
        self._hash_soon()
        try:
            yield
        finally:
            self._stop_hashing()

    def _hash_soon(self) -> None:
        self._hashing = asyncio.get_running_loop().call_soon(self._hash_on)

    def _hash_on(self) -> None:
        self.keys = keys = self._tickets.keys_of(self._prompt)
        if not keys.hash_more(HASHED_BLOCKS):
            self._hash_soon()

    def _stop_hashing(self) -> None:
        if self._hashing is not None:
            self._hashing.cancel()

    def _forget_keys(self) -> None:
        self._stop_hashing()
        self.keys, self._prompt.keys = (), None

    async def _hashed(self) -> KeyRun:
        self._stop_hashing()
        self.keys = keys = await self._tickets.hashed_keys_of(self._prompt)
        return keys

    async def _wait_for_hint(self, next_hint: Callable[[float], object], timeout_s: float) -> None:
        """Wait until the store should be read again, at most `timeout_s` seconds.

        `next_hint` waits for the next message about the ticket, up to the given seconds. Once the
        open ticket is known, the wait continues after a PROGRESS message, and `_on_progress` is
        called with its number of blocks. Any other message ends the wait.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        while (left := until - loop.time()) > 0:
            hint = await next_hint(left)  # type: ignore[misc]
            blocks = _blocks_of(hint)
            if blocks is None or self._open is None:
                return
            self._ready_blocks = max(self._ready_blocks, blocks)
            self._on_progress(blocks)

    async def _read_ticket(self) -> Ticket | None:
        """Return the ticket; None if it may still come; raise HandoffError if it cannot be used."""
        ticket, found = await self._read()
        if ticket is not None:
            try:
                self._tickets.check(ticket, self._prompt.space, await self._hashed())
            except HandoffError as error:
                if not await self._is_over(ticket):
                    raise
                self._give_up(error, _GRACE_S)  # a new ticket may come under the same id
            else:
                return ticket
        if found is None:
            self._open = None
            return None
        self._tickets.check(found, self._prompt.space, await self._hashed())
        is_new = self._open is None or self._open.incarnation != found.incarnation
        self._open = found
        failure = self._failure if found == self._failed else found.failure
        if failure:
            text = f"the prefill node {found.producer} gave up: {failure}"
            failed = HandoffError(HandoffProblem.PRODUCER_FAILED.value, text)
            self._give_up(failed, _GRACE_S)
        elif not await self._lease.is_alive(found.incarnation):
            text = (
                f"the prefill node {found.producer} began the prompt, but no longer renews "
                "its lease: it died, or cannot reach the store"
            )
            lost = HandoffError(HandoffProblem.PRODUCER_LOST.value, text)
            self._give_up(lost, self._lost_after_s)
        else:
            self._over = None
            if is_new:
                self._near.learn(found)
            if is_new or not self._ready_blocks:
                self._on_progress(None)
        return None

    async def _is_over(self, ticket: Ticket) -> bool:
        tickets = self._tickets
        return (
            tickets.has_expired(ticket)
            or await tickets.is_claimed(ticket)
            or await tickets.read(self._ticket_id) != ticket
        )

    async def _read(self) -> tuple[Ticket | None, OpenTicket | None]:
        whole, opened = self._tickets.read, self._tickets.read_open
        if not self._has_read:
            self._has_read = True
            ticket = await whole(self._ticket_id)
            return ticket, None if ticket is not None else await opened(self._ticket_id)
        # After the first read, both are read at once: one round trip instead of two.
        reading = expected(opened(self._ticket_id))
        ticket, found = await both(whole(self._ticket_id), reading)
        if not isinstance(found, TierKVError):
            return ticket, found
        if ticket is None:
            raise found
        return ticket, None

    def _give_up(self, problem: HandoffError, patience_s: float) -> None:
        if self._over is None:
            self._over_since = asyncio.get_running_loop().time()
        self._over, self._patience_s = problem, patience_s

    async def _missing_ticket(self, waited_s: float) -> HandoffError:
        name = repr(self._ticket_id[:80])
        if self._open is not None:
            return HandoffError(
                HandoffProblem.NOT_YET.value,
                f"the ticket {name} was not complete within {waited_s:.3g} s: "
                f"{self._open.producer} has published {self._ready_blocks} of "
                f"{len(self._open.digests)} blocks; wait longer",
            )
        try:
            async with asyncio.timeout(_LONGEST_READ_S):
                claimed = await self._tickets.read_acknowledgement(self._ticket_id)
        except (TimeoutError, StoreUnavailableError):
            claimed = None
        if claimed is not None:
            return HandoffError(
                HandoffProblem.CLAIMED.value,
                f"the ticket {name} was already claimed by {claimed.claimer}: prefill "
                "the prompt again",
            )
        return HandoffError(
            HandoffProblem.NOT_YET.value,
            f"no ticket {name} was published within {waited_s:.3g} s: check that a "
            "prefill node works on it, or wait longer",
        )


def _blocks_of(hint: object) -> int | None:
    if isinstance(hint, str) and hint.startswith(PROGRESS) and hint[1:].isdecimal():
        return int(hint[1:])
    return None


log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 0.5
# The caller claims the wrong ticket, so computing the prompt would hide a mistake.
_ALWAYS_REFUSED = (HandoffProblem.INCOMPATIBLE.value, HandoffProblem.OTHER_PROMPT.value)


class ClaimPolicy(Enum):
    """The action of a claim if the ticket or blocks of the prompt cannot be read.

    WHOLE refuses the claim with the reason. RECOMPUTE uses the blocks that can be fetched, and
    computes the others. RECOMPUTE_ALL computes the whole prompt and looks for no ticket.

    A ticket also contains the first generated tokens. A request without a ticket generates these
    tokens itself. WHOLE and RECOMPUTE refuse a ticket for another prompt or from an incompatible
    node.
    """

    WHOLE = "whole"  # refuse the claim, with the reason
    RECOMPUTE = "recompute"  # use what can be fetched and compute the rest
    RECOMPUTE_ALL = "recompute_all"  # compute the whole prompt, without looking for a ticket


class Claims:
    """Claims published prompts: waits for a ticket, fetches the blocks, and admits the request.

    Args:
        tickets: reads tickets, and records that they were claimed.
        scheduler: admits the requests.
        fetcher: fetches blocks from storage to the host.
        arrivals: the requests that wait for storage or another node and can be aborted.
        source: reads blocks from other nodes' memory instead of storage.
        portions: fetches blocks for which the host has no room.
        estimator: estimates the times of fetching and computing, for claims that may compute.
        fetch_deadline_s: seconds to wait for the next blocks, counted anew whenever the ticket or
            blocks arrive. If the claim's own deadline is earlier, it is moved to the end of this
            wait.
        stats: counters of the node's hand-offs.
    """

    def __init__(  # noqa: PLR0913 - collaborators
        self,
        tickets: Tickets,
        scheduler: Scheduler,
        fetcher: Fetcher,
        arrivals: Arrivals,
        *,
        source: PeerSource,
        portions: Portions,
        estimator: Estimator,
        fetch_deadline_s: float,
        stats: HandoffStats,
    ) -> None:
        self._tickets = tickets
        self._scheduler = scheduler
        self._fetcher = fetcher
        self._arrivals = arrivals
        self._source = source
        self._portions = portions
        self._estimator = estimator
        self._fetch_deadline_s = fetch_deadline_s
        self._stats = stats

    async def claim(
        self,
        spec: RequestSpec,
        ticket_id: str,
        *,
        policy: ClaimPolicy,
        deadline_s: float,
        sampling: Mapping[str, str],
    ) -> tuple[Request, Ticket | None]:
        """Wait for a published prompt, fetch its blocks, and admit the request.

        Args:
            spec: the request.
            ticket_id: id of the ticket.
            policy: what happens if the ticket or a block cannot be read. WHOLE refuses the claim.
                RECOMPUTE continues, if need be without the ticket, and computes what is neither
                cached nor fetched. RECOMPUTE_ALL does not look for the ticket and computes the
                whole prompt.
            deadline_s: seconds that the claim may wait for the ticket and for free blocks, in
                total. A request that continues without a ticket waits for free blocks without this
                limit.
            sampling: names and values of the request's sampling parameters, which must equal those
                of the ticket; {} to accept any.

        Returns:
            The running request, and its ticket; None in place of the ticket if the request
                continues without one.

        Raises:
            HandoffError: the prompt could not be claimed; the reason is a HandoffProblem.
            TierKVError: the request is not valid, or could not be admitted.
        """
        self._scheduler.check(spec)
        check_id(ticket_id)
        give_up_at = asyncio.get_running_loop().time() + deadline_s
        budget = claim_budget(
            deadline_s,
            step_s=self._fetch_deadline_s,
            estimator=None if policy is ClaimPolicy.WHOLE else self._estimator,
        )
        ticket: Ticket | None = None
        ticket_at = 0.0
        async with self._arrivals.wait(spec) as arrival:
            if policy is ClaimPolicy.RECOMPUTE_ALL:
                alone = msgspec.structs.replace(spec, needs_logits=True, uses_cache=False)
                request = await self._scheduler.admit(alone)
            else:
                with (
                    self._refusals(),
                    self._source.supply(lambda: self._has_room(spec.num_blocks)) as near,
                ):
                    try:
                        since_s = time.monotonic()
                        ticket, keys = await wait_for_ticket(
                            self._tickets,
                            ticket_id,
                            spec.prompt,
                            budget,
                            deadline_s=deadline_s,
                            estimator=self._estimator,
                            fetch=partial(self._fetch_ahead, spec, near),
                            near=near,
                        )
                        ticket_at = time.monotonic()
                        tracing.adopt(ticket.trace)
                        tracing.record("claim.wait", since_s, ticket_id=ticket_id)
                        _check_sampling(ticket, sampling)
                    except HandoffError as error:
                        if policy is ClaimPolicy.WHOLE or error.reason in _ALWAYS_REFUSED:
                            raise
                        ticket = None
                        log.warning(
                            "request %s continues without its ticket and computes "
                            "what is not cached: %s",
                            spec.request_id,
                            error,
                        )
                        request = await self._without_ticket(spec, error, budget, near)
                    else:
                        near.learn(ticket)
                        budget.arrived()
                        request = await self._get(
                            spec, keys, policy, budget, give_up_at=give_up_at, near=near
                        )
            arrival.release = lambda: self._scheduler.end(request)
            request.ticket_at = ticket_at
        if ticket is None:
            self._stats.claims_without_ticket += 1
        else:
            self._stats.claimed_prompts += 1
            acknowledging = acknowledge(self._tickets, ticket, request.loads)
            self._scheduler.tiers.work.start(acknowledging, "tierkv-acknowledge")
        return request, ticket

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except HandoffError:
            self._stats.refused_claims += 1
            raise

    def _has_room(self, num_blocks: int) -> bool:
        return self._scheduler.tiers.eviction.available(Tier.DEVICE) >= num_blocks

    async def _fetch_ahead(self, spec: RequestSpec, near: Supply, prefix: Prompt) -> bool:
        """Fetch blocks of a claimed prompt to the host while the producer computes the rest.

        `prefix` is the prompt up to the last block to fetch. `near` represents the producer, whose
        memory is read if possible. If the device has enough free memory, the blocks are also loaded
        to the device. Return True if all blocks arrived.
        """
        await near.ask(prefix)
        budget = Budget(self._fetch_deadline_s, step_s=self._fetch_deadline_s)
        fetched = await self._fetcher.fetch(prefix, budget)
        near.came.append(fetched.tokens)
        near.direct.extend(fetched.direct)
        try:
            has_room = self._scheduler.tiers.eviction.available(Tier.DEVICE) >= 2 * spec.num_blocks
            if has_room and fetched.tokens:
                with suppress(TransferError):
                    num_blocks = fetched.tokens.stop // prefix.block_size
                    await self._scheduler.load_ahead(prefix.first_blocks(num_blocks))
        finally:
            fetched.release()
        return fetched.first_problem is None

    async def _get(
        self,
        spec: RequestSpec,
        keys: Sequence[StoredKey],
        policy: ClaimPolicy,
        budget: Budget,
        *,
        give_up_at: float,
        near: Supply,
    ) -> Request:
        """Fetch the prompt and admit the request; raise HandoffError if too few blocks arrive.

        If all blocks must arrive, the fetch is repeated until `give_up_at` (loop time) while the
        store fails.
        """
        prompt, pause_s = spec.prompt, _FIRST_PAUSE_S
        while True:
            await near.ask(prompt)
            fetched = await self._fetch_and_load(spec, keys, budget)
            _note(fetched, near)  # this may not be the last attempt
            problem = fetched.first_problem
            if policy is not ClaimPolicy.WHOLE or not self._may_try_again(problem, give_up_at):
                left_s = give_up_at - asyncio.get_running_loop().time()
                async with deadline(left_s, _found_no_room):  # the request may still be queued then
                    request = await self._scheduler.admit(spec, fetched)
                request.matched_at, request.fetched_at = fetched.matched_at, fetched.ended_at
                is_whole = request.cached_tokens == prompt.num_tokens
                if not is_whole and (problem is None or problem is NO_ROOM):
                    problem = await self._portions.fetch_or_end(request, budget, keys)
                    is_whole = request.cached_tokens == prompt.num_tokens
                if is_whole or policy is not ClaimPolicy.WHOLE:
                    return request
                self._scheduler.end(request)
                if not self._may_try_again(problem, give_up_at):
                    raise _incomplete(request, problem)
            fetched.release()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _may_try_again(self, problem: GetOutcome | None, give_up_at: float) -> bool:
        has_failed = problem is not None and problem.status is GetStatus.FAILED
        return has_failed and asyncio.get_running_loop().time() + _FIRST_PAUSE_S < give_up_at

    async def _fetch_and_load(
        self, spec: RequestSpec, keys: Sequence[StoredKey], budget: Budget
    ) -> Fetched:
        loads = LoadsAhead(spec, self._scheduler, self._has_room)
        fetched: Fetched | None = None
        try:
            async with supervised({"tierkv-load-ahead": loads.run}):
                fetched = await self._fetcher.fetch(
                    spec.prompt, budget, on_arrival=loads.arrived, promised=keys
                )
        except BaseException:  # a cancel while the loads ahead end, too
            if fetched is not None:
                fetched.release()
            raise
        return fetched

    async def _without_ticket(
        self, spec: RequestSpec, error: HandoffError, budget: Budget, near: Supply
    ) -> Request:
        fetched = None
        if error.reason != HandoffProblem.UNAVAILABLE.value:
            fetched = await self._fetcher.fetch(spec.prompt, budget)
            _note(fetched, near)
        return await self._scheduler.admit(
            msgspec.structs.replace(spec, needs_logits=True), fetched
        )


async def acknowledge(tickets: Tickets, ticket: Ticket, loads: Sequence[Movement] = ()) -> None:
    """Wait for the loads of a ticket's blocks, then record in the store that it was claimed.

    The claim is recorded even if a load failed. If the store fails, no error is raised, and the
    ticket stays until it expires.

    Args:
        tickets: writes the record.
        ticket: the claimed ticket.
        loads: copies of the ticket's blocks to the device.
    """
    for load in loads:
        with suppress(TransferError):
            await load.done()
    with suppress(StoreUnavailableError):
        await tickets.acknowledge(ticket)


def _note(fetched: Fetched, near: Supply) -> None:
    """Collect the token ranges of all fetches of one claim, to count tokens by their source."""
    fetched.earlier = tuple(near.came)
    near.came.append(fetched.tokens)
    near.direct.extend(fetched.direct)
    fetched.direct = tuple(near.direct)


def _check_sampling(ticket: Ticket, ours: Mapping[str, str]) -> None:
    if ticket.sampling and ours and ticket.sampling != ours:
        raise HandoffError(
            HandoffProblem.INCOMPATIBLE.value,
            "the ticket's first tokens were sampled with other parameters: "
            + ", ".join(differences(dict(ours), ticket.sampling)),
        )


def _found_no_room() -> HandoffError:
    return HandoffError(
        HandoffProblem.NO_ROOM.value,
        "other requests held all blocks until the claim's deadline: retry, or add device blocks",
    )


def _incomplete(request: Request, problem: GetOutcome | None) -> HandoffError:
    if problem is NO_ROOM:
        return _found_no_room()
    reason = {
        GetStatus.DAMAGED: HandoffProblem.DAMAGED,
        GetStatus.FAILED: HandoffProblem.UNAVAILABLE,
    }.get(problem.status if problem else GetStatus.MISS, HandoffProblem.INCOMPLETE)
    return HandoffError(
        reason.value,
        f"only {request.cached_tokens} of {request.spec.prompt.num_tokens} prompt "
        "tokens could be loaded: "
        f"{(problem.reason if problem else '') or 'the next block is not in storage'}",
    )


# A load takes half a millisecond of the loop's time, in which PCIe 5 moves 25 MiB. Five loads for a
# prompt of 80 MiB took a tenth of the loop's time during the fetch (2-core x86-64 VM and H200).
MIN_BYTES = 32 << 20


class Ahead:
    """The task that fetches blocks of a claimed prompt before the ticket is written.

    The fetched blocks have no lease: they may be evicted for other requests, and the claim then
    fetches them again.

    Args:
        prompt: the claimed prompt.
        fetch: called with the part of the prompt whose blocks are stored, from the prompt's start;
            fetches these blocks, and returns True if all of them arrived.
    """

    def __init__(self, prompt: Prompt, fetch: Callable[[Prompt], Awaitable[bool]]) -> None:
        self._prompt = prompt
        self._fetch = fetch
        self._wanted = 0
        self._done = 0
        self._came = asyncio.Event()

    def ready(self, num_blocks: int | None) -> None:
        """Report how many leading blocks of the prompt are in storage, so that `run` fetches them.

        Args:
            num_blocks: number of blocks, counted from the prompt's start; None if it is unknown, to
                fetch as many as there are.
        """
        most = self._prompt.num_blocks
        self._wanted = max(self._wanted, most if num_blocks is None else min(num_blocks, most))
        self._came.set()

    async def run(self) -> None:
        """Fetch blocks until cancelled. Failures are ignored, because the claim fetches again."""
        while True:
            await self._came.wait()
            self._came.clear()
            if self._wanted <= self._done:
                continue
            # `_wanted` may be a guess, so from here on only new calls of `ready` count.
            prefix = self._prompt.first_blocks(self._wanted)
            self._wanted = self._done
            if await self._fetch(prefix):
                self._done = prefix.num_blocks


def claim_budget(deadline_s: float, *, step_s: float, estimator: Estimator | None) -> Budget:
    """Return the time that one claim may wait for its ticket and for its blocks together.

    Args:
        deadline_s: seconds that the claim may wait for storage; less than 0.1 counts as 0.1.
        step_s: after each arrival of blocks, the claim may wait for at least this many more
            seconds, even beyond `deadline_s`.
        estimator: estimates the times of fetching and computing, for a claim that can also compute
            blocks; None for a claim that needs the whole prompt.
    """
    return Budget(
        max(deadline_s, _LONGEST_READ_S), step_s=step_s, estimator=estimator, is_claim=True
    )


async def wait_for_ticket(  # noqa: PLR0913 - the ticket, its deadline, and sources
    tickets: Tickets,
    ticket_id: str,
    prompt: Prompt,
    budget: Budget,
    *,
    deadline_s: float,
    estimator: Estimator,
    fetch: Callable[[Prompt], Awaitable[bool]],
    near: Supply,
) -> tuple[Ticket, Sequence[StoredKey]]:
    """Wait for a ticket, and meanwhile fetch the blocks that are stored already.

    Args:
        tickets: reads tickets from the store.
        ticket_id: id of the ticket.
        prompt: the prompt that the ticket must be for.
        budget: the time that the claim may wait for storage, from `claim_budget`.
        deadline_s: seconds after which the call raises in any case.
        estimator: measures how long the store takes to answer.
        fetch: called with the part of `prompt` whose blocks are stored, from the prompt's start;
            fetches these blocks, and returns True if all of them arrived.
        near: reads blocks from the memory of the prefill node.

    Returns:
        The ticket, and the keys of all blocks that it names.

    Raises:
        HandoffError: no ticket came in time, or the ticket cannot be used; the reason is a
            HandoffProblem.
    """
    ahead = Ahead(prompt, fetch)
    watch = Watch(
        tickets,
        ticket_id,
        prompt,
        estimator=estimator,
        on_progress=ahead.ready,
        near=near,
    )
    beside = {"tierkv-claim-ahead": ahead.run, "tierkv-claim-producer": watch.ask_producer}
    async with supervised(beside):
        return await watch.ticket(budget, deadline_s), watch.keys


class LoadsAhead:
    """Loads of fetched blocks to the device, while the rest of the prompt is still fetched.

    A load has MIN_BYTES bytes or more. The request itself loads the blocks that arrive last.

    Args:
        spec: the claim's request.
        scheduler: loads the blocks.
        has_room: a function of a number of blocks; returns True if the device has room for so many
            blocks.
    """

    def __init__(
        self, spec: RequestSpec, scheduler: Scheduler, has_room: Callable[[int], bool]
    ) -> None:
        self._spec = spec
        self._scheduler = scheduler
        self._has_room = has_room
        self._min_blocks = MIN_BYTES / scheduler.tiers.mover.planes.layout.block_bytes
        self._on_host = self._begun = self._on_device = 0
        self._came = asyncio.Event()

    def arrived(self, num_blocks: int) -> None:
        """Record that the prompt's first `num_blocks` blocks are on the host and can be loaded."""
        self._on_host = min(num_blocks, self._spec.prompt.num_blocks)
        if self._on_host - self._begun >= self._min_blocks:
            self._came.set()

    async def run(self) -> None:
        """Load fetched blocks to the device as they arrive on the host, until cancelled.

        A load that runs at the time of the cancel continues, and the request uses its blocks.
        """
        while True:
            await self._came.wait()
            self._came.clear()
            on_host = self._begun = self._on_host
            if self._has_room(self._spec.num_blocks - self._on_device):
                with suppress(TransferError):  # the request tries again, and raises then
                    await self._scheduler.load_ahead(self._spec.prompt.first_blocks(on_host))
                    self._on_device = on_host
