"""Prefetches: tasks that fetch a prompt's stored blocks to the host before a request needs them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tierkv.api.idempotency import Key, Once
from tierkv.api.types import PrefetchState
from tierkv.cache.keys import Prompt
from tierkv.errors import StoreUnavailableError, TierKVError
from tierkv.http.problems import TooManyError, UnknownIdError
from tierkv.sched.budget import Budget
from tierkv.service import Service
from tierkv.tasks import task_group

MAX_RUNNING = 256
MAX_DONE = 4096
DONE_TTL_S = 300.0
_NOT_ASKED = "kv_hints has no action kv.fetch 1.0 of protocol 0.1"


@dataclass(slots=True, eq=False)
class Prefetch:
    """The state of one prefetch.

    Attributes:
        key: Tenant and id of the prefetch.
        prompt_tokens: Number of tokens of the prompt.
        task: The task that fetches the blocks; None if nothing is fetched.
        state: RUNNING, or the state in which the prefetch ended.
        tokens: Positions of the prompt's tokens whose blocks were fetched; empty while the prefetch
            runs, and after a cancel.
        problem: Reason why no more blocks were fetched; None if there is no such reason.
    """

    key: Key
    prompt_tokens: int
    task: asyncio.Task[None] | None = None
    state: PrefetchState = PrefetchState.RUNNING
    tokens: range = range(0)
    problem: str | None = None


class Prefetches:
    """The tasks that fetch prompts to the host before requests need them, by tenant and id."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._running: set[Prefetch] = set()
        self._tasks: asyncio.TaskGroup | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Accept prefetches until the `async with` block ends, then cancel the unfinished ones."""
        now = asyncio.get_running_loop().time
        self._once: Once[Prefetch] = Once(max_answers=MAX_DONE, ttl_s=DONE_TTL_S, now=now)
        async with task_group() as self._tasks:
            try:
                yield
            finally:
                for prefetch in list(self._running):
                    self._cancel(prefetch)

    async def begin(
        self,
        key: Key,
        content: bytes,
        prompt: Prompt,
        *,
        deadline_s: float,
        is_asked: bool = True,
    ) -> Prefetch:
        """Start a prefetch, or return the one that an earlier call with this key started.

        Args:
            key: Tenant and id of the prefetch.
            content: A digest of the call's content, which must be the same in all calls with this
                key.
            prompt: The prompt whose blocks are fetched.
            deadline_s: Seconds after which the prefetch ends with the blocks fetched so far.
            is_asked: False if the call has router hints and none of them asks to fetch the prompt.
                Nothing is fetched then.

        Raises:
            StoreUnavailableError: The node has no storage tier.
            TooManyError: `MAX_RUNNING` prefetches are running.
            DuplicateRequestError: An earlier call with this key had other content.
        """
        async with self._once.call(key, content, stays_open=is_asked) as call:
            if call.result is None:
                call.result = (
                    self._start(key, prompt, deadline_s)
                    if is_asked
                    else Prefetch(
                        key, prompt.num_tokens, state=PrefetchState.PARTIAL, problem=_NOT_ASKED
                    )
                )
        return call.result

    def _start(self, key: Key, prompt: Prompt, deadline_s: float) -> Prefetch:
        if self._service.tiers.copies.storage is None:
            raise StoreUnavailableError("this node has no storage tier: set storage.url")
        if len(self._running) >= MAX_RUNNING:
            raise TooManyError(
                f"{MAX_RUNNING} prefetches are running, the maximum: wait for the end of one"
            )
        prefetch = Prefetch(key, prompt.num_tokens)
        self._running.add(prefetch)
        assert self._tasks is not None, "prefetches are running"
        prefetch.task = self._tasks.create_task(
            self._run(prefetch, prompt, deadline_s), name="tierkv-prefetch"
        )
        return prefetch

    def find(self, key: Key) -> Prefetch:
        """Return the prefetch of `key`.

        Raises:
            UnknownIdError: There is no such prefetch.
        """
        prefetch = self._once.find(key)
        if prefetch is None:
            raise UnknownIdError(f"there is no prefetch {key[1]!r}")
        return prefetch

    def cancel(self, key: Key) -> Prefetch:
        """Cancel the prefetch of `key` if it is running, and return it.

        Copies that have begun are completed.

        Raises:
            UnknownIdError: There is no such prefetch.
        """
        prefetch = self.find(key)
        self._cancel(prefetch)
        return prefetch

    def _cancel(self, prefetch: Prefetch) -> None:
        if prefetch.task is not None and prefetch in self._running:
            prefetch.task.cancel()
            self._end(prefetch, PrefetchState.CANCELLED)

    async def _run(self, prefetch: Prefetch, prompt: Prompt, deadline_s: float) -> None:
        try:
            budget = Budget(deadline_s, step_s=deadline_s)
            fetched = await self._service.fetcher.fetch(prompt, budget)
            fetched.release()  # from now on the blocks may be evicted
            prefetch.tokens, problem = fetched.tokens, fetched.first_problem
            prefetch.problem = None if problem is None else problem.reason
        except TierKVError as error:
            prefetch.problem = str(error)
        is_whole = prefetch.problem is None
        self._end(prefetch, PrefetchState.DONE if is_whole else PrefetchState.PARTIAL)

    def _end(self, prefetch: Prefetch, state: PrefetchState) -> None:
        prefetch.state = state
        self._running.discard(prefetch)
        self._once.release(prefetch.key)
