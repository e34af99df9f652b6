"""What goes out of an engine's requests: publishes, each a task that outlives the call for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence

from tierkv.api.held import Held
from tierkv.api.leases import Leases
from tierkv.api.refusals import WrongStateError
from tierkv.errors import DuplicateRequestError, OwnershipError, TierKVError
from tierkv.pd.handoff import Published
from tierkv.sched.request import Request
from tierkv.service import Service


class Outgoing:
    """tasks: whose they are."""

    def __init__(self, service: Service, leases: Leases, tasks: asyncio.TaskGroup) -> None:
        self._service = service
        self._leases = leases
        self._tasks = tasks

    async def stream(self, held: Held, ticket_id: str) -> bool:
        """Publish what is committed of the prompt from now on, under a ticket that `publish`
        completes; whether it does, which the settings say. Raises HandoffError, and
        DuplicateRequestError if another prompt's ticket of this id can still be claimed."""
        if ticket_id not in held.publishes:
            with self._leases.called(held):
                await self._service.check_ticket_is_free(ticket_id, held.running().spec.prompt)
        if ticket_id in held.publishes:  # another call may have come first meanwhile
            return True
        stream = self._service.stream(held.running(), ticket_id)
        if stream is None:
            return False
        stream.advance(min(held.computed_tokens, held.prompt_tokens))
        # No call of the request's: while it is computed, its lease may end.
        task = self._tasks.create_task(_outcome(stream.run()), name="tierkv-publish")
        held.streams[ticket_id], held.publishes[ticket_id] = stream, task
        return True

    async def publish(
        self, held: Held, ticket_id: str, first_tokens: Sequence[int], sampling: Mapping[str, str]
    ) -> Published:
        """Publish once per ticket id; who goes away does not stop it. Raises as `stream` does, and
        DuplicateRequestError too if the ticket says something else about the first tokens."""
        held.finish_stream(ticket_id, first_tokens, sampling)
        task = held.publishes.get(ticket_id)
        if task is None:
            work = self._publish(held, held.running(), ticket_id, first_tokens, sampling)
            task = self._tasks.create_task(work, name="tierkv-publish")
            held.publishes[ticket_id] = task
        with self._leases.called(held):
            await asyncio.wait([task])
        if task.cancelled():
            raise WrongStateError(f"request {held.key[1]!r} was ended before it was published")
        outcome = task.result()
        if isinstance(outcome, TierKVError):
            if held.publishes.get(ticket_id) is task:
                del held.publishes[ticket_id]  # the next call tries again
            if isinstance(outcome, OwnershipError):  # it is not computed, or has ended meanwhile
                raise WrongStateError(str(outcome)) from outcome
            raise outcome
        said = outcome.ticket
        if (said.first_tokens, said.sampling) != (tuple(first_tokens), sampling):
            raise DuplicateRequestError(
                f"the prompt was published under {ticket_id!r} with other first tokens or sampling"
            )
        return outcome

    async def _publish(
        self,
        held: Held,
        request: Request,
        ticket_id: str,
        first_tokens: Sequence[int],
        sampling: Mapping[str, str],
    ) -> Published | TierKVError:
        async def work() -> Published:
            await self._service.check_ticket_is_free(ticket_id, request.spec.prompt)
            return await self._service.publish(request, ticket_id, first_tokens, sampling=sampling)

        with self._leases.called(held):
            return await _outcome(work())

    async def all_out(self, held: Held) -> None:
        """Return when nothing of it is being published: its blocks are read until then."""
        while tasks := held.busy_publishes():
            with self._leases.called(held):
                await asyncio.wait(tasks)


async def _outcome(work: Awaitable[Published]) -> Published | TierKVError:
    """An expected failure is for who waits; a task that raises would stop the node."""
    try:
        return await work
    except TierKVError as error:
        return error
