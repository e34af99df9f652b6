"""Brings the rest of a prompt from storage to the host before its request is admitted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tierkv.cache.history import Event, Fate
from tierkv.cache.index import Index, Lease
from tierkv.cache.keys import Prompt, StoredKey
from tierkv.errors import StoreUnavailableError
from tierkv.sched.fetch_groups import NO_ROOM, FetchGroups, Progress, SharedTails, Source
from tierkv.sched.log_throttle import LogThrottle
from tierkv.sched.tiers import Tiers
from tierkv.sched.worth import Decision, Estimator, FetchPolicy
from tierkv.storage.protocol import GetOutcome, GetStatus
from tierkv.transfer.storage_io import StorageIO

log = logging.getLogger("tierkv.fetcher")
_FATES = {GetStatus.DAMAGED: Fate.DAMAGED, GetStatus.FAILED: Fate.FAILED}
# How long a store that was told to stop may take to leave the buffers before the request goes on
# without it. Most leave within a turn of the loop, and then the fetch ends as any other.
LEAVE_S = 0.05


@dataclass(slots=True)
class Fetched:
    """What is on the host now because it was asked for.

    tokens: the prompt's tokens that came from storage for this call. earlier: those that came for
        the same request before it, if its owner says so.
    first_problem: why it ended before the end of the prompt, None if it did not.
    It stays on the host until `release`, which the owner calls once the request is admitted, or
    earlier: then it may be evicted, and the request matches less.
    """

    tokens: range
    first_problem: GetOutcome | None
    _release: Callable[[], None]
    is_released: bool = False
    earlier: tuple[range, ...] = ()

    def release(self) -> None:
        """Let it be evicted again. More than once is as good as once."""
        if not self.is_released:
            self.is_released = True
            self._release()


class Fetcher:
    """One fetch per block at a time: who wants a block that is on its way waits for it.

    estimator: whether a fetch is worth its time, and learns from each. None: all are.
    source: where blocks come from, if not from `storage` alone.
    """

    def __init__(
        self,
        tiers: Tiers,
        storage: StorageIO,
        estimator: Estimator | None = None,
        *,
        source: Source | None = None,
    ) -> None:
        self._tiers = tiers
        self._index: Index = tiers.index
        self._storage = storage
        self._source: Source = source or storage
        self._groups = FetchGroups(tiers, self._source)
        self.num_held = 0  # results that have not been released yet
        self._in_flight: dict[bytes, asyncio.Future[None]] = {}
        self._tails = SharedTails(tiers, storage)
        self._worth = FetchWorth(tiers, estimator)
        self._estimator = self._worth.estimator

    @property
    def num_in_flight(self) -> int:
        """Blocks that are being asked for or fetched."""
        return len(self._in_flight)

    def findings(self) -> list[str]:
        """What is wrong, in words, when nothing is on its way."""
        wrong = []
        if self._in_flight:
            wrong.append(f"nothing runs, but {len(self._in_flight)} blocks are marked as in flight")
        return wrong + self._worth.findings()

    def is_fetching(self, digest: bytes) -> bool:
        return digest in self._in_flight

    async def fetch(
        self,
        prompt: Prompt,
        *,
        deadline_s: float,
        policy: FetchPolicy = FetchPolicy.WAIT_COMPLETE,
        on_arrival: Callable[[int], None] = lambda _: None,
        promised: Sequence[StoredKey] = (),
    ) -> Fetched:
        """Bring what storage has of `prompt` beyond the local match, in order, without a gap.

        Whatever goes wrong with storage ends the fetch early and is told in `first_problem`; it
        never raises for it. The result is what has arrived when `deadline_s` seconds are over
        (WAIT_COMPLETE: over without an arrival), or earlier, where it is not worth the wait; also
        if the store is not done with the host slots by then, which stay taken until it is.
        on_arrival: called with how many of the prompt's first blocks are on the host, while more
        are fetched. promised: all keys of the prompt, where a ticket says that they are stored: it
        is not asked whether they are. Cancelling it leaves nothing held.
        """
        outcome: asyncio.Future[Fetched] = asyncio.get_running_loop().create_future()
        self._tiers.start(
            self._run(prompt, promised, deadline_s, policy, outcome, on_arrival),
            name="tierkv-fetch",
        )
        try:
            return await asyncio.shield(outcome)
        except asyncio.CancelledError:
            outcome.add_done_callback(_let_go)
            raise

    def _release(self, lease: Lease) -> None:
        self._index.release(lease)
        self.num_held -= 1
        self._tiers.capacity_changed()

    async def _run(  # noqa: PLR0917 - what was asked for, and where the answer goes
        self,
        prompt: Prompt,
        promised: Sequence[StoredKey],
        deadline_s: float,
        policy: FetchPolicy,
        outcome: asyncio.Future[Fetched],
        on_arrival: Callable[[int], None],
    ) -> None:
        match = self._index.match(prompt)
        progress = Progress(self._index.hold(match.node, match.num_blocks))
        progress.first_token = match.num_blocks * self._index.block_size
        give_up_at = asyncio.get_running_loop().time() + deadline_s
        scope = asyncio.timeout(deadline_s)
        try:
            async with scope:
                patience = Patience(
                    scope, deadline_s, policy, lambda: self._go_on(prompt, progress, outcome)
                )
                with patience.watching():
                    await self._fetch(prompt, promised, progress, patience, on_arrival)
        except TimeoutError:
            if not progress.is_whole:
                progress.ends(Fate.LATE, "storage took too long")
            # Before its deadline: the estimate was meant to end it.
            progress.was_given_up = (scope.when() or 0.0) < give_up_at
        except StoreUnavailableError as error:
            progress.ends(Fate.FAILED, str(error))
        except BaseException:
            # Nothing expected: it goes up and stops the service, and who waits hears of that.
            outcome.cancel()
            raise
        finally:
            self._finish_claims(progress)
        if outcome.done():  # the request went on without it
            for lease in (progress.tail, progress.lease):
                if lease is not None:
                    self._index.release(lease)
            self._tiers.capacity_changed()
            return
        self._worth.note(prompt, progress)
        lease = progress.lease
        if progress.tail is not None:
            lease = progress.tail
            self._index.release(progress.lease)
        outcome.set_result(self._fetched(progress, lease))

    def _go_on(self, prompt: Prompt, progress: Progress, outcome: asyncio.Future[Fetched]) -> None:
        """The store has not left the buffers though it was told to: the request goes on with what
        has arrived. The slots stay lent until the store is done with them, and nobody else waits
        for it."""
        if outcome.done():
            return
        progress.ends(Fate.LATE, "storage took too long, and still uses the host slots")
        self._finish_claims(progress)
        self._worth.note(prompt, progress)
        end = progress.tail or progress.lease
        outcome.set_result(self._fetched(progress, self._index.hold(end.node, end.num_blocks)))

    def _fetched(self, progress: Progress, lease: Lease) -> Fetched:
        start = progress.first_token
        self.num_held += 1
        return Fetched(
            range(start, start + progress.num_tokens),
            progress.first_problem,
            lambda: self._release(lease),
        )

    async def _fetch(
        self,
        prompt: Prompt,
        promised: Sequence[StoredKey],
        progress: Progress,
        patience: Patience,
        on_arrival: Callable[[int], None],
    ) -> None:
        keys = await self._wait_for_others(prompt, promised, progress, patience)
        if not keys:
            return
        missing = sum(key.num_tokens for key in keys)
        question = self._estimator.decide_question(missing, patience.policy)
        if not question.fetches:
            self._worth.refuse(progress, question)
            return
        self._claim([key.digest for key in keys], progress)
        patience.until(question.give_up_s)
        self._begin_to_wait(progress, patience)
        if promised and not self._storage.slices.peer_sizes:  # else of which size is a question
            present = len(keys)
        else:
            asked = self._source.count_present(keys)
            present = await self._worth.answer(asked, missing, question.give_up_s)
        if present < len(keys):
            progress.first_problem = GetOutcome(GetStatus.MISS, "not in storage")
        # Where nothing is present the time for the answer is that for a shared tail, too.
        if present and not self._is_worth_it(keys[:present], progress, patience):
            return

        def arrived() -> None:
            patience.arrived()
            self._worth.arrived(progress)
            if progress.fate is None:  # else the request has gone on without it
                on_arrival(progress.lease.num_blocks)

        await self._groups.fetch(prompt, progress, keys[:present], arrived)
        if progress.first_problem is None:
            progress.is_whole = True
        elif _is_gap(progress.first_problem):
            progress.is_whole = True
            await self._fetch_shared_tail(prompt, progress)

    def _is_worth_it(
        self, keys: Sequence[StoredKey], progress: Progress, patience: Patience
    ) -> bool:
        """Whether to fetch `keys`, and then until when."""
        tokens = sum(key.num_tokens for key in keys)
        decision = self._estimator.decide(tokens, patience.policy)
        if not decision.fetches:
            self._worth.refuse(progress, decision)
            return False
        self._worth.expect(progress, tokens)
        is_bound = patience.policy is not FetchPolicy.DEADLINE
        patience.until(decision.give_up_s if is_bound else None)
        return True

    async def _fetch_shared_tail(self, prompt: Prompt, progress: Progress) -> None:
        """Bring a tail that another prompt left where this one goes on, if storage has one."""
        found = await self._tails.find(prompt, progress.lease, missing=progress.claimed)
        if found is None:
            return
        digest = found.key.digest
        if busy := self._in_flight.get(digest):
            await asyncio.shield(busy)
            partial = self._index.match(prompt).partial
            if partial is not None:
                progress.tail = self._index.hold(partial.node, partial.block + 1)
            return
        self._claim([digest], progress)
        space = self._index.root_of(prompt).space
        slots = await self._groups.take(1, space)
        if slots is None:
            return
        try:
            progress.tail = await self._tails.fetch(prompt, progress.lease, found, slots)
        finally:
            self._groups.settled(slots, space)
        if progress.tail is not None:
            progress.num_tokens += found.num_shared
            if progress.first_token + progress.num_tokens == prompt.num_tokens:
                progress.first_problem = None  # what was missing came by another name

    async def _wait_for_others(
        self,
        prompt: Prompt,
        promised: Sequence[StoredKey],
        progress: Progress,
        patience: Patience,
    ) -> Sequence[StoredKey]:
        """The keys beyond the local match, once none of them is being fetched by another call."""
        while True:
            match = self._index.match(prompt)
            keys = (promised or self._tiers.prompt_keys(prompt))[match.num_blocks :]
            if match.num_blocks > progress.lease.num_blocks:
                longer = self._index.hold(match.node, match.num_blocks)
                self._index.release(progress.lease)
                progress.lease = longer
                progress.first_token = match.num_blocks * self._index.block_size
            partial = match.partial
            if keys and keys[0].is_tail and partial and partial.num_tokens >= keys[0].num_tokens:
                progress.tail = self._index.hold(partial.node, partial.block + 1)
                return []
            busy = next((f for key in keys if (f := self._in_flight.get(key.digest))), None)
            if busy is None:
                return keys
            tokens = sum(key.num_tokens for key in keys)
            decision = self._estimator.decide(tokens, patience.policy)
            if not decision.fetches:
                self._worth.refuse(progress, decision)
                return []
            self._tiers.decisions.wait_storage += 1
            patience.until(decision.give_up_s)
            self._begin_to_wait(progress, patience)
            await asyncio.shield(busy)

    def _begin_to_wait(self, progress: Progress, patience: Patience) -> None:
        could_compute = patience.policy is FetchPolicy.BEST_EFFORT
        if could_compute and self._estimator.prefill.is_known and progress.waits_since is None:
            progress.waits_since = patience.now()

    def _claim(self, digests: Sequence[bytes], progress: Progress) -> None:
        """Who wants these waits for this fetch, until `_finish_claims`."""
        loop = asyncio.get_running_loop()
        self._in_flight |= {digest: loop.create_future() for digest in digests}
        progress.claimed += digests

    def _finish_claims(self, progress: Progress) -> None:
        for digest in progress.claimed:
            self._in_flight.pop(digest).set_result(None)
        progress.claimed.clear()


class FetchWorth:
    """estimator: decides, and learns; None: every fetch is worth its time."""

    def __init__(self, tiers: Tiers, estimator: Estimator | None) -> None:
        self._tiers = tiers
        self._ended_early = LogThrottle(log, "fetch ended early (x%d): %s")
        self.estimator = estimator or Estimator(
            bytes_per_token=1.0, policy=FetchPolicy.WAIT_COMPLETE
        )
        self._arrived_bytes = 0.0  # since the start, for all fetches

    def findings(self) -> list[str]:
        """What is wrong, in words, when nothing is on its way."""
        queued = self.estimator.queued_bytes
        if abs(queued) < 1:
            return []
        return [f"nothing runs, but {queued:.0f} bytes are counted as queued for fetches"]

    def refuse(self, progress: Progress, decision: Decision) -> None:
        self._tiers.decisions.recompute_storage += 1
        progress.ends(Fate.NOT_WORTH_IT, decision.reason)

    async def answer(self, question: Awaitable[int], tokens: int, give_up_s: float | None) -> int:
        """The tier's answer; how long it took is remembered. tokens: what is asked about.
        give_up_s: how long it may take; a tier that fails before that is one that was waited for
        so long in vain."""
        loop = asyncio.get_running_loop()
        began, in_time = loop.time(), False
        try:
            found = await question
            in_time = True
        finally:
            took = loop.time() - began
            waited = took if in_time else max(took, give_up_s or 0.0)
            self.estimator.note_answer(tokens, waited, in_time=in_time)
        return found

    def expect(self, progress: Progress, tokens: int) -> None:
        """So many are fetched from now on: others queue behind them."""
        self._tiers.decisions.fetch_storage += tokens > 0
        progress.began = asyncio.get_running_loop().time()
        progress.queued_before = self.estimator.queued_bytes
        progress.arrived_before = self._arrived_bytes
        progress.expected_bytes = tokens * self.estimator.bytes_per_token
        self.estimator.queued_bytes += progress.expected_bytes

    def arrived(self, progress: Progress) -> None:
        """More of it is here, or all that will be."""
        num_bytes = progress.num_tokens * self.estimator.bytes_per_token
        self._arrived_bytes += num_bytes - progress.arrived_bytes
        progress.arrived_bytes = num_bytes

    def note(self, prompt: Prompt, progress: Progress) -> None:
        """What the fetch came to: for the estimate, for `explain`, and for the log."""
        now = asyncio.get_running_loop().time()
        self._tiers.decisions.recompute_late += progress.fate is Fate.LATE
        if progress.waits_since is not None:
            self.estimator.note_wait(progress.num_tokens, now - progress.waits_since)
        if progress.expected_bytes:
            self.arrived(progress)
            self.estimator.queued_bytes -= progress.expected_bytes
            moved = progress.arrived_bytes
            if moved >= progress.expected_bytes or progress.fate is Fate.LATE:
                # Of what was queued before it, only what came: if nothing did, the tier is slow.
                by_others = self._arrived_bytes - progress.arrived_before - moved
                queued = min(progress.queued_before, by_others)
                is_whole = moved >= progress.expected_bytes
                self.estimator.note_fetch(moved + queued, now - progress.began, is_whole=is_whole)
        problem = progress.first_problem
        if problem is None:
            return
        fate = progress.fate or _FATES.get(problem.status)
        if fate is not None:
            event = Event(fate, "storage", now, problem.reason)
            self._tiers.history.record(prompt, progress.lease.num_blocks, event)
        if problem.status is not GetStatus.MISS:
            if progress.was_given_up:
                log.debug("fetch ended early: %s", problem.reason)
            else:
                self._ended_early.warn(problem.reason)


class Patience:
    """When to give up: `deadline_s` after the start, or sooner; after each arrival, if the policy
    is to wait for all there is.

    scope: what is cancelled then. on_stuck: called if LEAVE_S later it has not ended.
    """

    def __init__(
        self,
        scope: asyncio.Timeout,
        deadline_s: float,
        policy: FetchPolicy,
        on_stuck: Callable[[], None],
    ) -> None:
        self.policy = policy
        self._scope = scope
        self._deadline_s = deadline_s
        self._on_stuck = on_stuck
        self._last = self.now() + deadline_s
        self._timer = self._timer_at(self._last)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Afterwards nobody is stuck."""
        try:
            yield
        finally:
            self._timer.cancel()

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def until(self, seconds: float | None) -> None:
        """Give up after so many seconds from now; None for the deadline."""
        latest = self._last
        self._reschedule(latest if seconds is None else min(latest, self.now() + seconds))

    def arrived(self) -> None:
        if self.policy is FetchPolicy.WAIT_COMPLETE:
            self._last = self.now() + self._deadline_s
            self._reschedule(self._last)

    def _reschedule(self, when: float) -> None:
        self._scope.reschedule(when)
        self._timer.cancel()
        self._timer = self._timer_at(when)

    def _timer_at(self, when: float) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_at(when + LEAVE_S, self._on_stuck)


def _is_gap(problem: GetOutcome) -> bool:
    """Whether storage does not have the next block."""
    return problem.status is GetStatus.MISS and problem is not NO_ROOM


def _let_go(outcome: asyncio.Future[Fetched]) -> None:
    """What was fetched for a caller that has gone."""
    if not outcome.cancelled():
        outcome.result().release()
