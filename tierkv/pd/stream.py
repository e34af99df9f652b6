"""Publishes a prompt while it is being computed, so that little is left to do when it is.

prefill   | chunk | chunk | chunk | last |
stream      open    blocks  blocks  blocks, tail, ticket
claimer             fetch   fetch   fetch        claimed
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from tierkv.cache.keys import StoredKey
from tierkv.errors import (
    DuplicateRequestError,
    HandoffError,
    StoreUnavailableError,
    TierKVError,
    TransferError,
)
from tierkv.gpu.protocol import Event
from tierkv.pd.handoff import Handoff, Published
from tierkv.pd.staging import GROUP_BLOCKS
from tierkv.pd.ticket import ClaimProblem, OpenTicket
from tierkv.pd.tickets import PROGRESS, check_id
from tierkv.sched.request import Request

log = logging.getLogger("tierkv.handoff")

_LAST_WORD_S = 0.5


@dataclass(frozen=True, slots=True)
class _Finish:
    first_tokens: tuple[int, ...]
    after: tuple[Event, ...]
    sampling: dict[str, str]


class PublishStream:
    """One prompt on its way out. Whoever computes it calls `advance`, and at the end `finish` or
    `fail`; a task runs `run`, and ends the request only after that has returned.

    What goes wrong before the prompt is computed is only a delay: `finish` publishes all that is
    not stored then.
    """

    def __init__(
        self,
        handoff: Handoff,
        request: Request,
        ticket_id: str,
        *,
        deadline_s: float,
    ) -> None:
        """deadline_s: for what is left to do when the prompt is computed. Raises BadRequestError if
        the ticket's id is no text."""
        check_id(ticket_id)
        self._handoff = handoff
        self._request = request
        self._ticket_id = ticket_id
        self._deadline_s = deadline_s
        self._computed_blocks = 0
        self._after: tuple[Event, ...] = ()
        self._finish: _Finish | None = None
        self._failure: str | None = None
        self._changed = asyncio.Event()
        self._scope: asyncio.Timeout | None = None
        self._end_at: float | None = None

    def advance(self, num_tokens: int, after: Sequence[Event] = ()) -> None:
        """The first `num_tokens` tokens are committed. after: events of the kernels that wrote
        the last of them."""
        blocks = num_tokens // self._request.spec.prompt.block_size
        self._computed_blocks = min(blocks, self._request.spec.prompt.num_blocks)
        self._after = tuple(after)
        self._changed.set()

    def finish(
        self,
        first_tokens: Sequence[int],
        after: Sequence[Event] = (),
        sampling: Mapping[str, str] | None = None,
    ) -> None:
        """The whole prompt is committed; write the rest and the ticket. sampling: see Ticket."""
        self._finish = _Finish(tuple(first_tokens), tuple(after), dict(sampling or {}))
        self._end_in(self._deadline_s)

    def fail(self, reason: str) -> None:
        """There will be no ticket; whoever waits for it is told `reason`."""
        self._failure = reason
        self._end_in(_LAST_WORD_S)

    def _end_in(self, delay_s: float) -> None:
        self._changed.set()
        self._end_at = asyncio.get_running_loop().time() + delay_s
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(self._end_at)

    async def run(self) -> Published:
        """Raises HandoffError, also after `fail`, and DuplicateRequestError if another prompt took
        the ticket's id in the same moment."""
        handoff, prompt = self._handoff, self._request.spec.prompt
        tickets = handoff.tickets
        open_ticket = tickets.new_open(
            self._ticket_id,
            prompt,
            handoff.source.offer(self._ticket_id, prompt, handoff.ledger),
        )
        keys = tickets.keys_of(prompt)
        handoff.ledger.opened(open_ticket)
        with tickets.lease.held():
            try:
                published = await self._publish(open_ticket, keys)
            except TierKVError as error:
                handoff.ledger.failed(self._ticket_id, str(error))
                await self._close(open_ticket, str(error))
                raise
            except asyncio.CancelledError:
                handoff.ledger.failed(self._ticket_id, "cancelled")
                raise
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORD_S):
                await tickets.forget_open(self._ticket_id)
        return published

    async def _publish(self, open_ticket: OpenTicket, keys: Sequence[StoredKey]) -> Published:
        present = ready = 0
        try:
            async with asyncio.timeout_at(self._end_at) as self._scope:
                await self._open(open_ticket)
                present, ready = await self._store_ahead(keys)
        except TimeoutError:
            pass  # the store hangs: the last attempt has a deadline of its own
        finally:
            self._scope = None
        if self._failure is not None:
            self._handoff.stats.failed_publishes += 1
            raise HandoffError(ClaimProblem.PRODUCER_FAILED.value, self._failure)
        finish = self._finish
        assert finish is not None, "it goes on until finished or failed"
        published = await self._handoff.publish(
            self._request,
            self._ticket_id,
            finish.first_tokens,
            after=finish.after,
            sampling=finish.sampling,
            deadline_s=self._deadline_s,
            stored_blocks=ready,
        )
        self._handoff.stats.early_blocks += ready - present
        return replace(published, present_blocks=present, early_blocks=ready - present)

    async def _open(self, open_ticket: OpenTicket) -> None:
        handoff = self._handoff
        try:
            await handoff.tickets.lease.is_said()
            await handoff.tickets.begin(open_ticket)
        except StoreUnavailableError as error:
            log.warning("ticket %s is not announced: %s", self._ticket_id, error)
        except DuplicateRequestError:
            handoff.stats.failed_publishes += 1
            raise

    async def _store_ahead(self, keys: Sequence[StoredKey]) -> tuple[int, int]:
        """Store full blocks as they come; how many were there, and how many are now."""
        handoff, most = self._handoff, self._request.spec.prompt.num_blocks
        present = ready = 0
        try:
            present = ready = min(await handoff.count_present(keys), most)
            while self._is_going_on:
                if ready >= self._computed_blocks:
                    await self._tell(ready)
                    if ready >= self._computed_blocks and self._is_going_on:
                        await self._change()
                    continue
                stop = min(ready + GROUP_BLOCKS, self._computed_blocks)
                await handoff.store(self._request, keys, ready, stop, self._after)
                ready = stop
        except (StoreUnavailableError, TransferError) as error:
            log.warning("ticket %s waits for the end of its prefill: %s", self._ticket_id, error)
            while self._is_going_on:
                await self._change()
        return present, ready

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    @property
    def _is_going_on(self) -> bool:
        return self._finish is None and self._failure is None

    async def _tell(self, ready: int) -> None:
        self._handoff.ledger.progressed(self._ticket_id, ready)
        await self._handoff.tickets.tell(self._ticket_id, f"{PROGRESS}{ready}")

    async def _close(self, open_ticket: OpenTicket, failure: str) -> None:
        """Tell those who wait why there will be no ticket, if the store takes it."""
        with suppress(TimeoutError, StoreUnavailableError, HandoffError):
            async with asyncio.timeout(_LAST_WORD_S):
                await self._handoff.tickets.give_up(open_ticket, failure or "it failed")
