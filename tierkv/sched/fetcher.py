"""Brings the rest of a prompt from storage to the host before its request is admitted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from tierkv.cache.history import Event, Fate
from tierkv.cache.index import Index, Lease
from tierkv.cache.keys import Prompt, StoredKey
from tierkv.errors import StoreUnavailableError
from tierkv.sched.estimate import Decision, Estimator, FetchPolicy
from tierkv.sched.fetch_groups import FetchGroups, Source
from tierkv.sched.fetched import Fetched, Progress
from tierkv.sched.patience import Patience
from tierkv.sched.seldom import Seldom
from tierkv.sched.shared_tail import SharedTails
from tierkv.sched.tiers import Tiers
from tierkv.storage.protocol import GetOutcome, GetStatus
from tierkv.transfer.storage_io import StorageIO

__all__ = ["Fetched", "Fetcher", "Source"]

log = logging.getLogger("tierkv.fetcher")


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
        self._source: Source = source or storage
        self._groups = FetchGroups(tiers, self._source)
        self.num_held = 0  # results that have not been released yet
        self._in_flight: dict[bytes, asyncio.Future[None]] = {}
        self._tails = SharedTails(tiers, storage)
        self._ended_early = Seldom(log, "fetch ended early (x%d): %s")
        self._estimator = estimator or Estimator(
            bytes_per_token=1.0, policy=FetchPolicy.WAIT_COMPLETE
        )

    @property
    def num_in_flight(self) -> int:
        """Blocks that are being asked for or fetched."""
        return len(self._in_flight)

    def is_fetching(self, digest: bytes) -> bool:
        return digest in self._in_flight

    async def fetch(
        self,
        prompt: Prompt,
        *,
        deadline_s: float,
        policy: FetchPolicy = FetchPolicy.WAIT_COMPLETE,
        on_arrival: Callable[[int], None] = lambda _: None,
    ) -> Fetched:
        """Bring what storage has of `prompt` beyond the local match, in order, without a gap.

        Whatever goes wrong with storage ends the fetch early and is told in `first_problem`; it
        never raises for it. The result is what has arrived when `deadline_s` seconds are over
        (WAIT_COMPLETE: over without an arrival), or earlier, where it is not worth the wait; also
        if the store is not done with the host slots by then, which stay taken until it is.
        on_arrival: called with how many of the prompt's first blocks are on the host, while more
        are fetched. Cancelling it leaves nothing held.
        """
        outcome: asyncio.Future[Fetched] = asyncio.get_running_loop().create_future()
        self._tiers.start(
            self._run(prompt, deadline_s, policy, outcome, on_arrival), name="tierkv-fetch"
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

    async def _run(
        self,
        prompt: Prompt,
        deadline_s: float,
        policy: FetchPolicy,
        outcome: asyncio.Future[Fetched],
        on_arrival: Callable[[int], None],
    ) -> None:
        match = self._index.match(prompt)
        progress = Progress(self._index.hold(match.node, match.num_blocks))
        progress.first_token = match.num_blocks * self._index.block_size
        give_up_at = asyncio.get_running_loop().time() + deadline_s
        try:
            async with asyncio.timeout(deadline_s) as scope:
                patience = Patience(
                    scope, deadline_s, policy, lambda: self._go_on(prompt, progress, outcome)
                )
                with patience.watching():
                    await self._fetch(prompt, progress, patience, on_arrival)
        except TimeoutError:
            progress.ends(Fate.LATE, "storage took too long")
            # Before its deadline: the estimate was meant to end it.
            progress.was_given_up = asyncio.get_running_loop().time() < give_up_at
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
        self._note(prompt, progress)
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
        self._note(prompt, progress)
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

    def _is_not_worth_it(self, progress: Progress, decision: Decision) -> None:
        self._tiers.decisions.recompute_storage += 1
        progress.ends(Fate.NOT_WORTH_IT, decision.reason)

    def _note(self, prompt: Prompt, progress: Progress) -> None:
        """What the fetch came to: for the estimate, for `explain`, and for the log."""
        now = asyncio.get_running_loop().time()
        self._tiers.decisions.recompute_late += progress.fate is Fate.LATE
        if progress.expected_bytes:
            self._estimator.queued_bytes -= progress.expected_bytes
            moved = progress.num_tokens * self._estimator.bytes_per_token
            if moved >= progress.expected_bytes or progress.fate is Fate.LATE:
                self._estimator.note_fetch(moved + progress.queued_before, now - progress.began)
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

    async def _fetch(
        self,
        prompt: Prompt,
        progress: Progress,
        patience: Patience,
        on_arrival: Callable[[int], None],
    ) -> None:
        keys = await self._wait_for_others(prompt, progress, patience)
        if not keys:
            return
        missing = sum(key.num_tokens for key in keys)
        question = self._estimator.decide_question(missing, patience.policy)
        if not question.fetches:
            self._is_not_worth_it(progress, question)
            return
        loop = asyncio.get_running_loop()
        for key in keys:
            self._in_flight[key.digest] = loop.create_future()
            progress.claimed.append(key.digest)
        patience.until(question.give_up_s)
        present = await self._ask(keys)
        if present < len(keys):
            progress.first_problem = GetOutcome(GetStatus.MISS, "not in storage")
        tokens = sum(key.num_tokens for key in keys[:present])
        decision = self._estimator.decide(tokens, patience.policy)
        if present and not decision.fetches:
            self._is_not_worth_it(progress, decision)
            return
        self._tiers.decisions.fetch_storage += present > 0
        self._expect(progress, tokens)
        patience.until(None if patience.policy is FetchPolicy.DEADLINE else decision.give_up_s)

        def arrived() -> None:
            patience.arrived()
            if progress.fate is None:  # else the request has gone on without it
                on_arrival(progress.lease.num_blocks)

        is_whole = await self._groups.fetch(prompt, progress, keys[:present], arrived)
        if is_whole and present < len(keys):
            await self._fetch_shared_tail(prompt, progress)

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
        self._in_flight[digest] = asyncio.get_running_loop().create_future()
        progress.claimed.append(digest)
        slots = await self._groups.take(1, self._index.root_of(prompt).space)
        if slots is None:
            return
        progress.tail = await self._tails.fetch(prompt, progress.lease, found, slots)
        if progress.tail is not None:
            progress.num_tokens += found.num_shared

    async def _ask(self, keys: list[StoredKey]) -> int:
        in_time = False
        try:
            present = await self._source.count_present(keys)
            in_time = True
        finally:
            self._estimator.note_answer(in_time=in_time)
        return present

    def _expect(self, progress: Progress, tokens: int) -> None:
        """From now on others queue behind this fetch."""
        progress.began = asyncio.get_running_loop().time()
        progress.queued_before = self._estimator.queued_bytes
        progress.expected_bytes = tokens * self._estimator.bytes_per_token
        self._estimator.queued_bytes += progress.expected_bytes

    async def _wait_for_others(
        self, prompt: Prompt, progress: Progress, patience: Patience
    ) -> list[StoredKey]:
        """The keys beyond the local match, once none of them is being fetched by another call."""
        while True:
            match = self._index.match(prompt)
            keys = self._tiers.prompt_keys(prompt)[match.num_blocks :]
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
                self._is_not_worth_it(progress, decision)
                return []
            self._tiers.decisions.wait_storage += 1
            patience.until(decision.give_up_s)
            await asyncio.shield(busy)

    def _finish_claims(self, progress: Progress) -> None:
        for digest in progress.claimed:
            self._in_flight.pop(digest).set_result(None)
        progress.claimed.clear()


_FATES = {GetStatus.DAMAGED: Fate.DAMAGED, GetStatus.FAILED: Fate.FAILED}


def _let_go(outcome: asyncio.Future[Fetched]) -> None:
    """What was fetched for a caller that has gone."""
    if not outcome.cancelled():
        outcome.result().release()
