"""Fetches blocks of prompts from storage to the host, before the prompts' requests are admitted."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Protocol

import numpy as np

from tierkv import tracing
from tierkv.cache.history import HistoryEvent, MissCause
from tierkv.cache.index import Lease, runs_of
from tierkv.cache.keys import TOKEN_BYTES, Prompt, StoredKey, Tail
from tierkv.cache.node import Ids, Mask, Space, Tier
from tierkv.errors import OutOfBlocksError, StoreUnavailableError
from tierkv.sched.budget import Budget
from tierkv.sched.copies import GROUP_BLOCKS, Beyond, keys_beyond, last_digest
from tierkv.sched.events import CacheEventKind
from tierkv.sched.log_throttle import LogThrottle
from tierkv.sched.tiers import Tiers
from tierkv.sched.worth import SLACK_S, Decision, Estimator, Transfer
from tierkv.storage.protocol import GetOutcome, GetStatus
from tierkv.tasks import task_group
from tierkv.transfer.storage_io import SharedTail, StorageIO

NO_ROOM = GetOutcome(GetStatus.MISS, "the host tier has no room")
NOT_IN_STORAGE = GetOutcome(GetStatus.MISS, "not in storage")


class Source(Protocol):
    """A source of stored blocks: the storage tier, or another node's memory."""

    async def count_present(self, keys: Sequence[StoredKey]) -> int:
        """Return how many of `keys` the source has before the first one that it lacks."""

    async def fetch(self, keys: Sequence[StoredKey], slot_ids: Ids) -> list[GetOutcome]:
        """Read blocks into host slots.

        Args:
            keys: the storage keys of the blocks.
            slot_ids: host slots to write, int32 [len(keys)]. The caller must not use or free them
                before the call has returned.

        Returns:
            One outcome for each key; the slot has the block if the outcome is HIT.
        """


@dataclass(slots=True)
class Landed:
    """The progress of a fetch.

    Attributes:
        lease: lease of the prompt's full blocks that are cached by now.
        tail: lease of a cached partial block after the full blocks; None without one.
        num_tokens: number of tokens that this fetch has brought.
        direct: ranges of the prompt's tokens that came from another node's memory.
        problem: the outcome by which the fetch stopped early, with its reason; None while it runs,
            or if all blocks came.
    """

    lease: Lease
    tail: Lease | None = None
    num_tokens: int = 0
    direct: list[range] = field(default_factory=list)
    problem: GetOutcome | None = None


@dataclass(slots=True, eq=False)
class _Group:
    """Up to GROUP_BLOCKS consecutive blocks that are fetched together.

    Attributes:
        slots: host slots that are written, int32 [len(keys)].
        kept: True for each slot that belongs to the index now, bool [len(keys)].
        has_ended: True once the slots that do not belong to the index are freed.
    """

    keys: Sequence[StoredKey]
    slots: Ids
    space: Space
    kept: Mask
    has_ended: bool = False


