"""The decode node's side of a hand-off: wait for the ticket, get its blocks, tell what is wrong."""

from __future__ import annotations

from enum import Enum

from tierkv.errors import HandoffError
from tierkv.pd.handoff import Handoff
from tierkv.pd.ticket import ClaimProblem, Ticket
from tierkv.sched.fetcher import Fetched, Fetcher
from tierkv.sched.request import Request, RequestSpec
from tierkv.sched.scheduler import Scheduler
from tierkv.storage.protocol import GetStatus

_ATTEMPTS = 3


class ClaimPolicy(Enum):
    """What a decode node does when not every token of a claimed prompt can be had."""

    WHOLE = "whole"  # refuse, with the reason
    RECOMPUTE = "recompute"  # load what there is and compute the rest


class Claims:
    """fetch_deadline_s: how long to wait for a prompt's blocks once its ticket is there."""

    def __init__(
        self, handoff: Handoff, scheduler: Scheduler, fetcher: Fetcher, *, fetch_deadline_s: float
    ) -> None:
        self._handoff = handoff
        self._scheduler = scheduler
        self._fetcher = fetcher
        self._fetch_deadline_s = fetch_deadline_s

    async def claim(
        self, spec: RequestSpec, ticket_id: str, *, policy: ClaimPolicy, deadline_s: float
    ) -> tuple[Request, Ticket]:
        """Wait for a published prompt and get its blocks; see Service.claim."""
        prompt = spec.prompt
        self._scheduler.check(spec)
        ticket = await self._handoff.wait_for_ticket(ticket_id, deadline_s=deadline_s)
        self._handoff.check_prompt(ticket, prompt)
        for attempts_left in reversed(range(_ATTEMPTS)):
            fetched = await self._fetcher.fetch(prompt, deadline_s=self._fetch_deadline_s)
            request = await self._scheduler.admit(spec, fetched)
            if request.cached_tokens == prompt.num_tokens or policy is ClaimPolicy.RECOMPUTE:
                return request, ticket
            self._scheduler.end(request)
            # What was fetched whole can be evicted while the request waits for its turn.
            was_whole = fetched.first_problem is None
            if not was_whole or not attempts_left:
                raise _incomplete(request, fetched)
        raise AssertionError("the last attempt returns or raises")


def _incomplete(request: Request, fetched: Fetched) -> HandoffError:
    problem = fetched.first_problem
    reason = {
        GetStatus.DAMAGED: ClaimProblem.DAMAGED,
        GetStatus.FAILED: ClaimProblem.UNAVAILABLE,
    }.get(problem.status if problem else GetStatus.MISS, ClaimProblem.INCOMPLETE)
    return HandoffError(
        reason.value,
        f"only {request.cached_tokens} of {request.prompt.num_tokens} prompt tokens could be "
        f"loaded: {problem.reason if problem else 'no room'}",
    )
