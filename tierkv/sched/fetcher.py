"""Brings the rest of a prompt from storage to the host before its request is admitted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from tierkv.cache.history import Fate
from tierkv.cache.index import Index, Lease
from tierkv.cache.keys import Prompt, StoredKey
from tierkv.errors import StoreUnavailableError
from tierkv.sched.estimate import Estimator, FetchPolicy
from tierkv.sched.fetch_groups import NO_ROOM, FetchGroups, Source
from tierkv.sched.fetch_worth import FetchWorth
from tierkv.sched.fetched import Fetched, Progress
from tierkv.sched.patience import Patience
from tierkv.sched.shared_tail import SharedTails
from tierkv.sched.tiers import Tiers
from tierkv.storage.protocol import GetOutcome, GetStatus
from tierkv.transfer.storage_io import StorageIO

__all__ = ["Fetched", "Fetcher", "Source"]


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


def _is_gap(problem: GetOutcome) -> bool:
    """Whether storage does not have the next block."""
    return problem.status is GetStatus.MISS and problem is not NO_ROOM


def _let_go(outcome: asyncio.Future[Fetched]) -> None:
    """What was fetched for a caller that has gone."""
    if not outcome.cancelled():
        outcome.result().release()