class FetchGroups:
    """Fetches consecutive blocks of a prompt into host slots, in groups of up to 32 blocks.

    Args:
        tiers: the device and host tiers of this node; blocks are fetched into its host slots.
        source: the storage tier or the other node's memory from which the blocks are read.
    """

    def __init__(self, tiers: Tiers, source: Source) -> None:
        self._tiers = tiers
        self._index = tiers.index
        self._source = source
        self._reserved: Counter[str] = Counter()  # slots that are not in the index yet, by space

    async def acquire(self, count: int, space: Space) -> Ids | None:
        """Acquire free host slots; if there are none, wait for running copies that will free some.

        Args:
            count: upper limit of the number of slots, at least 1.
            space: the space (part of the index for one fingerprint) of the blocks. The slots count
                towards its quota until `settled` is called.

        Returns:
            The slots, int32 [n], 1 <= n <= count; None if there are none and no copy will free any.
        """
        tiers = self._tiers
        while True:
            try:
                reserved = self._reserved[space.name]
                slots = tiers.eviction.acquire_some(Tier.HOST, count, space, reserved=reserved)
                self._reserved[space.name] += len(slots)
                return slots
            except OutOfBlocksError:
                if not tiers.eviction.is_making_room(Tier.HOST) and not tiers.copies.num_offloads:
                    return None
            await tiers.work.next_change()

    def settled(self, slots: Ids, space: Space) -> None:
        """End the reservation of slots for a fetch; the slots are now in the index, or free.

        Args:
            slots: the slots, from `acquire`.
            space: the space that was passed to `acquire`.
        """
        self._reserved[space.name] -= len(slots)
        if not self._reserved[space.name]:
            del self._reserved[space.name]

    async def fetch(
        self,
        prompt: Prompt,
        landed: Landed,
        keys: Sequence[StoredKey],
        on_arrival: Callable[[], None],
        *,
        num_first: int = GROUP_BLOCKS,
    ) -> None:
        """Fetch blocks of a prompt in groups, and insert them into the index in order.

        The next group is fetched while the previous group is inserted. If a block does not arrive,
        the call ends and `landed.problem` has the reason.

        Args:
            prompt: the prompt of the blocks.
            landed: the prompt's blocks that are in the index already; each inserted group is added.
            keys: the storage keys of the blocks to fetch, which follow the blocks of `landed`.
            on_arrival: called each time that a whole group is in the index.
            num_first: number of blocks in the first group.
        """
        space = self._index.spaces.root_of(prompt).space
        before: asyncio.Task[bool] | None = None
        at = 0
        async with task_group() as tasks:
            while at < len(keys):
                most = GROUP_BLOCKS if at else num_first
                slots = await self.acquire(min(most, len(keys) - at), space)
                if slots is None:
                    if await _arrived(before):
                        landed.problem = NO_ROOM
                    return
                none = np.zeros(len(slots), np.bool_)
                group = _Group(list(keys[at : at + len(slots)]), slots, space, none)
                self._tiers.slots.lend(Tier.HOST, slots)
                coming = tasks.create_task(
                    self._fetch(prompt, landed, group, before, on_arrival),
                    name="tierkv-fetch-group",
                )
                # A callback, since a task that is cancelled at once never runs its own code.
                coming.add_done_callback(partial(self._end, group))
                if not await _arrived(before):
                    return
                before = coming
                at += len(slots)

    async def _fetch(
        self,
        prompt: Prompt,
        landed: Landed,
        group: _Group,
        before: asyncio.Task[bool] | None,
        on_arrival: Callable[[], None],
    ) -> bool:
        """Fetch a group of blocks to the host, and insert it into the index.

        `before` is the task that fetches the preceding blocks. Return True if this group and all
        preceding groups arrived completely.
        """
        tiers, index = self._tiers, self._index
        keys, slots, kept, began = group.keys, group.slots, group.kept, tiers.events.now()
        outcomes = await self._source.fetch(keys, slots)
        if not await _arrived(before):
            return False
        arrived = 0
        for result in outcomes:
            if result.status is not GetStatus.HIT:
                landed.problem = result
                break
            arrived += 1
        first = landed.lease.num_blocks
        blocks = sum(not key.is_tail for key in keys[:arrived])
        if blocks:
            refused = index.insert(Tier.HOST, landed.lease, prompt, first + blocks, slots[:blocks])
            kept[:blocks] = True
            kept[list(refused)] = False
            node = landed.lease.node
            # The other blocks had copies on the host already.
            for start, stop in runs_of(kept[:blocks]):
                tiers.events.publish(
                    CacheEventKind.STORED, "host", node, first + start, first + stop
                )
            tiers.copies.note_stored(landed.lease.node, first, first + blocks, began)
        landed.direct += _direct(outcomes[:arrived], keys, first * index.block_size)
        if arrived > blocks:
            tail, kept[blocks] = index.insert_tail(
                Tier.HOST, landed.lease, prompt, int(slots[blocks])
            )
            if kept[blocks]:
                tiers.events.publish(CacheEventKind.STORED, "host", tail, tail.start, tail.end)
            landed.tail = index.hold(tail, tail.end)
            tiers.copies.note_stored(tail, tail.start, tail.end, began)
        self._end(group)  # before the next await, so that the slots never have two owners
        landed.num_tokens += sum(key.num_tokens for key in keys[:arrived])
        if arrived < len(keys):
            return False
        on_arrival()
        return True

    def _end(self, group: _Group, _: asyncio.Task[bool] | None = None) -> None:
        if group.has_ended:
            return
        group.has_ended = True
        self.settled(group.slots, group.space)
        self._tiers.slots.unlend(Tier.HOST, group.slots)
        self._tiers.slots.free(Tier.HOST, group.slots[~group.kept])


def _direct(outcomes: Sequence[GetOutcome], keys: Sequence[StoredKey], start: int) -> list[range]:
    """Return the ranges of tokens that came from another node's memory.

    `keys` belong to consecutive blocks, and `start` is the token number at which the first
    begins.
    """
    stops = list(accumulate((key.num_tokens for key in keys), initial=start))
    return [
        range(stops[at], stops[at + 1]) for at, result in enumerate(outcomes) if result.is_direct
    ]


