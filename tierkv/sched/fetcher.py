"""Brings the rest of a prompt from storage to the host before its request is admitted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from tierkv.cache.index import Index, Lease
from tierkv.cache.keys import Prompt, StoredKey
from tierkv.cache.node import Tier
from tierkv.cache.pool import Ids
from tierkv.cache.space import Space
from tierkv.errors import OutOfBlocksError, StoreUnavailableError
from tierkv.sched.tiers import GROUP_BLOCKS, Tiers
from tierkv.storage.protocol import GetOutcome, GetStatus
from tierkv.transfer.storage_io import StorageIO

log = logging.getLogger("tierkv.fetcher")


@dataclass(slots=True)
class Fetched:
    """What is on the host now because it was asked for.

    tokens: the prompt's tokens that came from storage for this call.
    first_problem: why it ended before the end of the prompt, None if it did not.
    It stays on the host until `release`, which the owner calls once the request is admitted, or
    earlier: then it may be evicted, and the request matches less.
    """

    tokens: range
    first_problem: GetOutcome | None
    _release: Callable[[], None]
    is_released: bool = False

    def release(self) -> None:
        """Let it be evicted again. More than once is as good as once."""
        if not self.is_released:
            self.is_released = True
            self._release()


@dataclass(slots=True)
class _Progress:
    lease: Lease
    tail: Lease | None = None
    num_tokens: int = 0
    first_token: int = 0
    first_problem: GetOutcome | None = None
    claimed: list[bytes] = field(default_factory=list)


class Fetcher:
    """One fetch per block at a time: who wants a block that is on its way waits for it."""

    def __init__(self, tiers: Tiers, storage: StorageIO) -> None:
        self._tiers = tiers
        self._index: Index = tiers.index
        self._storage = storage
        self.num_held = 0  # results that have not been released yet
        self._in_flight: dict[bytes, asyncio.Future[None]] = {}

    async def fetch(self, prompt: Prompt, *, deadline_s: float) -> Fetched:
        """Bring what storage has of `prompt` beyond the local match, in order, without a gap.

        Whatever goes wrong with storage ends the fetch early and is told in `first_problem`; it
        never raises for it. After `deadline_s` seconds the result is what has arrived. Cancelling
        it leaves nothing held.
        """
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[Fetched] = loop.create_future()
        self._tiers.start(self._run(prompt, loop.time() + deadline_s, outcome), name="tierkv-fetch")
        try:
            return await asyncio.shield(outcome)
        except asyncio.CancelledError:
            outcome.add_done_callback(_let_go)
            raise

    def _release(self, lease: Lease) -> None:
        self._index.release(lease)
        self.num_held -= 1
        self._tiers.capacity_changed()

    async def _run(self, prompt: Prompt, deadline: float, outcome: asyncio.Future[Fetched]) -> None:
        match = self._index.match(prompt)
        progress = _Progress(self._index.hold(match.node, match.num_blocks))
        progress.first_token = match.num_blocks * self._index.block_size
        try:
            async with asyncio.timeout_at(deadline):
                await self._fetch(prompt, progress)
        except TimeoutError:
            progress.first_problem = GetOutcome(GetStatus.FAILED, "storage took too long")
        except StoreUnavailableError as error:
            progress.first_problem = GetOutcome(GetStatus.FAILED, str(error))
        except BaseException:
            # Nothing expected: it goes up and stops the service, and who waits hears of that.
            outcome.cancel()
            raise
        finally:
            self._finish_claims(progress)
        if progress.first_problem is not None and progress.first_problem.status in (
            GetStatus.FAILED,
            GetStatus.DAMAGED,
        ):
            log.warning("fetch ended early: %s", progress.first_problem.reason)
        lease = progress.lease
        if progress.tail is not None:
            lease = progress.tail
            self._index.release(progress.lease)
        start = progress.first_token
        self.num_held += 1
        outcome.set_result(
            Fetched(
                range(start, start + progress.num_tokens),
                progress.first_problem,
                lambda: self._release(lease),
            )
        )

    async def _fetch(self, prompt: Prompt, progress: _Progress) -> None:
        keys = await self._wait_for_others(prompt, progress)
        if not keys:
            return
        loop = asyncio.get_running_loop()
        for key in keys:
            self._in_flight[key.digest] = loop.create_future()
            progress.claimed.append(key.digest)
        present = await self._storage.count_present(keys)
        if present < len(keys):
            progress.first_problem = GetOutcome(GetStatus.MISS, "not in storage")
        at = 0
        while at < present:
            group = keys[at : min(at + GROUP_BLOCKS, present)]
            slots = await self._take(len(group), self._index.root_of(prompt).space)
            if slots is None:
                progress.first_problem = GetOutcome(GetStatus.MISS, "the host tier has no room")
                return
            group = group[: len(slots)]
            if not await self._fetch_group(prompt, progress, group, slots):
                return
            at += len(group)

    async def _take(self, count: int, space: Space) -> Ids | None:
        """1 to `count` host slots, after copies that make room for them; None if none will."""
        tiers = self._tiers
        while True:
            try:
                wanted = min(count, max(tiers.available(Tier.HOST), 1))
                return tiers.take(Tier.HOST, wanted, space)
            except OutOfBlocksError:
                if not tiers.is_making_room(Tier.HOST):
                    return None
            await tiers.next_change()

    async def _wait_for_others(self, prompt: Prompt, progress: _Progress) -> list[StoredKey]:
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
            await asyncio.shield(busy)

    async def _fetch_group(
        self, prompt: Prompt, progress: _Progress, keys: list[StoredKey], slots: Ids
    ) -> bool:
        """Fetch one group into `slots`; whether all of it arrived."""
        tiers, index = self._tiers, self._index
        tiers.lend(Tier.HOST, slots)
        arrived = 0
        kept = [False] * len(slots)
        try:
            outcomes = await self._storage.fetch(keys, slots)
            for result in outcomes:
                if result.status is not GetStatus.HIT:
                    progress.first_problem = result
                    break
                arrived += 1
            first = progress.lease.num_blocks
            blocks = sum(not key.is_tail for key in keys[:arrived])
            if blocks:
                progress.lease, inserted = index.insert(
                    Tier.HOST, progress.lease, prompt, first + blocks, slots[:blocks]
                )
                kept[:blocks] = inserted.adopted
                index.mark_stored(progress.lease.node, first, first + blocks)
            if arrived > blocks:
                tail = index.insert_tail(Tier.HOST, progress.lease, prompt, int(slots[blocks]))
                kept[blocks] = tail.adopted[0]
                progress.tail = index.hold(tail.node, tail.num_blocks)
                index.mark_stored(tail.node, tail.num_blocks - 1, tail.num_blocks)
            progress.num_tokens += sum(key.num_tokens for key in keys[:arrived])
        finally:
            tiers.unlend(Tier.HOST, slots)
            tiers.give(Tier.HOST, slots[[not k for k in kept]])
        return arrived == len(keys)

    def _finish_claims(self, progress: _Progress) -> None:
        for digest in progress.claimed:
            self._in_flight.pop(digest).set_result(None)


def _let_go(outcome: asyncio.Future[Fetched]) -> None:
    """What was fetched for a caller that has gone."""
    if not outcome.cancelled():
        outcome.result().release()
