"""What requests leave in the cache: commits while they run, and all the rest when they end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from tierkv.cache.keys import Prompt
from tierkv.cache.node import Tier, TreeNode
from tierkv.errors import TransferError
from tierkv.gpu.protocol import Event
from tierkv.sched.computing import Computing
from tierkv.sched.events import Happening
from tierkv.sched.loads import HostLoads
from tierkv.sched.request import Request, RequestState, Running
from tierkv.sched.tiers import Tiers


class Commits:
    """Blocks become matchable when the kernels that write them are done, and go to others when
    nothing can touch them any more."""

    def __init__(
        self, tiers: Tiers, running: Running, loads: HostLoads, computing: Computing
    ) -> None:
        self._tiers = tiers
        self._index = tiers.index
        self._running = running
        self._loads = loads
        self._computing = computing

    async def commit(self, request: Request, tokens: bytes, *, after: Sequence[Event] = ()) -> None:
        """See Scheduler.commit."""
        request.check_tokens(tokens)
        if request.loads:
            await self._all_arrived(request)
            request.check_tokens(tokens)
        known = request.spec.prompt
        request.prompt = (
            known
            if tokens is known.tokens
            else Prompt(tokens, known.block_size, known.extras, known.space)
        )
        request.computed_tokens = request.prompt.num_tokens
        if request.written or after:
            # Kernels of earlier commits may still write: what comes now is not there before them.
            request.written = tuple(one for one in (*request.written, *after) if not _is_done(one))
        if not request.written:
            self._insert(request, request.prompt)
        else:
            self._tiers.work.start(self._insert_later(request, request.prompt), "tierkv-commit")

    async def _all_arrived(self, request: Request) -> None:
        """Return when what it matched is on the device, and the index knows it."""
        for movement in request.loads:
            await movement.done()
        # The movement is done a moment before its bookkeeping; both must be.
        for load in self._loads.used_by.get(request, ()):
            await asyncio.shield(load.settled)
            if load.is_failed:
                raise TransferError("blocks that this request waited for did not arrive")

    async def _insert_later(self, request: Request, prompt: Prompt) -> None:
        await self._written(request, request.written)
        if request in self._running:
            self._insert(request, prompt)

    def _insert(self, request: Request, prompt: Prompt) -> None:
        """Give the index the full blocks of `prompt` that it lacks, and copy down what the rules
        want. Blocks that others put there meanwhile stay private to the request."""
        first = request.lease.num_blocks
        is_computed = prompt.num_tokens <= request.computed_tokens and not request.is_damaged
        if not is_computed or prompt.num_blocks <= first:
            return
        slots = request.block_table[first : prompt.num_blocks]
        refused = self._index.insert(Tier.DEVICE, request.lease, prompt, prompt.num_blocks, slots)
        node = request.lease.node
        self._tiers.events.tell(Happening.STORED, "device", node, first, request.lease.num_blocks)
        request.is_private[first : prompt.num_blocks] = False
        if refused:
            request.is_private[[first + at for at in refused]] = True
        self._running.cached(request, len(slots) - len(refused))
        if request.promise is not None:
            self._computing.advance(request.promise, request.lease.node, request.lease.num_blocks)
        self._tiers.copies.write_down(request.lease.node, request.lease.num_blocks)

    def end(self, request: Request, state: RequestState, after: Sequence[Event]) -> None:
        """Give everything back, as soon as `after` is over; see Scheduler.end and preempt."""
        request.check_running()
        request.state = state
        self._running.remove(request)
        events = (*request.written, *after)
        if not events and not request.loads:
            self._finish(request)
            return
        is_quiet = all(_is_over(event) for event in events)
        if is_quiet and all(movement.has_ended for movement in request.loads):
            request.is_damaged |= not all(_is_done(event) for event in events)
            self._finish(request)
        else:
            self._running.ending.add(request)
            self._tiers.work.start(
                self._end_later(request, events), "tierkv-end", space=request.space
            )

    async def _end_later(self, request: Request, events: Sequence[Event]) -> None:
        await self._written(request, events)
        for movement in request.loads:
            with suppress(TransferError):  # ended is all that counts here
                await movement.done()
        self._running.ending.remove(request)
        self._finish(request)

    async def _written(self, request: Request, events: Sequence[Event]) -> None:
        """Return when `events` are over. If one failed, nothing of the request is cached."""
        for event in events:
            try:
                await self._tiers.mover.poller.done(event)
            except TransferError:
                request.is_damaged = True

    def _finish(self, request: Request) -> None:
        self._insert(request, request.prompt)
        tail = self._keep_tail(request)
        if request.promise is not None:
            self._computing.end(request.promise)
        if request.state is RequestState.PREEMPTED:
            end = tail or request.lease.node
            request.pinned = self._index.pin_softly(end, end.end)
            self._tiers.copies.save(end, end.end)
        self._index.release(request.lease)
        for load in self._loads.used_by.pop(request, ()):
            self._loads.let_go(load)
        if request.num_private:
            self._tiers.slots.pools[Tier.DEVICE].release(request.private_slots())
        self._running.freed(request)
        self._tiers.work.capacity_changed()

    def _keep_tail(self, request: Request) -> TreeNode | None:
        """Cache the tail, if it is whole; where it is then."""
        prompt = request.prompt
        is_whole = request.computed_tokens == prompt.num_tokens and not request.is_damaged
        if not is_whole or not prompt.tail_tokens:
            return None
        if request.lease.num_blocks != prompt.num_blocks:
            return None  # a block above it could not be inserted
        at = prompt.num_blocks
        tail, is_new = self._index.insert_tail(
            Tier.DEVICE, request.lease, prompt, int(request.block_table[at])
        )
        if is_new:
            self._tiers.events.tell(Happening.STORED, "device", tail, at, at + 1)
            request.is_private[at] = False
            self._running.cached(request, 1)
            self._tiers.copies.write_down(tail, tail.end)
        return tail


def _is_done(event: Event) -> bool:
    try:
        return event.is_done
    except TransferError:
        return False


def _is_over(event: Event) -> bool:
    try:
        return event.is_done
    except TransferError:
        return True
