"""Movements of prompts that callers start by name, each in a task of its own.

Prefetches bring blocks from storage to the host; backups copy cached blocks to storage.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count

from tierkv.api.idempotency import Key, Once
from tierkv.api.types import PrefetchState
from tierkv.cache.keys import Prompt
from tierkv.errors import StoreUnavailableError, TierKVError
from tierkv.http.problems import TooManyError, UnknownIdError
from tierkv.sched.budget import Budget
from tierkv.sched.request import RequestSpec
from tierkv.service import Service
from tierkv.tasks import task_group

MOST_RUNNING = 256
MOST_DONE = 4096
DONE_TTL_S = 300.0

Move = Callable[[Prompt, float], Awaitable[tuple[range, str | None]]]


@dataclass(slots=True, eq=False)
class PromptMovement:
    """One movement.

    Attributes:
        tokens: Range of the prompt's tokens that were moved.
        problem: Reason for moving no more, None without one.
    """

    key: Key
    prompt_tokens: int
    task: asyncio.Task[None] | None = None
    state: PrefetchState = PrefetchState.RUNNING
    tokens: range = range(0)
    problem: str | None = None


class PromptMovements:
    """Movements of one kind, by name. The end of `running` cancels those under way.

    Args:
        service: The service whose blocks are moved.
        kind: The name of the kind.
        move: Moves a prompt within a number of seconds; returns the range of tokens that were
            moved, and the reason for moving no more, None without one.
    """

    def __init__(self, service: Service, kind: str, move: Move) -> None:
        self._service = service
        self._kind = kind
        self._move = move
        self._running: set[PromptMovement] = set()
        self._tasks: asyncio.TaskGroup | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        now = asyncio.get_running_loop().time
        self._once: Once[PromptMovement] = Once(most=MOST_DONE, ttl_s=DONE_TTL_S, now=now)
        async with task_group() as self._tasks:
            try:
                yield
            finally:
                for movement in list(self._running):
                    self._cancel(movement)

    async def begin(
        self, key: Key, content: bytes, prompt: Prompt, *, deadline_s: float
    ) -> PromptMovement:
        """Return the movement of this key, begun now or by an earlier call.

        Args:
            key: Tenant and id of the movement.
            content: A digest of what is asked for; see `Once.call`.
            prompt: The prompt to move.
            deadline_s: Seconds that the movement may take.

        Raises:
            StoreUnavailableError: The node has no storage tier.
            TooManyError: `MOST_RUNNING` movements are under way.
            DuplicateRequestError: The key was used for other content.
        """
        async with self._once.call(key, content) as call:
            if call.made is None:
                if self._service.tiers.copies.storage is None:
                    raise StoreUnavailableError("this node has no storage tier: set storage.url")
                if len(self._running) >= MOST_RUNNING:
                    raise TooManyError(
                        f"{MOST_RUNNING} {self._kind}s are running, the maximum: wait "
                        "for the end of one"
                    )
                movement = PromptMovement(key, prompt.num_tokens)
                self._running.add(movement)
                assert self._tasks is not None, "movements are running"
                movement.task = self._tasks.create_task(
                    self._run(movement, prompt, deadline_s), name=f"tierkv-{self._kind}"
                )
                call.made = movement
        return call.made

    def find(self, key: Key) -> PromptMovement:
        """Return the movement of `key`.

        Raises:
            UnknownIdError: There is no such movement.
        """
        movement = self._once.find(key)
        if movement is None:
            raise UnknownIdError(f"there is no {self._kind} {key[1]!r}")
        return movement

    def cancel(self, key: Key) -> PromptMovement:
        """Cancel the movement of `key` unless it is over; copies on their way still arrive.

        Raises:
            UnknownIdError: There is no movement of this key.
        """
        movement = self.find(key)
        self._cancel(movement)
        return movement

    def _cancel(self, movement: PromptMovement) -> None:
        if movement.task is not None and movement in self._running:
            movement.task.cancel()
            self._end(movement, PrefetchState.CANCELLED)

    async def _run(self, movement: PromptMovement, prompt: Prompt, deadline_s: float) -> None:
        try:
            movement.tokens, movement.problem = await self._move(prompt, deadline_s)
        except TierKVError as error:
            movement.problem = str(error)
        is_whole = movement.problem is None
        self._end(movement, PrefetchState.DONE if is_whole else PrefetchState.PARTIAL)

    def _end(self, movement: PromptMovement, state: PrefetchState) -> None:
        movement.state = state
        self._running.discard(movement)
        self._once.release(movement.key)


def prefetching(service: Service) -> Move:
    """Return the movement that brings what storage has of a prompt to the host."""

    async def fetch(prompt: Prompt, deadline_s: float) -> tuple[range, str | None]:
        fetched = await service.fetcher.fetch(prompt, Budget(deadline_s, step_s=deadline_s))
        fetched.release()  # the cache decides from here on what stays
        problem = fetched.first_problem
        return fetched.tokens, None if problem is None else problem.reason

    return fetch


def backing_up(service: Service) -> Move:
    """Return the movement that stores the cached whole blocks of a prompt.

    The movement admits the blocks as a request that computes nothing, and stores them as a publish
    does, without a ticket.
    """
    numbers = count(1)

    async def store(prompt: Prompt, deadline_s: float) -> tuple[range, str | None]:
        size, width = prompt.block_size, prompt.block_token_bytes
        cached = service.index.match(prompt).num_blocks
        if not cached:
            return range(0), "no block of the prompt is cached at this node"
        head = Prompt(prompt.tokens[: cached * width], size, prompt.extras, prompt.space)
        handoff = service.handoff
        if handoff is None:
            return range(0), "this node has no storage tier: set storage.url"
        try:
            async with asyncio.timeout(deadline_s):
                spec = RequestSpec(f"backup {next(numbers)}", head, 0, needs_logits=False)
                request = await service.scheduler.admit(spec)
                try:
                    await request.gate.all_layers(deadline_s)
                    stop = request.matched.total_tokens // size
                    await handoff.tickets.hashed_keys_of(head)
                    blocks = handoff.blocks_of(request)
                    present = await handoff.find_stored(blocks, stop)
                    await handoff.store(blocks, present, stop, ())
                finally:
                    service.scheduler.end(request)
        except TimeoutError:
            return range(0), f"the prompt was not stored within {deadline_s:g} s"
        is_all = stop * size >= prompt.num_blocks * size
        return range(
            stop * size
        ), None if is_all else "the prompt's blocks were evicted before they were stored"

    return store
