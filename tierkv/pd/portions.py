"""Fetches of blocks from storage to the device that use no slot of the host tier.

Blocks are fetched in portions of up to GROUP_BLOCKS. A portion is read into staging slots, which
are host slots reserved for this purpose, and is copied from there to the device.
"""

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
    """Fetches blocks of admitted requests from storage to the device, GROUP_BLOCKS at a time.

    A portion is up to GROUP_BLOCKS blocks of one request, which move through staging slots
    together. A request holds no staging slots of one portion while it waits for those of another,
    so requests cannot deadlock.

    Args:
        scheduler: commits the arrived tokens.
        source: reads blocks from storage into host slots.
        staging: host slots reserved for portions.
    """

    def __init__(self, scheduler: Scheduler, source: Source, staging: Staging) -> None:
        self._scheduler = scheduler
        self._source = source
        self._staging = staging

    async def fetch_or_end(
        self, request: Request, budget: Budget, keys: Sequence[StoredKey] = ()
    ) -> GetOutcome | None:
        """Fetch the missing blocks of a newly admitted request; on any error, end the request.

        Args:
            request: the request, which no other code uses yet.
            budget: the time that the request may still wait for storage. The arrival of blocks may
                extend it.
            keys: keys of the prompt's blocks; () to compute the keys in this call.

        Returns:
            The outcome of the first block that did not arrive; None if all blocks arrived.

        Raises:
            TierKVError: the blocks could not be fetched or loaded, or the request was aborted.
        """
        try:
            keys = keys or self._scheduler.tiers.copies.prompt_keys(request.spec.prompt)
            return await self.fetch(request, budget, keys)
        except BaseException:  # a load that failed, an abort, a cancel
            self._scheduler.end(request)
            raise
        finally:
            self._scheduler.note_fetch_ended(request)

    async def fetch(
        self, request: Request, budget: Budget, keys: Sequence[StoredKey]
    ) -> GetOutcome | None:
        """Fetch the missing blocks of `request` from storage.

        Arrived tokens are committed and count in `cached_tokens`. If the request needs logits, its
        last block is not fetched but left to be computed. After a cancel, the request keeps the
        arrived blocks, and the caller has to end it.

        Args:
            request: an admitted request.
            budget: the time that the request may still wait for storage; each portion that arrives
                may extend it.
            keys: keys of the prompt's blocks.

        Returns:
            The outcome of the first block that did not arrive; None if all blocks arrived.

        Raises:
            TransferError: a load failed.
            RequestAbortedError: the request was aborted.
            OwnershipError: the request has ended or is preempted.
        """
        if request.spec.needs_logits:
            keys = keys[: (request.spec.prompt.num_tokens - 1) // request.spec.prompt.block_size]
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[GetOutcome | None] = loop.create_future()
        has_slots = asyncio.Event()
        work = self._fetch_portions(request, budget, keys, has_slots, outcome)
        self._scheduler.tiers.work.start(work, "tierkv-portions")
        try:
            async with budget.limit():
                return await asyncio.shield(outcome)
        except TimeoutError:
            return _LATE if has_slots.is_set() else NO_ROOM
        finally:
            outcome.cancel()

    async def _fetch_portions(
        self,
        request: Request,
        budget: Budget,
        keys: Sequence[StoredKey],
        has_slots: asyncio.Event,
        outcome: asyncio.Future[GetOutcome | None],
    ) -> None:
        """Fetch blocks through staging slots, a group at a time, until the request has all blocks.

        When all copies to the device have ended, `outcome` gets None, or the reason for an early
        end. If other code completes `outcome` before, the fetch ends.
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
                    has_slots.set()
                    if not outcome.done():
                        problem = await self._portion(request, budget, portion, group, outcome)
            result: GetOutcome | Exception | None = problem
        except StoreUnavailableError as error:
            result = GetOutcome(GetStatus.FAILED, str(error))
        except (TransferError, OwnershipError, RequestAbortedError) as error:
            result = error
        except BaseException:  # an unexpected error, which stops the service
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
        """Fetch a portion into the staging slots of `group`, and load it into the request's blocks.

        Return None if all blocks were loaded, otherwise the reason why a block was not.
        """
        at = request.lease.num_blocks
        budget.arrived()
        found = await self._source.fetch(portion, group.slots)
        if outcome.done() or budget.left_s <= 0:  # the caller has stopped waiting, or is about to
            return _LATE
        num_hits = next(
            (i for i, one in enumerate(found) if one.status is not GetStatus.HIT), len(found)
        )
        with budget.stopped():
            if num_hits:
                request.check_wanted()
                target = request.block_table[at : at + num_hits]
                mover = self._scheduler.tiers.mover
                movement = group.movement = mover.load(group.slots[:num_hits], target)
                request.loads = (*request.loads, movement)  # until it ends, its blocks stay here
                await movement.done()
                came = list(zip(found[:num_hits], portion, strict=False))
                await self._scheduler.commit_fetched(
                    request,
                    at * request.spec.prompt.block_size + sum(key.num_tokens for _, key in came),
                    num_direct=sum(key.num_tokens for one, key in came if one.is_direct),
                )
        return found[num_hits] if num_hits < len(found) else None