async def _arrived(group: asyncio.Task[bool] | None) -> bool:
    if group is None:
        return True
    if not group.done():
        await asyncio.wait([group])
    return not group.cancelled() and group.exception() is None and group.result()


class SharedTails:
    """Finds and fetches tails (partial last blocks) that other prompts have stored.

    A tail is useful to a prompt if it begins with the same tokens as the prompt's first block that
    is not cached.
    """

    def __init__(self, tiers: Tiers, storage: StorageIO) -> None:
        self._tiers = tiers
        self._storage = storage

    async def find(
        self, prompt: Prompt, cached: Lease, *, missing: Collection[bytes]
    ) -> SharedTail | None:
        """Return the stored tail that shares the most tokens with the prompt's next block.

        The search reads one small value from storage.

        Args:
            prompt: the prompt to extend.
            cached: a lease of the prompt's cached blocks; the next block is the one after them.
            missing: digests of tails that storage is known not to have, even if it lists them.

        Returns:
            The tail; None if no tail shares more tokens of that block than are cached here.
        """
        wanted = prompt.block(cached.num_blocks)
        here = self._cached_tokens(prompt, cached.num_blocks)
        if len(wanted) <= here * TOKEN_BYTES:
            return None
        index = self._tiers.index
        parent = last_digest(index, cached.node, cached.num_blocks)
        found = await self._storage.tails.best(
            parent, wanted, prompt.extra(cached.num_blocks), prompt.space, missing=missing
        )
        return self.of_use(prompt, cached, found)

    def of_use(self, prompt: Prompt, cached: Lease, found: SharedTail | None) -> SharedTail | None:
        """Return `found` if it has more tokens of the prompt's next block than are cached here.

        Args:
            prompt: the prompt to extend.
            cached: a lease of the prompt's cached blocks. The next block is the first block after
                these.
            found: a stored tail that begins like the next block; None for none.

        Returns:
            `found`; None if this node has cached as many tokens, or `found` is None.
        """
        here = self._cached_tokens(prompt, cached.num_blocks)
        return found if found is not None and found.num_shared > here else None

    def _cached_tokens(self, prompt: Prompt, block: int) -> int:
        match = self._tiers.index.match(prompt)
        if match.num_blocks > block:
            return prompt.block_size
        return match.partial.num_tokens if match.partial and match.num_blocks == block else 0

    async def fetch(
        self, prompt: Prompt, cached: Lease, found: SharedTail, slots: Ids
    ) -> Lease | None:
        """Fetch a stored tail into a host slot and insert it into the index.

        Args:
            prompt: the prompt to extend.
            cached: a lease of the prompt's cached blocks; the tail is inserted after them.
            found: the stored tail, from `find`.
            slots: the host slot, int32 [1].

        Returns:
            A lease of the tail. None if the store has no valid value for it; the slot is free then.
        """
        tiers, index = self._tiers, self._tiers.index
        is_kept, began = False, tiers.events.now()
        tiers.slots.lend(Tier.HOST, slots)
        try:
            [outcome] = await self._storage.fetch([found.key], slots)
            if outcome.status is not GetStatus.HIT:
                return None
            whole = _ending_in(prompt, cached.num_blocks, found.tail)
            tail, is_kept = index.insert_tail(Tier.HOST, cached, whole, int(slots[0]))
            if is_kept:
                tiers.events.publish(CacheEventKind.STORED, "host", tail, tail.start, tail.end)
            lease = index.hold(tail, tail.end)
            tiers.copies.note_stored(tail, tail.start, tail.end, began)
            return lease
        finally:
            tiers.slots.unlend(Tier.HOST, slots)
            if not is_kept:
                tiers.slots.free(Tier.HOST, slots)


def _ending_in(prompt: Prompt, num_blocks: int, tail: Tail) -> Prompt:
    tokens = prompt.tokens[: num_blocks * prompt.block_token_bytes] + tail.tokens
    extras = {block: extra for block, extra in prompt.extras.items() if block < num_blocks}
    if tail.extra:
        extras[num_blocks] = tail.extra
    return Prompt(tokens, prompt.block_size, extras, prompt.space)


log = logging.getLogger(__name__)

_FATES = {GetStatus.DAMAGED: MissCause.DAMAGED, GetStatus.FAILED: MissCause.FAILED}


