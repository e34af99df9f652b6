"""Brings the rest of a claimed prompt through staging slots, where the host tier has no room."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from tierkv.cache.keys import StoredKey
from tierkv.errors import OwnershipError, RequestAbortedError, StoreUnavailableError, TransferError
from tierkv.pd.staging import GROUP_BLOCKS, Group, Staging
from tierkv.sched.fetch_groups import NO_ROOM, Source
from tierkv.sched.request import Request
from tierkv.sched.scheduler import Scheduler
from tierkv.storage.protocol import GetOutcome, GetStatus

_LATE = GetOutcome(GetStatus.FAILED, "storage took too long")


class Portions:
    """From storage into blocks that an admitted request has to itself, GROUP_BLOCKS at a time.

    The staging slots are nobody's for longer than one portion needs, and the device blocks are
    taken already: whoever is here waits for the store alone, so claims cannot wait for each other.
    """

    def __init__(self, scheduler: Scheduler, source: Source, staging: Staging) -> None:
        self._scheduler = scheduler
        self._source = source
        self._staging = staging

    async def bring(
        self, request: Request, keys: Sequence[StoredKey], *, give_up_at: float, portion_s: float
    ) -> GetOutcome | None:
        """Bring what `request` lacks of its prompt, whose stored keys are `keys`; why that ended
        early, None if it did not. What came counts in `cached_tokens` and is committed.

        It gives up when nothing came for `portion_s` seconds, and waits for its turn until
        `give_up_at`. Raises TransferError, and what a commit raises. Cancelling it leaves the
        request as far as it has come: `end` it.
        """
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[GetOutcome | None] = loop.create_future()
        scope = asyncio.timeout_at(max(give_up_at, loop.time() + portion_s))
        waits_for_turn = True

        def begins() -> None:
            nonlocal waits_for_turn
            waits_for_turn = False
            if not outcome.done():
                scope.reschedule(loop.time() + portion_s)

        work = self._bring(request, keys, begins, outcome)
        self._scheduler.tiers.work.start(work, "tierkv-portions")
        try:
            async with scope:
                return await asyncio.shield(outcome)
        except TimeoutError:
            return NO_ROOM if waits_for_turn else _LATE
        finally:
            outcome.cancel()

    async def _bring(
        self,
        request: Request,
        keys: Sequence[StoredKey],
        begins: Callable[[], None],
        outcome: asyncio.Future[GetOutcome | None],
    ) -> None:
        """begins: called whenever a portion does."""
        try:
            for load in request.loads:
                await load.done()
            problem: GetOutcome | None = None
            while problem is None and not outcome.done():
                at = request.lease.num_blocks
                if request.cached_tokens == request.spec.prompt.num_tokens:
                    break
                async with self._staging.group() as group:
                    begins()
                    portion = keys[at : at + GROUP_BLOCKS]
                    problem = await self._bring_portion(request, portion, at, group, outcome)
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

    async def _bring_portion(
        self,
        request: Request,
        keys: Sequence[StoredKey],
        at: int,
        group: Group,
        outcome: asyncio.Future[GetOutcome | None],
    ) -> GetOutcome | None:
        """Bring blocks from `at` on; the first that is not there."""
        slots = group.slots[: len(keys)]
        found = await self._source.fetch(keys, slots)
        num_hits = next(
            (i for i, one in enumerate(found) if one.status is not GetStatus.HIT), len(found)
        )
        if num_hits and not outcome.done():
            request.check_wanted()
            tiers = self._scheduler.tiers
            target = request.block_table[at : at + num_hits]
            movement = group.movement = tiers.mover.load(slots[:num_hits], target)
            request.loads = (*request.loads, movement)  # its blocks are nobody else's before
            await movement.done()
            came = list(zip(found[:num_hits], keys, strict=False))
            await self._came(
                request,
                at,
                sum(key.num_tokens for _, key in came),
                num_direct=sum(key.num_tokens for one, key in came if one.is_direct),
            )
        return found[num_hits] if num_hits < len(found) else None

    async def _came(self, request: Request, at: int, num_tokens: int, *, num_direct: int) -> None:
        prompt = request.spec.prompt
        num_cached = at * prompt.block_size + num_tokens
        width = prompt.block_token_bytes // prompt.block_size
        await self._scheduler.commit(request, prompt.tokens[: num_cached * width])
        lease = request.lease
        self._scheduler.index.mark_stored(lease.node, min(at, lease.num_blocks), lease.num_blocks)
        brought = num_cached - request.cached_tokens
        request.cached_tokens = num_cached
        matched, straight = request.matched, min(num_direct, brought)
        request.matched = msgspec.structs.replace(
            matched,
            storage_tokens=matched.storage_tokens + brought - straight,
            direct_tokens=matched.direct_tokens + straight,
        )
