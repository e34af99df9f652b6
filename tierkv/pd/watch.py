"""A decode node waits for a ticket: by hints, and by looking where no hint can come."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

from tierkv.cache.keys import Prompt, StoredKey
from tierkv.errors import HandoffError, StoreUnavailableError
from tierkv.pd.ticket import ClaimProblem, OpenTicket, Ticket
from tierkv.pd.tickets import PROGRESS, Tickets

_FIRST_LOOK_S = 0.005
_LONGEST_LOOK_S = 0.1
_LIVE_LOOK_S = 1.0  # where hints come: they can be lost
# Another node may have begun the same hand-off anew and not have said so yet.
_GRACE_S = 0.5


class Watch:
    """One wait for one ticket.

    on_progress: called when blocks of the prompt may be in storage: the first so many, or None
        where their number is not known.
    on_open: called with each open ticket whose prompt is being computed.
    keys: the prompt's, once its ticket is there.
    """

    def __init__(
        self,
        tickets: Tickets,
        ticket_id: str,
        prompt: Prompt,
        *,
        on_progress: Callable[[int | None], None],
        on_open: Callable[[OpenTicket], None],
    ) -> None:
        self._tickets = tickets
        self._lease = tickets.lease
        self._ticket_id = ticket_id
        self._prompt = prompt
        self._on_progress = on_progress
        self._on_open = on_open
        self.keys: Sequence[StoredKey] = ()
        self._open: OpenTicket | None = None
        self._ready_blocks = 0
        self._over: HandoffError | None = None  # why no ticket will come, and since when
        self._over_since = 0.0
        self._patience_s = 0.0  # until it is believed
        # A store that was flushed or restarted has lost the lease until the next beat.
        self._lost_after_s = self._lease.beat_s + _GRACE_S

    async def ticket(self, *, deadline_s: float, silent_s: float = math.inf) -> Ticket:
        """The ticket, as soon as it is there. Raises HandoffError, its reason a ClaimProblem.

        silent_s: after so long it is given up if the store has not answered once.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + deadline_s
        silent_until = loop.time() + silent_s
        pause = _FIRST_LOOK_S
        # Nothing was said yet: a claim may be over before the store answers once.
        problem: StoreUnavailableError | None = StoreUnavailableError(
            f"the store did not say within {deadline_s:g} s whether there is a ticket"
        )
        with self._tickets.notifier.listen(self._tickets.names.ticket(self._ticket_id)) as listener:
            hashing = loop.call_soon(self._hashed)  # while the store answers
            while True:
                try:
                    async with asyncio.timeout_at(max(deadline, loop.time() + _LONGEST_LOOK_S)):
                        found = await self._look()
                    problem, silent_until = None, deadline
                    if found is not None:
                        return found
                    hashing.cancel()
                    self.keys = ()  # as large as the prompt: not for all who wait
                except StoreUnavailableError as error:
                    problem = error
                    # Leases ran out meanwhile, and producers that live have yet to say so.
                    self._lost_after_s = max(self._lost_after_s, self._lease.lease_s)
                except TimeoutError:
                    pass
                if self._over is not None and loop.time() - self._over_since >= self._patience_s:
                    raise self._over
                left = deadline - loop.time()
                if left <= 0 or loop.time() >= silent_until:
                    break
                is_quiet = listener.is_live and self._over is None
                await self._hear(listener.next, min(_LIVE_LOOK_S if is_quiet else pause, left))
                pause = min(pause * 2, _LONGEST_LOOK_S)
        if self._over is not None:
            raise self._over
        if problem is not None:
            raise HandoffError(ClaimProblem.UNAVAILABLE.value, str(problem)) from problem
        raise await self._not_there(deadline_s)

    def _hashed(self) -> Sequence[StoredKey]:
        if not self.keys:
            self.keys = self._tickets.keys_of(self._prompt)
        return self.keys

    async def _hear(self, next_hint: Callable[[float], object], timeout_s: float) -> None:
        """Return when it is worth looking again."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        while (left := until - loop.time()) > 0:
            hint = await next_hint(left)  # type: ignore[misc]
            blocks = _blocks_of(hint)
            if blocks is None or self._open is None:
                return
            self._ready_blocks = max(self._ready_blocks, blocks)
            self._on_progress(blocks)

    async def _look(self) -> Ticket | None:
        """Raises HandoffError at once for what will never be right, StoreUnavailableError."""
        ticket = await self._tickets.read(self._ticket_id)
        if ticket is not None:
            try:
                self._tickets.check(ticket, self._prompt.space, self._hashed())
            except HandoffError as error:
                is_over = self._tickets.has_expired(ticket) or await self._tickets.is_claimed(
                    ticket
                )
                if not is_over:
                    raise
                self._give_up(error)  # unless the id is in use again
            else:
                return ticket
        found = await self._tickets.read_open(self._ticket_id)
        if found is None:
            self._open = None
            return None
        self._tickets.check(found, self._prompt.space, self._hashed())
        is_new = self._open is None or self._open.incarnation != found.incarnation
        self._open = found
        if found.failure:
            text = f"{found.producer} gave up: {found.failure}"
            self._give_up(HandoffError(ClaimProblem.PRODUCER_FAILED.value, text))
        elif not await self._lease.is_alive(found.incarnation):
            text = f"{found.producer} began with the prompt, but says no more that it lives"
            lost = HandoffError(ClaimProblem.PRODUCER_LOST.value, text)
            self._give_up(lost, self._lost_after_s)
        else:
            self._over = None
            if is_new:
                self._on_open(found)
            if is_new or not self._ready_blocks:
                self._on_progress(None)
        return None

    def _give_up(self, problem: HandoffError, patience_s: float = _GRACE_S) -> None:
        if self._over is None:
            self._over_since = asyncio.get_running_loop().time()
        self._over, self._patience_s = problem, patience_s

    async def _not_there(self, deadline_s: float) -> HandoffError:
        name = repr(self._ticket_id[:80])
        if self._open is not None:
            return HandoffError(
                ClaimProblem.NOT_YET.value,
                f"the ticket {name} did not come within {deadline_s:g} s: {self._open.producer} is "
                f"still at it, with {self._ready_blocks} of {len(self._open.digests)} blocks",
            )
        try:
            async with asyncio.timeout(_LONGEST_LOOK_S):
                claimed = await self._tickets.read_acknowledgement(self._ticket_id)
        except (TimeoutError, StoreUnavailableError):
            claimed = None
        if claimed is not None:
            return HandoffError(
                ClaimProblem.CLAIMED.value,
                f"the ticket {name} was claimed by {claimed.claimer} and is gone",
            )
        return HandoffError(
            ClaimProblem.NOT_YET.value,
            f"no ticket {name} came within {deadline_s:g} s: is the prefill done?",
        )


def _blocks_of(hint: object) -> int | None:
    """How many blocks are ready, if that is what a hint says."""
    if isinstance(hint, str) and hint.startswith(PROGRESS) and hint[1:].isdecimal():
        return int(hint[1:])
    return None