@dataclass(slots=True)
class Fetched:
    """The blocks that a fetch brought for a request, protected from eviction until `release`.

    The owner calls `release` once the request is admitted. After an earlier release the blocks may
    be evicted, and the request may find fewer of its tokens cached.

    Attributes:
        tokens: range of the prompt's tokens that this fetch brought.
        first_problem: the outcome by which the fetch ended before the end of the prompt, with its
            reason; None if it did not.
        earlier: ranges of tokens that earlier fetches brought for the same request; () unless the
            owner of this result sets them.
        direct: the parts of `tokens` and `earlier` that came from another node's memory.
        began_at: start of the fetch, in seconds of the monotonic clock.
        matched_at: time at which the keys to fetch were known, on the same clock.
        ended_at: end of the fetch, on the same clock.
    """

    tokens: range
    first_problem: GetOutcome | None
    _release: Callable[[], None]
    is_released: bool = False
    earlier: tuple[range, ...] = ()
    direct: tuple[range, ...] = ()
    began_at: float = 0.0
    matched_at: float = 0.0
    ended_at: float = 0.0

    @property
    def lacked_room(self) -> bool:
        """True if the fetch ended early because the host had no free slot for the next block."""
        return self.first_problem is NO_ROOM

    def release(self) -> None:
        """Allow the eviction of the blocks. Further calls do nothing."""
        if not self.is_released:
            self.is_released = True
            self._release()


class Fetcher:
    """Fetches blocks from storage for the requests of one node.

    If several calls need the same block, one of them fetches it; the other calls wait until it has
    arrived or failed.

    Args:
        tiers: the tiers of the node; fetched blocks come to the host.
        storage: the storage tier.
        estimator: estimates if fetching or computing is faster; each fetch updates its estimate of
            storage's speed.
        source: the object from which blocks are read, for example other nodes' memory; None for
            `storage`.

    Attributes:
        num_held: number of fetch results that have not been released yet.
    """

    def __init__(
        self,
        tiers: Tiers,
        storage: StorageIO,
        estimator: Estimator,
        *,
        source: Source | None = None,
    ) -> None:
        self.tiers = tiers
        self.storage = storage
        self.source = source or storage
        self.estimator = estimator
        self.groups = FetchGroups(tiers, self.source)
        self.tails = SharedTails(tiers, storage)
        self.in_flight: list[_Run] = []
        self.num_held = 0
        self.ended_early = LogThrottle(log, "a fetch from storage ended early (x%d): %s")

    @property
    def num_in_flight(self) -> int:
        """Number of blocks that running calls look up or fetch."""
        return sum(len(run.keys) for run in self.in_flight)

    def findings(self) -> list[str]:
        """Return violated invariants, one sentence each; call only when no fetch runs."""
        wrong = []
        if self.num_in_flight:
            wrong.append(f"no fetch runs, but {self.num_in_flight} blocks are marked as in flight")
        return wrong + self.estimator.findings()

    def is_fetching(self, key: StoredKey, block: int) -> bool:
        """Return True if a block is being looked up or fetched for some request now.

        Args:
            key: storage key of the block.
            block: index of the block in its prompt.
        """
        return self.busy([key], block) is not None

    async def fetch(
        self,
        prompt: Prompt,
        budget: Budget,
        *,
        on_arrival: Callable[[int], None] = lambda _: None,
        promised: Sequence[StoredKey] = (),
        is_part: bool = False,
        known: Beyond | None = None,
    ) -> Fetched:
        """Fetch the blocks of a prompt that are not cached here, in order without a gap.

        The call returns when all blocks have arrived, when `budget` is used up, or when computing
        is estimated to be faster. A problem with storage is reported in `first_problem` of the
        result, never raised. A fetch that runs out of budget continues in the background for a
        while, so that later requests find the blocks. If the call is cancelled, the blocks that it
        fetched can be evicted.

        Args:
            prompt: the prompt of the wanted blocks.
            budget: the seconds that the request may still wait.
            on_arrival: called after each arrival of blocks, with the number of the prompt's first
                blocks that are on the host by then.
            promised: keys of all blocks of the prompt, if a prefill node has stated that storage
                has them: storage is then not asked. () if no node has.
            is_part: True if this is one of several fetches whose total time the code that calls
                this method reports to the estimator.
            known: a recent answer of storage, used instead of a new lookup; None to look up.

        Returns:
            The blocks that arrived; call `release` on the result.
        """
        one = _Fetch(self, prompt, budget, promised, on_arrival, is_part, known)
        try:
            with tracing.span("fetch", tokens=prompt.num_tokens) as span:
                self.tiers.work.start(one.run(), name="tierkv-fetch")
                try:
                    async with budget.limit():
                        await asyncio.shield(one.outcome)
                except TimeoutError:
                    one.go_on_alone()
                fetched = await one.outcome
                if span is not None:
                    span.set_attribute("tierkv.fetched_tokens", len(fetched.tokens))
                return fetched
        except asyncio.CancelledError:
            one.outcome.add_done_callback(_release_fetched)
            raise

    def busy(self, keys: Sequence[StoredKey], start: int) -> asyncio.Future[None] | None:
        """Return a future for the end of a running fetch that shares blocks with `keys`.

        Args:
            keys: storage keys of consecutive blocks of a prompt.
            start: index of the first of these blocks.

        Returns:
            The future; None if there is no such fetch.
        """
        # A key depends on all tokens before it. Two runs of keys therefore share blocks exactly if
        # their keys agree at the first index that both have.
        for run in self.in_flight:
            at = max(run.start, start)
            if (
                at - run.start < len(run.keys)
                and at - start < len(keys)
                and run.keys[at - run.start].digest == keys[at - start].digest
            ):
                return run.ended
        return None

    def reserve(self, keys: Sequence[StoredKey], start: int) -> _Run:
        """Record that `keys` are being fetched; other fetches of these keys wait until `finish`.

        Args:
            keys: storage keys of consecutive blocks of a prompt.
            start: index of the first of these blocks.

        Returns:
            The record, to pass to `finish`.
        """
        run = _Run(start, keys, asyncio.get_running_loop().create_future())
        self.in_flight.append(run)
        return run

    def finish(self, run: _Run) -> None:
        """Record that the fetch `run` has ended, so that its blocks may be fetched again."""
        self.in_flight.remove(run)
        run.ended.set_result(None)

    def release(self, lease: Lease) -> None:
        """Release the lease of a fetch result."""
        self.tiers.index.release(lease)
        self.num_held -= 1
        self.tiers.work.capacity_changed()


