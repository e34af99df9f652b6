"""Fetches in portions, from storage into a request's own blocks, if the host has no room."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tierkv.cache.keys import StoredKey
from tierkv.errors import (
    OwnershipError,
    RequestAbortedError,
    StoreUnavailableError,
    TransferError,
)
from tierkv.pd.handoff import Group, Staging
from tierkv.sched.budget import Budget
from tierkv.sched.copies import GROUP_BLOCKS
from tierkv.sched.fetch import NO_ROOM, Source
from tierkv.sched.request import Request
from tierkv.sched.scheduler import Scheduler
from tierkv.storage.protocol import GetOutcome, GetStatus

_LATE = GetOutcome(GetStatus.FAILED, "storage took too long")


class Portions:
    """Fetches from storage into private blocks of admitted requests, GROUP_BLOCKS at a time.

    Staging slots are lent for one portion only, and the device blocks are reserved already. A claim
    here waits for the store alone, so claims cannot wait for each other.
    """

    def __init__(self, scheduler: Scheduler, source: Source, staging: Staging) -> None:
        self._scheduler = scheduler
        self._source = source
        self._staging = staging

    async def bring_or_end(
        self, request: Request, budget: Budget, keys: Sequence[StoredKey] = ()
    ) -> GetOutcome | None:
        """Fetch missing blocks as `bring` does; end the request on any error.

        Args:
            request: An admitted request that has not been returned to a caller yet.
            budget: Remaining time for storage.
            keys: Keys of the prompt's blocks; empty if they are to be computed.
        """
        try:
            keys = keys or self._scheduler.tiers.copies.prompt_keys(request.spec.prompt)
            return await self.bring(request, budget, keys)
        except BaseException:  # a load that failed, an abort, a cancel
            self._scheduler.end(request)
            raise
        finally:
            self._scheduler.brought_all(request)

    async def bring(
        self, request: Request, budget: Budget, keys: Sequence[StoredKey]
    ) -> GetOutcome | None:
        """Fetch the missing blocks of `request`; return the problem, None if all arrived.

        Arrived tokens are committed and count in `cached_tokens`. If the request needs logits, its
        last block is left to be computed. After a cancel, the request keeps the arrived blocks and
        has to be ended.

        Args:
            request: an admitted request.
            budget: the request's budget; each portion is an arrival.
            keys: the prompt's stored keys.

        Raises:
            TransferError: a load failed.
            TierKVError: any error of `Scheduler.commit`.
        """
        if request.spec.needs_logits:
            keys = keys[: (request.spec.prompt.num_tokens - 1) // request.spec.prompt.block_size]
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[GetOutcome | None] = loop.create_future()
        has_turn = asyncio.Event()
        work = self._bring(request, budget, keys, has_turn, outcome)
        self._scheduler.tiers.work.start(work, "tierkv-portions")
        try:
            async with budget.limit():
                return await asyncio.shield(outcome)
        except TimeoutError:
            return _LATE if has_turn.is_set() else NO_ROOM
        finally:
            outcome.cancel()

    async def _bring(
        self,
        request: Request,
        budget: Budget,
        keys: Sequence[StoredKey],
        has_turn: asyncio.Event,
        outcome: asyncio.Future[GetOutcome | None],
    ) -> None:
        """Fetch portions until all are here; set `outcome`.

        `has_turn` is set once there are staging slots. A copy into the request's blocks is always
        waited for.
        """
        try:
            for load in request.loads:
                await load.done()
            problem: GetOutcome | None = None
            while problem is None and not outcome.done():
                at = request.lease.num_blocks
                portion = keys[at : at + GROUP_BLOCKS]
                if not portion or request.cached_tokens == request.spec.prompt.num_tokens:
                    break
                async with self._staging.group(len(portion)) as group:
                    has_turn.set()
                    if not outcome.done():
                        problem = await self._portion(request, budget, portion, group, outcome)
            result: GetOutcome | Exception | None = problem
        except StoreUnavailableError as error:
            result = GetOutcome(GetStatus.FAILED, str(error))
        except (TransferError, OwnershipError, RequestAbortedError) as error:
            result = error
        except BaseException:  # nothing expected: it goes up and stops the service
            outcome.cancel()
            raise
        if outcome.done():
            return
        if isinstance(result, Exception):
            outcome.set_exception(result)
        else:
            outcome.set_result(result)

    async def _portion(
        self,
        request: Request,
        budget: Budget,
        portion: Sequence[StoredKey],
        group: Group,
        outcome: asyncio.Future[GetOutcome | None],
    ) -> GetOutcome | None:
        """Fetch the next blocks of `request`; return the first outcome that is not a hit."""
        at = request.lease.num_blocks
        budget.arrived()
        found = await self._source.fetch(portion, group.slots[: len(portion)])
        if outcome.done() or budget.left_s <= 0:  # the wait has been given up, or is just being so
            return _LATE
        with budget.stopped():
            return await self._load(request, portion, at, group, found)

    async def _load(
        self,
        request: Request,
        keys: Sequence[StoredKey],
        at: int,
        group: Group,
        found: Sequence[GetOutcome],
    ) -> GetOutcome | None:
        """Load the fetched blocks from `at` on; return the first outcome that is not a hit."""
        num_hits = next(
            (i for i, one in enumerate(found) if one.status is not GetStatus.HIT), len(found)
        )
        if num_hits:
            request.check_wanted()
            target = request.block_table[at : at + num_hits]
            mover = self._scheduler.tiers.mover
            movement = group.movement = mover.load(group.slots[:num_hits], target)
            request.loads = (*request.loads, movement)  # no other request has its blocks until then
            await movement.done()
            came = list(zip(found[:num_hits], keys, strict=False))
            await self._scheduler.brought(
                request,
                at * request.spec.prompt.block_size + sum(key.num_tokens for _, key in came),
                num_direct=sum(key.num_tokens for one, key in came if one.is_direct),
            )
        return found[num_hits] if num_hits < len(found) else None