@dataclass(slots=True, eq=False)
class _Run:
    """Consecutive blocks that a running fetch reads from storage.

    Attributes:
        start: position of the first block in the prompt.
        keys: storage keys of the blocks.
        ended: done when the fetch has ended.
    """

    start: int
    keys: Sequence[StoredKey]
    ended: asyncio.Future[None]


@dataclass(slots=True, eq=False)
class _Fetch:
    """One call of `Fetcher.fetch`: a task of its own, while the caller waits for `outcome`.

    Attributes:
        budget: the seconds that the request may still wait.
        promised: the keys of all blocks of the prompt, if a prefill node has stated that it stored
            them; otherwise ().
        on_arrival: called after each arrival of blocks, with the number of the prompt's first
            blocks that are on the host by then.
        is_part: True if the caller fetches in several calls and reports the total time itself.
        known: a recent answer of storage about this prompt; None to ask storage.
        outcome: the result of the fetch; set even if the fetch fails.
        landed: the blocks that have arrived.
        deadline_at: end of the fetch, in seconds of the loop's clock.
        first_token: number of prompt tokens that were cached before the fetch.
        claimed: the keys that only this call fetches now.
        transfer: the bytes of this fetch, by which the speed of storage is measured.
        is_whole: True once all blocks of this prompt that the fetch wants have arrived. A tail that
            another prompt has stored may be fetched after that.
        fate: the reason why the fetch stopped early, for example that it took too long or that the
            store could not be used. None while the fetch runs, if all blocks came, or if the reason
            is the failed read of a block, which `landed.problem` describes.
        question: the decision to ask storage; None if storage was not asked.
        is_late: True once the request went on without this fetch.
        began_at: start, in seconds of the monotonic clock.
        matched_at: time at which the keys to fetch were known, on the same clock; 0 before that.
    """

    fetcher: Fetcher
    prompt: Prompt
    budget: Budget
    promised: Sequence[StoredKey]
    on_arrival: Callable[[int], None]
    is_part: bool = False
    known: Beyond | None = None
    outcome: asyncio.Future[Fetched] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    landed: Landed = field(init=False)
    deadline_at: float = 0.0
    scope: asyncio.Timeout = field(init=False)
    first_token: int = 0
    claimed: list[_Run] = field(default_factory=list)
    transfer: Transfer | None = None
    question: Decision | None = None
    is_late: bool = False
    began_at: float = field(default_factory=time.monotonic)
    matched_at: float = 0.0
    fate: MissCause | None = None
    is_whole: bool = False

    async def run(self) -> None:
        index, tier = self.fetcher.tiers.index, self.fetcher.estimator.tier
        match = index.match(self.prompt)
        self.landed = Landed(index.hold(match.node, match.num_blocks))
        self.first_token = match.num_blocks * index.block_size
        is_over = False
        try:
            self.deadline_at = self.budget.deadline_at
            async with asyncio.timeout_at(self.deadline_at) as self.scope:
                await self._match_and_fetch()
        except TimeoutError:
            is_over = True
            if not self.is_whole:
                self._ends(MissCause.LATE, "storage took too long")
        except StoreUnavailableError as error:
            self._ends(MissCause.FAILED, str(error))
        except BaseException:
            # An unexpected error stops the service; cancel the caller's wait.
            self.outcome.cancel()
            raise
        finally:
            self._finish_claims()
            tier.num_late -= self.is_late
            tier.num_tries -= self.question is not None and self.question.is_try
        landed = self.landed
        self._learn_transfer(is_late=is_over)
        if self.outcome.done():  # the request went on without it
            for lease in (landed.tail, landed.lease):
                if lease is not None:
                    index.release(lease)
            self.fetcher.tiers.work.capacity_changed()
            return
        self._learn()
        lease = landed.lease
        if landed.tail is not None:
            index.release(landed.lease)
            lease = landed.tail
        self._report(lease)

    def go_on_alone(self) -> None:
        """End the request's wait, and continue the fetch until its deadline for later requests.

        The request uses the blocks that have arrived.
        """
        if self.outcome.done():
            return
        if not self.is_whole:
            question = self.question
            if question is not None and question.is_try and not question.wait_s:
                self._ends(MissCause.NOT_WORTH_IT, question.reason)
            else:
                self._ends(MissCause.LATE, "storage took too long")
        if self.scope.expired() or asyncio.get_running_loop().time() >= self.deadline_at:
            self._finish_claims()  # other fetches must not wait for a store that hangs
        self.is_late = True
        self.fetcher.estimator.tier.num_late += 1
        self._learn()
        end = self.landed.tail or self.landed.lease
        self._report(self.fetcher.tiers.index.hold(end.node, end.num_blocks))

    def _report(self, lease: Lease) -> None:
        start = self.first_token
        tokens = range(start, start + self.landed.num_tokens)
        self.fetcher.num_held += 1
        fetched = Fetched(
            tokens,
            self.landed.problem,
            partial(self.fetcher.release, lease),
            direct=tuple(self.landed.direct),
            began_at=self.began_at,
            matched_at=self.matched_at or time.monotonic(),
            ended_at=time.monotonic(),
        )
        self.outcome.set_result(fetched)

    def _ends(self, fate: MissCause, reason: str) -> None:
        """Record that the fetch stops early, because it is late, not worth it, or failed."""
        status = GetStatus.MISS if fate is MissCause.NOT_WORTH_IT else GetStatus.FAILED
        self.landed.problem, self.fate = GetOutcome(status, reason), fate

    # Lookup and transfer

    async def _match_and_fetch(self) -> None:
        keys, present = await self._match()
        self.matched_at = time.monotonic()
        tracing.record("match", self.began_at, self.matched_at)
        # If storage has none of the blocks, the rest of the fetch is the search for a shared tail.
        question = self.question
        if question is None:
            return
        if present:
            wanted = self._worth_fetching(keys[:present], question)
            if not wanted:
                return
            # A small first group, for an early measurement.
            num_first = 1 if question.is_try else GROUP_BLOCKS
            await self.fetcher.groups.fetch(
                self.prompt, self.landed, wanted, self._arrived, num_first=num_first
            )
            if len(wanted) < present:  # the engine computes the rest, to measure its speed
                self.is_whole = self.landed.num_tokens == len(wanted) * self.prompt.block_size
                if self.is_whole:
                    self._ends(MissCause.NOT_WORTH_IT, "computed to measure the engine's speed")
                return
        if self.landed.problem is None:
            self.is_whole = True
        elif _is_gap(self.landed.problem):
            self.is_whole = True
            await self._fetch_shared_tail(keys)

    async def _match(self) -> tuple[Sequence[StoredKey], int]:
        """Return the keys of missing blocks, and how many of the first blocks to read.

        The number is 0 if computing is expected to be faster, and counts all keys if storage is
        not asked beforehand.
        """
        fetcher = self.fetcher
        keys = await self._wait_for_other_fetches()
        if not keys:
            return keys, 0
        start = self.landed.lease.num_blocks
        missing = self.prompt.num_tokens - start * self.prompt.block_size
        question = self.budget.restrict(missing, is_answered=bool(self.promised))
        if not question.is_asked:
            self._refuse(question)
            return keys, 0
        self.question = question
        fetcher.estimator.tier.num_tries += question.is_try
        self.claimed.append(fetcher.reserve(keys, start))
        # Only a lookup finds blocks that were stored with another block size.
        is_asked = not (self.promised or fetcher.storage.reads_at_once)
        if not is_asked and not fetcher.storage.has_other_sizes:
            present = len(keys)
        elif self.known is not None and self.known.blocks.start <= start <= self.known.blocks.stop:
            present = min(self.known.blocks.stop - start, len(keys))
        else:
            present = await self._ask(keys)
        if present < len(keys):
            self.landed.problem = NOT_IN_STORAGE
        return keys, present

    async def _wait_for_other_fetches(self) -> Sequence[StoredKey]:
        """Wait for other fetches of this prompt's blocks, and return the keys still missing.

        Return [] if no block is missing any more, or if computing is estimated to be faster than
        waiting.
        """
        fetcher, landed = self.fetcher, self.landed
        index, keys = fetcher.tiers.index, self.promised
        while True:
            match = index.match(self.prompt)
            if match.num_blocks > landed.lease.num_blocks:
                longer = index.hold(match.node, match.num_blocks)
                index.release(landed.lease)
                landed.lease = longer
                self.first_token = match.num_blocks * index.block_size
            if self.promised:
                keys = self.promised[match.num_blocks :]
            else:
                keys = keys_beyond(index, self.prompt, match)
            tail = match.partial
            if tail and keys and keys[0].is_tail and tail.num_tokens >= keys[0].num_tokens:
                landed.tail = index.hold(tail.node, tail.block + 1)
                return []
            busy = fetcher.busy(keys, match.num_blocks)
            if busy is None:
                return keys
            tokens = self.prompt.num_tokens - match.num_blocks * index.block_size
            verdict = self.budget.restrict(tokens, is_answered=True)
            if not verdict.is_asked:
                self._refuse(verdict)
                return []
            fetcher.tiers.decisions.wait_storage += 1
            await asyncio.shield(busy)

    async def _ask(self, keys: Sequence[StoredKey]) -> int:
        now, tier = asyncio.get_running_loop().time, self.fetcher.estimator.tier
        began, found = now(), None
        try:
            found = await self.fetcher.source.count_present(keys)
        finally:
            if not self.is_part:
                if found is None:
                    tier.note_silence(now() - began)
                else:
                    tier.note_answer(now() - began, has_found=found > 0)
        if not self.outcome.done():
            self.budget.arrived()
        return found

    def _worth_fetching(self, keys: Sequence[StoredKey], question: Decision) -> Sequence[StoredKey]:
        """Return the first of `keys` whose blocks are faster to fetch than to compute.

        `question` is the decision by which storage was asked. All keys are returned if its
        purpose was to measure the speed of storage (`is_try`).
        """
        estimator, end = self.fetcher.estimator, self.landed.lease.num_blocks + len(keys)
        end_token = min(end * self.prompt.block_size, self.prompt.num_tokens)
        tokens = end_token - self.landed.lease.num_blocks * self.prompt.block_size
        if not (question.is_try or self.outcome.done()):
            question = self.budget.restrict(tokens, is_answered=True)
            if not question.is_asked:
                self._refuse(question)
                return []
            if self.budget.may_compute and not self.budget.is_claim:
                sample = estimator.prefill.sample_tokens(tokens, question.fetch_s)
                keys = self._without_sample(keys, sample)
                tokens = sum(key.num_tokens for key in keys)
                if not keys:
                    self._refuse(question)
                    return []
        self.fetcher.tiers.decisions.fetch_storage += 1
        if not self.is_part:
            num_bytes = tokens * estimator.bytes_per_token
            self.transfer = estimator.tier.begin(num_bytes, asyncio.get_running_loop().time())
        return keys

    def _without_sample(self, keys: Sequence[StoredKey], sample: int) -> Sequence[StoredKey]:
        """Shorten `keys` so that the engine computes at least `sample` tokens itself.

        The time of this computation is used to measure the engine's speed. If `sample` is 0, `keys`
        is unchanged.
        """
        if not sample:
            return keys
        size, num_tokens = self.prompt.block_size, self.prompt.num_tokens
        start = self.landed.lease.num_blocks
        # Whole blocks only, since the computation of a partial one is not observed.
        whole = max(self.prompt.num_blocks * size - sample, 0) // size - start
        keys = keys[: max(whole, 0)]
        rest = num_tokens - (start + len(keys)) * size
        self.fetcher.estimator.prefill.sample = range(rest // size * size, rest + 1)
        return keys

    def _arrived(self) -> None:
        estimator, rest_s = self.fetcher.estimator, None
        if self.transfer is not None:
            num_bytes = self.landed.num_tokens * estimator.bytes_per_token
            estimator.tier.arrived(self.transfer, num_bytes)
            if self.question is not None and self.question.is_try and self.question.wait_s:
                remaining_s = self.transfer.remaining_s(asyncio.get_running_loop().time())
                left = int((self.transfer.num_bytes - num_bytes) / estimator.bytes_per_token)
                if remaining_s < estimator.compute_s(left):
                    rest_s = remaining_s + SLACK_S
        if not self.outcome.done():
            self.budget.arrived(rest_s)
            self.deadline_at = self.budget.deadline_at
            if not self.scope.expired():
                self.scope.reschedule(self.deadline_at)
        if self.fate is None:  # otherwise the request went on without this fetch
            self.on_arrival(self.landed.lease.num_blocks)

    async def _fetch_shared_tail(self, keys: Sequence[StoredKey]) -> None:
        fetcher, landed = self.fetcher, self.landed
        index, start = fetcher.tiers.index, landed.lease.num_blocks
        if self.known is not None and self.known.blocks.stop == start:
            found = fetcher.tails.of_use(self.prompt, landed.lease, self.known.tail)
        else:
            missing = (keys[-1].digest,) if start == self.prompt.num_blocks else ()
            found = await fetcher.tails.find(self.prompt, landed.lease, missing=missing)
        if found is None:
            return
        if busy := fetcher.busy([found.key], start):
            await asyncio.shield(busy)
            tail = index.match(self.prompt).partial
            if tail is not None:
                landed.tail = index.hold(tail.node, tail.block + 1)
            return
        self.claimed.append(fetcher.reserve([found.key], start))
        space = index.spaces.root_of(self.prompt).space
        slots = await fetcher.groups.acquire(1, space)
        if slots is None:
            return
        try:
            landed.tail = await fetcher.tails.fetch(self.prompt, landed.lease, found, slots)
        finally:
            fetcher.groups.settled(slots, space)
        if landed.tail is not None:
            landed.num_tokens += found.num_shared
            if self.first_token + landed.num_tokens == self.prompt.num_tokens:
                landed.problem = None  # the missing tokens came with another prompt's tail

    def _refuse(self, verdict: Decision) -> None:
        self.fetcher.tiers.decisions.recompute_storage += 1
        self._ends(MissCause.NOT_WORTH_IT, verdict.reason)

    def _finish_claims(self) -> None:
        for run in self.claimed:
            self.fetcher.finish(run)
        self.claimed.clear()

    # Results

    def _learn_transfer(self, *, is_late: bool) -> None:
        transfer, self.transfer = self.transfer, None
        if transfer is not None:
            estimator, problem = self.fetcher.estimator, self.landed.problem
            is_late |= problem is not None and problem.status is GetStatus.FAILED
            estimator.tier.arrived(transfer, self.landed.num_tokens * estimator.bytes_per_token)
            now = asyncio.get_running_loop().time()
            estimator.tier.end(transfer, now, is_late=is_late)

    def _learn(self) -> None:
        tiers, landed, problem = self.fetcher.tiers, self.landed, self.landed.problem
        tiers.decisions.recompute_late += self.fate is MissCause.LATE
        if problem is None:
            return
        fate = self.fate or _FATES.get(problem.status)
        if fate is not None:
            now = asyncio.get_running_loop().time()
            event = HistoryEvent(fate, "storage", now, problem.reason)
            tiers.eviction.history.record(self.prompt, landed.lease.num_blocks, event)
        if problem.status is not GetStatus.MISS:
            if fate is MissCause.LATE and asyncio.get_running_loop().time() < self.deadline_at:
                log.debug("fetch ended early: %s", problem.reason)
            else:
                self.fetcher.ended_early.warn(problem.reason)


def _is_gap(problem: GetOutcome) -> bool:
    """Return True if storage lacks a block, and False if the host lacks a slot."""
    return problem.status is GetStatus.MISS and problem is not NO_ROOM


def _release_fetched(outcome: asyncio.Future[Fetched]) -> None:
    if not outcome.cancelled():
        outcome.result().release()
